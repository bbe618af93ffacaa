"""Check of the memory of shared devices before workers start, with the memory of the nodes that get workers."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Sequence

from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table

from recipe_gkd.config import Config
from recipe_gkd.errors import DeadlineError
from recipe_gkd.memory_budget.phases import check_memory_budget
from recipe_gkd.memory_budget.slots import slot_memory
from recipe_gkd.ray_cluster.node_probe import run_on_node
from recipe_gkd.ray_cluster.pools import Pool
from recipe_gkd.runtime.threads import in_thread
from recipe_gkd.runtime.wait_log import waiting_for

log = logging.getLogger(__name__)


async def check_budget(config: Config, device: str, pools: Sequence[Pool], *, timeout_s: float) -> None:
    """Compute the memory of each phase, log it, and compare it with the memory of the nodes of the actor pool.

    Has no effect without ``hybrid_engine``. Nodes whose memory cannot be read are not checked.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        pools: The actor pool, and other pools, which are ignored.
        timeout_s: Deadline of reading the memory of all nodes.

    Raises:
        MemoryBudgetError: A phase does not fit. ``details`` has the table.
        DeadlineError: A node did not answer.
        ModelError: The student's ``config.json`` cannot be read or is not supported.
        ConfigError: ``lora.target_modules`` names no layer of the student.
    """
    if not config.actor_rollout_ref.hybrid_engine:
        return
    nodes = sorted({*placement_group_table(pools[0].group)["bundles_to_node_id"].values()})
    n_slots = pools[0].spec.n_per_node
    found = await asyncio.gather(*(_read_node(node, device, n_slots, timeout_s) for node in nodes))
    known = {name: memory for name, memory in found if memory is not None}
    if len(known) < len(nodes):
        log.warning("the memory of %d of %d nodes is unknown and was not checked", len(nodes) - len(known), len(nodes))
    table = await in_thread(check_memory_budget, config, device, known)
    log.info("memory of a slot that actor and rollout engine share:\n%s", table)


async def _read_node(node: str, device: str, n_slots: int, timeout_s: float) -> tuple[str, int | None]:
    """Return the name of a node and the memory of each of its slots in bytes, None if it is unknown."""
    try:
        async with asyncio.timeout(timeout_s):
            with waiting_for("start, memory of the slots", timeout_s, f"node {node[:8]}"):
                host, memory = await run_on_node(node, _read_memory, device, n_slots)
    except TimeoutError as error:
        raise DeadlineError(
            f"node {node[:8]} did not answer within {timeout_s:g} s",
            remedy="check `ray status` and `nvidia-smi` there, or raise trainer.startup_timeout_s",
            phase="memory of the slots",
            missing=(f"node {node[:8]}",),
            waited_s=timeout_s,
        ) from error
    except (RayError, OSError) as error:
        log.warning("node %s: its memory cannot be read: %s: %s", node[:8], type(error).__name__, error)
        return node[:8], None
    return f"node {host} ({node[:8]})", memory


def _read_memory(device: str, n_slots: int) -> tuple[str, int | None]:
    return socket.gethostname(), slot_memory(device, n_slots, visible_only=False)

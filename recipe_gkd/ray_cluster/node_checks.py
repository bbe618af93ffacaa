"""Checks of all nodes that get workers, before engines start; see :mod:`teacher.common.machine_checks`."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping, Sequence
from functools import partial

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group_table

from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.config import Config
from recipe_gkd.errors import DeadlineError, ResourceError
from recipe_gkd.ray_cluster.node_probe import run_on_node, session_folder
from recipe_gkd.ray_cluster.pools import Pool
from recipe_gkd.runtime.wait_log import waiting
from recipe_gkd.runtime.worker_variables import forwarded_variables
from teacher.common.machine_checks import find_problems

log = logging.getLogger(__name__)


async def check_nodes(config: Config, device: str, pools: Sequence[Pool], *, timeout_s: float) -> None:
    """Check driver, compiler, headers, shared memory and disk space on every node of the pools.

    On a CPU only the disk space is checked. With ``trainer.check_nodes=false`` problems are logged as warnings.

    Args:
        device: ``"cuda"`` or ``"cpu"``.

    Raises:
        ResourceError: A node cannot run workers. The message lists every problem of every node.
        DeadlineError: A node did not answer.
    """
    variables = forwarded_variables(os.environ, config.ray_init.env_vars)
    calls = {
        node: asyncio.ensure_future(run_on_node(node, find_problems, device, folders, variables))
        for node, folders in _folders_by_node(config, pools).items()
    }
    names = _node_names()
    unfinished = partial(_unfinished, calls, names)
    with waiting("start, check the nodes", timeout_s, unfinished):
        _, silent = await asyncio.wait(calls.values(), timeout=timeout_s)
    for call in silent:
        call.cancel()
    if silent:
        missing = tuple(unfinished())
        raise DeadlineError(
            f"{', '.join(missing)} did not answer within {timeout_s:g} s",
            phase="check of the nodes",
            missing=missing,
            waited_s=timeout_s,
            remedy="check `ray status` and `nvidia-smi` there, or raise trainer.startup_timeout_s",
        )
    problems = [f"  {names[node]}: {problem}" for node, call in calls.items() for problem in _problems_of(call)]
    if not problems:
        return
    if config.trainer.check_nodes:
        remedy = "set trainer.check_nodes=false to start them in spite of this"
        raise ResourceError("the workers cannot start on these nodes:", details=(*problems, remedy))
    log.warning("problems of the nodes, ignored because of trainer.check_nodes=false:\n%s", "\n".join(problems))


def _unfinished(calls: Mapping[str, asyncio.Future[list[str]]], names: Mapping[str, str]) -> dict[str, int]:
    """Return the names of the nodes that have not answered."""
    return {names[node]: 1 for node, call in calls.items() if call.cancelled() or not call.done()}


def _problems_of(call: asyncio.Future[list[str]]) -> list[str]:
    try:
        return call.result()
    except (RayError, OSError) as error:
        return [f"the check failed with {type(error).__name__}: {error}; check `ray status`"]


def _folders_by_node(config: Config, pools: Sequence[Pool]) -> dict[str, dict[str, str]]:
    """Return node id -> purpose -> folder that workers write there. Only actor ranks write to the run folder."""
    actor, rollout = ({*placement_group_table(pool.group)["bundles_to_node_id"].values()} for pool in pools)
    session = {"Ray's session": session_folder()}
    run_folder = {"trainer.default_local_dir": str(folder_of(config.trainer).absolute())}
    return {node: session | (run_folder if node in actor else {}) for node in sorted(actor | rollout)}


def _node_names() -> Mapping[str, str]:
    """Return node id -> name for messages: host name, address and the start of the id."""
    return {
        node["NodeID"]: f"node {node['NodeManagerHostname']} {node['NodeManagerAddress']} ({node['NodeID'][:8]})"
        for node in ray.nodes()
    }

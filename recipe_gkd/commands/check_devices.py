"""Check every node, show the placement of the workers, and check that each has the devices that Ray assigned to it.

python -m recipe_gkd check-devices --config-name on_policy_distill_trainer key=value ...

The command checks driver, compiler, headers, shared memory and disk space of each node, starts one small process per
worker and ends it. It needs no teacher, data or model.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from functools import partial

from recipe_gkd.actor.environment import worker_environment as actor_environment
from recipe_gkd.commands.arguments import command_parser
from recipe_gkd.config import Config
from recipe_gkd.config.compose import compose_config, fill_missing_keys
from recipe_gkd.config.load import to_config
from recipe_gkd.config.startup import startup_timeout_s
from recipe_gkd.config.validate import validate
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.ray_cluster.connection import choose_device, connected_cluster
from recipe_gkd.ray_cluster.node_checks import check_nodes
from recipe_gkd.ray_cluster.placement import (
    DeviceReport,
    Reports,
    check_devices,
    collect_device_reports,
    device_report,
    environments_of_guests,
    placement_table,
)
from recipe_gkd.ray_cluster.pools import create_pools, pool_specs
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.rollout.environment import worker_environment as rollout_environment
from recipe_gkd.runtime.worker_variables import worker_variables

STOP_TIMEOUT_S = 5


class ProbeActor:
    """Process in place of a worker that reports its devices."""

    def __init__(self, device: str) -> None:
        self._device = device

    def device_report(self) -> DeviceReport:
        """Return node, devices and memory of this process."""
        return device_report(self._device)

    def shutdown(self) -> None:
        """Do nothing. Worker groups call it before they end a process."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0 if every worker has its devices, 1 after an error, 130 after Ctrl-C.
    """
    arguments = command_parser("check-devices", __doc__).parse_intermixed_args(argv)
    try:
        composed = compose_config(arguments.config_name, arguments.overrides, arguments.config_dir)
        fill_missing_keys(composed)  # paths of data and model, which this command does not open
        config = to_config(composed)
        validate(config)
        with connected_cluster(config):
            device = choose_device(config.trainer.device)
            reports = asyncio.run(probe_placement(config, device))
        print(placement_table(reports))
        check_devices(reports, is_hybrid=config.actor_rollout_ref.hybrid_engine)
    except Exception as error:  # noqa: BLE001 - the command prints one error instead of a traceback
        print(f"\nerror: {as_known_error(error, 'check-devices')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    assigned = "the GPUs that Ray assigned to it" if device == "cuda" else "a CPU slot"
    print(f"\nall {len(reports)} workers can be placed: each has {assigned}")
    return 0


async def probe_placement(config: Config, device: str) -> Reports:
    """Return the device report of a probe process for each worker.

    Args:
        config: Configuration with the sizes of both pools.
        device: ``"cuda"`` or ``"cpu"``.
    """
    timeout_s = startup_timeout_s(config, device)
    pools = await create_pools(pool_specs(config, device), timeout_s=timeout_s)
    with_forwarded = partial(worker_variables, environment=os.environ, extra=config.ray_init.env_vars)
    groups: list[WorkerGroup[ProbeActor]] = [WorkerGroup(pool.spec.name, []) for pool in pools]
    guest_environments: dict[int, dict[str, str]] = {}
    try:
        for pool, group, environment in zip(pools, groups, (actor_environment, rollout_environment), strict=True):
            if pool.spec.is_guest and device == "cuda":
                guest_environments = await environments_of_guests(
                    groups[0], n_guests=pool.spec.n_workers, timeout_s=timeout_s
                )
            for rank in range(pool.spec.n_workers):
                env = with_forwarded(environment(device)) | (guest_environments.get(rank, {}))
                group.handles.append(pool.spawn(ProbeActor, rank, {"device": device}, env=env))
        await check_nodes(config, device, pools, timeout_s=timeout_s)  # while the processes start
        return await collect_device_reports(groups, timeout_s=timeout_s)
    finally:
        await asyncio.gather(*(group.stop(timeout_s=STOP_TIMEOUT_S) for group in groups))
        for pool in pools:
            pool.release()


if __name__ == "__main__":
    sys.exit(main())

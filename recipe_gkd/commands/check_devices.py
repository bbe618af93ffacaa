"""Show where the workers of both pools would be, and check that each has the devices that Ray gave it.

python -m recipe_gkd.commands.check_devices --config-name on_policy_distill_trainer key=value ...

It starts a small process in the place of every worker, and ends it. No teacher, data or model is needed.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any

from omegaconf import OmegaConf

from recipe_gkd.actor.environment import worker_environment as actor_environment
from recipe_gkd.commands.arguments import config_parser
from recipe_gkd.config import Config
from recipe_gkd.config.load import compose_config, to_config
from recipe_gkd.config.validate import validate
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.ray_cluster.connection import choose_device, ray_cluster
from recipe_gkd.ray_cluster.placement import (
    Reports,
    check_devices,
    collect_device_reports,
    device_report,
    placement_table,
)
from recipe_gkd.ray_cluster.pools import create_pools, pool_specs
from recipe_gkd.ray_cluster.worker_group import WorkerGroup
from recipe_gkd.rollout.environment import worker_environment as rollout_environment


class ProbeActor:
    """In the place of a worker: says where that is."""

    def __init__(self, device: str) -> None:
        self._device = device

    def where(self) -> dict[str, Any]:
        return device_report(self._device)

    def shutdown(self) -> None:
        pass


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 every worker has its devices, 1 an error, 130 Ctrl-C."""
    arguments = config_parser("check_devices", __doc__).parse_args(argv)
    try:
        composed = compose_config(arguments.config_name, arguments.overrides, arguments.config_dir)
        for key in OmegaConf.missing_keys(composed):  # folders and files, which nobody looks for here
            OmegaConf.update(composed, key, "none")
        config = to_config(composed)
        validate(config)
        with ray_cluster(config):
            device = choose_device(config.trainer.device)
            reports = asyncio.run(probe_placement(config, device))
        print(placement_table(reports))
        check_devices(reports, shared=config.rollout.share_actor_gpus)
    except Exception as error:  # noqa: BLE001 - printed as one error, with the place of an unexpected one
        print(f"\nerror: {as_known_error(error, 'check_devices')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130
    what = "the GPUs that Ray gave it" if device == "cuda" else "a CPU slot"
    print(f"\nall {len(reports)} workers have their places: each has {what}")
    return 0


async def probe_placement(config: Config, device: str) -> Reports:
    """What a process in the place of each worker says of it."""
    timeout_s = config.trainer.startup_timeout_s
    pools = await create_pools(pool_specs(config, device), timeout_s=timeout_s)
    groups = [
        WorkerGroup(
            pool.spec.name,
            [pool.spawn(ProbeActor, rank, {"device": device}, env=env) for rank in range(pool.spec.n_workers)],
        )
        for pool, env in zip(pools, (actor_environment(device), rollout_environment(device)), strict=True)
    ]
    try:
        return await collect_device_reports(groups, timeout_s=timeout_s)
    finally:
        await asyncio.gather(*(group.stop(timeout_s=5) for group in groups))
        for pool in pools:
            pool.release()


if __name__ == "__main__":
    sys.exit(main())

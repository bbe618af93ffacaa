"""Deadlines of the actor's collectives."""

from __future__ import annotations

import pytest

from recipe_gkd.actor.environment import worker_environment as actor_environment
from recipe_gkd.actor.ranks import collective_timeout_s
from recipe_gkd.checkpoints.saver import SAVE_DEADLINE_MARGIN_S
from recipe_gkd.config.startup import startup_timeout_s
from recipe_gkd.rollout.environment import worker_environment as rollout_environment
from recipe_gkd.weight_sync.spec import SYNC_RPC_MARGIN_S
from tests._support.base_config import base_config

NCCL_TIMEOUT = "actor_rollout_ref.nccl_timeout"


class TestCollectiveTimeout:
    @pytest.mark.parametrize(
        "overrides",
        [
            (),
            (f"{NCCL_TIMEOUT}=7000",),
            ("actor_rollout_ref.actor.timeout_s=9000",),
            ("trainer.startup_timeout_s=9000",),
        ],
    )
    def test_on_cuda_all_deadlines_of_the_driver_come_first(self, overrides: tuple[str, ...]) -> None:
        """NCCL's watchdog ends the processes, so that nothing would be left to diagnose."""
        config = base_config(*overrides)
        settings = config.actor_rollout_ref
        timeout_s = collective_timeout_s(config, "cuda")
        assert timeout_s > startup_timeout_s(config, "cuda")
        assert timeout_s > settings.actor.timeout_s + SAVE_DEADLINE_MARGIN_S
        assert timeout_s > settings.nccl_timeout + SYNC_RPC_MARGIN_S

    def test_on_cpu_only_the_weight_sync_comes_first(self) -> None:
        """An earlier timeout reports a hang earlier, because gloo raises an error and the process lives on."""
        assert collective_timeout_s(base_config(f"{NCCL_TIMEOUT}=30"), "cpu") == 90


def test_only_megatron_has_one_connection_for_kernels() -> None:
    assert actor_environment("cuda", "megatron")["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
    for environment in (actor_environment("cuda", "fsdp"), actor_environment("cpu", "megatron")):
        assert "CUDA_DEVICE_MAX_CONNECTIONS" not in environment


@pytest.mark.parametrize("environment", [actor_environment, rollout_environment])
def test_failure_of_one_group_does_not_end_the_process(environment: object) -> None:
    assert environment("cuda")["TORCH_NCCL_ENABLE_MONITORING"] == "0"  # type: ignore[operator]
    assert "TORCH_NCCL_ENABLE_MONITORING" not in actor_environment("cpu")

"""Requirements of pools that share their GPUs, ``rollout.share_actor_gpus``."""

from __future__ import annotations

import pytest

from recipe_gkd.config.validate import shared_cuda_problems
from recipe_gkd.errors import ConfigError
from recipe_gkd.rollout.engine_options import EngineOptions
from tests._support.base_config import base_config

SHARED = "rollout.share_actor_gpus=true"
KV_CACHE = "actor_rollout_ref.rollout.kv_cache_memory_megabytes=4096"
COLLECTIVE = "actor_rollout_ref.rollout.weight_transport=collective"


class TestSharedCudaProblems:
    @pytest.mark.parametrize(
        ("overrides", "messages"),
        [
            ([], ["without actor_rollout_ref.rollout.kv_cache_memory_megabytes"]),
            ([KV_CACHE], []),
            ([KV_CACHE, COLLECTIVE], ["NCCL does not connect two processes on one GPU; set it to auto or ipc"]),
        ],
    )
    def test_problems_name_the_keys(self, overrides: list[str], messages: list[str]) -> None:
        problems = list(shared_cuda_problems(base_config(SHARED, *overrides)))
        assert len(problems) == len(messages)
        assert all(message in problem for problem, message in zip(problems, messages, strict=True))

    def test_separate_pools_need_nothing(self) -> None:
        assert not list(shared_cuda_problems(base_config(COLLECTIVE)))

    @pytest.mark.parametrize("device", ["cpu", "auto"])
    def test_configuration_is_refused_only_if_the_device_is_known_to_be_cuda(self, device: str) -> None:
        base_config(SHARED, f"trainer.device={device}")
        with pytest.raises(ConfigError, match="kv_cache_memory_megabytes"):
            base_config(SHARED, "trainer.device=cuda")


def test_engine_of_shared_gpu_passes_start_check_of_vllm() -> None:
    """The check compares ``gpu_memory_utilization`` with the free memory, even if it gets the size of the KV cache."""
    options = EngineOptions.from_config(base_config(SHARED, KV_CACHE), "cuda")
    assert options.kv_cache_bytes == 4096 << 20 and options.gpu_memory_utilization <= 0.01
    alone = EngineOptions.from_config(base_config(KV_CACHE), "cuda")
    assert alone.gpu_memory_utilization == 0.8

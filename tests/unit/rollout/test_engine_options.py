"""Tests of the engine's options, its step budget, and the environment of its process."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from recipe_gkd.actor.megatron.model_dims import ModelDims, Rope
from recipe_gkd.errors import ConfigError
from recipe_gkd.rollout.engine_factory import step_budget
from recipe_gkd.rollout.engine_options import EngineOptions
from recipe_gkd.rollout.environment import worker_environment
from recipe_gkd.rollout.limits import check_engine_fits
from recipe_gkd.runtime.worker_variables import worker_variables
from tests._support.errors import raises
from tests._support.rollout_models import config_for

ROLLOUT = "actor_rollout_ref.rollout"
DIMS = ModelDims(
    family="qwen2", layers=4, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab_size=300, tied=True,
    qkv_bias=True, qk_norm=None, norm_eps=1e-6, max_positions=512, ropes=(Rope(width=16, theta=1e4),),
)  # fmt: skip


def options_for(device: str, *overrides: str) -> EngineOptions:
    return EngineOptions.from_config(config_for(Path("nowhere"), *overrides), device)


class TestEngineOptions:
    @pytest.mark.parametrize(
        ("device", "dtype", "head_dtype", "expected"),
        [
            ("cuda", "bfloat16", "auto", True),
            ("cuda", "auto", "auto", True),
            ("cuda", "float32", "auto", False),
            ("cpu", "bfloat16", "auto", False),
            ("cpu", "bfloat16", "float32", True),
            ("cuda", "bfloat16", "model", False),
        ],
    )
    def test_from_config_head_dtype_selects_float32_logits(
        self, device: str, dtype: str, head_dtype: str, expected: bool
    ) -> None:
        keys = f"{ROLLOUT}.dtype={dtype}", f"actor_rollout_ref.model.head_dtype={head_dtype}"
        assert options_for(device, *keys).float32_head is expected

    def test_from_config_requests_experts_for_routing_replay_only(self) -> None:
        assert options_for("cuda", f"{ROLLOUT}.routing_replay=true").return_routed_experts
        assert not options_for("cuda").return_routed_experts

    @pytest.mark.parametrize(
        ("device", "hybrid", "level", "expected"),
        [("cuda", True, 1, True), ("cuda", True, 2, True), ("cuda", True, 0, False), ("cuda", False, 2, False),
         ("cpu", True, 2, False)],
    )  # fmt: skip
    def test_from_config_enables_sleep_mode_for_engines_that_sleep_on_cuda(
        self, device: str, hybrid: bool, level: int, expected: bool
    ) -> None:
        keys = f"actor_rollout_ref.hybrid_engine={str(hybrid).lower()}", f"{ROLLOUT}.sleep_level={level}"
        assert options_for(device, "trainer.scheduler=sync", *keys).enable_sleep_mode is expected

    @pytest.mark.parametrize(
        ("hybrid", "cache", "expected"), [("true", "null", 0.4), ("false", "100", 0.4), ("true", "100", 0.01)]
    )
    def test_from_config_fixed_cache_of_a_hybrid_engine_ignores_the_memory_of_the_actor(
        self, hybrid: str, cache: str, expected: float
    ) -> None:
        options = options_for(
            "cuda", f"actor_rollout_ref.hybrid_engine={hybrid}", f"{ROLLOUT}.kv_cache_memory_megabytes={cache}",
            f"{ROLLOUT}.gpu_memory_utilization=0.4", "trainer.scheduler=sync",
        )  # fmt: skip
        assert options.gpu_memory_utilization == expected


class TestStepBudget:
    def test_step_budget_on_cuda_is_the_default_of_the_device(self) -> None:
        options = replace(options_for("cuda"), max_num_seqs=256, max_model_len=2048)
        assert step_budget(options, 16384) == {"max_num_batched_tokens": 16384}
        assert step_budget(replace(options, max_num_seqs=10_000), 8192) == {"max_num_batched_tokens": 10_000}
        short = replace(options, max_num_seqs=4, max_model_len=100)
        assert step_budget(short, 8192) == {"max_num_batched_tokens": 400}
        assert step_budget(replace(options, max_num_batched_tokens=512), 8192) == {"max_num_batched_tokens": 512}

    def test_step_budget_on_cpu_holds_a_whole_sequence(self) -> None:
        options = replace(options_for("cpu"), max_model_len=5000)
        assert step_budget(options, 8192) == {"enable_chunked_prefill": False, "max_num_batched_tokens": 5000}
        assert step_budget(replace(options, max_num_batched_tokens=6000), 8192)["max_num_batched_tokens"] == 6000
        with raises(ConfigError, keys=(f"{ROLLOUT}.max_num_batched_tokens",)):
            step_budget(replace(options, max_num_batched_tokens=4999), 8192)

    def test_max_num_batched_tokens_that_vllm_rejects_are_refused_before_the_start(self) -> None:
        tokens = f"{ROLLOUT}.max_num_batched_tokens=79"
        with raises(ConfigError, keys=(f"{ROLLOUT}.max_num_batched_tokens", f"{ROLLOUT}.max_num_seqs")):
            config_for(Path("nowhere"), tokens, f"{ROLLOUT}.max_num_seqs=80")
        fitting = f"{ROLLOUT}.max_num_seqs=8"
        with raises(ConfigError, keys=(f"{ROLLOUT}.max_num_batched_tokens",)):
            check_engine_fits(DIMS, config_for(Path("nowhere"), tokens, fitting))
        check_engine_fits(DIMS, config_for(Path("nowhere"), tokens, fitting, "trainer.device=cuda"))


class TestWorkerEnvironment:
    @pytest.mark.parametrize(("device", "default"), [("cpu", "ERROR"), ("cuda", "WARNING")])
    def test_worker_environment_log_level_of_the_driver_has_priority(self, device: str, default: str) -> None:
        defaults = worker_environment(device)
        assert worker_variables(defaults, {}, {})["VLLM_LOGGING_LEVEL"] == default
        for environment, extra in (({"VLLM_LOGGING_LEVEL": "INFO"}, {}), ({}, {"VLLM_LOGGING_LEVEL": "INFO"})):
            assert worker_variables(defaults, environment, extra)["VLLM_LOGGING_LEVEL"] == "INFO"

"""Tests that the limits of the configuration are those of the installed vLLM."""

from __future__ import annotations

import math
import multiprocessing
import os
import queue
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import Qwen2Config

from recipe_gkd.actor.megatron.model_dims import ModelDims, Rope
from recipe_gkd.config import limits
from recipe_gkd.config.ranges import numeric_range
from recipe_gkd.errors import ConfigError, WorkerError
from recipe_gkd.rollout.engine_factory import step_budget
from recipe_gkd.rollout.engine_options import EngineOptions
from recipe_gkd.rollout.limits import VLLM_VOCAB_MULTIPLE, check_engine_fits
from recipe_gkd.rollout.sampling import sampling_from
from tests._support.errors import raises
from tests._support.numeric_ends import ends_of
from tests._support.rollout_models import config_for
from tests._support.waiting import PATIENCE_S

ROLLOUT = "actor_rollout_ref.rollout"
SHAPE = ModelDims(
    family="qwen2", layers=4, hidden=64, ffn=96, heads=4, kv_heads=2, head_dim=16, vocab_size=300, tied=True,
    qkv_bias=True, qk_norm=None, norm_eps=1e-6, max_positions=512, ropes=(Rope(width=16, theta=1e4),),
)  # fmt: skip


@pytest.fixture(autouse=True)
def _environment_of_a_worker() -> None:
    from recipe_gkd.rollout.vllm import compat  # noqa: F401 - sets the environment before it imports vLLM


def test_watch_ranks_reports_name_of_dead_process() -> None:
    from recipe_gkd.rollout.vllm.compat import multiproc_executor, watch_ranks

    context = multiprocessing.get_context("spawn")
    processes = [context.Process(target=time.sleep, args=(60,), name=f"VllmWorker-{rank}") for rank in range(2)]
    executor = object.__new__(multiproc_executor.MultiprocExecutor)
    executor.workers = [SimpleNamespace(proc=process) for process in processes]
    engine: Any = SimpleNamespace(engine_core=SimpleNamespace(engine_core=SimpleNamespace(model_executor=executor)))
    deaths: queue.SimpleQueue[str] = queue.SimpleQueue()
    try:
        for process in processes:
            process.start()
        watch_ranks(engine, deaths.put)
        processes[1].kill()
        assert deaths.get(timeout=PATIENCE_S) == "VllmWorker-1"
    finally:
        del executor.workers  # the executor's finalizer would also end them
        for process in processes:
            process.kill()
            process.join()


def test_temperature_limits_are_those_of_vllm() -> None:
    from vllm.exceptions import VLLMValidationError

    from recipe_gkd.rollout.vllm.compat import SamplingParams

    lowest, highest = limits.LOWEST_TEMPERATURE, limits.MAX_TEMPERATURE
    for accepted in (lowest, highest):
        assert SamplingParams(temperature=accepted).temperature == accepted
    assert SamplingParams(temperature=math.nextafter(lowest, 0)).temperature == lowest
    with pytest.raises(VLLMValidationError, match="temperature must be in"):
        SamplingParams(temperature=math.nextafter(highest, 3))


@pytest.mark.parametrize("key", ["temperature", "top_p", "top_k"])
@pytest.mark.parametrize("section", ["", "val_kwargs."])
def test_sampling_range_ends_are_accepted_by_vllm(key: str, section: str) -> None:
    from recipe_gkd.rollout.vllm.compat import SamplingParams

    found = numeric_range(f"{ROLLOUT}.{section}{key}")
    assert found is not None
    for value in ends_of(found):
        requested = max(value, 1e-300) if key == "top_p" else value  # Hydra reads 5e-324 as text
        overrides = [f"{ROLLOUT}.{section}temperature=1", f"{ROLLOUT}.{section}{key}={requested}"]
        name: Any = "validation" if section else "train"
        asked = sampling_from(config_for(Path("nowhere"), *overrides), name).for_request(0, 0)
        made = SamplingParams(**asked)
        assert {own: getattr(made, own) for own in asked} == asked


@pytest.mark.parametrize("max_num_seqs", [1, 2048, 8193, 16384])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_step_budget_any_number_of_sequences_is_accepted(device: str, max_num_seqs: int) -> None:
    from vllm.config import SchedulerConfig

    options = EngineOptions.from_config(config_for(Path("nowhere"), f"{ROLLOUT}.max_num_seqs={max_num_seqs}"), device)
    settings = step_budget(options, cuda_default=8192)
    made = SchedulerConfig(
        max_model_len=options.max_model_len, is_encoder_decoder=False, max_num_seqs=max_num_seqs, **settings
    )
    assert made.max_num_seqs == max_num_seqs
    assert max_num_seqs <= (numeric_range(f"{ROLLOUT}.max_num_seqs").high or 0)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("layers", "overrides", "key"),
    [
        (4, [f"{ROLLOUT}.max_model_len=513"], "max_model_len"),
        (4, [f"{ROLLOUT}.tensor_model_parallel_size=3", "rollout.n_gpus_per_node=3"], "tensor_model_parallel_size"),
        (
            32,
            [f"{ROLLOUT}.kv_cache_memory_megabytes=1", f"{ROLLOUT}.max_model_len=512", f"{ROLLOUT}.dtype=bfloat16"],
            "kv_cache_memory_megabytes",
        ),
    ],
)
def test_check_engine_fits_rejects_invalid_combinations(layers: int, overrides: list[str], key: str) -> None:
    shape = replace(SHAPE, layers=layers)
    with raises(ConfigError, keys=(f"{ROLLOUT}.{key}",)):
        check_engine_fits(shape, config_for(Path("nowhere"), *overrides))
    check_engine_fits(shape, config_for(Path("nowhere"), f"{ROLLOUT}.max_model_len=512"))


def test_default_batched_tokens_are_those_of_the_llm_class(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.platforms import current_platform

    from recipe_gkd.rollout.vllm.compat import default_batched_tokens

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    for gibibytes, name, expected in ((80, "NVIDIA H100", 16384), (80, "NVIDIA A100-SXM4", 8192), (24, "L4", 8192)):
        memory, device_name = gibibytes << 30, name
        monkeypatch.setattr(type(current_platform), "get_device_total_memory", lambda *_, memory=memory: memory)
        monkeypatch.setattr(type(current_platform), "get_device_name", lambda *_, name=device_name: name)
        assert default_batched_tokens(1) == expected


@pytest.mark.parametrize(("device", "expected"), [("cuda", {"head_dtype": "float32"}), ("cpu", {})])
def test_build_engine_passes_options_to_vllm(
    device: str, expected: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipe_gkd.rollout import engine_factory
    from recipe_gkd.rollout.vllm import compat as vllm_compat

    class Built(Exception):
        """Arguments of the engine."""

    def build(arguments: Any) -> None:
        raise Built(arguments)

    Qwen2Config(architectures=["Qwen2ForCausalLM"], num_hidden_layers=1).save_pretrained(tmp_path)
    monkeypatch.setattr(vllm_compat, "check_platform", lambda _: None)
    monkeypatch.setattr(vllm_compat, "keep_files_in", lambda _: None)
    monkeypatch.setattr(vllm_compat.LLMEngine, "from_engine_args", build)
    overrides = [
        f"{ROLLOUT}.{each}" for each in ("dtype=bfloat16", "max_num_batched_tokens=777", "async_scheduling=false")
    ]
    with pytest.raises(WorkerError) as caught:
        engine_factory.build_engine(EngineOptions.from_config(config_for(tmp_path, *overrides), device))
    (arguments,) = caught.value.__cause__.args  # type: ignore[union-attr]
    assert arguments.hf_overrides == expected and arguments.max_num_batched_tokens == 777
    assert arguments.async_scheduling is False


def test_join_transport_does_not_apply_nccl_variables_of_batch_invariance(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.utils import nccl

    from recipe_gkd.rollout.vllm.calls import WorkerCalls

    monkeypatch.setattr(nccl, "_unpinned_env", {"NCCL_ALGO": None})  # as after `init_batch_invariance` on CUDA
    monkeypatch.setenv("NCCL_ALGO", "ring,tree")
    worker, seen = WorkerCalls(), []
    worker.weight_transfer_engine = SimpleNamespace(has_mixed_weights=False, reload_failed=False, received=None)
    worker.init_weight_transfer_engine = lambda _: seen.append(os.environ.get("NCCL_ALGO"))
    assert worker.gkd_join_transport({}).error is None
    assert seen == [None] and os.environ["NCCL_ALGO"] == "ring,tree"


def test_vocabulary_multiple_is_that_of_vllm() -> None:
    from vllm.model_executor.layers.vocab_parallel_embedding import DEFAULT_VOCAB_PADDING_SIZE

    assert DEFAULT_VOCAB_PADDING_SIZE == VLLM_VOCAB_MULTIPLE
    for tp in (1, 2, 4):  # more ranks than key/value heads: these are repeated
        sizes = f"{ROLLOUT}.tensor_model_parallel_size={tp}", f"rollout.n_gpus_per_node={tp}"
        check_engine_fits(SHAPE, config_for(Path("nowhere"), *sizes))

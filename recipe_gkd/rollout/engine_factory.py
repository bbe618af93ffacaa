"""Construction of a vLLM engine. vLLM is imported inside the functions: the driver must not wait seconds for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_gkd.errors import GkdError, ModelError, WorkerError
from recipe_gkd.rollout.engine_options import EngineOptions
from recipe_gkd.runtime.scratch import scratch_folder

if TYPE_CHECKING:
    from recipe_gkd.rollout.vllm_compat import LLMEngine

_CPU_BATCHED_TOKENS = 4096
_CUDA_BATCHED_TOKENS = 2048
"""vLLM's ``SchedulerConfig.DEFAULT_MAX_NUM_BATCHED_TOKENS``."""


def build_engine(options: EngineOptions) -> LLMEngine:
    """Return a new engine in this process; its tensor-parallel ranks are processes of their own.

    Raises:
        ModelError: The model folder has no ``config.json``.
        ResourceError: The installed vLLM does not support the device.
        WorkerError: vLLM could not start.
    """
    try:
        _check_model_folder(Path(options.model_path))
        return _build(options)
    except GkdError:
        raise
    except Exception as error:
        raise WorkerError(
            f"vLLM could not be started on {options.model_path}: {type(error).__name__}: {error}; its options are the "
            "keys of actor_rollout_ref.rollout"
        ) from error


def _check_model_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(f"{folder} has no config.json; actor_rollout_ref.model.path must be a Hugging Face folder")


def _build(options: EngineOptions) -> LLMEngine:
    from recipe_gkd.rollout import vllm_calls, vllm_weights
    from recipe_gkd.rollout import vllm_compat as vllm

    vllm.check_platform(options.device)
    vllm.keep_files_in(scratch_folder())
    vllm_weights.register()
    arguments = vllm.EngineArgs(
        options.model_path,
        dtype=options.dtype,  # type: ignore[arg-type]
        trust_remote_code=options.trust_remote_code,
        tensor_parallel_size=options.tensor_parallel_size,
        distributed_executor_backend="uni" if options.tensor_parallel_size == 1 else "mp",
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        kv_cache_memory_bytes=options.kv_cache_bytes,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=options.enforce_eager,
        **step_budget(options),
        skip_tokenizer_init=True,
        logprobs_mode="raw_logprobs",  # at temperature 1 and over all tokens, independent of the sampling parameters
        disable_log_stats=True,
        use_tqdm_on_load=False,
        weight_transfer_config=vllm.WeightTransferConfig(backend=vllm_weights.BACKEND),
        worker_extension_cls=f"{vllm_calls.__name__}.{vllm_calls.WorkerCalls.__name__}",
    )
    engine = vllm.LLMEngine.from_engine_args(arguments)
    if options.n_tokens is not None and options.n_tokens < engine.model_config.get_vocab_size():
        engine.collective_rpc(vllm_calls.WorkerCalls.set_logits.__name__, args=(1.0, options.n_tokens))
    return engine


def step_budget(options: EngineOptions) -> dict[str, Any]:
    """Return the engine arguments that bound the tokens of a step.

    On a CPU, vLLM fails with `CPU Generator does not use offset` if the prompt of a seeded request is split into
    chunks. On CUDA, its default of 2048 tokens would reject a larger ``max_num_seqs``.
    """
    if options.device != "cpu":
        is_larger = options.max_num_seqs > _CUDA_BATCHED_TOKENS
        return {"max_num_batched_tokens": options.max_num_seqs} if is_larger else {}
    budget = max(_CPU_BATCHED_TOKENS, options.max_model_len, options.max_num_seqs)
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": budget}


def describe_engine(engine: LLMEngine) -> dict[str, Any]:
    """Return vLLM's version, and dtype, maximum length and KV cache size (both in tokens) of an engine."""
    from recipe_gkd.rollout import vllm_compat

    return {
        "vllm": vllm_compat.vllm.__version__,
        "dtype": str(engine.model_config.dtype).removeprefix("torch."),
        "max_model_len": engine.model_config.max_model_len,
        "kv_cache_tokens": vllm_compat.kv_cache_tokens(engine),
    }


def watch_ranks(engine: LLMEngine, on_death: Callable[[str], None]) -> None:
    """Call ``on_death`` when a tensor-parallel rank dies; see :func:`vllm_compat.watch_ranks`."""
    from recipe_gkd.rollout import vllm_compat

    vllm_compat.watch_ranks(engine, on_death)

"""Creation of vLLM's engine, and its internals that the service depends on."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teacher.common.head_dtype import head_overrides, wants_float32_head
from teacher.common.sizes import MIB
from teacher.common.vllm_cpu import exact_attention
from teacher.common.vllm_setup import TESTED_VLLM
from teacher.engines.base import EngineConfig
from teacher.engines.sizes import ModelRunner, StepMemory, StepSize
from teacher.engines.vllm_install import vllm_version
from teacher.engines.vllm_memory import TeacherCalls
from teacher.errors import TeacherSetupError

_CPU_KV_CACHE_MIB = 256
CPU_BLOCK_TOKENS = 32
"""Tokens per block of the KV cache, the smallest that vLLM's CPU kernels allow: only full blocks are shared."""
ASYNC_SCHEDULING = {"auto": None, "on": True, "off": False}
"""``ASYNC_SCHEDULING`` of the service -> vLLM's option. None is True unless vLLM's executor cannot do it."""


@dataclass(frozen=True)
class KvCache:
    """Size of vLLM's KV cache. All groups of layers take their blocks from one pool.

    Attributes:
        n_blocks: Blocks for sequences.
        block_sizes: Tokens per block of each group of layers.
    """

    n_blocks: int
    block_sizes: tuple[int, ...]

    def blocks_for(self, n_tokens: int) -> int:
        """Return the maximum number of blocks of a sequence. Layers with a sliding window need fewer."""
        return sum(-(-n_tokens // block_size) for block_size in self.block_sizes)


def read_kv_cache(engine: Any) -> KvCache:
    """Return the size of the KV cache of an `LLMEngine`.

    Raises:
        TeacherSetupError: The engine has no KV cache configuration where the tested version has it.
    """
    try:
        config = engine.engine_core.engine_core.scheduler.kv_cache_config
        block_sizes = tuple(int(group.kv_cache_spec.block_size) for group in config.kv_cache_groups)
        return KvCache(int(config.num_blocks) - 1, block_sizes)  # vLLM never uses one of the blocks
    except (AttributeError, TypeError) as error:
        raise TeacherSetupError(
            f"the KV cache layout of vLLM {vllm_version()} cannot be read ({error})",
            remedy=f"install vLLM {TESTED_VLLM}, with which this engine was tested",
        ) from error


def plan_engine(config: EngineConfig, vocab_size: int, *, on_cpu: bool) -> tuple[Any, StepSize, ModelRunner]:
    """Return vLLM's `EngineArgs`, the maximum size of a step, and the model runner that vLLM selects for them.

    Args:
        config: Model and limits.
        vocab_size: Rows of the output layer.
        on_cpu: True for the CPU build of vLLM.

    Raises:
        TeacherSetupError: `LOGITS_MIB` is too small.
    """
    has_float32_logits = config.dtype == "float32" or _wants_float32_head(config, on_cpu=on_cpu)

    def plan(runner: ModelRunner) -> tuple[Any, StepSize, ModelRunner]:
        memory = StepMemory(runner, config.tp_size, has_float32_logits)
        step = memory.step_size(config.logits_mib, vocab_size, config.n_logprobs)
        return make_engine_args(config, step, on_cpu=on_cpu), step, runner

    if on_cpu:
        return plan("cpu")
    found = plan("cuda_v2")
    return found if found[0].create_engine_config().use_v2_model_runner else plan("cuda_v1")


def _wants_float32_head(config: EngineConfig, *, on_cpu: bool) -> bool:
    return wants_float32_head(config.head_dtype, config.dtype, "cpu" if on_cpu else "cuda")


def make_engine_args(config: EngineConfig, step: StepSize, *, on_cpu: bool) -> Any:
    """Return vLLM's `EngineArgs`. They set ``max_model_len`` one token above the longest sequence to score.

    Args:
        config: Model and limits.
        step: Maximum size of an engine step.
        on_cpu: True for the CPU build of vLLM.

    Raises:
        TeacherSetupError: vLLM does not serve the model, or not with sequences of this length.
    """
    from vllm import EngineArgs

    common: dict[str, Any] = {
        "model": config.ckpt_path,
        "dtype": config.dtype,
        "hf_overrides": head_overrides(float32_head=_wants_float32_head(config, on_cpu=on_cpu)),
        "skip_tokenizer_init": True,
        "max_logprobs": config.n_logprobs + 1,  # of V2: support ids, and the token of the sequence
    }
    # vLLM's own rule determines the maximum. With LongRoPE it is larger for a requested length than without one.
    requested: dict[str, Any] = {"max_model_len": config.max_model_len} if config.max_model_len else {}
    model_config = _model_config(EngineArgs(**common, **requested), config)
    max_model_len = int(model_config.max_model_len)
    # vLLM also reserves a slot for one generated token. It is never fed back, so its position may exceed the limit.
    os.environ["VLLM_ALLOW_LONG_MAX_MODEL_LEN"] = "1"

    kv_cache_mib = config.kv_cache_mib or (_CPU_KV_CACHE_MIB if on_cpu else 0)
    return EngineArgs(
        **common,
        max_model_len=max_model_len + 1,
        max_num_batched_tokens=step.tokens,
        max_num_seqs=step.sequences,
        long_prefill_token_threshold=min(step.max_sequence_tokens, max_model_len + 1),
        long_prefill_token_threshold_adaptive=True,  # at least a fair share, so that steps are full
        enable_chunked_prefill=True,
        enable_prefix_caching=None,  # vLLM's default for the model; see `vllm_prompt_rows`
        block_size=CPU_BLOCK_TOKENS if on_cpu else None,
        attention_backend=exact_attention(model_config) if on_cpu else None,  # type: ignore[arg-type]
        # There is no decode loop that a captured graph would speed up: graphs exist for at most 512 tokens. A step of
        # 8192 tokens computes for longer than its kernels take to launch, so compilation would only delay the start.
        enforce_eager=True,
        tensor_parallel_size=config.tp_size,
        distributed_executor_backend="uni" if config.tp_size == 1 else "mp",
        worker_extension_cls=f"teacher.engines.vllm_rank.{TeacherCalls.__name__}",
        kv_cache_memory_bytes=kv_cache_mib * MIB or None,
        gpu_memory_utilization=config.gpu_memory_utilization,
        enable_sleep_mode=config.sleep_mode and not on_cpu,  # vLLM refuses it on a CPU
        async_scheduling=ASYNC_SCHEDULING[config.async_scheduling],
        disable_log_stats=True,
        use_tqdm_on_load=False,
        seed=0,
    )


def _model_config(args: Any, config: EngineConfig) -> Any:
    """Return vLLM's configuration of the model. It has ``MAX_MODEL_LEN``, or the model's maximum by vLLM's own rule.

    Args:
        args: vLLM's `EngineArgs` with the requested length.
        config: Model and limits.

    Raises:
        TeacherSetupError: vLLM does not serve the model, or not with sequences of this length.
    """
    try:
        return args.create_model_config()
    except ValueError as error:
        reasons = "; ".join([item["msg"] for item in error.errors()] if hasattr(error, "errors") else [str(error)])
        if limit := re.search(r"greater than the derived max_model_len \(\w+=(\d+)", reasons):
            raise TeacherSetupError(
                f"MAX_MODEL_LEN={config.max_model_len}, but the model in CKPT_PATH={config.ckpt_path} takes at most "
                f"{limit[1]} tokens",
                options=("MAX_MODEL_LEN",),
                path=Path(config.ckpt_path),
                remedy="lower it, or leave it out for the default of vLLM",
            ) from error
        raise TeacherSetupError(
            f"vLLM does not serve CKPT_PATH={config.ckpt_path} with DTYPE={config.dtype}: {reasons}",
            options=("CKPT_PATH", "DTYPE"),
            path=Path(config.ckpt_path),
        ) from error


def make_llm_engine(args: Any) -> Any:
    """Load the model and return vLLM's `LLMEngine`.

    Raises:
        TeacherSetupError: The KV cache does not hold one sequence of the maximum length, or the model's output layer is
            quantized and cannot compute float32 logits.
    """
    from vllm.v1.engine.llm_engine import LLMEngine

    try:
        return LLMEngine.from_engine_args(args)
    except (ValueError, RuntimeError) as error:
        if (refusal := head_dtype_error(error)) is not None:
            raise refusal from None
        if not isinstance(error, ValueError) or not any(word in str(error) for word in ("KV cache", "cache blocks")):
            raise
        raise _kv_cache_error(error, args) from None


def head_dtype_error(error: Exception) -> TeacherSetupError | None:
    """Return vLLM's error about a quantized output layer in terms of the service's options, else None."""
    if "head_dtype different from the model dtype" not in str(error):
        return None
    return TeacherSetupError(
        "the output layer of the teacher is quantized, so vLLM cannot compute its logits in float32",
        options=("HEAD_DTYPE",),
        remedy="set HEAD_DTYPE=model",
    )


def _kv_cache_error(error: ValueError, args: Any) -> TeacherSetupError:
    """Return vLLM's error about a too small KV cache, in terms of the service's options."""
    n_bytes = args.kv_cache_memory_bytes
    size = f"KV_CACHE_MIB={n_bytes >> 20}" if n_bytes else f"GPU_MEMORY_UTILIZATION={args.gpu_memory_utilization:g}"
    fits = re.search(r"estimated maximum model length is (\d+)", str(error))
    shorter = f"MAX_MODEL_LEN to {int(fits[1]) - 1} or less" if fits else "a smaller MAX_MODEL_LEN"
    return TeacherSetupError(
        f"the KV cache ({size}) does not hold one sequence of MAX_MODEL_LEN={args.max_model_len - 1}, vLLM's error: "
        f"{error}",
        options=("MAX_MODEL_LEN", "KV_CACHE_MIB", "GPU_MEMORY_UTILIZATION"),
        remedy=f"set {shorter}, or KV_CACHE_MIB (on a GPU also GPU_MEMORY_UTILIZATION) larger",
    )


def limit_logit_rows(engine: Any, step: StepSize) -> None:
    """Limit the rows of logits that the V2 model runner computes at a time, in the process of each rank.

    Raises:
        TeacherSetupError: The constant that determines them does not exist in this version of vLLM.
    """
    _change_ranks(engine, TeacherCalls.set_logit_rows.__name__, step.logit_rows)


def replace_prompt_rows(engine: Any) -> None:
    """Let the V1 model runner of each rank score response rows; see `vllm_prompt_rows.score_responses`.

    Raises:
        TeacherSetupError: The replaced method does not exist in this version of vLLM.
    """
    _change_ranks(engine, TeacherCalls.score_responses.__name__)


def _change_ranks(engine: Any, method: str, *arguments: Any) -> None:
    try:
        engine.collective_rpc(method, args=arguments)
    except (RuntimeError, ImportError) as error:
        raise TeacherSetupError(
            f"vLLM {vllm_version()} does not fit ({error})", remedy=f"install vLLM {TESTED_VLLM}"
        ) from error


def keep_prompt_logprobs_as_tensors() -> None:
    """Return prompt log-probabilities as tensors instead of one Python object per entry (3 to 5 times faster).

    In `vllm/v1/engine/logprobs.py`, LogprobsProcessor gets all rows of a request at once and converts them to dicts.
    RequestOutput passes on the stored object unchanged. No public option skips the conversion.

    Raises:
        TeacherSetupError: The replaced method does not exist in this version of vLLM.
    """
    from vllm.v1.engine import logprobs

    if not hasattr(logprobs.LogprobsProcessor, "_update_prompt_logprobs"):
        raise TeacherSetupError(
            f"vLLM {vllm_version()} has no LogprobsProcessor._update_prompt_logprobs",
            remedy=f"install vLLM {TESTED_VLLM}",
        )

    def keep(self: Any, prompt_logprobs_tensors: Any) -> None:
        self.prompt_logprobs = prompt_logprobs_tensors

    logprobs.LogprobsProcessor._update_prompt_logprobs = keep  # type: ignore[method-assign]

"""Construction of a vLLM engine. vLLM is imported inside the functions: the driver must not wait seconds for it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_gkd.config.keys import LORA, ROLLOUT
from recipe_gkd.errors import ConfigError, GkdError, ModelError, WorkerError
from recipe_gkd.rollout.adapters import SYNC
from recipe_gkd.rollout.cpu_engine import CPU_BATCHED_TOKENS, exact_arguments, unsplit_prompts
from recipe_gkd.rollout.engine_options import EngineOptions
from recipe_gkd.rollout.engine_report import EngineReport
from recipe_gkd.rollout.limits import check_cpu_budget
from recipe_gkd.runtime.out_of_memory import ADVICE, Advice, advice
from recipe_gkd.runtime.scratch import scratch_folder
from teacher.common.head_dtype import head_overrides
from teacher.common.out_of_memory import VLLM_START_REFUSAL, is_out_of_memory, memory_details

if TYPE_CHECKING:
    from recipe_gkd.rollout.vllm.compat import LLMEngine

_UTILIZATION = f"{ROLLOUT}.gpu_memory_utilization"
_TOO_SMALL = Advice(
    f"the weights leave too little memory for the KV cache: raise {_UTILIZATION} or kv_cache_memory_megabytes if the "
    f"device has more, lower {ROLLOUT}.max_num_batched_tokens or the lengths in section data, or raise "
    f"{ROLLOUT}.tensor_model_parallel_size",
    (
        _UTILIZATION,
        *(
            f"{ROLLOUT}.{key}"
            for key in ("kv_cache_memory_megabytes", "max_num_batched_tokens", "tensor_model_parallel_size")
        ),
    ),
)
_NO_ADAPTERS = Advice(f"set {SYNC}=merged, or name other layers in {LORA}.target_modules", (SYNC,))
_REFUSALS = {
    VLLM_START_REFUSAL: Advice(
        f"lower {_UTILIZATION}, end other processes on this device, or offload the states of an actor that shares it",
        (_UTILIZATION,),
    ),
    "No available memory for the cache blocks": _TOO_SMALL,
    "larger than the available KV cache": _TOO_SMALL,
    "does not support LoRA yet": _NO_ADAPTERS,
    "could not be wrapped by any LoRA layer": _NO_ADAPTERS,
}
"""Text of vLLM's v1/worker/utils.py, v1/core/kv_cache_utils.py, v1/worker/lora_model_runner_mixin.py and
lora/model_manager.py -> keys to change."""


def build_engine(options: EngineOptions) -> LLMEngine:
    """Return a new engine in this process; its tensor-parallel ranks are separate processes.

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
        raise _start_error(error, options.model_path) from error


def _start_error(error: Exception, model_path: str) -> WorkerError:
    """Return the error of a failed start, with the keys to change if the memory is the reason."""
    what = f"vLLM could not be started on {model_path}: {type(error).__name__}: {error}"
    for text, changes in _REFUSALS.items():
        if text in str(error):
            return WorkerError(what, remedy=changes.text, keys=changes.keys, details=memory_details())
    if is_out_of_memory(error):
        keys = ADVICE["rollout", "start"].keys
        return WorkerError(what, remedy=advice("rollout", "start"), keys=keys, details=memory_details())
    return WorkerError(what, remedy=f"its options are the keys of {ROLLOUT}", keys=(ROLLOUT,))


def _check_model_folder(folder: Path) -> None:
    if not (folder / "config.json").is_file():
        raise ModelError(
            f"{folder} has no config.json",
            remedy="actor_rollout_ref.model.path must be a Hugging Face folder",
            path=folder / "config.json",
        )


def _build(options: EngineOptions) -> LLMEngine:
    from recipe_gkd.rollout.vllm import calls as vllm_calls
    from recipe_gkd.rollout.vllm import compat as vllm
    from recipe_gkd.rollout.vllm import weights as vllm_weights

    vllm.check_platform(options.device)
    ensure_device_returns_experts(options)
    vllm.keep_files_in(scratch_folder())
    vllm_weights.register()
    arguments = vllm.EngineArgs(
        options.model_path,
        dtype=options.dtype,  # type: ignore[arg-type]
        hf_overrides=head_overrides(float32_head=options.float32_head),
        trust_remote_code=options.trust_remote_code,
        tensor_parallel_size=options.tensor_parallel_size,
        distributed_executor_backend="uni" if options.tensor_parallel_size == 1 else "mp",
        max_num_seqs=options.max_num_seqs,
        max_model_len=options.max_model_len,
        kv_cache_memory_bytes=options.kv_cache_bytes,
        gpu_memory_utilization=options.gpu_memory_utilization,
        enforce_eager=options.enforce_eager,
        enable_sleep_mode=options.enable_sleep_mode,
        async_scheduling=options.async_scheduling,
        **adapter_arguments(options),
        **step_budget(options, vllm.default_batched_tokens(options.tensor_parallel_size)),
        skip_tokenizer_init=True,
        max_logprobs=options.max_logprobs,
        enable_return_routed_experts=options.return_routed_experts,
        logprobs_mode="raw_logprobs",  # at temperature 1 and over all tokens, independent of the sampling parameters
        disable_log_stats=True,
        use_tqdm_on_load=False,
        weight_transfer_config=vllm.WeightTransferConfig(backend=vllm_weights.BACKEND),
        worker_extension_cls=f"{vllm_calls.__name__}.{vllm_calls.WorkerCalls.__name__}",
    )
    if options.device == "cpu":
        for name, value in exact_arguments(arguments.create_model_config()).items():
            setattr(arguments, name, value)
    engine = vllm.LLMEngine.from_engine_args(arguments)
    if options.adapters is not None:
        engine.collective_rpc(vllm_calls.WorkerCalls.gkd_activate_adapter.__name__)
    if options.n_tokens is not None and options.n_tokens < engine.model_config.get_vocab_size():
        engine.collective_rpc(vllm_calls.WorkerCalls.set_logits.__name__, args=(1.0, options.n_tokens))
    return engine


def ensure_device_returns_experts(options: EngineOptions) -> None:
    """Raise :class:`ConfigError` if responses must have experts on a CPU, also one that ``trainer.device=auto`` chose.

    vLLM returns them with its second model runner, which needs Triton.
    """
    if options.return_routed_experts and options.device == "cpu":
        key = f"{ROLLOUT}.routing_replay"
        raise ConfigError(
            f"{key}=true on a CPU: vLLM returns the experts of its tokens on GPUs only",
            remedy=f"set {key}=false",
            keys=(key,),
        )


def adapter_arguments(options: EngineOptions) -> dict[str, Any]:
    """Return the engine arguments for adapters.

    Raises:
        ConfigError: vLLM's kernels for adapters do not support the data type.
    """
    if options.adapters is None:
        return {}
    if options.device != "cpu" and options.dtype == "float32":
        raise ConfigError(
            f"{SYNC}=adapter with {ROLLOUT}.dtype=float32: vLLM's kernels for adapters on a GPU support 16 bits only",
            remedy=f"set {ROLLOUT}.dtype=bfloat16, or {SYNC}=merged",
            keys=(SYNC, f"{ROLLOUT}.dtype"),
        )
    return {
        "enable_lora": True,
        "max_lora_rank": options.adapters.buffer_rank,
        "lora_target_modules": list(options.adapters.layers),
    }


def step_budget(options: EngineOptions, cuda_default: int) -> dict[str, Any]:
    """Return the engine arguments that bound the tokens of a step.

    On a CPU prompts are not split; see :func:`recipe_gkd.rollout.cpu_engine.unsplit_prompts`. On CUDA they are split,
    and vLLM only requires a token per sequence. Its own default for an ``LLMEngine`` is 2048 tokens, a quarter or an
    eighth of the default for its ``LLM`` class.

    Args:
        cuda_default: Tokens of a step on CUDA; see :func:`vllm_compat.default_batched_tokens`.

    Raises:
        ConfigError: On a CPU a step would not hold a whole sequence.
    """
    requested = options.max_num_batched_tokens
    if options.device != "cpu":
        # vLLM warns about a budget that no batch can fill, so the default is not larger than that.
        largest = options.max_num_seqs * options.max_model_len
        return {"max_num_batched_tokens": requested or min(max(cuda_default, options.max_num_seqs), largest)}
    if requested is not None:
        check_cpu_budget(requested, options.max_model_len)
    budget = requested or max(CPU_BATCHED_TOKENS, options.max_model_len, options.max_num_seqs)
    return unsplit_prompts(budget)


def describe_engine(engine: LLMEngine) -> EngineReport:
    """Return the settings of a started engine."""
    from recipe_gkd.rollout.vllm import compat as vllm_compat

    return EngineReport(
        vllm=vllm_compat.vllm.__version__,
        dtype=str(engine.model_config.dtype).removeprefix("torch."),
        head_dtype=str(engine.model_config.head_dtype).removeprefix("torch."),
        max_model_len=engine.model_config.max_model_len,
        max_num_batched_tokens=engine.vllm_config.scheduler_config.max_num_batched_tokens,
        kv_cache_tokens=vllm_compat.kv_cache_tokens(engine),
    )


def watch_ranks(engine: LLMEngine, on_death: Callable[[str], None]) -> None:
    """Call ``on_death`` when a tensor-parallel rank dies; see :func:`vllm_compat.watch_ranks`."""
    from recipe_gkd.rollout.vllm import compat as vllm_compat

    vllm_compat.watch_ranks(engine, on_death)

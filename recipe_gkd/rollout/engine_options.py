"""Options of a rollout engine."""

from __future__ import annotations

from dataclasses import dataclass

from recipe_gkd.config import Config
from recipe_gkd.config.conditions import sends_adapters
from recipe_gkd.config.support import Support
from recipe_gkd.rollout.adapters import AdapterOptions, adapter_options
from recipe_gkd.rollout.checkpoint_names import folder_shapes
from recipe_gkd.rollout.limits import engine_length
from teacher.common.head_dtype import wants_float32_head

_CPU_KV_CACHE_MEBIBYTES = 256
_UTILIZATION_WITH_FIXED_CACHE = 0.01
"""If vLLM gets the size of its KV cache, it uses ``gpu_memory_utilization`` only for a check at its start
(``request_memory``). On a GPU that it shares with an actor the check would count the actor's memory."""


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of a rollout engine.

    Attributes:
        model_path: Hugging Face model folder.
        device: ``"cpu"`` or ``"cuda"``.
        dtype: vLLM's ``dtype``.
        tensor_parallel_size: Number of tensor-parallel ranks.
        float32_head: If True, logits are computed in float32 from weights of any data type.
        max_num_seqs: Maximum number of sequences in a step.
        max_num_batched_tokens: Maximum number of tokens in a step; None selects the default of the device.
        enable_sleep_mode: If True, vLLM allocates weights and KV cache so that a sleep can release them. CUDA only.
        max_model_len: Maximum length of a sequence, in tokens.
        kv_cache_bytes: Size of the KV cache; None leaves it to ``gpu_memory_utilization``.
        gpu_memory_utilization: Fraction of the GPU memory for the engine.
        enforce_eager: If True, vLLM uses no CUDA graphs.
        async_scheduling: If True, vLLM schedules a step while the GPU computes the one before it. None leaves it to
            vLLM. A CPU never does.
        trust_remote_code: If True, the model folder may contain Python code.
        max_logprobs: Maximum number of likeliest ids that are returned with a token.
        return_routed_experts: If True, responses have the experts of their tokens. CUDA only.
        n_tokens: Ids of the tokenizer. Larger ids are padding of the output layer and get probability 0. None if there
            is no padding.
        adapters: Adapters that the engine adds to the weights of the folder; None: updates replace the weights.
    """

    model_path: str
    device: str
    dtype: str
    tensor_parallel_size: int
    max_num_seqs: int
    max_model_len: int
    kv_cache_bytes: int | None
    gpu_memory_utilization: float
    enforce_eager: bool
    trust_remote_code: bool
    n_tokens: int | None = None
    float32_head: bool = False
    max_num_batched_tokens: int | None = None
    enable_sleep_mode: bool = False
    async_scheduling: bool | None = None
    max_logprobs: int = 0
    return_routed_experts: bool = False
    adapters: AdapterOptions | None = None

    @classmethod
    def from_config(cls, config: Config, device: str, n_tokens: int | None = None) -> EngineOptions:
        """Return the options of a configuration.

        Args:
            device: ``"cpu"`` or ``"cuda"``.
            n_tokens: See the attribute.
        """
        rollout, model = config.actor_rollout_ref.rollout, config.actor_rollout_ref.model
        hybrid = config.actor_rollout_ref.hybrid_engine
        mebibytes = rollout.kv_cache_memory_megabytes or (_CPU_KV_CACHE_MEBIBYTES if device == "cpu" else None)
        return cls(
            model_path=model.path,
            device=device,
            dtype=rollout.dtype,
            tensor_parallel_size=rollout.tensor_model_parallel_size,
            max_num_seqs=rollout.max_num_seqs,
            max_model_len=engine_length(config),
            kv_cache_bytes=None if mebibytes is None else mebibytes << 20,
            gpu_memory_utilization=_UTILIZATION_WITH_FIXED_CACHE
            if hybrid and rollout.kv_cache_memory_megabytes is not None
            else rollout.gpu_memory_utilization,
            enforce_eager=rollout.enforce_eager or device == "cpu",
            trust_remote_code=model.trust_remote_code,
            n_tokens=n_tokens,
            float32_head=wants_float32_head(model.head_dtype, rollout.dtype, device),
            max_num_batched_tokens=rollout.max_num_batched_tokens,
            enable_sleep_mode=device == "cuda" and hybrid and rollout.sleep_level > 0,
            async_scheduling=rollout.async_scheduling,
            max_logprobs=Support.of(config).n_student_ids,
            return_routed_experts=rollout.routing_replay,
            adapters=adapter_options(config, folder_shapes(model.path)) if sends_adapters(config) else None,
        )

"""Report of a started rollout engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class EngineReport:
    """Settings of a rollout engine, as vLLM has chosen them.

    Attributes:
        vllm: Version of vLLM.
        dtype: Data type of the model, such as ``bfloat16``.
        head_dtype: Data type of the output layer's computation.
        max_model_len: Maximum number of tokens of a sequence.
        kv_cache_tokens: Size of the KV cache, in tokens.
        seconds: Duration of the start.
    """

    vllm: str
    dtype: str
    head_dtype: str
    max_model_len: int
    max_num_batched_tokens: int
    kv_cache_tokens: int
    seconds: float = 0.0

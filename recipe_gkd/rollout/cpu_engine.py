"""Arguments of engines that generate with vLLM's CPU build: the model of transformers, and seeded sampling."""

from __future__ import annotations

from typing import Any

from teacher.common.vllm_cpu import exact_attention

CPU_BATCHED_TOKENS = 4096
"""Default tokens of a step. A longer sequence needs more."""


def exact_arguments(model: Any) -> dict[str, Any]:
    """Return the engine arguments with which a CPU computes the model exactly.

    Args:
        model: vLLM's configuration of the model.
    """
    arguments: dict[str, Any] = {"attention_backend": exact_attention(model)}
    if model.has_inner_state:
        arguments["enable_prefix_caching"] = False  # vLLM caches recurrent states only with prompts in chunks
    return arguments


def unsplit_prompts(tokens: int) -> dict[str, Any]:
    """Return the engine arguments for steps of whole prompts.

    On a CPU, vLLM fails with `CPU Generator does not use offset` if the prompt of a seeded request is split into
    chunks.

    Args:
        tokens: Maximum number of tokens of a step, at least the maximum length of a sequence.
    """
    return {"enable_chunked_prefill": False, "max_num_batched_tokens": tokens}

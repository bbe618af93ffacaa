"""Prompts are not scored: their part of the KV cache is shared, and on a CPU their rows of logits are not computed.

Sequences with a common prompt (several responses, a system prompt) find its blocks in vLLM's prefix cache. By default
vLLM does not read the cache for requests of prompt log-probabilities, because rows of cached tokens are never computed.
Only rows from the last token of the prompt on are needed here, so a lookup that ends before this token is safe. It must
end there: the cache also has the responses of earlier requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from teacher.common.vllm_setup import TESTED_VLLM
from teacher.engines.vllm_install import vllm_version
from teacher.errors import TeacherSetupError

if TYPE_CHECKING:
    from collections.abc import Callable

PROMPT_LEN = "teacher_prompt_len"
"""Key of the number of prompt tokens in ``extra_args`` of a request's `SamplingParams`."""


def prompt_len_of(params: Any) -> int:
    """Return the number of prompt tokens of a request: at least 1. 1 for requests of vLLM itself."""
    return int((params.extra_args or {}).get(PROMPT_LEN, 1)) if params is not None else 1


def share_prompts(engine: Any) -> None:
    """Limit lookups in the prefix cache of an `LLMEngine` to the tokens before the last one of the prompt.

    Raises:
        TeacherSetupError: The engine has no cache manager where the tested version has it.
    """
    try:
        manager = engine.engine_core.engine_core.scheduler.kv_cache_manager
        lookup, coordinator = manager.get_computed_blocks, manager.coordinator
        find: Callable[[Any, int], Any] = coordinator.find_longest_cache_hit
    except AttributeError as error:
        raise TeacherSetupError(
            f"vLLM {vllm_version()} does not fit ({error})", remedy=f"install vLLM {TESTED_VLLM}"
        ) from error

    def limited_lookup(request: Any) -> Any:
        limit = prompt_len_of(request.sampling_params) - 1
        coordinator.find_longest_cache_hit = lambda hashes, longest: find(hashes, min(longest, limit))
        try:
            return lookup(request)
        finally:
            coordinator.find_longest_cache_hit = find

    manager.get_computed_blocks = limited_lookup


def skip_prompt_rows(runner: Any) -> None:
    """Let vLLM's V1 model runner compute no logits for tokens before the last one of a prompt.

    Its method reads the range of a step's tokens of each request from three places, whose start is moved during the
    call. On a GPU a copy of one of them to the device could still be in progress, so this is for CPUs only.

    Raises:
        RuntimeError: The runner has no such method.
    """
    if not hasattr(runner, "_get_prompt_logprobs_dict"):
        raise RuntimeError(f"vLLM {vllm_version()} has no GPUModelRunner._get_prompt_logprobs_dict")
    compute = runner._get_prompt_logprobs_dict

    def compute_responses(hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> Any:
        n_scheduled, starts = dict(num_scheduled_tokens), runner.query_start_loc.np
        moved: list[tuple[Any, int, int]] = []
        for request_id in runner.num_prompt_logprobs.keys() & n_scheduled.keys():
            request, index = runner.requests[request_id], runner.input_batch.req_id_to_index[request_id]
            n_unneeded = prompt_len_of(request.sampling_params) - 1 - request.num_computed_tokens
            if (n_skipped := min(n_unneeded, n_scheduled[request_id])) > 0:
                moved.append((request, index, n_skipped))
                n_scheduled[request_id] -= n_skipped
                request.num_computed_tokens += n_skipped
                starts[index] += n_skipped
        try:
            return compute(hidden_states, n_scheduled)
        finally:
            for request, index, n_skipped in moved:
                request.num_computed_tokens -= n_skipped
                starts[index] -= n_skipped

    runner._get_prompt_logprobs_dict = compute_responses

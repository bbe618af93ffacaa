"""Prompts are not scored: their part of the KV cache is shared, and V1 computes no logits of them.

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
SUPPORT_IDS = "teacher_support_ids"
"""Key of the support ids of the response, int32 [T, J], in ``extra_args``. -1 is an unused entry."""


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


def score_responses(runner: Any) -> None:
    """Let vLLM's V1 model runner score the response rows of a request, at its top k and at its support ids.

    It replaces the runner's method, which computes rows of all tokens of a prompt and has no support ids. Column 0 is
    the token of the sequence, the next columns are the top k; log-probabilities of the support ids follow. The ranks
    that vLLM returns are not computed: they take as long as the log-probabilities, and nothing reads them.

    Raises:
        RuntimeError: The runner has no such method.
    """
    if not hasattr(runner, "_get_prompt_logprobs_dict"):
        raise RuntimeError(f"vLLM {vllm_version()} has no GPUModelRunner._get_prompt_logprobs_dict")

    def compute_responses(hidden_states: Any, num_scheduled_tokens: dict[str, int]) -> dict[str, Any]:
        finished: dict[str, Any] = {}
        # In the order of the dict, which is the same on all ranks: `compute_logits` is a collective.
        for request_id in [each for each in runner.num_prompt_logprobs if each in num_scheduled_tokens]:
            request, n_tokens = runner.requests[request_id], len(runner.requests[request_id].prompt_token_ids)
            start = request.num_computed_tokens
            end = start + num_scheduled_tokens[request_id]
            rows = range(max(start, prompt_len_of(request.sampling_params) - 1), min(end, n_tokens - 1))
            if rows:
                first = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]]) - start
                _score_rows(runner, request_id, rows, hidden_states[first + rows.start : first + rows.stop])
            if end >= n_tokens:  # the sequence is complete
                finished[request_id] = request.in_progress_prompt_logprobs_cpu
                request.in_progress_prompt_logprobs_cpu = None
                del runner.num_prompt_logprobs[request_id]
        return finished

    runner._get_prompt_logprobs_dict = compute_responses


def _score_rows(runner: Any, request_id: str, rows: range, hidden_RD: Any) -> None:
    """Compute rows of a request, and store them until the request is finished. Row i predicts token i + 1.

    Args:
        rows: Positions of the rows in the sequence.
        hidden_RD: Hidden states of these positions.
    """
    import torch
    from vllm.v1.outputs import LogprobsTensors

    logits_RV = runner.model.compute_logits(hidden_RD)
    if logits_RV is None:  # another rank has them
        return
    logps_RV = runner.sampler.compute_logprobs(logits_RV)
    request, k = runner.requests[request_id], runner.num_prompt_logprobs[request_id]
    prompt_len = prompt_len_of(request.sampling_params)
    tokens_R = torch.tensor(request.prompt_token_ids[rows.start + 1 : rows.stop + 1], device=logps_RV.device)
    top_RK = logps_RV.topk(k, dim=-1)
    ids = torch.cat([tokens_R[:, None], top_RK.indices], dim=1)
    logps = [logps_RV.gather(1, tokens_R[:, None]), top_RK.values]
    in_response = slice(rows.start - prompt_len + 1, rows.stop - prompt_len + 1)
    if (support_TJ := (request.sampling_params.extra_args or {}).get(SUPPORT_IDS)) is not None:
        support_RJ = torch.from_numpy(support_TJ[in_response]).to(logps_RV.device, torch.int64)
        logps.append(logps_RV.gather(1, support_RJ.clamp(min=0)).where(support_RJ >= 0, float("-inf")))
    columns = torch.cat(logps, dim=1)
    if (stored := request.in_progress_prompt_logprobs_cpu) is None:
        n_rows = len(request.prompt_token_ids) - prompt_len
        stored = LogprobsTensors(
            torch.empty((n_rows, ids.shape[1]), dtype=torch.int32),
            torch.empty((n_rows, columns.shape[1]), dtype=torch.float32),
            torch.empty(0, dtype=torch.int32),
        )
        request.in_progress_prompt_logprobs_cpu = stored
    stored.logprob_token_ids[in_response] = ids.to("cpu", torch.int32)
    stored.logprobs[in_response] = columns.cpu()

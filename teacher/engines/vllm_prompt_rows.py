"""Tokens before the first scored one: their part of the KV cache is shared. V1 computes logits of scored tokens only.

Sequences with a common prompt (several responses, a system prompt) find its blocks in vLLM's prefix cache. By default
vLLM does not read the cache for requests of prompt log-probabilities, because rows of cached tokens are never computed.
Only rows from the token before the first scored one on are needed here, so a lookup that ends before it is safe. It
must end there: the cache also has the responses of earlier requests.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from teacher.common.vllm_setup import TESTED_VLLM
from teacher.engines.vllm_install import vllm_version
from teacher.errors import TeacherSetupError

if TYPE_CHECKING:
    from collections.abc import Callable

SCORED = "teacher_scored_positions"
"""Key of the positions of the scored tokens, ascending, int64 [T], in ``extra_args`` of a request's `SamplingParams`.
The first is at least 1."""
SUPPORT_IDS = "teacher_support_ids"
"""Key of the support ids of the scored tokens, int32 [T, J], in ``extra_args``. -1 is an unused entry."""


def first_scored(params: Any) -> int:
    """Return the position of the first scored token of a request. 1 for requests of vLLM itself."""
    positions_T = (params.extra_args or {}).get(SCORED) if params is not None else None
    return 1 if positions_T is None else int(positions_T[0])


def share_prompts(engine: Any) -> None:
    """Limit lookups in the prefix cache of an `LLMEngine` to the tokens before the one that predicts the first scored.

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
        limit = first_scored(request.sampling_params) - 1
        coordinator.find_longest_cache_hit = lambda hashes, longest: find(hashes, min(longest, limit))
        try:
            return lookup(request)
        finally:
            coordinator.find_longest_cache_hit = find

    manager.get_computed_blocks = limited_lookup


def score_responses(runner: Any) -> None:
    """Let vLLM's V1 model runner compute the scored rows of a request, at its top k and at its support ids.

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
            positions_T = _scored_positions(request)
            chunk = slice(*np.searchsorted(positions_T, (start + 1, end + 1)))  # row i predicts token i + 1
            if chunk.start < chunk.stop:
                first = int(runner.query_start_loc.np[runner.input_batch.req_id_to_index[request_id]]) - start
                _score_rows(runner, request_id, chunk, _rows(hidden_states, first - 1 + positions_T[chunk]))
            if end >= n_tokens:  # the sequence is complete
                finished[request_id] = request.in_progress_prompt_logprobs_cpu
                request.in_progress_prompt_logprobs_cpu = None
                del runner.num_prompt_logprobs[request_id]
        return finished

    runner._get_prompt_logprobs_dict = compute_responses


def _scored_positions(request: Any) -> np.ndarray:
    """Return the positions of the scored tokens. vLLM's own requests (warm-up) have all after the first."""
    positions_T = (request.sampling_params.extra_args or {}).get(SCORED)
    return np.arange(1, len(request.prompt_token_ids)) if positions_T is None else positions_T


def _rows(hidden_states: Any, rows_R: np.ndarray) -> Any:
    """Return rows of the hidden states, as a view if they are neighbors."""
    first, last = int(rows_R[0]), int(rows_R[-1])
    if last - first + 1 == len(rows_R):
        return hidden_states[first : last + 1]
    import torch

    return hidden_states[torch.from_numpy(rows_R).to(hidden_states.device)]


def _score_rows(runner: Any, request_id: str, chunk: slice, hidden_RD: Any) -> None:
    """Compute rows of a request, and store them until the request is finished.

    Args:
        chunk: Part of the scored tokens.
        hidden_RD: Hidden states that predict them.
    """
    import torch
    from vllm.v1.outputs import LogprobsTensors

    logits_RV = runner.model.compute_logits(hidden_RD)
    if logits_RV is None:  # another rank has them
        return
    logps_RV = runner.sampler.compute_logprobs(logits_RV)
    request, k = runner.requests[request_id], runner.num_prompt_logprobs[request_id]
    positions_T = _scored_positions(request)
    tokens_R = torch.tensor([request.prompt_token_ids[i] for i in positions_T[chunk].tolist()], device=logps_RV.device)
    top_RK = logps_RV.topk(k, dim=-1)
    ids = torch.cat([tokens_R[:, None], top_RK.indices], dim=1)
    logps = [logps_RV.gather(1, tokens_R[:, None]), top_RK.values]
    if (support_TJ := (request.sampling_params.extra_args or {}).get(SUPPORT_IDS)) is not None:
        support_RJ = torch.from_numpy(support_TJ[chunk]).to(logps_RV.device, torch.int64)
        logps.append(logps_RV.gather(1, support_RJ.clamp(min=0)).where(support_RJ >= 0, float("-inf")))
    columns = torch.cat(logps, dim=1)
    if (stored := request.in_progress_prompt_logprobs_cpu) is None:
        stored = LogprobsTensors(
            torch.empty((len(positions_T), ids.shape[1]), dtype=torch.int32),
            torch.empty((len(positions_T), columns.shape[1]), dtype=torch.float32),
            torch.empty(0, dtype=torch.int32),
        )
        request.in_progress_prompt_logprobs_cpu = stored
    stored.logprob_token_ids[chunk] = ids.to("cpu", torch.int32)
    stored.logprobs[chunk] = columns.cpu()

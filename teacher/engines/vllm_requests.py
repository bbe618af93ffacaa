"""A sequence as a request of vLLM, and the output of vLLM as its scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from teacher.engines.sizes import ModelRunner
from teacher.engines.vllm_prompt_rows import SCORED, SUPPORT_IDS
from teacher.records import ScoredSequence, TeacherSequence


def sampling_params(sequence: TeacherSequence, k: int, runner: ModelRunner, *, shares_prompts: bool) -> Any:
    """Return vLLM's `SamplingParams` of a sequence.

    V2 has parameters for the support ids, and computes all rows from the first scored one on. V1 gets the support ids
    in ``extra_args``; see `vllm_prompt_rows`.

    Args:
        sequence: Sequence to score.
        k: Log-probabilities per position, if the sequence has its top k scored.
        runner: Model runner of the engine.
        shares_prompts: Read the prefix cache.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    extra_args: dict[str, Any] = {SCORED: sequence.scored_positions_T}
    scored: dict[str, Any] = {"prompt_logprobs": k if sequence.with_top_k else 0}
    if sequence.support_ids_TJ is not None and runner == "cuda_v2":
        scored["prompt_logprob_start"] = sequence.first_scored - 1
        ids_TJ = sequence.support_ids_TJ
        if not sequence.with_top_k:  # vLLM computes the logits once instead of twice
            ids_TJ = np.concatenate([ids_TJ, sequence.scored_ids_T[:, None]], axis=1)
            scored["prompt_logprobs"] = None
        scored["prompt_logprob_token_ids"] = _at_all_rows(ids_TJ, sequence)
    elif sequence.support_ids_TJ is not None:
        extra_args[SUPPORT_IDS] = sequence.support_ids_TJ
    return SamplingParams(
        max_tokens=1,
        temperature=0.0,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        skip_reading_prefix_cache=not shares_prompts,
        extra_args=extra_args,
        **scored,
    )


def _at_all_rows(ids_TJ: np.ndarray, sequence: TeacherSequence) -> np.ndarray:
    """Return ids for each token from the first scored one on, id 0 for those that are not scored."""
    if sequence.scored_ranges is None:
        return ids_TJ
    first = sequence.first_scored
    ids_NJ = np.zeros((len(sequence.token_ids) - first, ids_TJ.shape[1]), ids_TJ.dtype)
    ids_NJ[sequence.scored_positions_T - first] = ids_TJ
    return ids_NJ


def _scored_rows(rows: np.ndarray, sequence: TeacherSequence) -> np.ndarray:
    """Return the rows of the scored tokens. ``rows`` has them alone (V1), or ends with the last token (V2).

    V2 omits rows of cached tokens, which are at the beginning.
    """
    n_scored, n_tokens = sequence.n_scored, len(sequence.token_ids)
    if len(rows) == n_scored:
        return rows
    if sequence.scored_ranges is None:
        return rows[max(0, len(rows) - n_scored) :]
    at_T = sequence.scored_positions_T - (n_tokens - len(rows))
    return rows[at_T[at_T >= 0]]


def scores_of(sequence: TeacherSequence, output: Any, k: int) -> ScoredSequence:
    """Return the scores of a finished output.

    Args:
        sequence: Sequence of its request.
        output: vLLM's `RequestOutput`, with prompt log-probabilities as tensors.
        k: Log-probabilities per position, if the sequence has its top k scored.

    Raises:
        RuntimeError: The rows do not belong to the sequence.
    """
    k = k if sequence.with_top_k else 0
    n_scored, n_support = sequence.n_scored, sequence.n_support
    of_support_ids = output.prompt_token_id_logprobs
    if of_support_ids is not None:
        of_support_ids = _scored_rows(of_support_ids, sequence)
    if output.prompt_logprobs is None:  # V2 with support ids alone: the last column is the token of the sequence
        ids_TX = sequence.scored_ids_T[:, None]
        logps_TX, support_TJ = of_support_ids[:, -1:], of_support_ids[:, :-1]
    else:
        logps = _scored_rows(output.prompt_logprobs.logprobs.numpy(), sequence)
        ids_TX = _scored_rows(output.prompt_logprobs.logprob_token_ids.numpy(), sequence)
        logps_TX = logps[:, : 1 + k]
        support_TJ = logps[:, 1 + k :] if of_support_ids is None else of_support_ids
    shapes = [logps_TX.shape, ids_TX.shape, support_TJ.shape]
    if shapes != [(n_scored, 1 + k), (n_scored, 1 + k), (n_scored, n_support)] or not np.array_equal(
        ids_TX[:, 0], sequence.scored_ids_T
    ):
        raise RuntimeError(
            f"vLLM returned prompt logprobs of shapes {shapes} that do not belong to the {n_scored} scored tokens"
        )
    # Copies: a view would keep the prompt's rows in memory, and the wire format needs contiguous arrays.
    return ScoredSequence(
        np.array(logps_TX[:, 1:], np.float32, order="C"),
        np.array(ids_TX[:, 1:], np.int32, order="C"),
        np.array(logps_TX[:, 0], np.float32),
        np.array(support_TJ, np.float32, order="C") if n_support else None,
    )

"""A sequence as a request of vLLM, and the output of vLLM as its scores."""

from __future__ import annotations

from typing import Any

import numpy as np

from teacher.engines.sizes import ModelRunner
from teacher.engines.vllm_prompt_rows import PROMPT_LEN, SUPPORT_IDS
from teacher.records import ScoredSequence, TeacherSequence


def sampling_params(sequence: TeacherSequence, k: int, runner: ModelRunner, *, shares_prompts: bool) -> Any:
    """Return vLLM's `SamplingParams` of a sequence.

    V2 has parameters for the support ids. V1 gets them in ``extra_args``; see `vllm_prompt_rows`.

    Args:
        sequence: Sequence to score.
        k: Log-probabilities per position, if the sequence has its top k scored.
        runner: Model runner of the engine.
        shares_prompts: Read the prefix cache.
    """
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    extra_args: dict[str, Any] = {PROMPT_LEN: sequence.prompt_len}
    scored: dict[str, Any] = {"prompt_logprobs": k if sequence.with_top_k else 0}
    if sequence.support_ids_TJ is not None and runner == "cuda_v2":
        scored["prompt_logprob_start"] = sequence.prompt_len - 1
        scored["prompt_logprob_token_ids"] = sequence.support_ids_TJ
        if not sequence.with_top_k:  # vLLM computes the logits once instead of twice
            sampled_T1 = sequence.token_ids[sequence.prompt_len :, None]
            scored["prompt_logprob_token_ids"] = np.concatenate([sequence.support_ids_TJ, sampled_T1], axis=1)
            scored["prompt_logprobs"] = None
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
    if output.prompt_logprobs is None:  # V2 with support ids alone: the last column is the token of the sequence
        ids_TX = sequence.token_ids[sequence.prompt_len :, None]
        logps_TX, support_TJ = of_support_ids[:, -1:], of_support_ids[:, :-1]
    else:
        logps, ids = output.prompt_logprobs.logprobs.numpy(), output.prompt_logprobs.logprob_token_ids.numpy()
        # Rows of the prompt are at the beginning. V1 does not compute them, V2 omits those of cached tokens.
        first = max(0, len(logps) - n_scored)
        ids_TX, logps_TX = ids[first:], logps[first:, : 1 + k]
        support_TJ = logps[first:, 1 + k :] if of_support_ids is None else of_support_ids
    shapes = [logps_TX.shape, ids_TX.shape, support_TJ.shape]
    if shapes != [(n_scored, 1 + k), (n_scored, 1 + k), (n_scored, n_support)] or not np.array_equal(
        ids_TX[:, 0], sequence.token_ids[sequence.prompt_len :]
    ):
        raise RuntimeError(
            f"vLLM returned prompt logprobs of shapes {shapes} that do not belong to the {n_scored} response tokens"
        )
    # Copies: a view would keep the prompt's rows in memory, and the wire format needs contiguous arrays.
    return ScoredSequence(
        np.array(logps_TX[:, 1:], np.float32, order="C"),
        np.array(ids_TX[:, 1:], np.int32, order="C"),
        np.array(logps_TX[:, 0], np.float32),
        np.array(support_TJ, np.float32, order="C") if n_support else None,
    )

"""Division of a conversation into the sequences that are scored and trained on.

Most conversations are one sequence. If the chat template has written the history differently before a turn, such as
without the reasoning of earlier turns, the student sampled this turn from other tokens than those before it, and a new
sequence begins: the history as its prompt, and the turns that follow it as its response
(``rollout.history=rewrite``).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from recipe_gkd.data.samples import InsertedTokens, Prompt, Response, Sample


def parts_of(prompt: Prompt, response: Response) -> list[tuple[Prompt, Response]]:
    """Return the sequences of a response, in order. All have its uid, and each sampled token is in one of them.

    The teacher sees its own prompt in place of the student's in each of them.
    """
    if not response.rewrites:
        return [(prompt, response)]
    starts = [0, *(rewrite.before for rewrite in response.rewrites)]
    prompts = [prompt, *(_with_context(prompt, rewrite.context_ids) for rewrite in response.rewrites)]
    ends = [*starts[1:], len(response.ids)]
    routed = [response.routed_experts_PX, *(rewrite.routed_experts_PX for rewrite in response.rewrites)]
    parts = [
        replace(_part(response, start, end), routed_experts_PX=experts_PX)
        for start, end, experts_PX in zip(starts, ends, routed, strict=True)
    ]
    return list(zip(prompts, parts, strict=True))


def as_sampled(prompt: Prompt, response: Response) -> Prompt:
    """Return the prompt of a response, which the environment of a conversation may have replaced."""
    return prompt if response.prompt_ids is None else replace(prompt, ids=response.prompt_ids)


def _with_context(prompt: Prompt, ids: np.ndarray) -> Prompt:
    teacher_ids = prompt.teacher_ids
    if teacher_ids is not None:
        teacher_ids = np.concatenate([teacher_ids, ids[len(prompt.ids) :]])
    return replace(prompt, ids=ids, teacher_ids=teacher_ids)


def _part(response: Response, start: int, end: int) -> Response:
    """Return the tokens from ``start`` to ``end`` as a response."""
    student_ids_TJ, inserted, versions_T = response.student_ids_TJ, response.inserted, response.versions_T[start:end]
    if inserted is not None:
        is_inside_N = (inserted.before_N >= start) & (inserted.before_N < end)
        before_N = inserted.before_N[is_inside_N] - np.int32(start)
        inserted = InsertedTokens(ids_N=inserted.ids_N[is_inside_N], before_N=before_N) if len(before_N) else None
    return replace(
        response,
        ids=response.ids[start:end],
        logprobs=response.logprobs[start:end],
        finish_reason=response.finish_reason if end == len(response.ids) else "stop",
        weights_version=int(versions_T.min()),
        versions_T=versions_T,
        student_ids_TJ=None if student_ids_TJ is None else student_ids_TJ[start:end],
        inserted=inserted,
        rewrites=(),
        start=start,
    )


def turns_T(response: Response) -> np.ndarray:
    """Return the index of each token's turn among the turns of a sequence, int32 [T]."""
    return np.searchsorted(response.turn_starts[1:], np.arange(len(response.ids)), side="right").astype(np.int32)


def by_response(samples: Sequence[Sample]) -> list[list[Sample]]:
    """Return the samples of each response: one, or the parts of a conversation."""
    groups: dict[int, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.prompt.uid, []).append(sample)
    return list(groups.values())

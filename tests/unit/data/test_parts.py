"""Division of conversations whose history was rewritten."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from recipe_gkd.conversations.conversation import ConversationState
from recipe_gkd.conversations.template import NextTokens
from recipe_gkd.data.parts import by_response, parts_of, turns_T
from recipe_gkd.data.samples import Prompt, Response, Sample, TeacherTopK

PROMPT = Prompt(uid=7, ids=np.array([1, 2, 3], np.int32), row=0)
REWRITE = NextTokens(ids=np.array([1, 2, 3, 4, 5], np.int32), is_rewrite=True)


def turn(n_tokens: int, first: int, version: int) -> Response:
    ids = np.arange(first, first + n_tokens, dtype=np.int32)
    return Response(
        uid=7,
        ids=ids,
        logprobs=-ids.astype(np.float32),
        finish_reason="stop",
        weights_version=version,
        versions_T=np.full(n_tokens, version, np.int32),
        student_ids_TJ=np.stack([ids, ids + 1], 1),
    )


def conversation(turns: list[tuple[int, int, bool]], prompt: Prompt = PROMPT) -> Response:
    """Return a conversation. ``turns``: for each turn its tokens, those after it, and whether these are a rewrite."""
    state = ConversationState(prompt)
    for number, (n_tokens, n_between, is_rewrite) in enumerate(turns):
        state.turns.append(turn(n_tokens, 1000 * (number + 1), number))
        ids = np.arange(n_between, dtype=np.int32) + 100 * (number + 1)
        if is_rewrite:
            ids = np.concatenate([prompt.ids, ids])
        state.between.append(NextTokens(ids=ids, is_rewrite=is_rewrite))
    return state.response("stop", version=0, environment_s=0, n_restarts=0)


turns = st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3), st.booleans()), min_size=1, max_size=6)


@settings(max_examples=200, deadline=None)
@given(turns=turns)
def test_each_token_is_in_one_part_behind_the_tokens_that_it_was_sampled_from(
    turns: list[tuple[int, int, bool]],
) -> None:
    response = conversation(turns)
    parts = parts_of(PROMPT, response)
    assert len(parts) == 1 + sum(is_rewrite for *_, is_rewrite in turns[:-1])
    for name in ("ids", "logprobs", "versions_T", "student_ids_TJ"):
        joined = np.concatenate([getattr(part, name) for _, part in parts])
        np.testing.assert_array_equal(joined, getattr(response, name))
    state, found = ConversationState(PROMPT), iter(parts)
    prompt, part = next(found)
    n_turns = 0
    for number, (n_tokens, n_between, is_rewrite) in enumerate(turns):
        sequence = np.concatenate([prompt.ids, part.sequence_ids]).tolist()
        context = state.context_ids.tolist()
        assert sequence[: len(context)] == context  # the student sampled the turn from these tokens
        start = len(context)
        assert sequence[start : start + n_tokens] == list(range(1000 * (number + 1), 1000 * (number + 1) + n_tokens))
        assert (turns_T(part) == n_turns).sum() == n_tokens
        state.turns.append(turn(n_tokens, 1000 * (number + 1), number))
        ids = np.arange(n_between, dtype=np.int32) + 100 * (number + 1)
        ids = np.concatenate([PROMPT.ids, ids]) if is_rewrite else ids
        state.between.append(NextTokens(ids=ids, is_rewrite=is_rewrite))
        n_turns += 1
        if is_rewrite and number + 1 < len(turns):
            assert part.finish_reason == "stop" and part.weights_version == part.versions_T[0]
            (prompt, part), n_turns = next(found), 0
    assert next(found, None) is None


def test_each_token_has_the_experts_of_the_turn_that_computed_it_first() -> None:
    """The experts of a turn are its number. An engine returns them for all tokens but the last one."""
    state = ConversationState(PROMPT)
    for number, tokens in enumerate([NextTokens(ids=np.arange(2, dtype=np.int32), is_rewrite=False), REWRITE, REWRITE]):
        n_computed = len(state.context_ids) + 4 - 1
        experts_PX = np.full((n_computed, 1, 2), number, np.int16)
        state.turns.append(replace(turn(4, 10, number), routed_experts_PX=experts_PX))
        state.between.append(tokens)
    response = state.response("stop", version=0, environment_s=0, n_restarts=0)
    (_, first), (prompt, second) = parts_of(PROMPT, response)
    # 3 tokens of the prompt and 3 of the first turn, then its last token, 2 other tokens and 3 of the second turn
    assert first.routed_experts_PX is not None and second.routed_experts_PX is not None
    assert first.routed_experts_PX[:, 0, 0].tolist() == [0] * 6 + [1] * 6
    assert len(prompt.ids) == 5 and second.routed_experts_PX[:, 0, 0].tolist() == [2] * 8


def test_teacher_sees_its_own_prompt_in_each_part() -> None:
    prompt = replace(PROMPT, teacher_ids=np.array([9, 9], np.int32))
    [_, (second, _)] = parts_of(prompt, conversation([(1, 2, True), (1, 1, False)], prompt))
    assert second.ids.tolist() == [1, 2, 3, 100, 101] and second.ids_for_teacher.tolist() == [9, 9, 100, 101]


def test_samples_of_a_response_are_together() -> None:
    samples = [
        Sample(prompt=prompt, response=part, teacher=TeacherTopK.absent(len(part.ids)))
        for prompt, part in parts_of(PROMPT, conversation([(1, 1, True), (2, 1, False)]))
    ]
    other = replace(samples[0], prompt=replace(PROMPT, uid=8), response=replace(samples[0].response, uid=8))
    assert by_response([samples[0], other, samples[1]]) == [samples, [other]]

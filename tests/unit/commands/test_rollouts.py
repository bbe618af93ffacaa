"""Lines of ``data inspect --rollout``: which tokens were sampled."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from recipe_gkd.commands.data.rollouts import describe_rollout
from recipe_gkd.conversations.conversation import ConversationState
from recipe_gkd.conversations.template import NextTokens
from recipe_gkd.data.samples import Prompt
from recipe_gkd.rollout.turns import TurnRequest
from tests._support.conversations import TOKENIZER, turn_of


def ids_of(text: str) -> np.ndarray:
    return np.array(TOKENIZER(text)["input_ids"], np.int32)


def test_each_line_is_a_stretch_of_tokens_of_the_same_origin() -> None:
    prompt = Prompt(uid=0, ids=ids_of("<|user|>1+1=<|assistant|>"), row=17)
    state = ConversationState(prompt)
    after = ["<|tool|>2<|assistant|>", "<|user|>3+3=<|assistant|>", ""]
    for number, text in enumerate(("12", "2", "6")):
        request = TurnRequest(prompt=prompt, number=number, max_tokens=9)
        state.turns.append(turn_of(request, text).response)
        state.between.append(NextTokens(ids=ids_of(after[number]), is_rewrite=number == 1))
    response = state.response("turns", version=0, environment_s=0, n_restarts=0)
    head, *lines = describe_rollout(prompt, response, TOKENIZER)
    assert head == "response to row 17: 3 turns, 0 tool calls, 7 sampled tokens, end: turns"
    assert [line.split(maxsplit=2) for line in lines] == [
        ["prompt", "6", "<|user|>1+1=<|assistant|>"],
        ["sampled", "3", "12<|end|>"],
        ["added", "3", "<|tool|>2<|assistant|>"],
        ["sampled", "2", "2<|end|>"],
        ["rewritten", "6", "<|user|>3+3=<|assistant|>"],
        ["sampled", "2", "6<|end|>"],
    ]


def test_prompt_of_the_environment_and_failures_are_shown() -> None:
    prompt = Prompt(uid=0, ids=ids_of("<|user|>1+1="), row=0)
    state = ConversationState(prompt)
    state.turns.append(turn_of(TurnRequest(prompt=prompt, number=0, max_tokens=9), "1").response)
    response = state.response("failure", version=0, environment_s=0, n_restarts=0, failure="it\nraised")
    head, first, *_ = describe_rollout(prompt, replace(response, prompt_ids=ids_of("<|user|>2")), TOKENIZER)
    assert "failed: it" in head and "\n" not in head and "end: failure" in head
    assert first.split() == ["prompt", "2", "<|user|>2"]

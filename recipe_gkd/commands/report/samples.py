"""Responses to the same validation prompts at several steps of a run."""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

from recipe_gkd.commands.report.run_files import Run, read_responses
from recipe_gkd.commands.report.templates import render
from recipe_gkd.data.values import is_list_of_objects
from recipe_gkd.rewards.items import CONVERSATION
from recipe_gkd.validation.kl import FORWARD
from recipe_gkd.validation.tokens import TOKENS
from teacher.common.display_text import shorten

N_PROMPTS = 6
KL_STEPS = (0.1, 0.3, 1.0, 3.0)
"""Forward KL in nats from which a token has the first, second, ... color."""
N_WORST = 2
"""Number of prompts that are shown because of their score at the end."""
SCORES = (
    ("reward", 1, "the prompts with the lowest reward", "those whose reward rose most"),
    (FORWARD, -1, "the prompts with the highest KL to the teacher", "those whose KL fell most"),
)
"""Fields that can select the prompts, in the order of precedence; the sign of a good value; two descriptions."""
MAX_CHARS = 3000
"""Characters of each text on the page. The file has the whole text."""


def samples_section(run: Run) -> str:
    """Return sample responses as HTML. Empty if the run has no validation responses."""
    shown = _spread(list(run.validations), 3)
    responses = {step: found for step in shown if (found := read_responses(run.validations[step]))}
    if not responses:
        return ""
    steps = list(responses)
    last = responses[steps[-1]]
    keys = [key for key in last if all(key in found for found in responses.values())] or list(last)
    keys = [key for key in keys if TOKENS in last[key]] or keys
    chosen, order = choose_prompts(keys, last, responses[steps[0]] if len(steps) > 1 else None)
    cards = [(key, [(step, responses[step][key]) for step in steps if key in responses[step]]) for key in chosen]
    names = [run.validations[step].name for step in steps]
    has_kl = any(TOKENS in record for _, records in cards for _, record in records)
    functions = {each.__name__: each for each in (prompt_parts, response_parts, kl_color, cut)}
    kl_steps = KL_STEPS if has_kl else ()
    numbers = {"n_prompts": len(last), "kl_steps": kl_steps}
    return render("samples.html", cards=cards, order=order, files=names, **numbers, **functions)


def choose_prompts(
    keys: Sequence[Any], last: Mapping[Any, Mapping[str, Any]], first: Mapping[Any, Mapping[str, Any]] | None
) -> tuple[list[Any], str]:
    """Return the prompts to show: the two with the worst score at the end, then those that improved most.

    The score is the reward, or without rewards the KL divergence. Without a score they are the first prompts.

    Args:
        keys: Candidates, in the order of the data.
        last: Records of the last validation.
        first: Records of the first validation. None if there is only one; the prompts are then those with the worst
            score.

    Returns:
        The prompts, and their description.
    """
    known = [score for score in SCORES if any(_is_number(last[key].get(score[0])) for key in keys)]
    if not known:
        return list(keys[:N_PROMPTS]), "the first prompts"
    name, sign, worst, best_gain = known[0]
    scored = [key for key in keys if _is_number(last[key].get(name))]
    scored.sort(key=lambda key: sign * last[key][name])  # equal scores keep the order of the data
    if first is None or len(scored) <= N_WORST:
        return scored[:N_PROMPTS], worst

    def gain(key: Any) -> float:
        before = first.get(key, {}).get(name)
        return float(sign * (last[key][name] - before)) if _is_number(before) else 0.0

    order = {key: index for index, key in enumerate(keys)}
    gained = sorted(scored[N_WORST:], key=lambda key: (-gain(key), order[key]))
    return (scored[:N_WORST] + gained)[:N_PROMPTS], f"{worst} at the end, then {best_gain}"


def _is_number(value: object) -> bool:
    return isinstance(value, int | float)


def prompt_parts(prompt: object) -> list[tuple[object, object]]:
    """Return role and content of each message of a prompt. A text is one message."""
    if is_list_of_objects(prompt):
        return [(message.get("role", "prompt"), message.get("content")) for message in prompt]
    return [("prompt", prompt)]


@dataclass(frozen=True)
class ResponsePart:
    """Part of a response: the response of one turn, or a message of a conversation.

    Attributes:
        role: Role of the message. None for a response of one turn.
        text: Its text, with one line per tool call.
        tokens: Text and forward KL of each token that the student sampled; empty if they are not in the file.
    """

    role: str | None
    text: str
    tokens: Sequence[tuple[str, float | None]] = ()

    @property
    def is_sampled(self) -> bool:
        """True for what the student sampled."""
        return self.role in (None, "assistant")


def response_parts(record: dict[str, Any]) -> list[ResponsePart]:
    """Return the parts of a response. Tokens that do not belong to the student's messages one by one are left out."""
    turns = _tokens_of_turns(record)
    conversation = record.get(CONVERSATION)
    messages = conversation.get("messages") if isinstance(conversation, dict) else None
    if not is_list_of_objects(messages) or not messages:
        parts = [ResponsePart(None, str(record.get("raw_answer", record.get("answer", ""))))]
    else:
        parts = [ResponsePart(str(message.get("role", "message")), _message_text(message)) for message in messages]
    if sum(part.is_sampled for part in parts) != len(turns):
        return parts
    tokens = iter(turns)
    return [replace(part, tokens=next(tokens)) if part.is_sampled else part for part in parts]


def _tokens_of_turns(record: dict[str, Any]) -> list[list[tuple[str, float | None]]]:
    """Return the tokens of each turn, empty if the record does not have them."""
    match record.get(TOKENS):
        case {"texts": list(texts), "kl": list(kl_T), "turns": list(starts)} if len(texts) == len(kl_T):
            pairs = list(zip(texts, kl_T, strict=True))
            return [_cut(pairs[start:end]) for start, end in zip(starts, [*starts[1:], len(pairs)], strict=True)]
        case _:
            return []


def _cut(tokens: list[tuple[str, float | None]]) -> list[tuple[str, float | None]]:
    """Return tokens with at most :data:`MAX_CHARS` characters."""
    n_chars = list(accumulate(len(text) for text, _ in tokens))
    n_shown = bisect_right(n_chars, MAX_CHARS)
    return tokens if n_shown == len(tokens) else [*tokens[:n_shown], (" ...", None)]


def kl_color(kl: float | None) -> int:
    """Return the number of the color of a token, 0 for none."""
    return 0 if kl is None else sum(kl >= step for step in KL_STEPS)


def _message_text(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    lines = [] if content in (None, "") else [str(content)]
    calls = message.get("tool_calls")
    functions = [call.get("function") for call in calls] if is_list_of_objects(calls) else []
    lines += [f"-> {each.get('name')} {_arguments(each)}" for each in functions if isinstance(each, dict)]
    return "\n".join(lines)


def _arguments(function: Mapping[str, Any]) -> str:
    arguments = function.get("arguments", "")
    return arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)


def cut(value: object) -> str:
    """Return at most :data:`MAX_CHARS` characters of a text."""
    return shorten("" if value is None else str(value), MAX_CHARS, " ...")


def _spread(steps: list[int], count: int) -> list[int]:
    """Return the first, the last and evenly spaced steps between them."""
    if len(steps) <= count:
        return steps
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]

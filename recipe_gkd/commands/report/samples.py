"""Responses to the same validation prompts at several steps of a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from recipe_gkd.commands.report.run_files import Run, read_responses
from recipe_gkd.commands.report.templates import render
from recipe_gkd.data.values import is_list_of_objects
from recipe_gkd.rewards.items import CONVERSATION
from teacher.common.display_text import shorten

N_PROMPTS = 6
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
    cards = [
        (key, [(step, responses[step][key]) for step in steps if key in responses[step]])
        for key in choose_prompts(keys, last, responses[steps[0]])
    ]
    names = [run.validations[step].name for step in steps]
    shown_as = {"prompt_parts": prompt_parts, "conversation_parts": conversation_parts, "cut": cut}
    return render("samples.html", cards=cards, files=names, n_prompts=len(last), **shown_as)


def choose_prompts(keys: list[Any], last: dict[Any, dict[str, Any]], first: dict[Any, dict[str, Any]]) -> list[Any]:
    """Return the prompts to show: two with the lowest reward at the end, then those whose reward rose most.

    Args:
        keys: Candidates, in the order of the data.
        last: Records of the last validation.
        first: Records of the first validation.
    """
    lowest = sorted(keys, key=lambda key: _reward(last[key]))[:2]
    rest = [key for key in keys if key not in lowest]
    gained = sorted(rest, key=lambda key: _reward(first.get(key, {})) - _reward(last[key]))
    return (lowest + gained)[:N_PROMPTS]


def _reward(record: dict[str, Any]) -> float:
    reward = record.get("reward")
    return float(reward) if isinstance(reward, int | float) else 0.0


def prompt_parts(prompt: object) -> list[tuple[object, object]]:
    """Return role and content of each message of a prompt. A text is one message."""
    if is_list_of_objects(prompt):
        return [(message.get("role", "prompt"), message.get("content")) for message in prompt]
    return [("prompt", prompt)]


def conversation_parts(record: dict[str, Any]) -> list[tuple[object, str]]:
    """Return role and text of each message of a conversation, with one line per tool call.

    Returns:
        Empty for a response of one generation, and for a conversation of another form than
        :func:`recipe_gkd.rewards.items.conversation_fields` writes.
    """
    conversation = record.get(CONVERSATION)
    messages = conversation.get("messages") if isinstance(conversation, dict) else None
    if not is_list_of_objects(messages):
        return []
    return [(message.get("role", "message"), _message_text(message)) for message in messages]


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

"""Responses to the same validation prompts at several steps of a run."""

from __future__ import annotations

from typing import Any

from recipe_gkd.commands.report.markup import text
from recipe_gkd.commands.report.run_files import Run, read_responses
from recipe_gkd.commands.report.series import number
from recipe_gkd.data.values import is_list_of_objects

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
        _card(key, [(step, responses[step][key]) for step in steps if key in responses[step]])
        for key in choose_prompts(keys, last, responses[steps[0]])
    ]
    names = ", ".join(text(run.validations[step].name) for step in steps)
    return (
        f'<p class="lead">Responses to {len(cards)} of {len(last):,} validation prompts at {len(steps)} step(s): the '
        "prompts with the lowest reward at the end, then those that improved most. All responses: "
        f"<code>{names}</code> in <code>validation/</code>.</p>"
        f'<div class="samples">{"".join(cards)}</div>'
    )


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


def _card(key: tuple[str, Any], records: list[tuple[int, dict[str, Any]]]) -> str:
    newest = records[-1][1]
    truth = newest.get("ground_truth")
    expected = f'<div class="truth"><h4>Ground truth</h4><pre>{_cut(truth)}</pre></div>' if truth is not None else ""
    answers = "".join(_response(step, record) for step, record in records)
    return (
        f'<article class="card sample"><header><b>{text(key[0])}</b> row {text(key[1])}</header>'
        f"{_prompt(newest.get('prompt'))}{expected}{answers}</article>"
    )


def _prompt(prompt: object) -> str:
    if is_list_of_objects(prompt):
        return "".join(_prompt_part(message.get("role", "prompt"), message.get("content")) for message in prompt)
    return _prompt_part("prompt", prompt)


def _prompt_part(title: object, content: object) -> str:
    return f'<div class="prompt"><h4>{text(title)}</h4><pre>{_cut(content)}</pre></div>'


def _response(step: int, record: dict[str, Any]) -> str:
    reward = record.get("reward")
    value = f'<span class="reward">reward {number(float(reward))}</span>' if isinstance(reward, int | float) else ""
    truncated = ' <span class="cut">truncated</span>' if record.get("finish_reason") == "length" else ""
    return (
        f'<div class="response"><h4>step {step:,} {value}{truncated}</h4><pre>{_cut(record.get("answer"))}</pre></div>'
    )


def _cut(value: object) -> str:
    content = "" if value is None else str(value)
    return text(content if len(content) <= MAX_CHARS else content[:MAX_CHARS] + " ...")


def _spread(steps: list[int], count: int) -> list[int]:
    """Return the first, the last and evenly spaced steps between them."""
    if len(steps) <= count:
        return steps
    return [steps[round(index * (len(steps) - 1) / (count - 1))] for index in range(count)]

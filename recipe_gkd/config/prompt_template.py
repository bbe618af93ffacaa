"""Templates of the teacher's prompts: ``actor_rollout_ref.teacher.prompt_template``.

A template has the syntax of ``str.format`` with names only: ``{prompt}``, ``{ground_truth}``, ``{extra_info.answer}``.
``{{`` and ``}}`` are braces.
"""

from __future__ import annotations

import string
from collections.abc import Mapping

PROMPT = "prompt"
"""Field of the text that the template replaces."""


def template_fields(template: str) -> list[str]:
    """Return the names of the fields of a valid template, each once, in their order."""
    return list(dict.fromkeys(name for _, name, _, _ in string.Formatter().parse(template) if name is not None))


def template_problem(template: str) -> str | None:
    """Return the reason why a template is invalid, None if it is valid."""
    expected = "expected text with fields such as {prompt} or {extra_info.answer}"
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        return f"{error}; {expected}"
    for _, name, spec, conversion in parts:
        if name is None:
            continue
        if not name or name.isdecimal() or spec or conversion:
            shown = name + (f"!{conversion}" if conversion else "") + (f":{spec}" if spec else "")
            return f"got the field {{{shown}}}; {expected}"
    return None


def fill(template: str, values: Mapping[str, str]) -> str:
    """Return the text of a valid template.

    Args:
        values: Text of each field. Braces in it are not fields.
    """
    parts = string.Formatter().parse(template)
    return "".join(literal + (values[name] if name is not None else "") for literal, name, _, _ in parts)

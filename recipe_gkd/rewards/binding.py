"""Binding of a reward function's parameters, by name, to the values of one response.

Two families of names are accepted: this project's and verl's (``verl.workers.reward_manager``). :data:`NAMES` is the
only table of them. This file imports only the standard library, because the process that calls the function loads it by
its path.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from typing import Any, NamedTuple

OURS, VERL = "this project's", "verl's"

NAMES: dict[str, tuple[str | None, str]] = {
    "prompt": (OURS, "prompt"),
    "response": (OURS, "response"),
    "answer": (OURS, "response"),  # the former name of `response`
    "extra": (OURS, "extra"),
    "data_source": (VERL, "data_source"),
    "solution_str": (VERL, "response"),
    "extra_info": (VERL, "extra_info"),
    "ground_truth": (None, "ground_truth"),
}
"""Parameter name -> (its family, the value that it receives). The family None stands for both."""

KEYWORDS = {
    OURS: ("prompt", "response", "answer", "ground_truth", "extra"),
    VERL: ("data_source", "solution_str", "ground_truth", "extra_info"),
}
"""Names under which ``**kwargs`` receives the values that no other parameter receives."""

ACCEPTED = (
    "parameters named (prompt, response, ground_truth, extra) or, as in verl, (data_source, solution_str, "
    "ground_truth, extra_info=None): any of one family, in any order; other parameters need a default value"
)


class Refusal(NamedTuple):
    """Signature of a reward function that is refused.

    Attributes:
        reason: Reason, as the predicate of a sentence.
        names: Names of the parameters, or of the keyword arguments, that are the reason.
    """

    reason: str
    names: tuple[str, ...] = ()


def values_of(
    prompt: object, response: str, ground_truth: object, extra: dict[str, Any], data_source: object
) -> dict[str, Any]:
    """Return the values that :data:`NAMES` refers to.

    ``extra_info`` is the column of that name, as in verl. Without such a column it is all of ``extra``.
    """
    extra_info = extra.get("extra_info")
    return {
        "prompt": prompt,
        "response": response,
        "ground_truth": ground_truth,
        "extra": extra,
        "data_source": data_source,
        "extra_info": extra_info if isinstance(extra_info, dict) else extra,
    }


def bind(function: Callable[..., Any], name: str, kwargs: Collection[str] = ()) -> dict[str, str] | Refusal:
    """Bind the parameters of a reward function.

    Args:
        function: The function, or another callable.
        name: Its name, for messages.
        kwargs: Names of the arguments in ``custom_reward_function.kwargs``.

    Returns:
        Parameter name -> name of the value that it receives, or a refusal of the signature.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # Some functions that are written in C have no signature.
        return Refusal(f"the parameters of its {name} cannot be read; wrap it in a Python function with {ACCEPTED}")
    shown = f"its {name}{signature!s:.300}"
    parameters = list(signature.parameters.values())
    has_kwargs = any(p.kind == p.VAR_KEYWORD for p in parameters)
    named = [p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    known = [p.name for p in named if p.name in NAMES]
    families = {family: [n for n in known if NAMES[n][0] == family] for family in (OURS, VERL)}
    if all(families.values()):
        known_of_families = [name for names in families.values() for name in names]
        mixture = " and ".join(f"{', '.join(names)} (of {family} names)" for family, names in families.items())
        return Refusal(f"{shown} mixes {mixture}; expected {ACCEPTED}", tuple(known_of_families))
    accepted = {p.name for p in named if p.kind != p.POSITIONAL_ONLY and p.name not in NAMES}
    if refused := [key for key in kwargs if key in NAMES or not (has_kwargs or key in accepted)]:
        return Refusal(
            f"{shown} cannot receive {', '.join(refused)} of custom_reward_function.kwargs; expected names of its "
            f"other parameters: {', '.join(sorted(accepted)) or 'it has none'}",
            tuple(refused),
        )
    unknown = [p.name for p in named if p.name not in {*NAMES, *kwargs} and p.default is p.empty]
    if not has_kwargs:
        unknown += [f"*{p.name}" for p in parameters if p.kind == p.VAR_POSITIONAL]
    unknown += [f"{p.name} (positional-only)" for p in named if p.kind == p.POSITIONAL_ONLY and p.name in NAMES]
    if unknown:
        reason = f"{shown} has parameters that receive no value: {', '.join(unknown)}; expected {ACCEPTED}"
        return Refusal(reason, tuple(unknown))
    if not known and not has_kwargs:
        return Refusal(f"{shown} receives no value of the response that it must score; expected {ACCEPTED}")
    binding = {n: NAMES[n][1] for n in known}
    if has_kwargs:
        family = VERL if families[VERL] else OURS
        binding |= {n: NAMES[n][1] for n in KEYWORDS[family] if NAMES[n][1] not in binding.values()}
    return binding


def requires(function: Callable[..., Any], value: str) -> bool:
    """Return True if a parameter without a default value receives ``value``."""
    parameters = inspect.signature(function).parameters.values()
    return any(
        p.default is p.empty and p.kind != p.VAR_KEYWORD and NAMES.get(p.name, (None, ""))[1] == value
        for p in parameters
    )

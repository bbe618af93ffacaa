"""Values that the parameters of a reward function receive, and signatures that are refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from recipe_gkd.rewards.binding import ACCEPTED, bind, number_of, values_of

VALUES = values_of("P", "A", "T", {"level": 1}, "math")
OURS = {"prompt": "P", "answer": "A", "ground_truth": "T", "extra": {"level": 1}}
VERL = {"data_source": "math", "solution_str": "A", "ground_truth": "T", "extra_info": {"level": 1}}


def function(signature: str) -> Callable[..., dict[str, Any]]:
    """A function with this signature that returns what it received."""
    namespace: dict[str, Any] = {}
    exec(f"def fn({signature}):\n    return locals()", namespace)
    return namespace["fn"]


def received(fn: Callable[..., Any]) -> Any:
    binding = bind(fn, "fn")
    assert isinstance(binding, dict), binding
    return fn(**{name: VALUES[value] for name, value in binding.items()})


@pytest.mark.parametrize(
    ("signature", "expected"),
    [
        ("prompt, answer, ground_truth, extra", OURS),
        ("extra, ground_truth, answer, prompt", OURS),
        ("data_source, solution_str, ground_truth, extra_info=None", VERL),
        ("ground_truth, solution_str", {"ground_truth": "T", "solution_str": "A"}),
        ("response, *, ground_truth=None", {"response": "A", "ground_truth": "T"}),
        ("answer, strict=True", {"answer": "A", "strict": True}),
        ("solution_str, *more, **kwargs", {"solution_str": "A", "more": (), "kwargs": VERL | {"solution_str": None}}),
        ("response, **kwargs", {"response": "A", "kwargs": OURS | {"answer": None}}),
        ("*, ground_truth, **kwargs", {"ground_truth": "T", "kwargs": OURS | {"ground_truth": None}}),
        ("*args, **kwargs", {"args": (), "kwargs": OURS}),
    ],
)
def test_values_go_to_the_parameters_of_their_names(signature: str, expected: dict[str, Any]) -> None:
    if "kwargs" in expected:
        expected["kwargs"] = {name: value for name, value in expected["kwargs"].items() if value is not None}
        expected["kwargs"] = {name: value for name, value in expected["kwargs"].items() if name not in expected}
    assert received(function(signature)) == expected


def test_callable_objects_wrapped_functions_and_partials_are_bound_by_their_own_names() -> None:
    class Scorer:
        def __call__(self, ground_truth: str, response: str) -> tuple[str, str]:
            return response, ground_truth

    def plain(data_source: str, solution_str: str, limit: int) -> tuple[str, str, int]:
        return data_source, solution_str, limit

    @functools.wraps(plain)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return plain(*args, limit=2, **kwargs)

    assert received(Scorer()) == ("A", "T")
    assert received(functools.partial(plain, limit=3)) == ("math", "A", 3)
    assert "limit" in str(bind(wrapped, "fn"))  # its own signature is that of `plain`


@pytest.mark.parametrize(
    ("signature", "says"),
    [
        ("p, a, t, e", "fn(p, a, t, e) has parameters that receive nothing: p, a, t, e"),
        ("prompts, completions, **kwargs", "receive nothing: prompts, completions"),
        ("prompt, answer, truth", "receive nothing: truth"),
        ("prompt, *rest", "receive nothing: *rest"),
        ("prompt, answer, /", "receive nothing: prompt (positional-only), answer (positional-only)"),
        ("", "fn() takes nothing of the answer"),
        ("strict=True", "takes nothing of the answer"),
        ("data_source, answer", "mixes answer (of this project's names) and data_source (of verl's names)"),
        ("prompt, solution_str, **kwargs", "mixes prompt (of this project's names) and solution_str (of verl's"),
    ],
)
def test_other_signatures_are_refused_with_what_is_accepted(signature: str, says: str) -> None:
    refusal = bind(function(signature), "fn")
    assert isinstance(refusal, str) and says in refusal and refusal.endswith(ACCEPTED)


def test_a_function_without_a_readable_signature_is_refused() -> None:
    assert "cannot be read; wrap it" in str(bind(type, "fn"))


def test_extra_info_is_the_column_of_that_name_if_there_is_one() -> None:
    with_column = {"level": 1, "extra_info": {"index": 7}}
    assert values_of("P", "A", "T", with_column, None)["extra_info"] == {"index": 7}
    assert values_of("P", "A", "T", with_column, None)["extra"] == with_column
    assert values_of("P", "A", "T", with_column | {"extra_info": None}, None)["extra_info"]["level"] == 1


def test_the_score_of_a_dict_is_its_entry_score() -> None:
    assert number_of({"score": 0.5, "acc": True}) == 0.5 and number_of(2) == 2
    assert number_of({"acc": 1}) == {"acc": 1}

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from recipe_gkd.rewards.binding import ACCEPTED, Refusal, bind, requires, values_of

VALUES = values_of("P", "R", "T", {"level": 1}, "math")
OURS = {"prompt": "P", "response": "R", "ground_truth": "T", "extra": {"level": 1}}
VERL = {"data_source": "math", "solution_str": "R", "ground_truth": "T", "extra_info": {"level": 1}}


def without(values: dict[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in values.items() if name not in names}


def function(signature: str) -> Callable[..., dict[str, Any]]:
    """Return a function with this signature that returns its arguments."""
    namespace: dict[str, Any] = {}
    exec(f"def fn({signature}):\n    return locals()", namespace)
    return namespace["fn"]


def received(fn: Callable[..., Any]) -> Any:
    binding = bind(fn, "fn")
    assert isinstance(binding, dict), binding
    return fn(**{name: VALUES[value] for name, value in binding.items()})


def refused_names(fn: Callable[..., Any], *kwargs: str) -> tuple[str, ...]:
    refusal = bind(fn, "fn", kwargs)
    assert isinstance(refusal, Refusal)
    return refusal.names


class TestBind:
    @pytest.mark.parametrize(
        ("signature", "expected"),
        [
            ("prompt, response, ground_truth, extra", OURS),
            ("extra, ground_truth, response, prompt", OURS),
            ("prompt, answer, ground_truth, extra", without(OURS, "response") | {"answer": "R"}),
            ("data_source, solution_str, ground_truth, extra_info=None", VERL),
            ("ground_truth, solution_str", {"ground_truth": "T", "solution_str": "R"}),
            ("response, *, ground_truth=None", {"response": "R", "ground_truth": "T"}),
            ("response, strict=True", {"response": "R", "strict": True}),
            (
                "solution_str, *more, **kwargs",
                {"solution_str": "R", "more": (), "kwargs": without(VERL, "solution_str")},
            ),
            ("response, **kwargs", {"response": "R", "kwargs": without(OURS, "response")}),
            ("answer, **kwargs", {"answer": "R", "kwargs": without(OURS, "response")}),
            (
                "*, ground_truth, **kwargs",
                {"ground_truth": "T", "kwargs": without(OURS, "ground_truth") | {"answer": "R"}},
            ),
            ("*args, **kwargs", {"args": (), "kwargs": OURS | {"answer": "R"}}),
        ],
    )
    def test_accepted_signature_receives_values_by_name(self, signature: str, expected: dict[str, Any]) -> None:
        assert received(function(signature)) == expected

    def test_callable_object_and_partial_are_bound_by_their_own_names(self) -> None:
        class Scorer:
            def __call__(self, ground_truth: str, response: str) -> tuple[str, str]:
                return response, ground_truth

        def plain(data_source: str, solution_str: str, limit: int) -> tuple[str, str, int]:
            return data_source, solution_str, limit

        assert received(Scorer()) == ("R", "T")
        assert received(functools.partial(plain, limit=3)) == ("math", "R", 3)

    def test_wrapped_function_has_the_signature_of_the_original(self) -> None:
        def plain(data_source: str, solution_str: str, limit: int) -> None: ...

        @functools.wraps(plain)
        def wrapped(*args: Any, **kwargs: Any) -> None: ...

        assert refused_names(wrapped) == ("limit",)

    @pytest.mark.parametrize(
        ("signature", "names"),
        [
            ("p, a, t, e", ("p", "a", "t", "e")),
            ("prompts, completions, **kwargs", ("prompts", "completions")),
            ("prompt, response, truth", ("truth",)),
            ("prompt, *rest", ("*rest",)),
            ("prompt, response, /", ("prompt (positional-only)", "response (positional-only)")),
            ("", ()),
            ("strict=True", ()),
            ("data_source, response", ("response", "data_source")),
            ("prompt, solution_str, **kwargs", ("prompt", "solution_str")),
        ],
    )
    def test_other_signature_is_rejected_with_accepted_names(self, signature: str, names: tuple[str, ...]) -> None:
        refusal = bind(function(signature), "fn")
        assert isinstance(refusal, Refusal) and refusal.names == names and refusal.reason.endswith(ACCEPTED)

    def test_function_without_readable_signature_is_rejected(self) -> None:
        assert refused_names(type) == ()


class TestValuesOf:
    def test_extra_info_is_the_column_of_that_name(self) -> None:
        columns = {"level": 1, "extra_info": {"index": 7}}
        assert values_of("P", "R", "T", columns, None)["extra_info"] == {"index": 7}
        assert values_of("P", "R", "T", columns, None)["extra"] == columns

    def test_extra_info_without_that_column_is_all_of_extra(self) -> None:
        assert values_of("P", "R", "T", {"level": 1, "extra_info": None}, None)["extra_info"]["level"] == 1


class TestRequires:
    @pytest.mark.parametrize(
        ("signature", "expected"),
        [
            ("prompt, response, ground_truth, extra", True),
            ("response, *, ground_truth", True),
            ("response, ground_truth=None", False),
            ("solution_str", False),
            ("response, **others", False),
        ],
    )
    def test_ground_truth_is_required_by_a_parameter_without_default(self, signature: str, expected: bool) -> None:
        namespace: dict[str, Any] = {}
        exec(f"def compute_score({signature}): ...", namespace)
        assert requires(namespace["compute_score"], "ground_truth") is expected


def test_bind_kwargs_fill_required_parameters_and_unknown_ones_are_refused() -> None:
    def fn(response: str, scale: float) -> float:
        return len(response) * scale

    assert bind(fn, "fn", ["scale"]) == {"response": "response"}
    assert refused_names(fn) == ("scale",)
    assert refused_names(fn, "scal") == ("scal",)
    assert refused_names(fn, "response", "scale") == ("response",)

"""Results of a user's environment, which its process checks."""

from __future__ import annotations

import math
from typing import Any

import pytest

from recipe_gkd.conversations.child_results import CallFailed, as_messages, as_step

MESSAGE = {"role": "user", "content": "hello"}
DONE: dict[str, Any] = {"messages": [], "done": True, "reward": None, "info": {}}


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (None, DONE),
        (MESSAGE, DONE | {"messages": [MESSAGE], "done": False}),
        ([MESSAGE, MESSAGE], DONE | {"messages": [MESSAGE, MESSAGE], "done": False}),
        ({"reward": 1}, DONE | {"reward": 1.0}),
        ({"messages": MESSAGE, "done": True}, DONE | {"messages": [MESSAGE]}),
        ({"info": {"n": 2, "text": "x", "nan": math.nan}}, DONE | {"info": {"n": 2.0}}),
    ],
)
def test_each_form_of_a_step_has_all_fields(returned: object, expected: dict[str, Any]) -> None:
    assert as_step(returned) == expected


@pytest.mark.parametrize(
    ("returned", "text"),
    [
        (7, "expected messages"),
        ({"tool_errors": "x"}, "step returned the fields \\['tool_errors'\\]"),
        ({"messages": [{"role": "assistant", "content": "a"}]}, "of the role assistant"),
        ({"reward": math.inf}, "expected a finite number"),
        ({"info": [1]}, "expected a dict"),
    ],
)
def test_other_results_are_rejected(returned: object, text: str) -> None:
    with pytest.raises(CallFailed, match=text):
        as_step(returned)


def test_empty_list_of_reset_is_none() -> None:
    assert as_messages([], "reset") is None and as_messages(MESSAGE, "reset") == [MESSAGE]

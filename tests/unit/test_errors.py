"""Errors are data: fields survive pickling, a copy and Ray, and are rendered in one place."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest

from recipe_gkd import errors
from recipe_gkd.errors import ConfigError, DeadlineError, GkdError, WeightSyncError, find_timeout_error
from teacher import errors as teacher_errors
from teacher.common.detailed_error import DetailedError
from tests._support.errors import raises

CLASSES = sorted(
    {
        kind
        for module in (errors, teacher_errors)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, DetailedError)
    },
    key=lambda kind: kind.__name__,
)
FIELDS: dict[str, Any] = {"remedy": "wait", "phase": "update", "worker": "actor worker 0", "details": ("more",)}


class TestDetailedError:
    @pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
    def test_pickled_or_copied_error_has_all_fields(self, kind: type[DetailedError]) -> None:
        error = kind("no reply", **FIELDS)
        error.add_note("a note")
        for other in (pickle.loads(pickle.dumps(error)), copy.copy(error), error.replaced()):
            assert type(other) is kind and vars(other) == vars(error) and str(other) == str(error)

    @pytest.mark.parametrize(
        ("fields", "text"),
        [
            ({}, "no reply"),
            ({"remedy": "wait"}, "no reply; wait"),
            ({"phase": "update"}, "update: no reply"),
            ({"worker": "actor worker 0", "phase": "update"}, "update: actor worker 0: no reply"),
            (FIELDS, "update: actor worker 0: no reply; wait\nmore"),
        ],
    )
    def test_text_has_every_field_once(self, fields: dict[str, Any], text: str) -> None:
        assert str(GkdError("no reply", **fields)) == text

    def test_located_keeps_the_innermost_place_and_the_cause(self) -> None:
        inner = WeightSyncError("no store", phase="connect")
        inner.__cause__ = OSError("refused")
        outer = inner.located(phase="sync", worker="actor worker 0")
        assert (outer.phase, outer.worker, inner.worker) == ("connect", "actor worker 0", "")
        assert outer.__cause__ is inner.__cause__

    def test_field_that_the_class_lacks_is_refused(self) -> None:
        with pytest.raises(TypeError):
            GkdError("x").replaced(keys=("a",))

    def test_project_error_is_caught_as_the_standard_one(self) -> None:
        with raises(ConfigError, keys=("a.b",)) as caught:
            raise ConfigError("got 1", keys=("a.b",))
        assert isinstance(caught.value, ValueError)


class TestFindTimeoutError:
    def test_first_error_with_silent_workers_in_the_chain(self) -> None:
        late = DeadlineError("late", silent=("actor worker 0",))
        middle, outer = DeadlineError("of a peer"), WeightSyncError("failed")
        middle.__cause__, outer.__cause__ = late, middle
        assert find_timeout_error(outer) is late and find_timeout_error(DeadlineError("x")) is None

    def test_cycle_of_causes_ends(self) -> None:
        first, second = WeightSyncError("a"), WeightSyncError("b")
        first.__cause__, second.__cause__ = second, first
        assert find_timeout_error(first) is None

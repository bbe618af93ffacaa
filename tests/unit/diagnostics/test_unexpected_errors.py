from __future__ import annotations

import json

import pytest

from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import ModelError, UnexpectedError
from recipe_gkd.runtime.user_code import split_spec


class TestAsKnownError:
    def test_own_error_is_returned(self) -> None:
        error = ModelError("no such model")
        assert as_known_error(error, "training") is error

    def test_foreign_error_names_line_of_the_dependency_and_of_this_project(self) -> None:
        with pytest.raises(AttributeError) as caught:
            split_spec(3, key="k")  # type: ignore[arg-type]
        known = as_known_error(caught.value, "training")
        assert isinstance(known, UnexpectedError) and known.__cause__ is caught.value
        assert known.phase == "training" and known.details[0].count("recipe_gkd/runtime/user_code.py:") == 1

    def test_error_without_a_project_frame_names_the_raising_line(self) -> None:
        with pytest.raises(json.JSONDecodeError) as caught:
            json.loads("{")
        known = as_known_error(caught.value, "training")
        assert isinstance(known, UnexpectedError) and known.details[0].endswith("(raw_decode)")

    def test_operating_system_error_advises_to_check_the_machine(self) -> None:
        of_system = as_known_error(OSError(28, "No space left on device"), "save")
        assert of_system.remedy != as_known_error(ValueError("x"), "save").remedy

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from recipe_gkd.errors import ConfigError
from recipe_gkd.runtime.user_code import call_problem, load_attribute, split_spec
from tests._support.errors import raises


class TestSplitSpec:
    def test_spec_is_split_at_the_last_colon(self) -> None:
        assert split_spec("a:b/mine.py:Slack", key="k") == ("a:b/mine.py", "Slack")

    @pytest.mark.parametrize("spec", ["mine.py", "mine.py:", ":Slack", "mine.py:not a name"])
    def test_another_form_raises_with_the_expected_one(self, spec: str) -> None:
        with raises(ConfigError, keys=("trainer.logger",)):
            split_spec(spec, key="trainer.logger")


class TestLoadAttribute:
    def test_file_runs_once_and_imports_its_siblings(self, tmp_path: Path) -> None:
        (tmp_path / "sibling_of_user_code.py").write_text("VALUE = 3\n")
        text = "import sibling_of_user_code\nruns = []\ndef f():\n    return sibling_of_user_code.VALUE\n"
        (tmp_path / "mine.py").write_text(text)
        assert load_attribute(str(tmp_path / "mine.py"), "f", key="k")() == 3
        first = load_attribute(str(tmp_path / "mine.py"), "runs", key="k")
        assert load_attribute(str(tmp_path / "mine.py"), "runs", key="k") is first

    def test_siblings_hide_installed_modules_during_the_import_only(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        installed, folder = tmp_path / "installed", tmp_path / "mine"
        for place in (installed, folder):
            place.mkdir()
            for name in ("imported_at_once_by_user", "imported_later_by_user"):
                (place / f"{name}.py").write_text(f"PLACE = {place.name!r}\n")
        (folder / "sibling_for_later.py").write_text("PLACE = 'mine'\n")
        (folder / "mine.py").write_text(
            "import imported_at_once_by_user\n\n\ndef places():\n    import imported_later_by_user, sibling_for_later\n"
            "    return [imported_at_once_by_user.PLACE, imported_later_by_user.PLACE, sibling_for_later.PLACE]\n"
        )
        monkeypatch.setattr(sys, "path", [str(installed), *sys.path])
        assert load_attribute(str(folder / "mine.py"), "places", key="k")() == ["mine", "installed", "mine"]

    def test_missing_file_broken_file_and_missing_name_raise(self, tmp_path: Path) -> None:
        (tmp_path / "broken.py").write_text("1 / 0\n")
        (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
        (tmp_path / "other.py").write_text("def g(): pass\n")
        causes = {"none": None, "broken": ZeroDivisionError, "exits": SystemExit, "other": None}
        for name, cause in causes.items():
            with raises(ConfigError, keys=("k",)) as caught:
                load_attribute(str(tmp_path / f"{name}.py"), "f", key="k")
            assert type(caught.value.__cause__) is (cause or type(None))


class TestCallProblem:
    def test_constructor_with_another_number_of_parameters_is_described(self) -> None:
        class NoParameter: ...

        class One:
            def __init__(self, run_info: object, level: int = 0) -> None: ...

        class Two:
            def __init__(self, run_info: object, level: int) -> None: ...

        assert call_problem(One, "run_info") is None
        assert call_problem(dict, "run_info") is None  # has no signature
        assert call_problem(NoParameter, "run_info") == "too many positional arguments; its signature is ()"
        assert call_problem(Two, "run_info") == (
            "missing a required argument: 'level'; its signature is (run_info: 'object', level: 'int') -> 'None'"
        )

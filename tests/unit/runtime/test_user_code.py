from __future__ import annotations

from pathlib import Path

import pytest

from recipe_gkd.errors import ConfigError
from recipe_gkd.runtime.user_code import load_attribute, split_spec


class TestSplitSpec:
    def test_spec_is_split_at_the_last_colon(self) -> None:
        assert split_spec("a:b/mine.py:Slack", key="k") == ("a:b/mine.py", "Slack")

    @pytest.mark.parametrize("spec", ["mine.py", "mine.py:", ":Slack", "mine.py:not a name"])
    def test_another_form_raises_with_the_expected_one(self, spec: str) -> None:
        with pytest.raises(ConfigError, match=r"trainer\.logger: got .* expected FILE\.py:Name"):
            split_spec(spec, key="trainer.logger")


class TestLoadAttribute:
    def test_file_runs_once_and_imports_its_siblings(self, tmp_path: Path) -> None:
        (tmp_path / "sibling_of_user_code.py").write_text("VALUE = 3\n")
        text = "import sibling_of_user_code\nruns = []\ndef f():\n    return sibling_of_user_code.VALUE\n"
        (tmp_path / "mine.py").write_text(text)
        assert load_attribute(str(tmp_path / "mine.py"), "f", key="k")() == 3
        first = load_attribute(str(tmp_path / "mine.py"), "runs", key="k")
        assert load_attribute(str(tmp_path / "mine.py"), "runs", key="k") is first

    def test_missing_file_broken_file_and_missing_name_raise(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match=r"k: there is no file .*none\.py"):
            load_attribute(str(tmp_path / "none.py"), "f", key="k")
        (tmp_path / "broken.py").write_text("1 / 0\n")
        with pytest.raises(ConfigError, match=r"broken\.py cannot be imported: ZeroDivisionError"):
            load_attribute(str(tmp_path / "broken.py"), "f", key="k")
        (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
        with pytest.raises(ConfigError, match=r"exits\.py cannot be imported: SystemExit: 0"):
            load_attribute(str(tmp_path / "exits.py"), "f", key="k")
        (tmp_path / "other.py").write_text("def g(): pass\n")
        with pytest.raises(ConfigError, match="does not define f; it defines g"):
            load_attribute(str(tmp_path / "other.py"), "f", key="k")

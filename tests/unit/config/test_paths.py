"""``~`` in paths of overrides and YAML files."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, get_args, get_origin

import pytest
from omegaconf import OmegaConf

from recipe_gkd.commands.data import inspect
from recipe_gkd.config.compose import compose_config
from recipe_gkd.config.key_types import description, known_keys, type_of
from recipe_gkd.config.load import to_config
from recipe_gkd.config.schema.fields import expand_home
from recipe_gkd.errors import ConfigError
from tests._support.base_config import CONFIG_NAME, REQUIRED
from tests._support.errors import raises

PATH_TEXT = re.compile(r"\b(folders?|files?|FILE\.py|path)\b", re.IGNORECASE)
NOT_PATHS = {
    "custom_reward_function.functions": "mappings, whose entries have the type",
    "custom_reward_function.name": "a name in a file",
    "gkd.custom_loss.name": "a name in a file",
    "trainer.experiment_name": "a part of a path",
    "trainer.project_name": "a part of a path",
}
"""Text keys whose description contains such a word, and why they have another type."""


def expands(hint: Any) -> bool:
    """Return True if a type expands ``~`` in its values or elements."""
    checks = [getattr(check, "func", None) for check in getattr(hint, "__metadata__", ())]
    return expand_home in checks or any(expands(part) for part in get_args(hint))


PATH_KEYS = [name for name in known_keys() if expands(type_of(name))]


def value_type(key: str) -> Any:
    """Return the type of a key without its annotations."""
    hint = type_of(key)
    return get_args(hint)[0] if hasattr(hint, "__metadata__") else hint


def has_text(hint: Any) -> bool:
    return hint is str or any(has_text(part) for part in get_args(hint))


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Home folder whose path has characters with a meaning for Hydra."""
    folder = tmp_path / "home=of (me)"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    return folder


def value_of(key: str, *overrides: str, folder: Path | None = None, name: str = CONFIG_NAME) -> Any:
    """Return the value of a key of a configuration that is converted, without the checks of its files."""
    config: Any = to_config(compose_config(name, [*REQUIRED, *overrides], folder))
    for part in key.split("."):
        config = getattr(config, part)
    return config


def test_every_key_that_is_a_path_has_the_type() -> None:
    named = {
        name for name, field in known_keys().items() if has_text(type_of(name)) and PATH_TEXT.search(description(field))
    }
    assert len(PATH_KEYS) >= 13
    assert named - set(PATH_KEYS) == set(NOT_PATHS)


@pytest.mark.parametrize("key", PATH_KEYS)
@pytest.mark.parametrize("file", ["~/own.py:Name", "'~/own.py:Name'", '"~/own.py:Name"'])
def test_home_in_an_override_is_expanded(home: Path, key: str, file: str) -> None:
    is_list = get_origin(value_type(key)) is list
    expected: Any = f"{home}/own.py:Name"
    assert value_of(key, f"{key}=[{file}]" if is_list else f"{key}={file}") == ([expected] if is_list else expected)


@pytest.mark.parametrize("key", PATH_KEYS)
def test_home_in_a_yaml_file_is_expanded(home: Path, tmp_path: Path, key: str) -> None:
    is_list = get_origin(value_type(key)) is list
    value: Any = ["~/own.py:Name", "/x.py:Name"] if is_list else "~/own.py:Name"
    own = OmegaConf.create({"defaults": [CONFIG_NAME, "_self_"]})
    OmegaConf.update(own, key, value)
    (tmp_path / "mine.yaml").write_text(OmegaConf.to_yaml(own))
    composed = compose_config("mine", [], tmp_path)
    for required in REQUIRED:
        name, _, text = required.partition("=")
        if name != key:
            OmegaConf.update(composed, name, text)
    found: Any = to_config(composed)
    for part in key.split("."):
        found = getattr(found, part)
    expected = f"{home}/own.py:Name"
    assert found == ([expected, "/x.py:Name"] if is_list else expected)


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train_files=~", ["{home}"]),
        ("data.train_files=~/a b.jsonl", ["{home}/a b.jsonl"]),
        ("data.train_files=~/a=1(2)", ["{home}/a=1(2)"]),
        ("data.train_files=[a,~/b, ~/c,'~/d']", ["a", "{home}/b", "{home}/c", "{home}/d"]),
        ("data.train_files='~/a, ~/b,c~/d'", ["{home}/a, {home}/b,c~/d"]),
        ("data.train_files=/x/~/y", None),
    ],
)
def test_home_in_data_files_is_expanded_at_the_start_of_a_path(
    home: Path, override: str, expected: list[str] | None
) -> None:
    if expected is None:
        with raises(ConfigError, keys=("data.train_files",)):
            value_of("data.train_files", override)
    else:
        assert value_of("data.train_files", override) == [path.replace("{home}", str(home)) for path in expected]


def test_home_in_entries_of_mappings_is_expanded(home: Path) -> None:
    functions = "custom_reward_function.functions"
    found = value_of(functions, f"{functions}.one=~/own.py:score", f"{functions}.two={{path: ~/other.py, weight: 2}}")
    assert [found[name].path for name in ("one", "two")] == [f"{home}/own.py", f"{home}/other.py"]
    teachers = "actor_rollout_ref.teacher.teachers"
    found = value_of(teachers, f"{teachers}.math={{address: 'a:1', auth_dir: ~/keys}}")
    assert found["math"].auth_dir == f"{home}/keys"


def test_texts_that_are_no_paths_keep_the_character(home: Path) -> None:
    assert value_of("data.system_prompt", "data.system_prompt=~/x") == "~/x"
    assert value_of("trainer.logger", "trainer.logger=[console,jsonl]") == ["console", "jsonl"]


def test_commands_and_configurations_read_the_same_file(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``data inspect`` has a file as its argument, which no shell expands if it is quoted."""
    (home / "rows.jsonl").write_text('{"prompt": "1+1="}\n')
    assert inspect.main(["~/rows.jsonl"]) == 0
    assert "1+1=" in capsys.readouterr().out

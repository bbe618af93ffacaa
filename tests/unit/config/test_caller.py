"""Relative paths of overrides, for a command that a launch script runs in another folder than the caller's."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe_gkd.checkpoints.resume_hint import resume_hint
from recipe_gkd.commands.arguments import config_parser
from recipe_gkd.config.caller import VARIABLE
from recipe_gkd.config.compose import compose_config
from tests._support.base_config import CONFIG_NAME, REQUIRED
from tests._support.checkpoint_files import write_checkpoints
from tests.unit.config.test_paths import value_of

FILES = ("t.jsonl", "a=b.jsonl", "own.py", "student/config.json", "hf", "console", "qwen2.5", "c,d.jsonl")


@pytest.fixture
def caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the caller's folder, whose name has characters with a meaning for Hydra. Another one is current."""
    folder = tmp_path / "it's=${trainer.nnodes}, (1)"
    for name in FILES:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).touch()
    (tmp_path / "repository").mkdir()
    monkeypatch.chdir(tmp_path / "repository")
    monkeypatch.setenv(VARIABLE, str(folder))
    return folder


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.train_files=t.jsonl", ["HERE/t.jsonl"]),
        ("data.train_files=[./t.jsonl,student,/x.jsonl]", ["HERE/t.jsonl", "HERE/student", "/x.jsonl"]),
        ("data.train_files='t.jsonl, student'", ["HERE/t.jsonl,HERE/student"]),
        ("data.train_files=c,d.jsonl", ["HERE/c,d.jsonl"]),
        ("data.train_files=a=b.jsonl", ["HERE/a=b.jsonl"]),
        ("data.val_files=[a.jsonl]", ["a.jsonl"]),
        ("actor_rollout_ref.model.path=student", "HERE/student"),
        ("++actor_rollout_ref.model.path=./student", "HERE/student"),
        ("model_name_or_path=student", "HERE/student"),
        ("actor_rollout_ref.model.path=Qwen/Qwen3-8B", "Qwen/Qwen3-8B"),
        ("trainer.default_local_dir=runs/1", "HERE/runs/1"),
        ("trainer.default_local_dir=runs/${trainer.experiment_name}", "HERE/runs/mine"),
        ("output_dir=runs/1", "HERE/runs/1"),
        ("trainer.trace_file=null", None),
        ("trainer.trace_file=trace.json", "HERE/trace.json"),
        ("actor_rollout_ref.teacher.backend=own.py:Teacher", "HERE/own.py:Teacher"),
        ("actor_rollout_ref.teacher.backend=hf", "hf"),
        ("trainer.logger=[console,own.py:Logger]", ["console", "HERE/own.py:Logger"]),
        ("custom_reward_function.path=own.py", "HERE/own.py"),
        ("gkd.custom_loss.path=own.py", "HERE/own.py"),
    ],
)
def test_path_of_an_override_is_one_of_the_callers_folder(caller: Path, override: str, expected: object) -> None:
    key = override.partition("=")[0].lstrip("+")
    key = {"model_name_or_path": "actor_rollout_ref.model.path", "output_dir": "trainer.default_local_dir"}.get(
        key, key
    )
    texts = [expected] if not isinstance(expected, list) else expected
    absolute = [text.replace("HERE", str(caller)) if isinstance(text, str) else text for text in texts]
    assert value_of(key, "trainer.experiment_name=mine", override) == (
        absolute if isinstance(expected, list) else absolute[0]
    )


def test_paths_in_mappings_are_resolved(caller: Path) -> None:
    functions = "custom_reward_function.functions"
    found = value_of(functions, f"{functions}.one=own.py:score", f"{functions}.two={{path: own.py, weight: 2}}")
    assert [found[name].path for name in ("one", "two")] == [f"{caller}/own.py"] * 2
    assert found["one"].name == "score" and found["two"].weight == 2
    teachers = "actor_rollout_ref.teacher.teachers"
    found = value_of(teachers, f"{teachers}.math={{address: 'a:1', auth_dir: student}}", f"{teachers}.code=hf:1")
    assert found["math"].auth_dir == f"{caller}/student" and found["code"].address == "hf:1"


@pytest.mark.parametrize("key", ["trainer.experiment_name", "trainer.project_name", "data.system_prompt"])
def test_text_that_is_no_path_is_kept(caller: Path, key: str) -> None:
    assert value_of(key, f"{key}=qwen2.5") == "qwen2.5"


def test_path_in_a_yaml_file_is_kept(caller: Path, tmp_path: Path) -> None:
    own = {"defaults": [CONFIG_NAME, "_self_"], "data": {"val_files": "t.jsonl"}}
    (tmp_path / "mine.yaml").write_text(OmegaConf.to_yaml(OmegaConf.create(own)))
    composed = compose_config("mine", ["data.train_files=t.jsonl"], tmp_path)
    assert composed.data.val_files == "t.jsonl" and composed.data.train_files == f"{caller}/t.jsonl"


@pytest.mark.parametrize("arguments", [["--config-path=./conf"], ["--config-path", "conf"], ["--config-dir", "conf"]])
def test_config_folder_is_one_of_the_callers_folder(caller: Path, arguments: list[str]) -> None:
    assert config_parser("main_gkd", None).parse_args(arguments).config_dir == caller / "conf"


def test_command_that_resumes_reads_the_same_paths(caller: Path, tmp_path: Path) -> None:
    trainer = value_of("trainer", f"trainer.default_local_dir={tmp_path}/run")
    write_checkpoints(tmp_path / "run", 3)
    assert f"env '{VARIABLE}=" in resume_hint(trainer, ["data.train_files=t.jsonl"])


def test_without_a_launch_script_paths_are_kept(caller: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE)
    monkeypatch.chdir(caller)
    assert value_of("data.train_files", *REQUIRED, "data.train_files=[t.jsonl]") == ["t.jsonl"]
    assert value_of("data.train_files", *REQUIRED, "data.train_files=a=b.jsonl") == ["a=b.jsonl"]

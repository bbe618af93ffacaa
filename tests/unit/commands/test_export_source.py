"""Checkpoint and settings of an export, before any weight is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from recipe_gkd.commands.export.command import _parser, check_out
from recipe_gkd.commands.export.source import find_source, with_float32
from recipe_gkd.errors import CheckpointError, ConfigError, ModelError
from tests._support.errors import raises


def make_checkpoint(run: Path, step: int = 4, **description: Any) -> Path:
    folder = run / f"global_step_{step}"
    (folder / "actor").mkdir(parents=True)
    (folder / "trainer.json").write_text("{}")
    (folder / "actor" / "metadata.json").write_text(json.dumps(description or {"sharded_backend": "torch_dist"}))
    return folder


def make_run(tmp_path: Path, **actor: Any) -> Path:
    """Write a run folder with a model folder beside it."""
    run = tmp_path / "run"
    description: dict[str, Any] = {"backend": "fsdp"} if actor.get("strategy") == "fsdp" else {}
    make_checkpoint(run, **description)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    section = {"model": {"path": str(tmp_path / "model")}, "actor": actor}
    (run / "config.yaml").write_text(yaml.safe_dump({"actor_rollout_ref": section, "former_key": 1}))
    return run


def test_home_folder_of_the_output_is_expanded() -> None:
    assert _parser().parse_args(["run", "~/exported"]).out == Path.home() / "exported"


class TestFindSource:
    def test_settings_of_the_weights_are_those_of_the_run(self, tmp_path: Path) -> None:
        run = make_run(tmp_path, strategy="fsdp", lora={"rank": 4, "alpha": 8}, fsdp_config={"dtype": "bfloat16"})
        source = find_source(run)
        actor = source.config.actor_rollout_ref.actor
        assert (actor.strategy, actor.lora.rank, actor.fsdp_config.dtype) == ("fsdp", 4, "bfloat16")
        assert actor.fsdp_config.fsdp_size == -1 and source.model == tmp_path / "model"
        assert with_float32(source).config.actor_rollout_ref.actor.fsdp_config.dtype == "float32"

    def test_parallel_layout_of_the_run_is_not_used(self, tmp_path: Path) -> None:
        run = make_run(tmp_path, megatron={"tensor_model_parallel_size": 8, "dtype": "float32"})
        megatron = find_source(run).config.actor_rollout_ref.actor.megatron
        assert (megatron.tensor_model_parallel_size, megatron.dtype) == (1, "float32")

    def test_ids_that_end_responses_are_those_of_the_run(self, tmp_path: Path) -> None:
        run = make_run(tmp_path)
        assert find_source(run).stop_token_ids == ()
        (run / "global_step_4" / "trainer.json").write_text('{"stop_token_ids": [3, 7]}')
        assert find_source(run).stop_token_ids == (3, 7)

    def test_moved_model_folder_is_named_with_the_option(self, tmp_path: Path) -> None:
        run = make_run(tmp_path)
        (tmp_path / "model").rename(tmp_path / "moved")
        with raises(ModelError, path=tmp_path / "model", names=("config.json",)):
            find_source(run)
        assert find_source(run, tmp_path / "moved").config.actor_rollout_ref.model.path == str(tmp_path / "moved")

    def test_missing_configuration_is_named_with_the_option(self, tmp_path: Path) -> None:
        run = make_run(tmp_path)
        (run / "config.yaml").rename(tmp_path / "config.yaml")
        with raises(ConfigError, keys=("--config",)):
            find_source(run)
        assert find_source(run, config_file=tmp_path / "config.yaml").checkpoint == run / "global_step_4"

    def test_damaged_description_is_an_error(self, tmp_path: Path) -> None:
        run = make_run(tmp_path)
        (run / "global_step_4" / "actor" / "metadata.json").write_text("{")
        with raises(CheckpointError, path=run / "global_step_4"):
            find_source(run)


class TestCheckOut:
    def test_new_or_empty_folder_is_accepted(self, tmp_path: Path) -> None:
        check_out(tmp_path)
        check_out(tmp_path / "new")

    def test_files_are_never_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("")
        for path in (tmp_path, tmp_path / "notes.txt"):
            with raises(CheckpointError, path=path):
                check_out(path)

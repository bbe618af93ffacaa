"""Decisions of the training command before and around a run."""

from __future__ import annotations

import asyncio
import errno
import logging
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zmq

from recipe_gkd import main_gkd, restarts
from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.checkpoints.run_folder import RunFolder, check_outputs
from recipe_gkd.config import Config
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import read_data_set
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import (
    CheckpointError,
    CheckpointMismatch,
    ConfigError,
    DataError,
    GkdError,
    UnexpectedError,
    WorkerDied,
)
from recipe_gkd.model_files import Student
from recipe_gkd.run import _reward_items
from recipe_gkd.runtime.stop_request import StopRequest
from teacher.errors import TeacherTimeout
from tests._support.base_config import base_config
from tests._support.checkpoint_files import write_checkpoints
from tests._support.data_sets import data_set_of
from tests._support.errors import raises

STUDENT = Student(Path("x"), 64, build_tokenizer(), "the same", n_tokens=60)


def make_config(folder: Path, *overrides: str) -> Config:
    pq.write_table(pa.table({"prompt": ["1+1="], "ground_truth": ["2"]}), folder / "train.parquet")
    paths = [f"data.train_files={folder}/train.parquet", f"trainer.default_local_dir={folder}", "data.val_files=x"]
    return base_config(*paths, *overrides)


def scorer_of(config: Config, *, truth_use: str = "required") -> Any:
    """Return a stand-in for the loaded reward function of a configuration."""
    return None if config.custom_reward_function.path is None else SimpleNamespace(truth_use=truth_use)


class TestOutputs:
    def test_check_outputs_folder_at_best_link_refused(self, tmp_path: Path) -> None:
        reward = ["custom_reward_function.path=x", "trainer.test_freq=1"]
        config = make_config(tmp_path, "trainer.best_metric=val/data/score", *reward)
        check_outputs(config)
        (tmp_path / "best").symlink_to("global_step_4")
        check_outputs(config)
        (tmp_path / "best").unlink()
        (tmp_path / "best").mkdir()
        check_outputs(make_config(tmp_path))
        with raises(ConfigError, keys=("trainer.best_metric", "trainer.default_local_dir")):
            check_outputs(config)


class TestRewardItems:
    REWARD = "custom_reward_function.path=x"
    NOT_ON_TRAINING = "custom_reward_function.on_training=false"

    @pytest.mark.parametrize(
        ("overrides", "has_items"),
        [
            ((), False),
            ((REWARD,), True),
            ((REWARD, NOT_ON_TRAINING), False),
            ((REWARD, NOT_ON_TRAINING, "gkd.use_rl_loss=true", "actor_rollout_ref.rollout.n=2"), True),
        ],
    )
    def test_reward_items_present_if_needed_or_allowed(
        self, tmp_path: Path, overrides: tuple[str, ...], has_items: bool
    ) -> None:
        config = make_config(tmp_path, *overrides)
        data = PromptData(read_data_set(config.data.train_files, config.data), config.data, STUDENT.tokenizer)
        assert (_reward_items(config, data, STUDENT, scorer_of(config)) is not None) == has_items

    def test_reward_items_decode_as_the_key_states(self, tmp_path: Path) -> None:
        for skips, text in (("true", ""), ("false", STUDENT.tokenizer.eos_token)):
            config = make_config(tmp_path, self.REWARD, f"custom_reward_function.skip_special_tokens={skips}")
            data = PromptData(read_data_set(config.data.train_files, config.data), config.data, STUDENT.tokenizer)
            items = _reward_items(config, data, STUDENT, scorer_of(config))
            assert items is not None
            end = np.array([STUDENT.tokenizer.eos_token_id], np.int32)
            response = data.reference_response(replace(data.prompt(0, 0), reference_ids=end), 0)
            assert items.build_item(data.prompt(0, 0), response).response == text

    def test_reward_items_unknown_ground_truth_key_is_an_error(self, tmp_path: Path) -> None:
        config = make_config(tmp_path, self.REWARD, "data.ground_truth_key=nowhere")
        data = PromptData(read_data_set(config.data.train_files, config.data), config.data, STUDENT.tokenizer)
        with raises(DataError, column="nowhere", existing=("prompt", "ground_truth")) as caught:
            _reward_items(config, data, STUDENT, scorer_of(config))
        [hint] = caught.value.details
        assert self.NOT_ON_TRAINING in hint

    def test_reward_items_of_a_function_without_ground_truth_need_no_column(self, tmp_path: Path) -> None:
        config = make_config(tmp_path, self.REWARD, "gkd.use_rl_loss=true", "actor_rollout_ref.rollout.n=2")
        data = PromptData(data_set_of({"prompt": ["1+1="]}, config.data), config.data, STUDENT.tokenizer)
        items = _reward_items(config, data, STUDENT, scorer_of(config, truth_use="optional"))
        assert items is not None
        response = data.reference_response(replace(data.prompt(0, 0), reference_ids=data.ids[0]), 0)
        assert items.build_item(data.prompt(0, 0), response).ground_truth is None
        named = make_config(tmp_path, self.REWARD, "data.ground_truth_key=nowhere")
        data = PromptData(data_set_of({"prompt": ["1+1="]}, named.data), named.data, STUDENT.tokenizer)
        with raises(DataError, column="nowhere", existing=("prompt",)):
            _reward_items(named, data, STUDENT, scorer_of(named, truth_use="optional"))
        assert _reward_items(named, data, STUDENT, scorer_of(named, truth_use="unused")) is not None


class TestUnexpectedErrors:
    def test_main_unexpected_error_prints_message_and_logs_traceback(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        def run(*_: Any) -> None:
            raise zmq.ZMQError(errno.EMFILE)

        root, handlers = logging.getLogger(), logging.getLogger().handlers[:]
        monkeypatch.setattr(logging, "raiseExceptions", True)  # main sets it
        monkeypatch.setattr("recipe_gkd.run.run", run)
        monkeypatch.setattr(main_gkd, "raise_on_signals", lambda: None)
        overrides = [f"data.train_files={tmp_path}/x", "actor_rollout_ref.model.path=x"]
        try:
            status = main_gkd.main([*overrides, f"trainer.default_local_dir={tmp_path}/run"])
        finally:
            root.handlers[:] = handlers
        printed = capsys.readouterr().err
        assert status == 1 and "Traceback" not in printed
        assert "error: outside the training: ZMQError: Too many open files" in printed
        assert "test_main_gkd.py" in printed
        log = (tmp_path / "run" / "run.log").read_text()
        assert f"the traceback is in {tmp_path}/run/run.log" in printed
        assert "Traceback" in log and "zmq.ZMQError" in log

    @pytest.mark.parametrize(
        ("error", "has_started", "is_named"),
        [
            (TeacherTimeout("step 5: teacher default, 2 samples (8, 9): late"), False, False),
            (TeacherTimeout("step 5: teacher default, 2 samples (8, 9): late"), True, True),
            # The command that resumes would be refused again.
            (CheckpointMismatch("step 5: teacher default, other settings", path=Path("x")), True, False),
        ],
        ids=["rejected", "started", "refused checkpoint"],
    )
    def test_main_error_of_a_started_run_names_the_newest_checkpoint(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
        error: Exception, has_started: bool, is_named: bool,
    ) -> None:  # fmt: skip
        def run(config: Config, stored: str, folder: RunFolder) -> None:
            write_checkpoints(folder.path, 4)
            if has_started:
                folder.accept()
            raise error

        handlers = logging.getLogger().handlers[:]
        monkeypatch.setattr(logging, "raiseExceptions", True)  # main sets it
        monkeypatch.setattr("recipe_gkd.run.run", run)
        monkeypatch.setattr(main_gkd, "raise_on_signals", lambda: None)
        overrides = [f"data.train_files={tmp_path}/x", "actor_rollout_ref.model.path=x"]
        try:
            assert main_gkd.main([*overrides, f"trainer.default_local_dir={tmp_path}/run"]) == 1
        finally:
            logging.getLogger().handlers[:] = handlers
        printed = capsys.readouterr().err
        assert "error: step 5: teacher default" in printed
        hint = (
            f"\nthe newest checkpoint is {tmp_path}/run/global_step_4\nto resume from it: python -m recipe_gkd.main_gkd"
        )
        assert (hint in printed) == is_named

    @pytest.mark.parametrize(
        ("error", "root"),
        [
            (OSError(28, "No space left on device", "/x/y"), "OSError"),
            (RuntimeError("CUDA error: lost"), "RuntimeError"),
            (ExceptionGroup("two", [ExceptionGroup("", [KeyError("a")])]), "KeyError"),
        ],
    )
    def test_as_known_error_unexpected_has_phase_and_place(self, error: Exception, root: str) -> None:
        known = as_known_error(error, "training")
        assert isinstance(known, UnexpectedError) and known.phase == "training" and known.details
        assert known.what.startswith(f"{root}: ")
        assert known.__cause__ is error
        assert as_known_error(known, "later") is known


class TestRestarts:
    """The loop around the trainer, with fake workers that lose an actor rank."""

    def train(
        self,
        monkeypatch: pytest.MonkeyPatch,
        *outcomes: GkdError | None,
        on_restart: Callable[[StopRequest], object] = lambda _: None,
        folder: Path | None = None,
        stop_in_training: bool = False,
        start: Path | None = None,
    ) -> tuple[list[str], StopRequest]:
        """Train with these outcomes of loads and trainings. Return the calls, and the request to stop.

        Args:
            start: Checkpoint that the run resumes from. None: a new run.
        """
        calls, remaining, stop = list[str](), iter(outcomes), StopRequest()

        async def call(name: str) -> None:
            calls.append(name)
            if name == "fit" and stop_in_training:
                with stop.accepted():
                    assert stop.request("SIGTERM")
            if (error := next(remaining)) is not None:
                raise error

        async def restart_actors(error: GkdError) -> None:
            if not isinstance(error, WorkerDied):
                raise error
            calls.append("restart")
            on_restart(stop)
            if stop.reason is not None:
                await asyncio.sleep(1)
                calls.append("the restart was not canceled")

        loaded = SimpleNamespace(checkpoint=start)

        def make_trainer(*_: object) -> SimpleNamespace:
            trainer = SimpleNamespace(fit=lambda _: call("fit"), saver=SimpleNamespace(newest=None), start=loaded)
            self.trainers.append(trainer)
            return trainer

        self.trainers = list[Any]()
        monkeypatch.setattr(restarts, "load_weights", lambda *_: call("load"))
        monkeypatch.setattr(restarts, "Trainer", make_trainer)

        async def actor_is_lost(error: BaseException) -> bool:
            return isinstance(error, WorkerDied)

        workers: Any = SimpleNamespace(restart_actors=restart_actors, actor_is_lost=actor_is_lost)
        plan: Any = SimpleNamespace(points=[], loader=None)
        context: Any = None
        run_folder: Any = SimpleNamespace(begin_training=lambda: None)
        config = base_config("trainer.save_freq=1", f"trainer.default_local_dir={folder}")
        asyncio.run(restarts.train_with_restarts(config, workers, plan, context, context, run_folder, stop))
        return calls, stop

    def test_actor_lost_in_training_or_in_a_load_is_restarted(self, monkeypatch: pytest.MonkeyPatch) -> None:
        deaths = None, WorkerDied("in training"), WorkerDied("in the load"), None, None
        calls, stop = self.train(monkeypatch, *deaths, on_restart=lambda _: None)
        assert calls == ["load", "fit", "restart", "load", "restart", "load", "fit"] and stop.reason is None
        first, second = self.trainers
        assert first.summary is second.summary and (first.is_restarted, second.is_restarted) == (False, True)

    def test_request_to_stop_during_a_restart_ends_the_run_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls, stop = self.train(
            monkeypatch, None, WorkerDied("in training"), on_restart=lambda stop: stop.request("SIGTERM")
        )
        assert calls == ["load", "fit", "restart"] and stop.reason == "SIGTERM"

    def test_actor_lost_after_a_stop_ends_as_requested_with_an_earlier_checkpoint(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        write_checkpoints(tmp_path, 4)
        outcomes = None, WorkerDied("actor worker 0 died")
        start = tmp_path / "global_step_4"
        calls, stop = self.train(monkeypatch, *outcomes, folder=tmp_path, stop_in_training=True, start=start)
        assert calls == ["load", "fit"] and stop.reason == "SIGTERM"
        assert "an actor rank was lost after SIGTERM: actor worker 0 died" in caplog.text
        assert f"the newest checkpoint is {tmp_path}/global_step_4" in caplog.text

    @pytest.mark.parametrize("error", [WorkerDied("no checkpoint"), CheckpointError("the last save failed")])
    def test_error_after_a_stop_without_checkpoint_or_lost_actor_is_raised(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: GkdError
    ) -> None:
        write_checkpoints(tmp_path, 4)  # of another run, which this one does not resume from, or its own
        start = tmp_path / "global_step_4" if isinstance(error, CheckpointError) else None
        with raises(type(error)) as caught:
            self.train(monkeypatch, None, error, folder=tmp_path, stop_in_training=True, start=start)
        assert caught.value is error

    def test_other_errors_are_raised(self, monkeypatch: pytest.MonkeyPatch) -> None:
        error = ConfigError("other")
        with raises(ConfigError) as caught:
            self.train(monkeypatch, error, on_restart=lambda _: None)
        assert caught.value is error

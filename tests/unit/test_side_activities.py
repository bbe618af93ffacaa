"""Failures outside of the optimizer step: each row of the table in docs/failures.md has a test that fails it."""

from __future__ import annotations

import asyncio
import errno
import io
import json
import logging
import os
import re
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.compat.tensorflow_stub.io.gfile import LocalFileSystem
from torch.utils.tensorboard import SummaryWriter

from recipe_gkd.actor.profile import profiled
from recipe_gkd.checkpoints import save_folders, store
from recipe_gkd.checkpoints.folders import steps_of
from recipe_gkd.checkpoints.run_folder import EVENTS
from recipe_gkd.config.schema import ProfileConfig
from recipe_gkd.diagnostics.collect import diagnose
from recipe_gkd.errors import CheckpointError, SavesFailed, WorkerError
from recipe_gkd.metrics.loggers.loggers import Loggers
from recipe_gkd.metrics.run_events import RunEvents, read_events
from recipe_gkd.metrics.run_summary import RunSummary
from recipe_gkd.ray_cluster.connection import _write_timeline
from recipe_gkd.rewards import RewardScorer
from recipe_gkd.runtime.run_log import as_event, start_logging
from tests._support.errors import raises
from tests._support.repository import REPO
from tests._support.reward_files import reward_file, settings
from tests.unit.test_trainer_stops import ERRORS, Faults, StoppingTrainer, fit, make_trainer
from tests.unit.validation.test_validation import make_config

TITLE = "### Failures outside of the optimizer step"
N_STEPS = 6
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def documented() -> list[str]:
    """Return the first cells of the table."""
    text = (REPO / "docs" / "failures.md").read_text().partition(TITLE)[2].partition("\n#")[0]
    return re.findall(r"^\| ([^|]+?) \|", text, re.MULTILINE)[1:]  # without the header


class Case:
    """A run of six steps that validates and saves at the last one.

    Attributes:
        patch: Pytest's fixture.
        log: Pytest's fixture.
    """

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture) -> None:
        self.folder, self.patch, self.log = folder, patch, log

    def trainer(self, *overrides: str, faults: Faults | None = None) -> StoppingTrainer:
        config = make_config(
            self.folder,
            f"trainer.total_training_steps={N_STEPS}",
            "trainer.test_freq=-1",
            "trainer.save_freq=100",
            "trainer.logger=[jsonl]",
            *overrides,
        )
        trainer = make_trainer(config, faults or Faults())
        if faults is None or not faults.stage:
            trainer.stop_in = None
        return trainer

    def run(self, trainer: StoppingTrainer, *, warning: str, n_steps: int = N_STEPS) -> list[dict[str, Any]]:
        """Train, check the end of the run and its checkpoint, and return the lines of metrics.jsonl."""
        with self.log.at_level(logging.INFO):
            fit(trainer)
        assert trainer.progress.step == n_steps
        assert n_steps in steps_of(self.folder)
        assert warning in self.log.text
        lines = [json.loads(line) for line in (self.folder / "metrics.jsonl").open()]
        assert [line["training/global_step"] for line in lines if "timing/step" in line] == list(range(1, n_steps + 1))
        return lines

    def fail_while(self, owner: Any, name: str, is_failing: Callable[[], bool], error: Exception = FULL) -> None:
        """Let a function fail as long as the condition holds."""
        original = getattr(owner, name)

        def function(*args: Any, **options: Any) -> Any:
            if is_failing():
                raise error
            return original(*args, **options)

        self.patch.setattr(owner, name, function)


def fail_line_file(case: Case, name: str) -> None:
    """Let the disk be full in steps 2 to 4 for one file."""
    trainer = case.trainer()
    pwrite = os.pwrite

    def write(descriptor: int, data: bytes, at: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(name) and trainer.progress.step in (2, 3, 4):
            if len(data) > 10:
                return pwrite(descriptor, data[:10], at)  # a part fits
            raise FULL
        return pwrite(descriptor, data, at)

    case.patch.setattr(os, "pwrite", write)
    case.run(trainer, warning=f"{name} cannot be written: ")
    lines = [json.loads(line) for line in (case.folder / name).open()]
    assert [line["training/global_step"] for line in lines] == list(range(1, N_STEPS + 1))
    assert case.log.text.count(f"{name} cannot be written") == 1


def fail_metrics(case: Case) -> None:
    fail_line_file(case, "metrics.jsonl")


def fail_samples(case: Case) -> None:
    fail_line_file(case, "training/samples.jsonl")


def fail_events(case: Case) -> None:
    """The disk is full until step 3. The events of this time are written later, in their order."""
    trainer = case.trainer()
    pwrite = os.pwrite

    def write(descriptor: int, data: bytes, at: int) -> int:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(EVENTS) and trainer.progress.step < 3:
            raise FULL
        return pwrite(descriptor, data, at)

    case.patch.setattr(os, "pwrite", write)
    restart = as_event("rollout_restart")
    with RunEvents(case.folder):
        logging.getLogger("recipe_gkd").warning("replaced while the disk is full", extra=restart)
        assert read_events(case.folder) == []
        case.run(trainer, warning=f"{EVENTS} cannot be written: ")
        logging.getLogger("recipe_gkd").warning("replaced later", extra=restart)
    events = [event.get("message", event["event"]) for event in read_events(case.folder)]
    assert events == ["start", "replaced while the disk is full", "replaced later", "end"]
    assert case.log.text.count(f"{EVENTS} cannot be written") == 1


def fail_tensorboard(case: Case) -> None:
    """The disk is full in steps 2 and 3, which TensorBoard's own thread meets first."""
    trainer = case.trainer("trainer.logger=[jsonl,tensorboard]")
    case.patch.setattr(threading, "excepthook", lambda _: None)
    case.fail_while(LocalFileSystem, "append", lambda: trainer.progress.step in (2, 3))
    add_scalar = SummaryWriter.add_scalar

    def add_and_write(writer: SummaryWriter, name: str, value: float, step: int) -> None:
        add_scalar(writer, name, value, step)
        with suppress(OSError):
            writer.flush()

    case.patch.setattr(SummaryWriter, "add_scalar", add_and_write)
    case.run(trainer, warning="TensorBoard's files in ")
    steps = set()
    for file in (case.folder / "tensorboard").rglob("events.*"):
        events = EventAccumulator(str(file)).Reload()
        steps |= {scalar.step for scalar in events.Scalars("timing/step")} if events.Tags()["scalars"] else set()
    assert steps == set(range(1, N_STEPS + 1))


def fail_console(case: Case) -> None:
    """The disk of a redirected output is full in some steps, and then its reader is gone."""
    trainer = case.trainer("trainer.logger=[console,jsonl]")

    class Output(io.StringIO):
        def write(self, text: str) -> int:
            if trainer.progress.step in (2, 3):
                raise FULL
            if trainer.progress.step > 4:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().write(text)

    case.patch.setattr(sys, "stdout", output := Output())
    case.run(trainer, warning="the console cannot be written any more: ")
    printed = [int(step) for step in re.findall(r"^step +(\d+)/", output.getvalue(), re.MULTILINE)]
    assert printed == [1, 4]
    assert case.log.text.count("the console cannot be written") == 2


def fail_user_logger(case: Case) -> None:
    file = case.folder / "user.py"
    file.write_text(
        "class Mine:\n    def __init__(self, run): pass\n    def log(self, step, metrics): 1 / 0\n"
        "    def close(self): pass\n"
    )
    case.run(case.trainer(f"trainer.logger=[jsonl,{file}:Mine]"), warning="is disabled for the rest of this run")


def fail_opening_again(case: Case) -> None:
    file = case.folder / "user.py"
    file.write_text(
        "class Mine:\n    def __init__(self, run): 1 / 0\n    def log(self, step, metrics): pass\n"
        "    def close(self): pass\n"
    )
    trainer = case.trainer(f"trainer.logger=[jsonl,{file}:Mine]")
    trainer.is_restarted = True
    case.run(trainer, warning="the run continues without this logger")


def fail_built_in_logger(case: Case) -> None:
    trainer = case.trainer()
    original = Loggers.__aenter__

    async def open_with_broken(loggers: Loggers) -> Loggers:
        class Broken:
            def log(self, *_: Any) -> None:
                raise KeyError("a bug")

            def close(self) -> None:
                raise KeyError("a bug")

        loggers._built_in.append(Broken())
        return await original(loggers)

    case.patch.setattr(Loggers, "__aenter__", open_with_broken)
    case.run(trainer, warning="Broken failed, and is not used any more")


def fail_trace(case: Case) -> None:
    case.run(case.trainer("trainer.trace_file=/dev/full"), warning="the trace ends here: ")


def fail_log(case: Case) -> None:
    root, handlers, level = logging.getLogger(), logging.getLogger().handlers[:], logging.getLogger().level
    try:
        start_logging(Path("/dev/full"))
        root.addHandler(case.log.handler)
        case.run(case.trainer(), warning="summary of this run")
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)
        logging.raiseExceptions = True


def fail_validation(case: Case) -> None:
    faults = Faults(validation_error=WorkerError("no response"))
    lines = case.run(case.trainer("trainer.test_freq=3", faults=faults), warning="the validation after step 3 failed")
    assert [line["training/failed_validations"] for line in lines if line["training/global_step"] in (3, 6)] == [1, 2]


def fail_response_file(case: Case) -> None:
    """The disk is full in the first validation. Its responses are written in the second one."""
    trainer = case.trainer("trainer.test_freq=3", faults=Faults(validation_waits=False))
    case.fail_while(Path, "write_bytes", lambda: trainer.progress.step == 3)
    case.run(trainer, warning="step_3.jsonl cannot be written")
    assert {path.name for path in (case.folder / "validation").iterdir()} == {"step_3.jsonl", "step_6.jsonl"}


def fail_reward(case: Case) -> None:
    path = reward_file(case.folder, "return 1 / (ground_truth != '4')")
    with RewardScorer(settings(path, on_failure="skip")) as scorer:
        lines = case.run(case.trainer(faults=Faults(scorer=scorer)), warning="the run continues")
    assert lines[-1]["reward/failures"] >= 2 and lines[-1]["reward/mean"] == 1


def fail_background_save(case: Case) -> None:
    trainer = case.trainer("trainer.save_freq=2", "actor_rollout_ref.actor.checkpoint.async_save=true")
    cluster: Any = trainer.cluster
    cluster.save_errors = [CheckpointError("disk full")]
    case.run(trainer, warning="the checkpoint of step 2 could not be saved: disk full")
    assert steps_of(case.folder) == [4, 6]


def fail_removal(case: Case) -> None:
    case.fail_while(save_folders, "remove_old", lambda: True)
    trainer = case.trainer("trainer.save_freq=3", "trainer.max_actor_ckpt_to_keep=1")
    case.run(trainer, warning="old checkpoints could not be removed")
    assert trainer.saver.failed_saves == 0 and steps_of(case.folder) == [3, 6]


def fail_best(case: Case) -> None:
    """The record of the best checkpoint fails. The checkpoint is kept, and is the newest one."""
    options = ("trainer.test_freq=6", "trainer.best_metric=val/easy/score", "trainer.save_failures_allowed=2")
    trainer = case.trainer(*options, faults=Faults(validation_waits=False))
    case.fail_while(store, "keep_best", lambda: True, CheckpointError("best.json cannot be written"))
    with raises(SavesFailed, path=case.folder / "global_step_6"):
        fit(trainer)
    assert steps_of(case.folder) == [6]
    assert (case.folder / "latest_checkpointed_iteration.txt").read_text() == "6\n"


def fail_dropped_batch(case: Case) -> None:
    for number, stage in enumerate(ERRORS):
        run = Case(case.folder / str(number), case.patch, case.log)
        run.folder.mkdir()
        trainer = run.trainer("trainer.scheduler=two_step_off", faults=Faults(stage))
        run.run(trainer, warning="SIGTERM: the run saves", n_steps=2)


def fail_summary(case: Case) -> None:
    case.fail_while(RunSummary, "render", lambda: True)
    case.run(case.trainer(), warning="its summary cannot be made: ")


def fail_profile(case: Case) -> None:
    (case.folder / "profile").touch()  # a file in place of the folder
    with profiled(ProfileConfig(steps=[1], ranks=[0]), case.folder, step=1, rank=0):
        torch.zeros(1)
    assert "could not be written" in case.log.text


def fail_ray_timeline(case: Case) -> None:
    case.fail_while(__import__("ray"), "timeline", lambda: True)
    _write_timeline(str(case.folder / "timeline.json"))
    assert "ray_init.timeline_json_file=" in case.log.text


def fail_diagnosis(case: Case) -> None:
    (case.folder / "diagnosis").touch()
    assert asyncio.run(diagnose(WorkerError("died"), [], case.folder)) is None
    assert "the diagnosis failed" in case.log.text


FAILURES: dict[str, Callable[[Case], None]] = {
    "`metrics.jsonl`": fail_metrics,
    "`training/samples.jsonl`": fail_samples,
    "`events.jsonl`": fail_events,
    "`tensorboard/`": fail_tensorboard,
    "console": fail_console,
    "`run.log`": fail_log,
    "tracking services, loggers of the user": fail_user_logger,
    "any logger, when it is opened again after a restart of the actor ranks": fail_opening_again,
    "any other built-in logger": fail_built_in_logger,
    "`trainer.trace_file`": fail_trace,
    "validation": fail_validation,
    "`validation/step_N.jsonl`": fail_response_file,
    "rewards that are only metrics": fail_reward,
    "background saves": fail_background_save,
    "removal of old checkpoints": fail_removal,
    "`best.json`, `best`": fail_best,
    "batches that a stop drops": fail_dropped_batch,
    "summary at the end": fail_summary,
    "`trainer.profile`": fail_profile,
    "`ray_init.timeline_json_file`": fail_ray_timeline,
    "`diagnosis/`": fail_diagnosis,
}


def test_every_row_of_the_table_has_a_test() -> None:
    assert documented() == list(FAILURES)


@pytest.mark.parametrize("row", FAILURES)
def test_failure_ends_no_run_and_loses_no_checkpoint(
    row: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    FAILURES[row](Case(tmp_path, monkeypatch, caplog))

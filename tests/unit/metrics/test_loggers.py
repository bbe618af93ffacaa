"""Loggers: built-in destinations, and classes from a user's file."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import signal
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path

import pytest

from recipe_gkd.errors import ConfigError
from recipe_gkd.metrics.loggers import background_logger, loggers
from recipe_gkd.metrics.loggers.console_logger import ConsoleLogger
from recipe_gkd.metrics.loggers.jsonl_logger import JsonlLogger
from recipe_gkd.metrics.loggers.loggers import Loggers
from recipe_gkd.runtime.signals import Terminated, run_until_terminated
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.repository import REPO

METRICS = {"actor/kl_loss": 0.25, "timing/step": 1.5, "response_seq_len/average": 12.0}


def make_loggers(folder: Path, *specs: str, completed_steps: int = 0) -> Loggers:
    trainer = base_config(f"trainer.logger=[{','.join(specs)}]", f"trainer.default_local_dir={folder}").trainer
    return Loggers(trainer, completed_steps=completed_steps, last_step=2, loss_name="jsd")


def log_steps(
    folder: Path, *specs: str, steps: Mapping[int, Mapping[str, float]], completed_steps: int = 0, fails: bool = False
) -> None:
    """Open the loggers, log ``steps`` and close the loggers, after an error if ``fails``."""

    async def scenario() -> None:
        async with make_loggers(folder, *specs, completed_steps=completed_steps) as loggers:
            for step, metrics in steps.items():
                loggers.log(step, metrics)
            if fails:
                raise ArithmeticError

    asyncio.run(scenario())


class TestLoggers:
    def test_every_logger_gets_every_step(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        log_steps(tmp_path, "console", "jsonl", "tensorboard", steps={1: METRICS, 2: METRICS})
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["training/global_step"] for line in lines] == [1, 2]
        events = EventAccumulator(str(tmp_path / "tensorboard" / "recipe_gkd" / "on_policy_distill")).Reload()
        assert [(event.step, event.value) for event in events.Scalars("actor/kl_loss")] == [(1, 0.25), (2, 0.25)]
        assert "step 2/2  jsd 0.2500" in capsys.readouterr().out


class TestJsonlLogger:
    def test_resumed_run_keeps_earlier_lines_and_rewrites_later_ones(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        lines = [json.dumps({"training/global_step": step}) + "\n" for step in (1, 2, 3)]
        path.write_text("".join(lines) + '{"truncat')
        logger = JsonlLogger(path, completed_steps=2)
        logger.log(3, {})
        logger.close()
        assert [json.loads(line)["training/global_step"] for line in path.open()] == [1, 2, 3]

    def test_new_run_keeps_the_metrics_of_earlier_ones_under_other_names(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        for value in range(3):
            logger = JsonlLogger(path, completed_steps=0)
            logger.log(1, {"value": value})
            logger.close()
        found = {file.name: json.loads(file.read_text())["value"] for file in tmp_path.iterdir()}
        assert found == {"metrics.previous.jsonl": 0, "metrics.previous2.jsonl": 1, "metrics.jsonl": 2}

    def test_validation_before_resumed_run_joins_line_of_previous_step(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        for completed_steps in (0, 2, 2):
            logger = JsonlLogger(path, completed_steps)
            logger.log(completed_steps, {"val/data/score": 0.5 + completed_steps, "timing/validate": 9.0})
            for step in (completed_steps + 1, completed_steps + 2):
                logger.log(step, {"timing/step": 1.0})
            logger.close()
        assert [json.loads(line) for line in path.open()] == [
            {"training/global_step": 0, "val/data/score": 0.5, "timing/validate": 9.0},
            {"training/global_step": 1, "timing/step": 1.0},
            {"training/global_step": 2, "timing/step": 1.0, "val/data/score": 2.5},
            {"training/global_step": 3, "timing/step": 1.0},
            {"training/global_step": 4, "timing/step": 1.0},
        ]
        assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


class TestConsoleLogger:
    def test_validation_has_its_own_line(self) -> None:
        stream, results = io.StringIO(), {"val/math/score": 0.5, "timing/validate": 2.0}
        console = ConsoleLogger(0, 10, stream, loss_name="jsd")
        console.log(0, results)
        console.log(7, METRICS | results)
        assert stream.getvalue().splitlines() == [
            "val   0/10  math/score 0.5000  time 2.00s",
            "step  7/10  jsd 0.2500  len 12.0  step 1.50s",
            "val   7/10  math/score 0.5000  time 2.00s",
        ]

    def test_absent_metrics_are_left_out(self) -> None:
        stream = io.StringIO()
        ConsoleLogger(0, 10, stream, loss_name="jsd").log(7, METRICS)
        assert stream.getvalue() == "step  7/10  jsd 0.2500  len 12.0  step 1.50s\n"


FAILING = """
class FailsToStart:
    def __init__(self, run):
        raise RuntimeError("no connection")

    def log(self, step, metrics): ...
    def close(self): ...


class ExitsAtStart(FailsToStart):
    def __init__(self, run):
        raise SystemExit(2)


class FailsToLog:
    def __init__(self, run):
        self.file = run.folder / "calls.txt"

    def log(self, step, metrics):
        metrics.clear()
        self.file.open("a").write(f"log {step} ")
        raise RuntimeError("no connection")

    def close(self):
        self.file.open("a").write("close")


class ExitsInLog(FailsToLog):
    def log(self, step, metrics):
        raise SystemExit(2)
"""

HANGING = """
import threading

class Hangs:
    def __init__(self, run):
        pass

    def log(self, step, metrics):
        threading.Event().wait()

    def close(self):
        pass


class HangsAtStart(Hangs):
    def __init__(self, run):
        threading.Event().wait()
"""


ENDING = """
class Ending:
    def __init__(self, run):
        self.file = run.folder / "end.txt"
    def log(self, step, metrics): pass
    def close(self): self.file.write_text("closed")
    def fail(self): self.file.write_text("failed")
"""


class TestUserLogger:
    def test_example_of_docs_writes_csv(self, tmp_path: Path) -> None:
        spec = f"{REPO}/docs/examples/custom_logger.py:CsvLogger"
        log_steps(tmp_path, spec, steps={0: {"timing/validate": 3.0}, 1: METRICS, 2: METRICS})
        resumed = {1: {"timing/validate": 3.0}, 2: {"timing/step": 2.0}}
        log_steps(tmp_path, spec, steps=resumed, completed_steps=1)  # the run resumes from a checkpoint of step 1
        with (tmp_path / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert rows == [
            {"step": "1", "actor/kl_loss": "0.25", "response_seq_len/average": "12.0", "timing/step": "1.5"},
            {"step": "2", "actor/kl_loss": "", "response_seq_len/average": "", "timing/step": "2.0"},
        ]
        log_steps(tmp_path, spec, steps={1: {"timing/step": 4.0}})  # a new run in the same folder
        lines = (tmp_path / "metrics.csv").read_text().splitlines()
        assert lines == ["step,actor/kl_loss,response_seq_len/average,timing/step", "1,,,4.0"]

    @pytest.mark.parametrize(
        ("name", "calls", "error"),
        [("FailsToLog", "log 1 ", "RuntimeError: no connection"), ("ExitsInLog", "", "SystemExit: 2")],
    )
    def test_failure_is_reported_once_and_disables_logger(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, calls: str, error: str
    ) -> None:
        file = tmp_path / "mine.py"
        file.write_text(FAILING)
        log_steps(tmp_path, f"{file}:{name}", "jsonl", steps={1: METRICS, 2: METRICS})
        called = tmp_path / "calls.txt"
        assert (called.read_text() if called.exists() else "") == calls
        (record,) = caplog.records
        assert f"{file}:{name} is disabled" in record.message and f"log() raised {error}" in record.message
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["actor/kl_loss"] for line in lines] == [0.25, 0.25]

    def test_hanging_log_is_reported_once_behind_too_many_steps(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(background_logger, "MAX_QUEUED_STEPS", 2)
        file = tmp_path / "mine.py"
        file.write_text(HANGING)
        log_steps(tmp_path, f"{file}:Hangs", steps=dict.fromkeys(range(1, 6), METRICS))
        (record,) = caplog.records
        assert f"{file}:Hangs is disabled" in record.message and "log() is 2 steps behind" in record.message

    @pytest.mark.parametrize("fails", [False, True])
    def test_logger_with_fail_is_told_how_the_run_ended(self, tmp_path: Path, fails: bool) -> None:
        file = tmp_path / "mine.py"
        file.write_text(ENDING)
        with pytest.raises(ArithmeticError) if fails else nullcontext():
            log_steps(tmp_path, f"{file}:Ending", steps={1: METRICS}, fails=fails)
        assert (tmp_path / "end.txt").read_text() == ("failed" if fails else "closed")

    @pytest.mark.parametrize(("fails", "constant"), [(False, "CLOSE_TIMEOUT_S"), (True, "CLOSE_AFTER_ERROR_TIMEOUT_S")])
    def test_hanging_loggers_are_closed_together_with_a_deadline(
        self,
        tmp_path: Path,
        caplog: pytest.LogCaptureFixture,
        monkeypatch: pytest.MonkeyPatch,
        fails: bool,
        constant: str,
    ) -> None:
        monkeypatch.setattr(loggers, constant, 0.1)
        file, copy = tmp_path / "mine.py", tmp_path / "copy.py"
        file.write_text(HANGING)
        copy.write_text(HANGING)
        with pytest.raises(ArithmeticError) if fails else nullcontext():
            log_steps(tmp_path, f"{file}:Hangs", f"{copy}:Hangs", steps={1: METRICS}, fails=fails)
        messages = sorted(record.message for record in caplog.records)
        reason = "is disabled for the rest of this run: its last call did not return within 0.1 s"
        assert messages == [f"trainer.logger={name}:Hangs {reason}" for name in (copy, file)]

    def test_close_of_hanging_logger_does_not_block_the_event_loop(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.py"
        file.write_text(HANGING)

        async def scenario() -> None:
            opened = make_loggers(tmp_path, f"{file}:Hangs")
            await opened.__aenter__()
            opened.log(1, METRICS)
            closing = asyncio.create_task(opened.__aexit__(None))
            await asyncio.wait([closing], timeout=0.05)
            assert not closing.done()
            closing.cancel()  # as a signal does
            with pytest.raises(asyncio.CancelledError):
                await closing

        asyncio.run(scenario())

    @pytest.mark.parametrize(("name", "cause"), [("FailsToStart", RuntimeError), ("ExitsAtStart", SystemExit)])
    def test_failing_constructor_is_config_error(self, tmp_path: Path, name: str, cause: type[BaseException]) -> None:
        file = tmp_path / "mine.py"
        file.write_text(FAILING)
        with raises(ConfigError, keys=("trainer.logger",)) as caught:
            log_steps(tmp_path, "jsonl", f"{file}:{name}", steps={})
        assert type(caught.value.__cause__) is cause

    def test_hanging_constructor_is_config_error(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(background_logger, "OPEN_TIMEOUT_S", 0.1)
        file = tmp_path / "mine.py"
        file.write_text(HANGING)
        with raises(ConfigError, keys=("trainer.logger",)) as caught:
            log_steps(tmp_path, f"{file}:HangsAtStart", steps={})
        assert caught.value.__cause__ is None

    def test_signal_during_hanging_constructor_ends_the_run(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(loggers, "CLOSE_AFTER_ERROR_TIMEOUT_S", 0.1)
        file = tmp_path / "mine.py"
        file.write_text(HANGING)

        async def opened() -> None:
            asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
            async with make_loggers(tmp_path, f"{file}:HangsAtStart"):
                raise AssertionError("the constructor has returned")

        with pytest.raises(Terminated):
            asyncio.run(run_until_terminated(opened(), lambda *_: None))

"""Loggers: built-in destinations, and classes from a user's file."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path

import pytest

from recipe_gkd.errors import ConfigError
from recipe_gkd.metrics import user_logger
from recipe_gkd.metrics.console_logger import ConsoleLogger
from recipe_gkd.metrics.jsonl_logger import JsonlLogger
from recipe_gkd.metrics.loggers import Loggers
from tests._support.base_config import base_config
from tests._support.repository import REPO

METRICS = {"actor/kl_loss": 0.25, "timing/step": 1.5, "response_seq_len/average": 12.0}


def open_loggers(folder: Path, *specs: str, first_step: int = 0, last_step: int = 2) -> Loggers:
    trainer = base_config(f"trainer.logger=[{','.join(specs)}]", f"trainer.default_local_dir={folder}").trainer
    return Loggers(trainer, first_step=first_step, last_step=last_step)


class TestLoggers:
    def test_every_logger_gets_every_step(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        with open_loggers(tmp_path, "console", "jsonl", "tensorboard") as loggers:
            for step in (1, 2):
                loggers.log(step, METRICS)
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["training/global_step"] for line in lines] == [1, 2]
        events = EventAccumulator(str(tmp_path / "tensorboard" / "recipe_gkd" / "on_policy_distill")).Reload()
        assert [(event.step, event.value) for event in events.Scalars("actor/kl_loss")] == [(1, 0.25), (2, 0.25)]
        assert "step 2/2  kl 0.2500" in capsys.readouterr().out


class TestJsonlLogger:
    def test_resumed_run_keeps_earlier_lines_and_rewrites_later_ones(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        lines = [json.dumps({"training/global_step": step}) + "\n" for step in (1, 2, 3)]
        path.write_text("".join(lines) + '{"truncat')
        logger = JsonlLogger(path, first_step=2)
        logger.log(3, {})
        logger.close()
        assert [json.loads(line)["training/global_step"] for line in path.open()] == [1, 2, 3]

    def test_validation_before_resumed_run_joins_line_of_previous_step(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        for first_step in (0, 2, 2):
            logger = JsonlLogger(path, first_step)
            logger.log(first_step, {"val/data/score": 0.5 + first_step, "timing/validate": 9.0})
            for step in (first_step + 1, first_step + 2):
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
        console = ConsoleLogger(0, 10, stream)
        console.log(0, results)
        console.log(7, METRICS | results)
        assert stream.getvalue().splitlines() == [
            "val   0/10  math/score 0.5000  time 2.00s",
            "step  7/10  kl 0.2500  len 12.0  step 1.50s",
            "val   7/10  math/score 0.5000  time 2.00s",
        ]

    def test_absent_metrics_are_left_out(self) -> None:
        stream = io.StringIO()
        ConsoleLogger(0, 10, stream).log(7, METRICS)
        assert stream.getvalue() == "step  7/10  kl 0.2500  len 12.0  step 1.50s\n"


FAILING = """
class FailsToStart:
    def __init__(self, run):
        raise RuntimeError("no connection")

    def log(self, step, metrics): ...
    def close(self): ...


class FailsToLog:
    def __init__(self, run):
        self.file = run.folder / "calls.txt"

    def log(self, step, metrics):
        metrics.clear()
        self.file.open("a").write(f"log {step} ")
        raise RuntimeError("no connection")

    def close(self):
        self.file.open("a").write("close")
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
"""


class TestUserLogger:
    def test_example_of_docs_writes_csv(self, tmp_path: Path) -> None:
        spec = f"{REPO}/docs/examples/custom_logger.py:CsvLogger"
        with open_loggers(tmp_path, spec) as loggers:
            loggers.log(1, METRICS)
        with open_loggers(tmp_path, spec, first_step=1) as loggers:
            loggers.log(2, {"timing/step": 2.0})
        with (tmp_path / "metrics.csv").open() as file:
            rows = list(csv.DictReader(file))
        assert rows == [
            {"step": "1", "actor/kl_loss": "0.25", "response_seq_len/average": "12.0", "timing/step": "1.5"},
            {"step": "2", "actor/kl_loss": "", "response_seq_len/average": "", "timing/step": "2.0"},
        ]

    def test_failure_is_reported_once_and_disables_logger(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        file = tmp_path / "mine.py"
        file.write_text(FAILING)
        with open_loggers(tmp_path, f"{file}:FailsToLog", "jsonl") as loggers:
            for step in (1, 2):
                loggers.log(step, METRICS)
        assert (tmp_path / "calls.txt").read_text() == "log 1 "
        (record,) = caplog.records
        assert f"{file}:FailsToLog is disabled" in record.message and "RuntimeError: no connection" in record.message
        lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
        assert [json.loads(line)["actor/kl_loss"] for line in lines] == [0.25, 0.25]

    def test_hanging_logger_delays_neither_steps_nor_the_end(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(user_logger, "CLOSE_TIMEOUT_S", 0.1)
        monkeypatch.setattr(user_logger, "MAX_QUEUED_STEPS", 2)
        file = tmp_path / "mine.py"
        file.write_text(HANGING)
        with open_loggers(tmp_path, f"{file}:Hangs") as loggers:
            for step in range(1, 6):
                loggers.log(step, METRICS)
        (record,) = caplog.records
        assert f"{file}:Hangs is disabled" in record.message and "log() is 2 steps behind" in record.message
        with open_loggers(tmp_path, f"{file}:Hangs") as loggers:
            loggers.log(1, METRICS)
        assert "did not return within 0.1 s" in caplog.records[-1].message

    def test_failing_constructor_is_config_error(self, tmp_path: Path) -> None:
        file = tmp_path / "mine.py"
        file.write_text(FAILING)
        with pytest.raises(ConfigError, match=r"mine\.py:FailsToStart: .* raised RuntimeError: no connection"):
            open_loggers(tmp_path, "jsonl", f"{file}:FailsToStart")

"""Starts, restarts and ends of a run in events.jsonl, and their table in the report."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe_gkd import main_gkd, restarts
from recipe_gkd.checkpoints.resume import ResumePoint
from recipe_gkd.checkpoints.run_folder import EVENTS, RunFolder
from recipe_gkd.checkpoints.run_lock import LOCK
from recipe_gkd.commands.report.history import history_rows, history_section
from recipe_gkd.config import Config
from recipe_gkd.errors import ModelError, WorkerDied
from recipe_gkd.metrics.run_events import MAX_TEXT, RunEvents, read_events
from recipe_gkd.ray_cluster import actor_restarts
from recipe_gkd.ray_cluster.actor_restarts import ActorRestarts
from recipe_gkd.ray_cluster.rollout_restarts import RolloutRestarts
from recipe_gkd.runtime.run_log import as_event
from recipe_gkd.runtime.signals import Terminated
from recipe_gkd.teachers.scoring.pool import ScoringPool
from teacher.client import ClientSpec
from tests._support.base_config import base_config
from tests._support.checkpoint_files import PROGRESS, write_checkpoints

log = logging.getLogger("recipe_gkd.test")


@pytest.fixture(autouse=True)
def quiet_logging() -> Iterator[None]:
    """Restore the log handlers that ``main`` sets."""
    handlers, level = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:], logging.root.level = handlers, level
    logging.raiseExceptions = True


def names(folder: Path) -> list[str]:
    return [event["event"] for event in read_events(folder)]


class TestEnds:
    """Ends of the training command, with :func:`recipe_gkd.run.run` replaced."""

    def command(self, folder: Path, monkeypatch: pytest.MonkeyPatch, outcome: Any) -> int:
        def run(config: Config, stored: str, run_folder: RunFolder) -> Any:
            run_folder.accept()
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        monkeypatch.setattr("recipe_gkd.run.run", run)
        monkeypatch.setattr(main_gkd, "raise_on_signals", lambda: None)
        overrides = [f"data.train_files={folder}/x", "actor_rollout_ref.model.path=x"]
        return main_gkd.main([*overrides, f"trainer.default_local_dir={folder}"])

    @pytest.mark.parametrize(
        ("outcome", "status", "expected"),
        [
            (None, 0, {"status": "complete"}),
            ("SIGTERM", 75, {"status": "stopped", "reason": "SIGTERM"}),
            (WorkerDied("actor worker 0 died\nits log"), 1, {"status": "failed", "reason": "actor worker 0 died"}),
            (KeyError("x"), 1, {"status": "failed", "reason": "outside the training: KeyError: 'x'"}),
            (Terminated(15), 143, {"status": "stopped", "reason": "at once, by signal 15"}),
            (KeyboardInterrupt(), 130, {"status": "stopped", "reason": "at once, by KeyboardInterrupt"}),
        ],
    )
    def test_end_has_status_and_reason(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, outcome: Any, status: int, expected: dict[str, str]
    ) -> None:
        assert self.command(tmp_path, monkeypatch, outcome) == status
        start, end = read_events(tmp_path)
        assert (start["event"], start["pid"], end["event"]) == ("start", os.getpid(), "end")
        assert {name: end[name] for name in end if name not in ("time", "event")} == expected

    def test_each_start_appends(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        for outcome in (WorkerDied("x"), "SIGTERM", None):
            self.command(tmp_path, monkeypatch, outcome)
        assert names(tmp_path) == ["start", "end"] * 3
        assert [event["status"] for event in read_events(tmp_path)[1::2]] == ["failed", "stopped", "complete"]

    def test_rejected_start_leaves_no_file(self, tmp_path: Path) -> None:
        folder = RunFolder(tmp_path)
        (tmp_path / LOCK).touch()
        with pytest.raises(ModelError) as caught, RunEvents(tmp_path):
            raise ModelError("no such model")
        assert names(tmp_path) == ["start", "end"]
        folder.remove_traces(caught.value)
        assert list(tmp_path.iterdir()) == []


class TestRecords:
    @pytest.fixture
    def events(self, tmp_path: Path) -> Iterator[Path]:
        """Folder of a run whose events are recorded."""
        with RunEvents(tmp_path):
            yield tmp_path

    def restarts(self, folder: Path, name: str) -> list[str]:
        return [event["message"] for event in read_events(folder) if event["event"] == name]

    def test_other_log_records_are_no_events(self, events: Path) -> None:
        log.warning("a warning")
        log.warning("first line\nsecond line", extra=as_event("rollout_restart"))
        log.warning("%s", "x" * 10_000, extra=as_event("rollout_restart"))
        first, second = self.restarts(events, "rollout_restart")
        assert first == "first line" and len(second) == MAX_TEXT and names(events)[0] == "start"

    def test_replaced_rollout_worker_is_recorded(self, events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        group: Any = SimpleNamespace(
            dead=lambda: asyncio.sleep(0, [1]), label=lambda rank: f"rollout worker {rank}", replace=lambda *_: None
        )
        restarts = RolloutRestarts(group, lambda rank: rank, allowed=2, timeout_s=1)
        monkeypatch.setattr(restarts, "_set_up", lambda rank: asyncio.sleep(0))
        monkeypatch.setattr(restarts, "record_processes", lambda ranks: asyncio.sleep(0))
        asyncio.run(restarts.replace_dead(WorkerDied("out of memory")))
        assert self.restarts(events, "rollout_restart") == [
            "rollout worker 1 died; starting another (1 of 2 restarts): out of memory"
        ]

    def test_actor_restart_is_recorded(self, events: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        class Actors:
            handles = ("first",)

            def __len__(self) -> int:
                return 1

            label = staticmethod(lambda rank: f"actor worker {rank}")
            dead = staticmethod(lambda: asyncio.sleep(0, [0]))
            replace = staticmethod(lambda *_: None)

        async def done(*_: Any, **__: Any) -> None: ...

        monkeypatch.setattr(actor_restarts, "kill_workers", done)
        monkeypatch.setattr(actor_restarts, "set_up_in_new_processes", lambda actors, ranks, work: work)
        actors: Any = Actors()
        restarts = ActorRestarts(actors, str, done, allowed=1, save_state=done)
        asyncio.run(restarts.restart(WorkerDied("actor worker 0 died")))
        assert self.restarts(events, "actor_restart") == [
            "actor worker 0 died; starting all actor ranks again (1 of 1 restarts)"
        ]

    def test_restarted_scoring_worker_is_recorded(self, events: Path) -> None:
        pool = ScoringPool({"a": ClientSpec("127.0.0.1", 1, {})}, "driver", lambda *_: None, per_node=1)
        pool.start_on({"driver": "127.0.0.1"})
        for pid in (7, 7, 8):
            pool._note_process(0, pid)
        [message] = self.restarts(events, "scoring_restart")
        assert "died (process 7)" in message

    @pytest.mark.parametrize("steps", [(), (4, 8)])
    def test_loaded_checkpoint_is_recorded(
        self, events: Path, caplog: pytest.LogCaptureFixture, steps: tuple[int, ...]
    ) -> None:
        for step in steps:
            write_checkpoints(events, step)
        workers: Any = SimpleNamespace(actors=SimpleNamespace(call=lambda *_, **__: asyncio.sleep(0, [])))
        points = [ResumePoint(events / f"global_step_{step}", PROGRESS) for step in steps]
        loader: Any = SimpleNamespace(last_step=lambda *_: 10)
        plan = restarts.TrainingPlan(loader=loader, points=points, fresh=PROGRESS, stop_token_ids=(), n_tokens=8)
        with caplog.at_level(logging.INFO, "recipe_gkd"):
            asyncio.run(
                restarts.load_weights(base_config(f"trainer.default_local_dir={events}"), workers, plan, points)
            )
        [load] = [event for event in read_events(events) if event["event"] == "load"]
        assert load["step"] == (PROGRESS.step if steps else 0)


KILLED = """
import os, signal, sys
from pathlib import Path
from recipe_gkd.metrics.run_events import RunEvents
with RunEvents(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""


class TestReport:
    def test_killed_run_has_no_end(self, tmp_path: Path) -> None:
        killed = subprocess.run([sys.executable, "-c", textwrap.dedent(KILLED), str(tmp_path)], check=False)
        assert killed.returncode == -signal.SIGKILL
        with (tmp_path / EVENTS).open("ab") as file:
            file.write(b'{"event": "rollout_re')  # the last write before the power failed
        assert [row[1] for row in history_rows(read_events(tmp_path))] == ["start", "no end recorded"]
        with RunEvents(tmp_path):
            pass
        rows = [row[1].partition(" after")[0] for row in history_rows(read_events(tmp_path))]
        assert rows == ["start", "no end recorded", "start", "end: complete"]

    def test_table_has_restarts_steps_and_reasons(self, tmp_path: Path) -> None:
        lines: list[dict[str, Any]] = [
            {"time": "2026-01-01T10:00:00+00:00", "event": "start", "host": "node7", "pid": 12},
            {"time": "2026-01-01T10:01:00+00:00", "event": "load", "step": 40},
            {"time": "2026-01-01T10:30:00+00:00", "event": "actor_restart", "message": "<died>"},
            {"time": "2026-01-01T10:31:00+00:00", "event": "load", "step": 0},
            {"time": "2026-01-01T12:00:00+00:00", "event": "end", "status": "failed", "reason": "disk full"},
            {"time": "2026-01-02T12:00:00+00:00", "event": "of a later version", "x": 1},
        ]
        text = "\n".join([*map(json.dumps, lines), "{", '{"event": "start"}', "3"])
        (tmp_path / EVENTS).write_text(text)
        assert list(history_rows(read_events(tmp_path))) == [
            ("2026-01-01 10:00:00", "start", "host node7, process 12"),
            ("2026-01-01 10:01:00", "resumed", "from step 40"),
            ("2026-01-01 10:30:00", "actor ranks started again", "<died>"),
            ("2026-01-01 10:31:00", "begun", "from the model folder, step 0"),
            ("2026-01-01 12:00:00", "end: failed after 2 h", "disk full"),
            ("2026-01-02 12:00:00", "of a later version", ""),
        ]
        section = history_section(read_events(tmp_path))
        assert "Starts of the run: 1." in section and "&lt;died&gt;" in section and "<died>" not in section

    def test_long_history_shows_the_last_rows(self) -> None:
        events = [{"time": "2026-01-01T10:00:00+00:00", "event": name} for name in ["start", "end"] * 150]
        section = history_section(events)
        assert "The first 100 rows are left out." in section and section.count("<tr>") == 201
        assert history_section([]) == ""

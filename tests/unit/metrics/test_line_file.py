"""Lines on a disk that fails for some time, and a console that goes away."""

from __future__ import annotations

import errno
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from recipe_gkd.metrics.loggers import line_file
from recipe_gkd.metrics.loggers.console_logger import ConsoleLogger
from recipe_gkd.metrics.loggers.jsonl_logger import JsonlLogger
from recipe_gkd.metrics.loggers.line_file import LineFile
from recipe_gkd.metrics.loggers.tensorboard_logger import TensorBoardLogger
from recipe_gkd.runtime import pending_files
from recipe_gkd.runtime.pending_files import PendingFiles

FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def keep_all(_: bytes) -> bool:
    return True


def full_disk(*_: Any) -> Any:
    raise FULL


class TestLineFile:
    def test_file_that_cannot_be_opened_is_written_later(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        path = tmp_path / "folder" / "lines"
        (tmp_path / "folder").touch()
        file = LineFile(path, keep_all)
        file.append(b"1")
        (tmp_path / "folder").unlink()
        file.append(b"2")
        file.close()
        assert path.read_bytes() == b"1\n2\n"
        assert [record.levelno for record in caplog.records] == [logging.WARNING]

    def test_oldest_lines_are_lost_above_the_limit(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(line_file, "MAX_PENDING_BYTES", 4)
        file = LineFile(tmp_path / "lines", keep_all)
        with monkeypatch.context() as disk:
            disk.setattr(os, "pwrite", full_disk)
            for number in range(5):
                file.append(str(number).encode())
        file.close()
        assert (tmp_path / "lines").read_bytes() == b"3\n4\n"
        assert "3 lines of" in caplog.text

    def test_close_of_a_full_disk_raises_nothing(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        file = LineFile(tmp_path / "lines", keep_all)
        file.append(b"1")
        monkeypatch.setattr(os, "pwrite", full_disk)
        file.append(b"2")
        file.close()
        assert (tmp_path / "lines").read_bytes() == b"1\n"

    def test_lines_from_the_first_unwanted_one_on_are_removed(self, tmp_path: Path) -> None:
        path = tmp_path / "lines"
        path.write_bytes(b"1\n2\n3\n4\nhalf")
        file = LineFile(path, lambda line: int(line) < 3)
        assert file.last_kept == b"2"
        file.append(b"two", instead_of_last=True)
        file.append(b"three")
        file.close()
        assert path.read_bytes() == b"1\ntwo\nthree\n"


class TestJsonlLogger:
    def test_resumed_run_keeps_the_lines_after_a_damaged_one(self, tmp_path: Path) -> None:
        path = tmp_path / "metrics.jsonl"
        lines = [b'{"training/global_step": %d}\n' % step for step in range(1, 8)]
        lines[2] = b"\0\0\0\n"
        path.write_bytes(b"".join([*lines, b'{"training/glo']))
        logger = JsonlLogger(path, 6)
        logger.log(7, {"actor/kl_loss": 1.0})
        logger.close()
        assert path.read_bytes() == b"".join(lines[:6]) + b'{"training/global_step": 7, "actor/kl_loss": 1.0}\n'


class TestTensorBoardLogger:
    def test_repeated_steps_are_removed_although_the_first_file_cannot_be_opened(self, tmp_path: Path) -> None:
        for completed, last in ((0, 4), (2, 3)):
            folder = tmp_path / "events"
            if completed:
                folder.rename(tmp_path / "away")
                folder.touch()  # the folder cannot be made
            logger = TensorBoardLogger(folder, completed)
            if completed:
                folder.unlink()
                (tmp_path / "away").rename(folder)
            for step in range(completed + 1, last + 1):
                logger.log(step, {"value": float(last)})
            logger.close()
        found = EventAccumulator(str(folder)).Reload().Scalars("value")
        assert [(scalar.step, scalar.value) for scalar in found] == [(1, 4.0), (2, 4.0), (3, 3.0)]


class TestPendingFiles:
    def test_files_beyond_the_limit_are_lost(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        monkeypatch.setattr(pending_files, "MAX_PENDING_BYTES", 10)
        files = PendingFiles()
        with monkeypatch.context() as disk:
            disk.setattr(Path, "write_bytes", full_disk)
            for name in ("a", "b", "c"):
                files.write(tmp_path / name, b"12345")
            files.close()
        files.close()
        assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "c"]
        assert f"{tmp_path}/a was not written: the disk has failed for too long" in caplog.text


class TestConsole:
    def test_closed_terminal_ends_nothing(self, caplog: pytest.LogCaptureFixture) -> None:
        """A real pseudoterminal with a progress bar, whose other end is closed."""
        reader, terminal = os.openpty()
        stream = os.fdopen(terminal, "w")
        logger = ConsoleLogger(0, 3, stream)
        logger.log(1, {"actor/kl_loss": 1.0})
        printed = b""
        while b"loss 1.0000" not in printed:
            printed += os.read(reader, 1 << 16)
        os.close(reader)
        for step in (2, 3):
            logger.log(step, {"actor/kl_loss": 1.0})
        logger.close()
        assert caplog.text.count("the console cannot be written any more") == 1

    def test_exit_status_does_not_depend_on_the_reader(self) -> None:
        code = (
            "import sys\nfrom recipe_gkd.diagnostics.exit_messages import leave_dead_streams\n"
            "sys.stdin.read()\nsys.stdout.write('x')\nleave_dead_streams()\nsys.exit(75)"
        )
        buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
        process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=buffered
        )
        assert process.stdout is not None and process.stdin is not None
        process.stdout.close()
        process.stdin.close()
        assert process.wait(timeout=60) == 75

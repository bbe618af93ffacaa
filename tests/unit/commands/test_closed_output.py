"""Commands whose output is closed by its reader, as by ``head``: they end without an error message."""

from __future__ import annotations

import io
import itertools
import json
import os
import runpy
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from recipe_gkd.__main__ import COMMANDS, main
from recipe_gkd.commands import check_devices
from recipe_gkd.commands import record as record_command
from recipe_gkd.commands.chat import command as chat_command
from recipe_gkd.commands.evaluate import command as evaluate_command
from recipe_gkd.commands.export import command as export_command
from recipe_gkd.runtime.closed_output import CLOSED, run_until_closed
from tests.unit.commands.test_plan import QWEN_7B
from tests.unit.commands.test_report import make_run

ERRORS = ("Traceback", "error", "disk", "may be a bug", "Broken pipe", "Exception ignored")


@contextmanager
def closed_output(capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    """Make stdout a pipe without a reader in the body, which must write to it, and must not print an error.

    It is no fixture, because pytest sets ``sys.stdout`` again between fixtures and test.
    """
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as stream, pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "stdout", stream)
        yield
        assert os.readlink(f"/proc/self/fd/{writer}") == os.devnull, "nothing was written"
    printed = capsys.readouterr().err
    assert not [word for word in ERRORS if word in printed], printed


def check_config(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return ["--config-name", "quickstart"]


def devices(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    async def probe(*_: Any) -> list[Any]:
        return []

    patch.setattr(check_devices, "connected_cluster", lambda _: nullcontext())
    patch.setattr(check_devices, "choose_device", str)
    patch.setattr(check_devices, "probe_placement", probe)
    patch.setattr(check_devices, "placement_table", lambda _: "a table\n" * 10_000)
    patch.setattr(check_devices, "check_devices", lambda *_, **__: None)
    return []


def doctor(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return ["--config-name", "quickstart", "--quick"]


def plan(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    (folder / "config.json").write_text(json.dumps(QWEN_7B))
    return [f"actor_rollout_ref.model.path={folder}", "--device-memory-gb", "1000"]


def report(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return [str(make_run(folder / "run"))]


def export(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    write = ModuleType("write")
    write.__dict__.update(write_model=lambda *_, **__: None, write_adapter=None)
    patch.setitem(sys.modules, "recipe_gkd.commands.export.write", write)
    patch.setattr(export_command, "find_source", lambda *_: SimpleNamespace(checkpoint=folder))
    patch.setattr(export_command, "worker_environment", lambda _: {})
    patch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))  # the command sets it
    return [str(folder), str(folder / "out")]


def record(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    patch.setattr(record_command, "record", lambda *_: print("progress\n" * 10_000))
    given = ["data.train_files=x", "data.response_key=answer", "actor_rollout_ref.model.path=x"]
    return ["--out", str(folder / "recording"), *given]


def evaluate(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    for name in ("config.json", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    patch.setattr(evaluate_command, "run", lambda *_: [])
    patch.setattr(evaluate_command, "render", lambda *_: "a table\n" * 10_000)
    return [str(folder), "--data", "none"]


def chat(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    patch.setattr(chat_command, "converse", lambda _: print("a response\n" * 10_000))
    return [str(folder)]


def data(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    file = folder / "a.jsonl"
    file.write_text('{"prompt": "1+1"}\n' * 3)
    return ["inspect", str(file)]


def gpu_smoke(folder: Path, patch: pytest.MonkeyPatch) -> list[str]:
    return ["--list"]


OUTPUTS: dict[str, Callable[[Path, pytest.MonkeyPatch], list[str]]] = {
    "check-config": check_config,
    "check-devices": devices,
    "doctor": doctor,
    "plan": plan,
    "report": report,
    "export": export,
    "record": record,
    "evaluate": evaluate,
    "chat": chat,
    "data": data,
    "gpu_smoke": gpu_smoke,
}
"""Command -> its arguments for an output on stdout. Parts that need Ray, vLLM or Megatron are replaced."""
MODULES = {
    "recipe_gkd.config": [],
    "recipe_gkd.main_gkd": ["--config-name", "quickstart", "--cfg", "job"],
    "recipe_gkd.quickstart.prepare": ["--help"],
    "recipe_gkd.quickstart.report": ["--help"],
    "recipe_gkd.quickstart.table": ["--help"],
}


class TestCommands:
    @pytest.mark.parametrize("command", COMMANDS)
    def test_output_is_closed_without_an_error(
        self, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        arguments = OUTPUTS[command](tmp_path, monkeypatch)
        with closed_output(capsys):
            assert main([command, *arguments]) in (0, CLOSED)

    @pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)], ids="-".join)
    def test_help_is_closed_without_an_error(self, command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
        with closed_output(capsys):
            try:
                assert main([*command, "--help"]) in (0, CLOSED)
            except SystemExit as ended:
                assert ended.code == 0

    @pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
    @pytest.mark.parametrize("module", MODULES)
    def test_module_is_closed_without_an_error(
        self, module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setattr(sys, "argv", [module, *MODULES[module]])
        with closed_output(capsys), pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__")
        assert ended.value.code in (0, CLOSED)

    def test_process_ends_without_a_message(self) -> None:
        """Python flushes stdout again when it exits."""
        reader, writer = os.pipe()
        os.close(reader)
        command = [sys.executable, "-m", "recipe_gkd.config"]
        done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, check=False)
        os.close(writer)
        assert (done.returncode, done.stderr) == (CLOSED, "")


class TestRunUntilClosed:
    def test_command_ends_when_the_reader_does(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Without its end, this command would print forever. Handlers of errors are not reached, but clean-ups are."""
        reader, writer = os.pipe()
        cleaned: list[str] = []

        def command() -> int:
            try:
                for number in itertools.count():
                    print(f"line {number}", flush=True)
                    if number == 0:
                        assert os.read(reader, 100) == b"line 0\n"
                        os.close(reader)
            except Exception:  # noqa: BLE001 - as in commands, which print one error
                cleaned.append("reported as an error")
            finally:
                cleaned.append("cleaned up")
            return 0

        with os.fdopen(writer, "w") as stream:
            monkeypatch.setattr(sys, "stdout", stream)
            assert run_until_closed(command) == CLOSED == 141
            assert sys.stdout is stream
        assert cleaned == ["cleaned up"]

    @pytest.mark.parametrize("status", [0, 1])
    def test_status_of_a_completed_command_stays(self, status: int, capsys: pytest.CaptureFixture[str]) -> None:
        def command() -> int:
            print("one line, which is sent after the end")
            return status

        with closed_output(capsys):
            assert run_until_closed(command) == status

    def test_other_threads_are_not_ended(self, capsys: pytest.CaptureFixture[str]) -> None:
        ended: list[bool] = []

        def work() -> None:
            print("x", flush=True)
            ended.append(True)

        def command() -> int:
            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            return 0

        with closed_output(capsys):
            assert run_until_closed(command) == 0
        assert ended == [True]

    def test_closed_stderr_is_ignored(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reader, writer = os.pipe()
        os.close(reader)
        with os.fdopen(writer, "w") as stream:
            monkeypatch.setattr(sys, "stderr", stream)
            assert main(["check-config", "gkd.betaa=1"]) == 1

    @pytest.mark.parametrize("stream", [None, io.StringIO()])
    def test_streams_without_descriptor_stay(self, monkeypatch: pytest.MonkeyPatch, stream: Any) -> None:
        monkeypatch.setattr(sys, "stdout", stream)
        assert run_until_closed(lambda: 3) == 3 and sys.stdout is stream

    def test_text_arrives_unchanged(self, capfd: pytest.CaptureFixture[str]) -> None:
        def command() -> int:
            print("früh")
            print("spät", file=sys.stderr)
            return 0

        assert run_until_closed(command) == 0
        assert capfd.readouterr() == ("früh\n", "spät\n")

"""Commands `serve`, `join` and `stop`: options, pid files, signals, and what they import."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

import pytest

import teacher
from teacher.__main__ import main, make_parser
from teacher.common.process_id import boot_id, process_id
from teacher.errors import TeacherSetupError
from teacher.launcher.commands import COMMANDS
from teacher.launcher.options import SERVE_OPTIONS, Option, parse_options
from teacher.launcher.pid_files import HOST, read_pid_file, read_pid_files, write_pid_file
from teacher.launcher.settings import check_settings, connect_address, environment_of_processes, find_gpus
from teacher.launcher.stop_requests import Interrupted, StopRequests
from tests._support.repository import REPO

OPTIONS = (Option("SIZE", 3, "a number"), Option("A_B", "", "a text"))


def parse(*arguments: str) -> Namespace:
    return parse_options(OPTIONS, arguments)


def parse_serve(*arguments: str) -> Namespace:
    return parse_options(SERVE_OPTIONS, arguments)


class TestOptions:
    def test_flag_overrides_variable_and_variable_overrides_default(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert (parse().size, parse().a_b) == (3, "")
        monkeypatch.setenv("SIZE", "4")
        monkeypatch.setenv("A_B", "from the environment")
        assert (parse().size, parse().a_b) == (4, "from the environment")
        assert parse("--size", "5", "--a-b=x=y z").size == 5
        assert parse("--size", "5", "--a-b=x=y z").a_b == "x=y z"
        monkeypatch.setenv("SIZE", "")
        assert parse().size == 3

    @pytest.mark.parametrize("flag", ["--a-b", "--a_b", "--A_B"])
    def test_flag_is_accepted_in_each_form_of_the_name(self, flag: str) -> None:
        assert parse(flag, "v").a_b == parse(f"{flag}=v").a_b == "v"

    def test_negative_port_and_empty_text_are_values(self) -> None:
        assert parse_serve("--http-port", "-1").http_port == parse_serve("--http-port=-1").http_port == "-1"
        assert parse_serve("--auth-dir", "").auth_dir == parse_serve("--auth-dir=").auth_dir == ""

    @pytest.mark.parametrize(
        ("arguments", "message"),
        [
            (["--siz", "1"], "unknown option --siz; see --help"),
            (["--sizes=1"], "unknown option --sizes; see --help"),
            (["--size"], "--size needs a value; see --help"),
            (["now"], "unexpected argument 'now'; see --help"),
            (["-x"], "unexpected argument '-x'; see --help"),
            (["--size="], "SIZE must be an integer of 0 or more, got ''"),
            (["--size=-1"], "SIZE must be an integer of 0 or more, got '-1'"),
            (["--size=1.5"], "SIZE must be an integer of 0 or more, got '1.5'"),
            (["--size=\u0663"], "SIZE must be an integer of 0 or more"),
        ],
    )
    def test_mistake_is_refused_with_its_name(self, arguments: list[str], message: str) -> None:
        with pytest.raises(TeacherSetupError) as error:
            parse(*arguments)
        assert message in str(error.value)

    @pytest.mark.parametrize("name", COMMANDS)
    def test_help_names_every_option_and_fits_a_terminal(self, name: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([name, "--help"]) == 0
        shown = capsys.readouterr().out
        assert max(map(len, shown.splitlines())) <= 120
        assert all(f"\n  {option.name} " in shown for option in COMMANDS[name].options)
        assert COMMANDS[name].text in make_parser().format_help().replace("\n" + 24 * " ", " ")


class TestSettings:
    @pytest.mark.parametrize(
        ("gpus", "configured", "expected"), [("", "0", 600), ("0", "0", 1800), ("", "7", 7), ("0", "7", 7)]
    )
    def test_start_timeout_on_gpus_allows_for_compilation(
        self, gpus: str, configured: str, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", gpus)
        args = parse_serve("--ckpt-path", str(tmp_path), "--python", "true", "--start-timeout-s", configured)
        assert check_settings(args) == list(gpus)
        assert args.start_timeout_s == expected

    def test_interpreter_that_does_not_exist_is_refused(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        with pytest.raises(TeacherSetupError, match="PYTHON=/no/python is not found"):
            check_settings(parse_serve("--ckpt-path", str(tmp_path), "--python", "/no/python"))

    def test_gpus_of_nvidia_smi_count_without_a_list(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        monkeypatch.setenv("PATH", str(tmp_path))
        assert find_gpus() == []
        (tmp_path / "nvidia-smi").write_text("#!/bin/sh\necho 0; echo 1; exit ${STATUS:-0}\n")
        (tmp_path / "nvidia-smi").chmod(0o700)
        assert find_gpus() == ["0", "1"]
        monkeypatch.setenv("STATUS", "9")
        assert find_gpus() == []

    @pytest.mark.parametrize(("visible", "expected"), [("-1", []), ("", []), ("2,-1,3", ["2"]), ("0, 1", ["0", "1"])])
    def test_list_of_gpus_ends_at_minus_one(
        self, visible: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert find_gpus() == expected

    @pytest.mark.parametrize(
        ("bind", "address"), [("*", "127.0.0.1"), ("lo", "127.0.0.1"), ("10.0.0.1", "10.0.0.1"), ("localhost",) * 2]
    )
    def test_workers_connect_to_the_address_of_an_interface(self, bind: str, address: str) -> None:
        assert connect_address(bind) == address

    def test_long_tmpdir_moves_sockets_of_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
        monkeypatch.setenv("TMPDIR", "/" + 69 * "t")
        assert "VLLM_RPC_BASE_PATH" not in environment_of_processes()
        monkeypatch.setenv("TMPDIR", "/" + 35 * "\u00e4")
        assert environment_of_processes()["VLLM_RPC_BASE_PATH"] == "/tmp"
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/own")
        assert environment_of_processes()["VLLM_RPC_BASE_PATH"] == "/own"

    def test_processes_import_this_package_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", f"/other:{REPO}")
        assert environment_of_processes()["PYTHONPATH"] == f"{REPO}:/other"


class TestPidFiles:
    @pytest.fixture
    def child(self) -> Iterator[subprocess.Popen[bytes]]:
        process = subprocess.Popen(["sleep", "3600"], start_new_session=True)
        yield process
        process.kill()
        process.wait(timeout=10)

    def test_written_file_is_read_as_the_running_process(self, child: subprocess.Popen[bytes], tmp_path: Path) -> None:
        written = write_pid_file(tmp_path / "proxy.pid", child.pid)
        found = read_pid_file(tmp_path / "proxy.pid")
        assert found == written and found.process == process_id(child.pid)
        assert found.name == "proxy" and found.is_alive() and found.is_running()
        assert [path.name for path in tmp_path.iterdir()] == ["proxy.pid"]
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not found.is_alive() and not found.is_running()  # a zombie has ended
        child.wait(timeout=10)
        assert not found.is_alive() and not found.is_running()

    @pytest.mark.parametrize("pid", ["0", "1", "-1", "99999999999", "9" * 5000])
    def test_pid_that_names_no_single_process_is_damaged(self, pid: str, tmp_path: Path) -> None:
        """`kill -- -1` would reach every process of the user."""
        (tmp_path / "proxy.pid").write_text(f"{pid} 1 {boot_id()} {HOST}\n")
        found = read_pid_file(tmp_path / "proxy.pid")
        assert "empty or damaged" in found.foreign and not found.is_running()

    def test_unreadable_and_hidden_files(self, tmp_path: Path) -> None:
        (tmp_path / "folder.pid").mkdir()
        (tmp_path / "binary.pid").write_bytes(b"\xff\xfe")
        (tmp_path / ".hidden.pid").touch()
        (tmp_path / "dangling.pid").symlink_to(tmp_path / "nothing")
        ours, foreign = read_pid_files(tmp_path)
        assert ours == [] and [file.name for file in foreign] == ["binary", "folder"]
        assert read_pid_files(tmp_path / "missing") == ([], [])


class TestSignals:
    @pytest.fixture(autouse=True)
    def restored(self) -> Iterator[None]:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.getsignal(number) for number in numbers]
        yield
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)

    def test_first_signal_gives_the_exit_status(self) -> None:
        requests = StopRequests()
        requests.record()
        requests.raise_if_any()
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
        with pytest.raises(Interrupted) as error:
            requests.raise_if_any()
        assert error.value.status == 143 and requests.numbers == [signal.SIGTERM, signal.SIGINT]
        requests.restore()
        assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL

    def test_ignored_signal_stays_ignored_as_under_nohup(self) -> None:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        requests = StopRequests()
        requests.record()
        requests.restore()
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
        requests.record(also_ignored=True)
        assert signal.getsignal(signal.SIGHUP) != signal.SIG_IGN


class TestImports:
    def test_stop_needs_no_installed_package(self, tmp_path: Path) -> None:
        command = [sys.executable, "-S", "-m", "teacher", "stop", "--run-dir", str(tmp_path)]
        environment = {**os.environ, "PYTHONPATH": str(REPO)}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=False)
        assert done.returncode == 0 and done.stdout.startswith("nothing to stop"), done.stderr

    def test_package_imports_its_names_when_they_are_used(self) -> None:
        code = (
            "import sys, teacher, teacher.common.process_id; print('zmq' in sys.modules); "
            "from teacher import TeacherClient; print('zmq' in sys.modules)"
        )
        shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True)
        assert shown.stdout.split() == ["False", "True"]
        assert all(hasattr(teacher, name) for name in teacher.__all__)
        assert not hasattr(teacher, "no_such_name") and not hasattr(teacher, "__wrapped__")

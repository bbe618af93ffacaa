"""Run folders of the scripts: pid files, foreign processes, failed starts."""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests._support.ports import free_port
from tests._support.teacher_service import REPO, processes_of
from tests._support.waiting import PATIENCE_S, wait_until

HOST = os.uname().nodename
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """Return a stub interpreter. Processes of the service are ready at once and sleep. Other commands succeed.

    The commands of the scripts run in a real interpreter. ``$HANG`` names a command that sleeps as well. Command lines
    of processes contain the folder (see ``processes_of``).
    """
    stub = tmp_path / "interpreter"
    stub.write_text(
        f"""#!/bin/bash
[[ $3 == @(serve|join|stop) ]] && exec {sys.executable} "$@"
[[ $3 == "${{HANG:-}}" ]] && exec -a "$0 $3" sleep 3600
while (($#)); do [[ $1 == --ready-file ]] && touch "$2" && exec -a "$2" sleep 3600; shift; done
"""
    )
    stub.chmod(0o700)
    return stub


def environment_of(interpreter: Path, run_dir: Path | str) -> dict[str, str]:
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    environment |= {"PYTHON": str(interpreter), "CKPT_PATH": str(interpreter.parent), "RUN_DIR": str(run_dir)}
    return environment | {name: str(free_port()) for name in ("PROXY_FRONTEND_PORT", "PROXY_BACKEND_PORT")}


def run(
    script: str, interpreter: Path, run_dir: Path | str, *, disk_is_full: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    def limit_files() -> None:
        """Make every write to a file fail like on a full disk: a limit of 0 bytes, with its signal ignored."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if disk_is_full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    return subprocess.run(
        [str(REPO / "teacher" / script)],
        env=environment_of(interpreter, run_dir) | variables,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
        preexec_fn=limit_files,
    )


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """Run a process that no script may end."""
    process = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    yield process
    assert process.poll() is None, "it was ended"
    process.kill()
    process.wait(timeout=PATIENCE_S)


def ticks(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def state_of(pid: int) -> str:
    """Return the letter of the process's state, or an empty string if it does not exist."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return ""


def signals(pid: int, mask: str) -> set[int]:
    """Return the signals in a mask of /proc/PID/status: ``SigIgn`` or ``SigCgt``."""
    lines = dict(line.split(":\t", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return {number for number in signal.valid_signals() if int(lines[mask], 16) >> (number - 1) & 1}


def test_pid_file_names_process_boot_and_host(interpreter: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    started = run("start_server.sh", interpreter, run_dir, N_WORKERS="2")
    assert started.returncode == 0, started.stderr
    for name in ("proxy", "worker-0", "worker-1"):
        pid, *rest = (run_dir / f"{name}.pid").read_text().split()
        assert rest == [ticks(int(pid)), BOOT, HOST]
    again = run("start_server.sh", interpreter, run_dir)
    assert again.returncode == 1 and "are running already" in again.stderr
    assert run("stop_server.sh", interpreter, run_dir).returncode == 0
    assert processes_of(tmp_path) == [] and not list(run_dir.glob("*.pid"))


def test_second_start_at_the_same_time_is_refused(interpreter: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    environment = environment_of(interpreter, run_dir) | {"HANG": "proxy"}
    first = subprocess.Popen([str(REPO / "teacher" / "start_server.sh")], env=environment, start_new_session=True)
    try:
        wait_until((run_dir / "proxy.pid").exists)
        recorded = (run_dir / "proxy.pid").read_text()
        for script in ("start_server.sh", "join_server.sh"):
            refused = run(script, interpreter, run_dir)
            assert refused.returncode == 1 and f"another start in RUN_DIR={run_dir} has not ended" in refused.stderr
        assert (run_dir / "proxy.pid").read_text() == recorded
        first.terminate()
        assert first.wait(timeout=PATIENCE_S) == 128 + signal.SIGTERM and processes_of(tmp_path) == []
        assert run("start_server.sh", interpreter, run_dir).returncode == 0
    finally:
        first.kill()
        first.wait(timeout=PATIENCE_S)
        run("stop_server.sh", interpreter, run_dir)


def test_start_with_openai_port_starts_gateway_that_stop_ends(interpreter: Path, tmp_path: Path) -> None:
    run_dir, port = tmp_path / "run", str(free_port())
    started = run("start_server.sh", interpreter, run_dir, OPENAI_PORT=port)
    assert started.returncode == 0, started.stderr
    assert f"http://127.0.0.1:{port}/v1/completions" in started.stdout
    assert {path.stem for path in run_dir.glob("*.pid")} == {"proxy", "gateway", "worker-0"}
    assert (run_dir / "gateway.log").exists()
    assert run("stop_server.sh", interpreter, run_dir).returncode == 0
    assert processes_of(tmp_path) == [] and not list(run_dir.glob("*.pid"))


def test_start_without_openai_port_starts_no_gateway(interpreter: Path, tmp_path: Path) -> None:
    started = run("start_server.sh", interpreter, tmp_path / "run", OPENAI_PORT="")
    names = {path.stem for path in (tmp_path / "run").glob("*.pid")}
    assert run("stop_server.sh", interpreter, tmp_path / "run").returncode == 0
    assert names == {"proxy", "worker-0"} and "/v1/completions" not in started.stdout


def test_start_openai_port_in_use_is_refused_before_any_process(interpreter: Path, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        refused = run("start_server.sh", interpreter, tmp_path / "run", OPENAI_PORT=str(port))
    assert refused.returncode == 1 and processes_of(tmp_path) == [] and not (tmp_path / "run").exists()
    assert f"port {port} of 127.0.0.1 is in use" in refused.stderr and "or set OPENAI_PORT" in refused.stderr


def test_gateway_port_of_the_proxy_is_refused(tmp_path: Path, interpreter: Path) -> None:
    ports = {name: str(free_port()) for name in ("PROXY_FRONTEND_PORT", "PROXY_BACKEND_PORT")}
    for name, port in ports.items():
        refused = run("start_server.sh", interpreter, tmp_path / "run", **ports, OPENAI_PORT=port)
        assert refused.returncode == 1 and f"OPENAI_PORT={port} is {name} too" in refused.stderr


def test_start_gateway_that_ends_is_named_with_its_log(interpreter: Path, tmp_path: Path) -> None:
    text = interpreter.read_text()
    interpreter.write_text(text.replace("while ((", '[[ $3 == gateway ]] && echo "no aiohttp" && exit 1\nwhile (('))
    failed = run("start_server.sh", interpreter, tmp_path / "run", OPENAI_PORT=str(free_port()))
    assert failed.returncode == 1 and processes_of(tmp_path) == []
    assert "no aiohttp" in failed.stderr and "gateway ended while starting" in failed.stderr


def test_default_run_dir_contains_host_name(interpreter: Path) -> None:
    stopped = run("stop_server.sh", interpreter, "", PROXY_FRONTEND_PORT="15999")
    assert stopped.returncode == 0 and f"outputs/teacher-{HOST}-15999" in stopped.stdout


FOREIGN = {
    "other host": ("{pid} {ticks} 00000000-0000-0000-0000-000000000000 nodeA", "is of host nodeA, this is"),
    "other host, same boot": ("{pid} 1 {boot} nodeA", "is of host nodeA, this is"),
    "empty": ("", "it is empty or damaged, expected 'pid start-ticks boot-id host'"),
    "cut": ("{pid}", "it is empty or damaged"),
    "no number": ("; rm -rf x", "it is empty or damaged"),
    "old format, elsewhere": ("{pid} 1", "it names no host (an older version wrote it)"),
}


@pytest.mark.parametrize("case", FOREIGN)
def test_stop_foreign_pid_file_is_left_alone(
    case: str, interpreter: Path, tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    run_dir = tmp_path / "run"
    assert run("start_server.sh", interpreter, run_dir).returncode == 0
    content, reason = FOREIGN[case]
    file = run_dir / "a-first.pid"
    file.write_text(content.format(pid=bystander.pid, ticks=ticks(bystander.pid), boot=BOOT))
    stopped = run("stop_server.sh", interpreter, run_dir)
    assert stopped.returncode == 1
    assert f"left alone: {file}: " in stopped.stderr and reason in stopped.stderr
    assert "stopped 2 processes of this host, and left 1 pid files alone" in stopped.stderr
    assert processes_of(tmp_path) == [] and [path.name for path in run_dir.glob("*.pid")] == ["a-first.pid"]
    refused = run("join_server.sh", interpreter, run_dir)
    assert refused.returncode == 1 and reason in refused.stderr and "set another RUN_DIR" in refused.stderr
    assert file.exists() and processes_of(tmp_path) == []


@pytest.mark.parametrize("boot", ["11111111-2222-3333-4444-555555555555", BOOT])
def test_stop_reused_pid_counts_as_ended(
    boot: str, interpreter: Path, tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    """The bystander has the pid of the file, and after a reboot also its start ticks."""
    started = ticks(bystander.pid) if boot != BOOT else "1"
    (tmp_path / "proxy.pid").write_text(f"{bystander.pid} {started} {boot} {HOST}\n")
    stopped = run("stop_server.sh", interpreter, tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    assert not (tmp_path / "proxy.pid").exists()


def test_stop_old_pid_file_format_is_stopped(interpreter: Path, tmp_path: Path) -> None:
    old = subprocess.Popen(["sleep", "3600"], start_new_session=True)
    try:
        (tmp_path / "proxy.pid").write_text(f"{old.pid} {ticks(old.pid)}\n")
        assert run("stop_server.sh", interpreter, tmp_path).returncode == 0
        assert old.wait(timeout=PATIENCE_S) == -signal.SIGTERM and not (tmp_path / "proxy.pid").exists()
    finally:
        old.kill()
        old.wait(timeout=PATIENCE_S)


FULL_DISK = """
import os, resource, sys
from teacher.launcher import commands, processes

def write(path, pid, write=processes.write_pid_file):
    if path.stem == os.environ["FULL_AT"]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    return write(path, pid)

processes.write_pid_file = write
sys.exit(commands.main(sys.argv[3], sys.argv[4:]))
"""
"""Program of the command whose writes fail from the pid file of the process ``$FULL_AT`` onward."""


@pytest.mark.parametrize("full_at", ["before", "proxy", "worker-0", "worker-1"])
def test_start_full_disk_leaves_no_process(full_at: str, interpreter: Path, tmp_path: Path) -> None:
    run_dir, program = tmp_path / "run", tmp_path / "full_disk.py"
    program.write_text(FULL_DISK)
    interpreter.write_text(interpreter.read_text().replace(sys.executable, f"{sys.executable} {program}"))
    failed = run(
        "start_server.sh", interpreter, run_dir, disk_is_full=full_at == "before", FULL_AT=full_at, N_WORKERS="2"
    )
    assert failed.returncode == 1
    assert f"cannot write {run_dir}/" in failed.stderr and "is the disk full?" in failed.stderr
    assert not list(run_dir.glob("*.pid")) and not list(run_dir.glob(".*.part"))
    wait_until(lambda: processes_of(tmp_path) == [])  # a child of a killed process can take a moment to end


@pytest.mark.parametrize("script", ["start_server.sh", "join_server.sh"])
def test_start_former_name_of_variable_is_refused(script: str, interpreter: Path, tmp_path: Path) -> None:
    refused = run(script, interpreter, tmp_path / "run", MAX_ANSWER_MIB="512")
    assert refused.returncode == 1 and not (tmp_path / "run").exists()
    assert "MAX_ANSWER_MIB is now MAX_RESULT_MIB; set MAX_RESULT_MIB=512 instead" in refused.stderr


def test_start_symlink_in_place_of_log_is_not_followed(interpreter: Path, tmp_path: Path) -> None:
    run_dir, victim = tmp_path / "run", tmp_path / "victim"
    run_dir.mkdir()
    victim.write_text("precious")
    for name in ("proxy.log", "worker-0.ready", ".proxy.pid.part"):
        (run_dir / name).symlink_to(victim)
    try:
        started = run("start_server.sh", interpreter, run_dir)
        assert started.returncode == 0, started.stderr
    finally:
        run("stop_server.sh", interpreter, run_dir)
    assert victim.read_text() == "precious" and processes_of(tmp_path) == []


def test_start_unsafe_run_dir_is_refused(interpreter: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    run_dir.chmod(0o1777)
    refused = run("start_server.sh", interpreter, run_dir)
    assert refused.returncode == 1 and f"every user can write RUN_DIR={run_dir}" in refused.stderr
    run_dir.chmod(0o755)
    if os.getuid() == 0:
        os.chown(run_dir, 65534, 65534)
        refused = run("start_server.sh", interpreter, run_dir)
        assert refused.returncode == 1 and "belongs to another user" in refused.stderr
    assert list(run_dir.iterdir()) == []


@pytest.mark.parametrize("run_dir", ["/proc/teacher", "{file}/run"])
def test_start_run_dir_not_creatable_is_refused(run_dir: str, interpreter: Path, tmp_path: Path) -> None:
    refused = run("start_server.sh", interpreter, Path(run_dir.format(file=interpreter)))
    assert refused.returncode == 1 and "start_server.sh: cannot create RUN_DIR=" in refused.stderr
    assert "set RUN_DIR to a folder that you can write" in refused.stderr


@pytest.mark.parametrize("is_ours", [True, False])
@pytest.mark.parametrize("log_is_removed", [False, True])
def test_stop_group_without_leader_kills_only_own_processes(
    is_ours: bool, log_is_removed: bool, interpreter: Path, tmp_path: Path
) -> None:
    """The pid of an ended process may be the number of a later, unrelated group whose leader has ended as well."""
    run_dir, link = tmp_path / "run", tmp_path / "link"
    run_dir.mkdir()
    link.symlink_to(run_dir)
    log = run_dir / ("proxy.log" if is_ours else "other.log")
    with open(log, "wb") as errors:
        leader = subprocess.Popen(
            ["bash", "-c", "sleep 3600 >&2 & echo $!"], stdout=subprocess.PIPE, stderr=errors, start_new_session=True
        )
    member = int(leader.communicate(timeout=PATIENCE_S)[0])
    if log_is_removed:
        log.unlink()
    try:
        (run_dir / "proxy.pid").write_text(f"{leader.pid} 1 {BOOT} {HOST}\n")
        stopped = run("stop_server.sh", interpreter, link, STOP_TIMEOUT_S="0")
        assert stopped.returncode == 0, stopped.stderr
        assert ("killing" in stopped.stderr) == is_ours and not (run_dir / "proxy.pid").exists()
        assert state_of(member) in ("Z", "") if is_ours else state_of(member) == "S"
    finally:
        with suppress(ProcessLookupError):
            os.kill(member, signal.SIGKILL)


@pytest.mark.parametrize("how", ["signal", "Ctrl-C while it waits", "Ctrl-C from the start"])
def test_stop_signaled_while_waiting_kills_process(how: str, interpreter: Path, tmp_path: Path) -> None:
    stubborn = subprocess.Popen(["bash", "-c", "trap '' TERM; exec sleep 3600"], start_new_session=True)
    try:
        wait_until(lambda: signal.SIGTERM in signals(stubborn.pid, "SigIgn"))
        (tmp_path / "proxy.pid").write_text(f"{stubborn.pid} {ticks(stubborn.pid)} {BOOT} {HOST}\n")
        script = subprocess.Popen(
            [str(REPO / "teacher" / "stop_server.sh")],
            env=environment_of(interpreter, tmp_path) | {"STOP_TIMEOUT_S": "50"},
            start_new_session=True,
        )
        if how == "Ctrl-C from the start":
            wait_until(lambda: {signal.SIGINT, signal.SIGTERM} <= signals(script.pid, "SigIgn"))
        else:
            wait_until(lambda: {signal.SIGINT, signal.SIGTERM} <= signals(script.pid, "SigCgt"))
        if how == "signal":
            script.terminate()
        while how != "signal" and script.poll() is None:
            os.killpg(script.pid, signal.SIGINT)
            threading.Event().wait(0.02)
        assert script.wait(timeout=PATIENCE_S) == 0 and stubborn.wait(timeout=PATIENCE_S) == -signal.SIGKILL
        assert not (tmp_path / "proxy.pid").exists()
    finally:
        stubborn.kill()
        stubborn.wait(timeout=PATIENCE_S)


def test_start_signaled_during_final_check_ends_service(interpreter: Path, tmp_path: Path) -> None:
    environment = environment_of(interpreter, tmp_path / "run") | {"HANG": "check"}
    script = subprocess.Popen([str(REPO / "teacher" / "start_server.sh")], env=environment, start_new_session=True)
    try:
        wait_until(lambda: len(processes_of(Path(f"{interpreter} check"))) == 1)
        assert len(processes_of(tmp_path)) == 3
        script.terminate()
        assert script.wait(timeout=PATIENCE_S) == 128 + signal.SIGTERM
        assert processes_of(tmp_path) == []
    finally:
        script.kill()
        script.wait(timeout=PATIENCE_S)


@pytest.mark.parametrize("repeated", [False, True])
def test_start_interrupted_at_any_moment_leaves_no_process(repeated: bool, interpreter: Path, tmp_path: Path) -> None:
    """Ctrl-C reaches the script alone: its processes have their own sessions."""
    environment = environment_of(interpreter, tmp_path / "run") | {"HANG": "check", "N_WORKERS": "3"}
    for delay_s in (0.0, 0.03, 0.06, 0.09, 0.12, 0.15, 0.18, 0.21, 0.25, 0.3, 0.4, 0.6):
        script = subprocess.Popen(
            [str(REPO / "teacher" / "start_server.sh")],
            env=environment,
            start_new_session=True,
            stderr=subprocess.DEVNULL,
        )
        threading.Event().wait(delay_s)
        while script.poll() is None:
            os.killpg(script.pid, signal.SIGINT)
            if not repeated:
                script.wait(timeout=PATIENCE_S)
            threading.Event().wait(0.01)
        assert script.returncode in (128 + signal.SIGINT, -signal.SIGINT, 1)  # 1: while Python itself starts
        assert processes_of(tmp_path) == []


def test_start_process_that_is_not_ready_is_named(interpreter: Path, tmp_path: Path) -> None:
    failed = run("start_server.sh", interpreter, tmp_path / "run", HANG="proxy", START_TIMEOUT_S="1")
    assert failed.returncode == 1 and processes_of(tmp_path) == []
    assert re.search(r"proxy not ready after \d+ s; raise START_TIMEOUT_S, or see the logs in", failed.stderr)


def test_start_process_that_ends_is_named_with_its_log(interpreter: Path, tmp_path: Path) -> None:
    text = interpreter.read_text()
    reason = '[[ $3 == worker ]] && printf "line %s\\n" {1..40} && echo "no memory" >&2 && exit 1\n'
    interpreter.write_text(text.replace("while ((", f"{reason}while (("))
    failed = run("start_server.sh", interpreter, tmp_path / "run", LOG_LINES="3")
    shown = failed.stderr.splitlines()
    log = tmp_path / "run" / "worker-0.log"
    assert failed.returncode == 1 and processes_of(tmp_path) == []
    assert shown[:5] == [f"--- last lines of {log}", "line 39", "line 40", "no memory", "---"]
    assert shown[5].startswith("start_server.sh: worker-0 ended while starting (its log is above, and in")

"""Run folders of the scripts: whose processes they name, what is left alone, and what a failed start leaves."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import REPO, processes_of

from tests.ports import free_port

pytestmark = pytest.mark.timeout(60)

HOST = os.uname().nodename
BOOT = Path("/proc/sys/kernel/random/boot_id").read_text().strip()


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    """A stand-in for Python: each process of the service is ready at once and sleeps; every other command succeeds.

    ``$FILL_DISK`` names the process (``proxy`` or ``worker``) at whose start the script can no longer write files.
    """
    stub = tmp_path / "interpreter"
    stub.write_text(
        """#!/bin/bash
[[ $3 == "${FILL_DISK:-}" ]] && prlimit --pid $PPID --fsize=0:0
while (($#)); do [[ $1 == --ready-file ]] && touch "$2" && exec sleep 60; shift; done
"""
    )
    stub.chmod(0o700)
    return stub


def run(
    script: str, interpreter: Path, run_dir: Path | str, *, disk_is_full: bool = False, **variables: str
) -> subprocess.CompletedProcess[str]:
    def limit_files() -> None:
        """A limit of 0 bytes, with its signal ignored, makes every write to a file fail, as a full disk does."""
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        if disk_is_full:
            resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))

    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    environment |= {"PYTHON": str(interpreter), "CKPT_PATH": str(interpreter.parent), "RUN_DIR": str(run_dir)}
    environment |= {name: str(free_port()) for name in ("PROXY_FRONTEND_PORT", "PROXY_BACKEND_PORT")}
    return subprocess.run(
        [str(REPO / "teacher" / script)],
        env=environment | variables,
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
        preexec_fn=limit_files,
    )


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that no script may end."""
    process = subprocess.Popen(["sleep", "60"], start_new_session=True)
    yield process
    assert process.poll() is None, "it was ended"
    process.kill()
    process.wait(timeout=10)


def ticks(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]


def test_a_pid_file_names_process_boot_and_host_and_stopping_removes_it(interpreter: Path, tmp_path: Path) -> None:
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


def test_the_default_folder_contains_the_host_name(interpreter: Path) -> None:
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
def test_a_pid_file_of_another_host_or_damaged_is_named_and_all_others_are_stopped(
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
def test_a_process_of_an_earlier_boot_or_with_a_reused_pid_is_taken_for_ended(
    boot: str, interpreter: Path, tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    """The bystander has the pid, and after a reboot even the start ticks."""
    started = ticks(bystander.pid) if boot != BOOT else "1"
    (tmp_path / "proxy.pid").write_text(f"{bystander.pid} {started} {boot} {HOST}\n")
    stopped = run("stop_server.sh", interpreter, tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    assert not (tmp_path / "proxy.pid").exists()


def test_a_process_recorded_by_an_older_version_is_stopped(interpreter: Path, tmp_path: Path) -> None:
    old = subprocess.Popen(["sleep", "60"], start_new_session=True)
    try:
        (tmp_path / "proxy.pid").write_text(f"{old.pid} {ticks(old.pid)}\n")
        assert run("stop_server.sh", interpreter, tmp_path).returncode == 0
        assert old.wait(timeout=10) == -signal.SIGTERM and not (tmp_path / "proxy.pid").exists()
    finally:
        old.kill()
        old.wait(timeout=10)


@pytest.mark.parametrize("full_at", ["before", "proxy", "worker"])
def test_a_full_disk_at_launch_leaves_no_process(full_at: str, interpreter: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    failed = run(
        "start_server.sh", interpreter, run_dir, disk_is_full=full_at == "before", FILL_DISK=full_at, N_WORKERS="2"
    )
    assert failed.returncode == 1
    assert f"cannot write {run_dir}/" in failed.stderr and "is the disk full?" in failed.stderr
    assert processes_of(tmp_path) == [] and not list(run_dir.glob("*.pid")) and not list(run_dir.glob(".*"))


def test_a_link_in_place_of_a_log_is_not_followed(interpreter: Path, tmp_path: Path) -> None:
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


def test_a_folder_that_others_own_or_can_write_is_refused(interpreter: Path, tmp_path: Path) -> None:
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
def test_a_folder_that_cannot_be_made_is_refused_with_what_to_set(
    run_dir: str, interpreter: Path, tmp_path: Path
) -> None:
    refused = run("start_server.sh", interpreter, Path(run_dir.format(file=interpreter)))
    assert refused.returncode == 1 and "start_server.sh: cannot make RUN_DIR=" in refused.stderr
    assert "set RUN_DIR to a folder that you can write" in refused.stderr

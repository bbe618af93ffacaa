"""Signals to launch scripts: they reach the training first, then the teacher is stopped."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S, wait_until

TRAINING = """#!/bin/bash
# A stub for Python. As a training it ends half a second after a signal, like one that saves a checkpoint.
[[ "$*" == *recipe_gkd.main_gkd* ]] || exit 0
for name in TERM INT HUP USR1; do trap "echo training got $name >>events; sleep 0.5; echo training ended >>events
  exit ${SAVED:-$((128 + $(kill -l $name)))}" $name; done
again() { echo training got TERM again >>events; exit 3; }
[[ -z ${SECOND:-} ]] || trap "echo training got TERM >>events; trap again TERM" TERM
sleep 3600 &  # left behind
echo "helper $!" >>events
echo "training $$" >>events
while :; do sleep 0.05; done
"""


def stub(text: str) -> str:
    return f"#!/bin/bash\n{text}\n"


@pytest.fixture(autouse=True)
def default_hangup() -> Iterator[None]:
    """Set SIGHUP as in a shell. Bash cannot trap a signal that was ignored when it started, as under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_DFL)
    yield
    signal.signal(signal.SIGHUP, before)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """Copy the launch scripts next to stubs of the teacher's scripts and of Python. All write to ``events``."""
    shutil.copytree(REPO / "launch", tmp_path / "launch")
    for path, text in {
        "launch/setup.sh": stub("exit 0"),
        "teacher/start_server.sh": stub('echo teacher started >>events; mkdir -p "$RUN_DIR"; exit ${START_STATUS:-0}'),
        "teacher/stop_server.sh": stub("echo teacher stopped >>events"),
        ".venv/bin/python": TRAINING,
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
        (tmp_path / path).chmod(0o700)
    shutil.copytree(REPO / "config", tmp_path / "config")
    (tmp_path / "events").touch()
    (tmp_path / "model").mkdir()
    return tmp_path


def events(checkout: Path) -> list[str]:
    return (checkout / "events").read_text().splitlines()


SCRIPTS = ["run_qwen2.5_one_node.sh", "run_simple.sh", "quickstart.sh"]
Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(checkout: Path) -> Iterator[Start]:
    """Yield a function that starts a script and returns once its stub training runs."""
    scripts: list[subprocess.Popen[bytes]] = []

    def start(script: str, *, until: str = "training ", **variables: str) -> subprocess.Popen[bytes]:
        settings = {"STUDENT": "x", "TEACHER": "model", "TRAIN_FILES": "x", "QUICKSTART_DIR": "outputs/q"}
        environment = os.environ | settings | variables
        command = ["bash", f"launch/{script}"]
        scripts.append(
            subprocess.Popen(command, cwd=checkout, env=environment, stdout=subprocess.DEVNULL, process_group=0)
        )
        wait_until(lambda: any(event.startswith(until) for event in events(checkout)))
        return scripts[-1]

    yield start
    for script in scripts:
        script.kill()
        script.wait(timeout=PATIENCE_S)
    for event in events(checkout):
        if event.removeprefix("training ").isdigit() and Path(f"/proc/{event.split()[1]}").exists():
            os.kill(int(event.split()[1]), signal.SIGKILL)
            pytest.fail("the training outlived its script")


DOCUMENTED = ("TERM", "USR1", "HUP", "INT")
"""Signals of docs/failures.md."""


@pytest.mark.parametrize(
    ("script", "name", "saved"),
    [  # all scripts source launch/foreground.bash
        pytest.param(script, name, saved, marks=() if script == SCRIPTS[0] or name == "TERM" else pytest.mark.slow)
        for script in SCRIPTS
        for name, saved in [*((name, False) for name in DOCUMENTED), ("USR1", True)]
    ],
)
def test_signal_ends_training_then_teacher(script: str, name: str, saved: bool, start: Start, checkout: Path) -> None:
    """The status is that of the training: 75 if it was saved between steps."""
    running = start(script, **({"SAVED": "75"} if saved else {}))
    number = signal.Signals[f"SIG{name}"]
    running.send_signal(number)
    assert running.wait(timeout=PATIENCE_S) == (75 if saved else 128 + number)
    (helper,) = [event.split()[1] for event in events(checkout) if event.startswith("helper ")]
    wait_until(lambda: not Path(f"/proc/{helper}").exists())
    after = events(checkout)[events(checkout).index("teacher started") + 1 :]
    assert after[2:] == [f"training got {name}", "training ended", "teacher stopped"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_ctrl_c_reaches_training_once(script: str, start: Start, checkout: Path) -> None:
    """A terminal sends the signal to the whole process group of the script."""
    running = start(script)
    os.killpg(running.pid, signal.SIGINT)
    assert running.wait(timeout=PATIENCE_S) == 130
    assert events(checkout)[-3:] == ["training got INT", "training ended", "teacher stopped"]


def test_second_signal_reaches_training(start: Start, checkout: Path) -> None:
    running = start("run_qwen2.5_one_node.sh", SECOND="1")
    running.terminate()
    wait_until(lambda: "training got TERM" in events(checkout))
    running.terminate()
    assert running.wait(timeout=PATIENCE_S) == 3
    assert events(checkout)[-2:] == ["training got TERM again", "teacher stopped"]


@pytest.mark.parametrize("script", SCRIPTS)
def test_failed_teacher_start_does_not_stop_teacher(script: str, start: Start, checkout: Path) -> None:
    """The service in the folder then belongs to another script."""
    running = start(script, until="teacher started", START_STATUS="7")
    assert running.wait(timeout=PATIENCE_S) == 7
    assert events(checkout)[-1] == "teacher started"


def test_fresh_quickstart_does_not_affect_running_one(start: Start, checkout: Path) -> None:
    running = start("quickstart.sh")
    kept = checkout / "outputs" / "q" / "runs" / "quickstart" / "checkpoint"
    kept.touch()
    command = ["bash", "launch/quickstart.sh", "--fresh"]
    environment = os.environ | {"QUICKSTART_DIR": "outputs/q"}

    def fresh(**variables: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command,
            cwd=checkout,
            env=environment | variables,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )

    before = events(checkout)
    refused = fresh()
    assert (
        refused.returncode == 1 and f"another quickstart (pid {running.pid} on {os.uname().nodename})" in refused.stderr
    )
    assert kept.exists() and events(checkout) == before and running.poll() is None
    running.terminate()
    running.wait(timeout=PATIENCE_S)
    (checkout / "link").symlink_to("outputs/q")
    for folder in ("outputs/q", "link"):
        kept.touch()
        fresh(START_STATUS="7", QUICKSTART_DIR=folder)
        assert not kept.exists() and (checkout / "outputs" / "q" / ".lock").exists()


def test_fresh_keeps_folder_without_lock_file(checkout: Path) -> None:
    home = checkout / "home"
    home.mkdir()
    (home / "thesis").touch()
    refused = subprocess.run(
        ["bash", "launch/quickstart.sh", "--fresh"],
        cwd=checkout,
        env=os.environ | {"QUICKSTART_DIR": str(home)},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert refused.returncode == 1 and "not created by a quickstart; --fresh removes nothing" in refused.stderr
    assert [path.name for path in home.iterdir()] == ["thesis"]


def test_every_script_of_a_training_forwards_all_documented_signals() -> None:
    """Scripts run a training with ``run_foreground``, or have their own traps."""
    foreground = (REPO / "launch" / "foreground.bash").read_text()
    n_checked = 0
    for script in [*(REPO / "launch").glob("*.sh"), REPO / "launch" / "slurm.sbatch"]:
        text = script.read_text()
        if "recipe_gkd.main_gkd" not in text or "ray job submit" in text:
            continue
        traps = foreground if "source launch/foreground.bash" in text else text
        missing = [name for name in DOCUMENTED if not re.search(rf"^ *trap '.*' {name}\b", traps, re.MULTILINE)]
        assert not missing, (script.name, missing)
        n_checked += 1
    assert n_checked >= 5


@pytest.mark.parametrize("name", DOCUMENTED)
def test_signal_between_commands_runs_cleanup(name: str) -> None:
    script = f"""
set -euo pipefail
source launch/foreground.bash
run_foreground --cleanup 'echo cleanup' true
kill -s {name} $$
echo went on
"""
    done = subprocess.run(
        ["bash", "-c", script], cwd=REPO, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout) == (128 + signal.Signals[f"SIG{name}"], "cleanup\n")


def test_signal_does_not_interrupt_cleanup() -> None:
    script = """
set -euo pipefail
source launch/foreground.bash
cleanup() {
  bash -c 'trap "echo handled" INT; kill -s TERM $PPID; kill -s INT $$; sleep 0.5; echo cleanup'
}
run_foreground --cleanup cleanup true
"""
    done = subprocess.run(
        ["bash", "-c", script], cwd=REPO, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "handled\ncleanup\n", "")


def test_signal_right_after_start_is_forwarded_once() -> None:
    """The signal arrives between the line that starts the command and the line that checks for earlier signals."""
    script = """
set -euo pipefail
source launch/foreground.bash
set() { builtin set "$@"; [ "$1" != +m ] || builtin kill -s TERM $$; }
kill() { echo "$@"; builtin kill "$@"; }
run_foreground sleep 3600
"""
    done = subprocess.run(
        ["bash", "-c", script], cwd=REPO, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode == 143
    to_command, to_group = done.stdout.splitlines()
    assert to_command.startswith("-s TERM -- ") and to_group.startswith("-s TERM -- -")

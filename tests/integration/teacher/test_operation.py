"""Commands, scripts, logs and systemd units. Workers use a fake engine."""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from teacher.__main__ import main, make_parser
from teacher.commands.table import duration
from teacher.logs import set_up_logging
from teacher.wire.auth import client_keys, server_keys
from tests._support.fake_worker import running_worker
from tests._support.ports import free_port
from tests._support.teacher_service import REPO, processes_of, running_proxy
from tests._support.waiting import PATIENCE_S, wait_until

UNITS = REPO / "launch" / "systemd"


@pytest.fixture
def python(tmp_path: Path) -> Path:
    """Return an interpreter for the scripts that runs `fake_engine_main`."""
    wrapper = tmp_path / "python"
    paths = f"{REPO}:{REPO / 'tests' / 'teacher'}"
    script = shlex.join([sys.executable, "-m", "tests.integration.teacher.fake_engine_main"])
    wrapper.write_text(f'#!/bin/sh\nPYTHONPATH={paths} exec {script} "$@"\n')
    wrapper.chmod(0o700)
    return wrapper


def run_script(name: str, python: Path, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if key != "CUDA_VISIBLE_DEVICES"}
    environment |= {"PYTHON": str(python), "CKPT_PATH": str(python.parent), "RUN_DIR": str(python.parent / "run")}
    command = [str(REPO / "teacher" / name), *flags]
    return subprocess.run(
        command, env=environment | variables, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def ports() -> dict[str, str]:
    names = ("PROXY_FRONTEND_PORT", "PROXY_BACKEND_PORT", "HTTP_PORT")
    return {name: str(free_port()) for name in names}


def complete(port: str, ids: list[int]) -> dict[str, Any]:
    body = json.dumps({"prompt": ids, "prompt_logprobs": 2}).encode()
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/completions", body, timeout=PATIENCE_S) as response:
        [choice] = json.load(response)["choices"]
    return dict(choice)


# --- scripts ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_scripts_secured_service_starts_joins_and_stops(python: Path, tmp_path: Path) -> None:
    assert main(["keys", "--auth-dir", str(tmp_path / "keys")]) == 0
    copy = tmp_path / "another machine"
    shutil.copytree(tmp_path / "keys" / "clients" / "default", copy)
    setting = ports() | {"BIND": "0.0.0.0", "STALL_TIMEOUT_S": "20", "LOG_FORMAT": "json"}
    setting["OPENAI_PORT"] = str(free_port())
    try:
        started = run_script("start_server.sh", python, **setting, AUTH_DIR=str(tmp_path / "keys"))
        assert started.returncode == 0, started.stderr
        assert f"stop it with: {REPO}/teacher/stop_server.sh --run-dir {tmp_path / 'run'}" in started.stdout
        joined = run_script("join_server.sh", python, **setting, AUTH_DIR=str(copy), RUN_DIR=str(tmp_path / "run2"))
        assert joined.returncode == 0, joined.stderr
        command = ["status", "--json", "--port", setting["PROXY_FRONTEND_PORT"], "--auth-dir", str(copy)]
        shown = subprocess.run(
            [python, "-m", "teacher", *command], capture_output=True, text=True, timeout=PATIENCE_S, check=True
        )
        assert len(json.loads(shown.stdout)["workers"]) == 2
        log = [json.loads(line) for line in (tmp_path / "run" / "proxy.log").read_text().splitlines()]
        assert sum("joined" in line["message"] for line in log) == 2
        completion = complete(setting["OPENAI_PORT"], [5, 6, 7])
        assert [len(entries or ()) for entries in completion["prompt_logprobs"]] == [0, 2, 2]
        [line] = [json.loads(line) for line in (tmp_path / "run" / "gateway.log").read_text().splitlines()]
        assert f"serving http://127.0.0.1:{setting['OPENAI_PORT']}/v1/completions" in line["message"]
        keyless = run_script("join_server.sh", python, **setting, RUN_DIR=str(tmp_path / "run3"), START_TIMEOUT_S="1")
        assert keyless.returncode == 1
    finally:
        for run_dir in ("run", "run2"):
            stopped = run_script("stop_server.sh", python, RUN_DIR=str(tmp_path / run_dir))
            assert stopped.returncode == 0 and "killing" not in stopped.stderr
    assert processes_of(tmp_path) == []


def test_start_public_address_without_keys_is_refused(python: Path, tmp_path: Path) -> None:
    refused = run_script("start_server.sh", python, **ports(), BIND="0.0.0.0")
    assert refused.returncode == 1
    assert "python -m teacher keys --auth-dir DIR" in refused.stderr
    assert "AUTH_DIR=DIR BIND=0.0.0.0 teacher/start_server.sh" in refused.stderr
    assert not (tmp_path / "run" / "worker-0.log").exists() and processes_of(tmp_path) == []
    nowhere = run_script("start_server.sh", python, **ports(), AUTH_DIR=str(tmp_path / "nowhere"))
    assert nowhere.returncode == 1 and f"keys --auth-dir {tmp_path}/nowhere" in nowhere.stderr


@pytest.fixture
def recorder(tmp_path: Path) -> Path:
    """Return an interpreter for the scripts that records its arguments and is ready at once."""
    stub = tmp_path / "recorder"
    stub.write_text(
        f"""#!/bin/bash
[[ $3 == @(serve|join|stop) ]] && exec {sys.executable} "$@"
[[ $3 == worker ]] && echo "${{CUDA_VISIBLE_DEVICES-unset}}|$*" >> {tmp_path}/record
while (($#)); do [[ $1 == --ready-file ]] && touch "$2" && exec sleep 3600; shift; done
"""
    )
    stub.chmod(0o700)
    return stub


@pytest.mark.parametrize(
    ("visible", "n_workers", "tp_size", "expected"),
    [
        ("0,1,2,3", 2, 2, ["0,1", "2,3"]),
        ("5,3", 2, 1, ["5", "3"]),
        ("GPU-8a3c-01, GPU-77f0-02,MIG-1-2", 1, 3, ["GPU-8a3c-01,GPU-77f0-02,MIG-1-2"]),
        ("7,6,5", 1, 2, ["7,6"]),
        ("", 2, 1, ["", ""]),
    ],
)
def test_start_assigns_distinct_gpus_to_workers(
    visible: str, n_workers: int, tp_size: int, expected: list[str], recorder: Path, tmp_path: Path
) -> None:
    setting = ports() | {"N_WORKERS": str(n_workers), "TP_SIZE": str(tp_size), "CUDA_VISIBLE_DEVICES": visible}
    try:
        started = run_script("start_server.sh", recorder, **setting)
        assert started.returncode == 0, started.stderr
    finally:
        run_script("stop_server.sh", recorder)
    lines = [line.split("|") for line in (tmp_path / "record").read_text().splitlines()]
    assert sorted(devices for devices, _ in lines) == sorted(expected)
    assert all(f"--tp-size {tp_size} " in arguments for _, arguments in lines)
    assert processes_of(tmp_path) == []


def test_start_too_few_gpus_is_refused_before_any_process(python: Path, tmp_path: Path) -> None:
    setting = ports() | {"N_WORKERS": "2", "TP_SIZE": "2", "CUDA_VISIBLE_DEVICES": "GPU-1,GPU-2,GPU-3"}
    refused = run_script("start_server.sh", python, **setting)
    assert refused.returncode == 1 and "need 4 GPUs, 3 are visible" in refused.stderr
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("name", ["start_server.sh", "join_server.sh"])
def test_start_on_a_machine_with_problems_is_refused_before_any_process(name: str, tmp_path: Path) -> None:
    stub = tmp_path / "stub"
    stub.write_text(
        f"""#!/bin/bash
[[ $3 == @(serve|join) ]] && exec {sys.executable} "$@"
echo "$*" >> {tmp_path}/calls; echo "this machine: no compiler" >&2; exit 1
"""
    )
    stub.chmod(0o700)
    refused = run_script(name, stub, **ports(), CUDA_VISIBLE_DEVICES="0")
    assert refused.returncode == 1
    assert "this machine: no compiler" in refused.stderr and "cannot start on this machine" in refused.stderr
    assert (tmp_path / "calls").read_text().split() == ["-m", "teacher.machine_checks", "cuda"]
    assert not (tmp_path / "run").exists()


# --- commands --------------------------------------------------------------------------------------------------------


def test_status_prints_table_or_json_and_fails_without_worker(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running_proxy() as proxy:
        command = ["status", "--port", str(proxy.frontend_port)]
        assert main(command) == 1
        assert "no worker" in capsys.readouterr().out
        with running_worker(proxy.backend_port):
            assert main(["check", "--port", str(proxy.frontend_port)]) == 0
            capsys.readouterr()
            assert main(command) == 0
            shown = capsys.readouterr().out
            assert main([*command, "--json"]) == 0
            status = json.loads(capsys.readouterr().out)
    assert re.search(r"fake, top 4; up \d", shown) and "scored 1" in shown
    rows = [line for line in shown.splitlines() if "of 1,000" in line]
    assert len(rows) == 1 and status["workers"][0]["name"] in rows[0]
    assert status["model_name"] == "fake" and status["totals"]["scored"] == 1
    assert main([*command, "--timeout-s", "0.3"]) == 1
    assert "no teacher service at" in capsys.readouterr().err


def test_duration_has_at_most_two_units() -> None:
    shown = [duration(seconds) for seconds in (0, 0.44, 9.97, 12.4, 185, 7800, 450_000)]
    assert shown == ["0.0s", "0.4s", "10s", "12s", "3m05s", "2h10m", "5d05h"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["proxy", "--frontend-port", "70000"], "expected a port from 0"),
        (["proxy", "--stall-timeout-s", "nan"], "seconds above 0"),
        (["proxy", "--max-queue-tokens", "0"], "1 or more"),
        (["worker"], "--ckpt-path"),
        (["status", "--watch", "-1"], "seconds above 0"),
        (["proxy", "--log-format", "xml"], "invalid choice"),
    ],
)
def test_main_wrong_argument_exits_with_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_end_with_parent_ends_process_with_its_parent(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    child = [sys.executable, "-m", "teacher", "proxy", "--frontend-port=0", "--backend-port=0", "--http-port=-1"]
    child += [f"--ready-file={ready}", "--end-with-parent"]
    code = f"import os, subprocess; subprocess.run([*{child}, str(os.getpid())])"
    parent = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_until(lambda: ready.exists() and ready.read_text().endswith("\n"))
        pid = int(ready.read_text())
        assert pid in processes_of(ready)
    finally:
        parent.kill()
        parent.wait(timeout=PATIENCE_S)
    wait_until(lambda: processes_of(ready) == [])
    orphan = subprocess.run([*child, "1"], capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert orphan.returncode == 1 and "--end-with-parent 1: the parent process is" in orphan.stderr


@pytest.mark.parametrize("command", ["proxy", "worker", "check", "status", "sleep", "wake", "gateway", "keys"])
def test_main_help_describes_each_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([command, "--help"])
    assert ended.value.code == 0 and "--log-format" in capsys.readouterr().out


def test_import_without_proxy_command_does_not_import_prometheus() -> None:
    code = (
        "import sys, teacher, teacher.worker, teacher.proxy, teacher.__main__; "
        "sys.exit(any(name.startswith('prometheus') for name in sys.modules))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=PATIENCE_S)


# --- logs ------------------------------------------------------------------------------------------------------------


def test_json_log_is_one_object_per_line(capsys: pytest.CaptureFixture[str]) -> None:
    set_up_logging("INFO", "json")
    log = logging.getLogger("teacher.test")
    log.info("two\nlines of %s", "text", extra={"fields": {"worker": "host:1", "tokens": 3, "odd": {1}}})
    log.debug("not shown")
    try:
        raise ValueError("broken\n")
    except ValueError:
        log.exception("failed")
    set_up_logging("INFO", "text")
    log.warning("plain", extra={"fields": {"tokens": 3}})
    first, second, third = capsys.readouterr().err.splitlines()
    record = json.loads(first)
    assert record["message"] == "two\nlines of text" and record["worker"] == "host:1" and record["tokens"] == 3
    assert (record["level"], record["logger"]) == ("INFO", "teacher.test")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}\+00:00", record["ts"])
    assert "ValueError: broken" in json.loads(second)["exception"]
    assert third.endswith("WARNING teacher.test: plain tokens=3")


# --- systemd ---------------------------------------------------------------------------------------------------------


def settings(unit: Path) -> dict[str, list[str]]:
    text = re.sub(r"\\\n\s*", "", unit.read_text())
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        if "=" in line and not line.startswith("#"):
            key, value = line.split("=", 1)
            found.setdefault(key, []).append(value)
    return found


def environment() -> dict[str, str]:
    lines = (UNITS / "teacher.env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))


@pytest.mark.parametrize("unit", sorted(UNITS.glob("*.service")), ids=lambda unit: unit.stem)
def test_systemd_unit_starts_valid_command(unit: Path) -> None:
    found, variables = settings(unit), environment()
    (command,) = found["ExecStart"]
    words: list[str] = []
    for word in command.split():
        whole = re.fullmatch(r"\$(\w+)", word)
        # Like systemd: $NAME is split at blanks, ${NAME} is one argument, even if it is empty.
        words += variables[whole[1]].split() if whole else [re.sub(r"\$\{(\w+)\}", lambda m: variables[m[1]], word)]
    assert words[1:3] == ["-m", "teacher"] and "$" not in " ".join(words)
    args = make_parser().parse_args(words[3:])
    assert args.stall_timeout_s == 60 and args.log_format == "json"
    assert server_keys(args.auth_dir) is client_keys(args.auth_dir) is None
    assert found["Restart"] == ["always"] and int(found["TimeoutStopSec"][0]) > 10 and "LimitNOFILE" in found
    assert f"EnvironmentFile=/etc/recipe-gkd/{(UNITS / 'teacher.env').name}" in unit.read_text()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="no systemd-analyze on this machine")
def test_systemd_units_are_valid(tmp_path: Path) -> None:
    for unit in UNITS.glob("*.service"):
        text = unit.read_text().replace("/opt/recipe_gkd/.venv/bin/python", "/bin/true").replace("User=teacher", "")
        (tmp_path / unit.name.replace("@.", "@0.")).write_text(text)
    checked = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", *map(str, tmp_path.glob("*.service"))],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (checked.returncode, checked.stderr) == (0, "")


def test_ray_script_submits_secured_service(tmp_path: Path) -> None:
    ray = tmp_path / "ray"
    ray.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    ray.chmod(0o700)
    variables = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "RAY_ADDRESS": "http://head:8265",
        "CKPT_PATH": "/models/t",
    }
    command = ["bash", str(REPO / "launch" / "run_teacher_on_ray.sh"), "--n-logprobs", "64"]

    def run(**more: str) -> subprocess.CompletedProcess[str]:
        environment = variables | more
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)

    assert "AUTH_DIR: a folder of keys" in run().stderr
    words = run(AUTH_DIR="/shared/keys", TP_SIZE="2").stdout.split()
    options = words[words.index("launch.teacher_on_ray") + 1 :]
    own = ["--n-workers", "1", "--tp-size", "2", "--auth-dir", "/shared/keys"]
    assert options[:6] == own
    assert make_parser().parse_args(["worker", *options[2:]]).n_logprobs == 64


def test_keys_command_creates_keys_and_adds_clients(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = str(tmp_path / "keys")
    assert main(["keys", "--auth-dir", folder]) == 0
    assert f"copy {folder}/clients/default" in capsys.readouterr().out
    assert main(["keys", "--auth-dir", folder, "--client", "gpu-7"]) == 0
    assert client_keys(f"{folder}/clients/gpu-7") != client_keys(folder)
    assert main(["keys", "--auth-dir", folder]) == 1
    assert "never overwritten" in capsys.readouterr().err
    keys = server_keys(folder)
    assert keys is not None and len(keys.allowed) == 2

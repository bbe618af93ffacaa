"""The command ``gpu_smoke`` without its checks: selection, obstacles, processes, table and exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.commands import gpu_smoke
from recipe_gkd.commands.gpu_smoke import command, runner
from recipe_gkd.commands.gpu_smoke.checks import BY_NAME, CHECKS, MACHINE
from recipe_gkd.commands.gpu_smoke.isolation import run_with_deadline
from recipe_gkd.commands.gpu_smoke.machine import versions
from recipe_gkd.commands.gpu_smoke.outcome import CheckFailed, Context, Outcome
from teacher.common.process_id import is_alive, process_id

CUDA_PACKAGES = {"vllm": "0.32.0", "ray": "2.60.0"}
SHELL_TIMEOUT_S = 20.0


def run_shell(tmp_path: Path, script: str, deadline_s: float = SHELL_TIMEOUT_S) -> int | None:
    return run_with_deadline(["sh", "-c", script], variables={}, log=tmp_path / "log", deadline_s=deadline_s)


def run_with_result(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, status: int | None, result: dict[str, Any] | None, log: str = ""
) -> Outcome:
    """Run the check ``kernels`` with a process that ends as given."""

    def end(command: Sequence[str], *, variables: Mapping[str, str], log: Path, deadline_s: float) -> int | None:
        log.write_text(text)
        if result is not None:
            Path(command[-1]).write_text(json.dumps(result))
        return status

    text = log
    monkeypatch.setattr(runner, "run_with_deadline", end)
    return runner.run_check(BY_NAME["kernels"], device="cpu", n_gpus=0, installed={}, folder=tmp_path)


class TestCheck:
    @pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.name)
    def test_function_exists_and_deadlines_are_positive(self, check: Any) -> None:
        module, _, name = check.function.partition(":")
        source = Path(gpu_smoke.__file__).with_name(f"{module}.py").read_text()
        assert f"def {name}(context: Context) -> str:" in source
        assert 0 < check.cpu_deadline_s <= check.deadline_s

    @pytest.mark.parametrize(
        ("name", "n_gpus", "installed", "reason"),
        [
            ("kernels", 0, CUDA_PACKAGES, "needs 1 GPU, torch finds none"),
            ("transport_collective", 1, CUDA_PACKAGES, "needs 2 GPUs, there is 1"),
            ("rollout", 1, {"vllm": None}, "vllm is not installed"),
            ("training_hybrid", 1, CUDA_PACKAGES | {"ray": None}, "ray is not installed"),
            ("teacher", 1, {"vllm": "0.32.0+cpu"}, "the installed vLLM (0.32.0+cpu) is not for CUDA"),
            ("rollout_tp2", 2, CUDA_PACKAGES, None),
            (MACHINE, 0, {}, None),
        ],
    )
    def test_obstacle_on_cuda_names_what_is_missing(
        self, name: str, n_gpus: int, installed: dict[str, Any], reason: str | None
    ) -> None:
        assert BY_NAME[name].obstacle("cuda", n_gpus, installed) == reason

    def test_obstacle_on_cpu_needs_no_gpu_but_a_vllm_for_cpus(self) -> None:
        assert BY_NAME["rollout_tp2"].obstacle("cpu", 0, {"vllm": "0.32.0+cpu"}) is None
        assert BY_NAME["rollout_tp2"].obstacle("cpu", 0, CUDA_PACKAGES) == "the installed vLLM (0.32.0) is not for CPUs"

    def test_variables_hide_gpus_on_cpu_only(self) -> None:
        for check in CHECKS:
            assert check.variables("cpu")["CUDA_VISIBLE_DEVICES"] == ""
            assert "CUDA_VISIBLE_DEVICES" not in check.variables("cuda")
        assert BY_NAME["actor"].variables("cuda")["CUDA_DEVICE_MAX_CONNECTIONS"] == "1"
        assert not [name for name in BY_NAME["teacher"].variables("cuda") if name.startswith("VLLM_")]


class TestContext:
    @pytest.mark.parametrize(("error", "fails"), [(0.5, False), (1.0, False), (1.5, True), (float("nan"), True)])
    def test_compare_records_the_error_and_raises_above_its_limit(
        self, error: float, fails: bool, tmp_path: Path
    ) -> None:
        context = Context(device="cpu", n_gpus=0, folder=tmp_path, deadline_s=1)
        if fails:
            with pytest.raises(CheckFailed):
                context.compare("loss", error, 1.0)
        else:
            context.compare("loss", error, 1.0)
        assert "loss" in context.figures


class TestRunWithDeadline:
    def test_command_in_time_returns_status_and_log(self, tmp_path: Path) -> None:
        assert run_shell(tmp_path, "echo out; echo err >&2; exit 3") == 3
        assert (tmp_path / "log").read_text() == "out\nerr\n"

    def test_command_after_deadline_is_killed_with_detached_descendants(self, tmp_path: Path) -> None:
        detached = f"setsid sh -c 'echo $$ > {tmp_path}/pid; sleep 3600' & sleep 3600"
        assert run_shell(tmp_path, detached, deadline_s=2.0) is None
        found = process_id(int((tmp_path / "pid").read_text()))
        assert found is None or not is_alive(found)

    def test_temporary_files_are_beside_the_log(self, tmp_path: Path) -> None:
        run_shell(tmp_path, 'echo "$TMPDIR $RAY_TMPDIR"')
        temporary, ray_temporary = (tmp_path / "log").read_text().split()
        assert Path(temporary) == tmp_path / "t" and Path(ray_temporary) != tmp_path / "t"


class TestRunCheck:
    def test_passed_check_returns_its_result(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        result = {"status": "passed", "detail": "9 cases", "figures": {"error": 0.1}}
        outcome = run_with_result(monkeypatch, tmp_path, 0, result)
        assert (outcome.name, outcome.status, outcome.detail) == ("kernels", "passed", "9 cases")
        assert outcome.figures == {"error": 0.1}

    @pytest.mark.parametrize(
        ("status", "reason"),
        [(-11, "the process ended with SIGSEGV"), (7, "with exit status 7"), (None, "no result within 120 s")],
    )
    def test_process_without_result_fails_with_the_end_of_its_log(
        self, status: int | None, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        outcome = run_with_result(monkeypatch, tmp_path, status, None, log="first\n" * 30 + "Fatal error: CUDA\n")
        assert outcome.status == "FAILED"
        assert reason in outcome.detail and outcome.detail.endswith("Fatal error: CUDA")
        assert len(outcome.detail.splitlines()) < 20

    @pytest.mark.parametrize(("status", "reason"), [(None, "did not end within 120 s"), (-6, "ended with SIGABRT")])
    def test_passed_check_whose_process_does_not_end_well_fails(
        self, status: int | None, reason: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        outcome = run_with_result(monkeypatch, tmp_path, status, {"status": "passed", "detail": "", "figures": {}})
        assert outcome.status == "FAILED" and reason in outcome.detail

    def test_check_with_obstacle_starts_no_process(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        monkeypatch.setattr(runner, "run_with_deadline", None)
        outcome = runner.run_check(BY_NAME["kernels"], device="cuda", n_gpus=0, installed={}, folder=tmp_path)
        assert (outcome.status, outcome.detail) == ("not possible here", "needs 1 GPU, torch finds none")


class TestCommand:
    @pytest.fixture
    def run(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
        """Return a function that runs the command with checks that end as given by name, by default passed."""

        def run(results: dict[str, Outcome], *arguments: str, n_gpus: int = 1) -> tuple[int, list[str]]:
            ran = []

            def run_check(check: Any, **given: Any) -> Outcome:
                ran.append(check.name)
                if check.name == MACHINE:
                    gpus = {"gpus": [{}] * n_gpus}
                    return Outcome(name=check.name, status="passed", detail="", figures=gpus)
                assert given["n_gpus"] == n_gpus
                passed = Outcome(name=check.name, status="passed", detail="as expected")
                return replace(results.get(check.name, passed), name=check.name)

            monkeypatch.setattr(command, "run_check", run_check)
            monkeypatch.setattr(command, "mkdtemp", lambda **_: str(tmp_path / "smoke"))
            (tmp_path / "smoke").mkdir()
            return gpu_smoke.main(list(arguments)), ran

        return run

    def test_all_checks_run_in_order_and_files_are_removed(self, run: Any, tmp_path: Path) -> None:
        assert run({}) == (0, [check.name for check in CHECKS])
        assert not (tmp_path / "smoke").exists()

    def test_only_runs_the_machine_and_named_checks(self, run: Any) -> None:
        assert run({}, "--only", "teacher", "actor", n_gpus=4) == (0, [MACHINE, "actor", "teacher"])

    def test_failure_gives_status_1_and_keeps_files(
        self, run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        failed = Outcome(name="", status="FAILED", detail="loss: got 3\nsecond line", seconds=2.0)
        missing = Outcome(name="", status="not possible here", detail="needs 2 GPUs, there is 1")
        status, ran = run({"actor": failed, "rollout_tp2": missing}, "--json", str(tmp_path / "out.json"))
        assert status == 1 and len(ran) == len(CHECKS)
        text = capsys.readouterr().out
        assert "loss: got 3\n    second line" in text and (tmp_path / "smoke").exists()
        assert (
            f"{len(CHECKS) - 2} passed, 1 FAILED, 1 not possible here; logs and files are in {tmp_path / 'smoke'}"
            in text
        )
        report = json.loads((tmp_path / "out.json").read_text())
        assert report["passed"] is False and set(report["versions"]) >= {"torch", "driver", "flash-attn"}
        by_name = {check["name"]: check["status"] for check in report["checks"]}
        assert (by_name["actor"], by_name["rollout_tp2"]) == ("FAILED", "not possible here")

    def test_unknown_name_is_refused_with_the_known_ones(self, run: Any, capsys: pytest.CaptureFixture[str]) -> None:
        assert run({}, "--only", "kernel") == (2, [])
        assert "got kernel, expected names of machine, kernels" in capsys.readouterr().err

    def test_list_names_every_check(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert gpu_smoke.main(["--list"]) == 0
        assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == [check.name for check in CHECKS]

    def test_interrupted_command_returns_130_and_writes_results_so_far(
        self, run: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        monkeypatch.setattr(command, "selected", lambda _: (_ for _ in ()).throw(KeyboardInterrupt))
        status, ran = run({}, "--json", str(tmp_path / "out.json"))
        assert (status, ran) == (130, [MACHINE])
        report = json.loads((tmp_path / "out.json").read_text())
        assert len(report["checks"]) == 1 and (report["complete"], report["passed"]) == (False, False)

    def test_results_that_cannot_be_written_are_refused_before_the_checks(
        self, run: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        (tmp_path / "file").touch()
        assert run({}, "--json", str(tmp_path / "file" / "out.json")) == (2, [])
        assert "--json" in capsys.readouterr().err


def test_versions_mark_a_vllm_for_cpus() -> None:
    assert (versions()["vllm"] or "cpu").endswith("cpu")


def test_help_of_the_command_imports_no_torch() -> None:
    import subprocess

    program = "import sys; from recipe_gkd.commands import gpu_smoke; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0

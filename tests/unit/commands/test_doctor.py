"""The checks of ``doctor`` that start nothing: planted faults are found, each with its remedy."""

from __future__ import annotations

import json
import shutil
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe_gkd.__main__ import main
from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.commands.doctor import live_checks, machine_checks, versions
from recipe_gkd.commands.gpu_smoke.machine import versions as installed_versions
from recipe_gkd.memory_budget.actor_states import read_actor_memory
from recipe_gkd.teachers import backends
from teacher.common import machine_checks as shared_checks
from teacher.common.fingerprint import count_ids, tokenizer_fingerprint
from tests._support.base_config import base_config
from tests._support.fake_worker import INFO, FakeEngine, running_worker
from tests._support.teacher_service import running_proxy
from tests._support.training_command import make_model

TEACHER = "actor_rollout_ref.teacher"
MODEL = "actor_rollout_ref.model.path"


class Service(NamedTuple):
    """Port of a teacher service, and its engine."""

    port: int
    engine: FakeEngine


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Model folder of a student with a chat template."""
    return make_model(tmp_path_factory.mktemp("models") / "student", seed=1)


@pytest.fixture(scope="module")
def service() -> Iterator[Service]:
    """Teacher with the student's vocabulary."""
    tokenizer = build_tokenizer()
    info = replace(
        INFO,
        vocab_size=len(tokenizer),
        n_tokens=count_ids(tokenizer),
        tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
        eos_token_ids=(tokenizer.eos_token_id,),
    )
    engine = FakeEngine(info)
    with running_proxy() as proxy, running_worker(proxy.backend_port, engine):
        yield Service(proxy.frontend_port, engine)


@pytest.fixture
def chats(tmp_path: Path) -> Path:
    """Data with chat messages."""
    return write_rows(tmp_path / "train.parquet", prompt=[[{"role": "user", "content": "1+2"}]] * 3)


@pytest.fixture
def keys(student: Path, service: Service, chats: Path, tmp_path: Path) -> dict[str, Any]:
    """Overrides of a run without a fault."""
    return {
        "data.train_files": chats,
        "data.max_prompt_length": 16,
        "data.max_response_length": 12,
        MODEL: student,
        f"{TEACHER}.server_port": service.port,
        "trainer.device": "cpu",
        "ray_init.num_cpus": 2,
        "trainer.default_local_dir": tmp_path / "run",
        "actor_rollout_ref.actor.megatron.dtype": "float32",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.actor.max_token_len": 64,
    }


def write_rows(path: Path, **columns: Any) -> Path:
    pq.write_table(pa.table(columns), path)
    return path


def run(capsys: pytest.CaptureFixture[str], keys: dict[str, Any]) -> tuple[int, dict[str, list[tuple[str, str]]]]:
    """Return exit status, and check -> severity and text of its findings."""
    capsys.readouterr()
    status = main(["doctor", *(f"{key}={value}" for key, value in keys.items()), "--quick", "--json"])
    report = json.loads(capsys.readouterr().out)
    assert report["passed"] is (status == 0)
    found: dict[str, list[tuple[str, str]]] = {}
    for finding in report["findings"]:
        found.setdefault(finding["check"], []).append((finding["severity"], finding["text"]))
    return status, found


def assert_problem(found: dict[str, list[tuple[str, str]]], check: str, *parts: str) -> None:
    """Assert that a check found a problem whose text has all parts, the last of which is the remedy."""
    texts = [text for severity, text in found.get(check, []) if severity == "problem"]
    assert any(all(part in text for part in parts) for text in texts), (check, parts, found.get(check))


class TestDoctor:
    def test_healthy_run_has_no_problem(self, keys: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
        status, found = run(capsys, keys)
        assert status == 0, found
        assert {"versions", "devices", "run folder", "ports", "student", "tokenizer", "memory"} <= found.keys()
        assert {"data.train_files", "chat template", "teacher default", "end of response"} <= found.keys()
        assert not Path(keys["trainer.default_local_dir"]).exists(), "the command must leave nothing"

    def test_full_disk_is_reported_in_units_of_its_size(
        self, keys: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        free = SimpleNamespace(free=3000, total=1 << 40)
        monkeypatch.setattr(machine_checks.shutil, "disk_usage", lambda _: free)
        _, found = run(capsys, keys | {"trainer.save_freq": 1})
        [(severity, text)] = found["run folder"]
        assert severity == "problem" and "has 2.9 KiB free, but a checkpoint needs" in text and "GiB" not in text

    def test_reward_function_that_returns_no_number_is_found(
        self, keys: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        reward = tmp_path / "reward.py"
        path = {"custom_reward_function.path": reward}
        reward.write_text("def compute_score(prompt, response, extra):\n    len(response)\n")
        status, found = run(capsys, keys | path)
        assert status == 1 and found["reward function"][0][0] == "ok"
        assert_problem(found, "reward call", "None", "expected a finite number")
        reward.write_text("def compute_score(prompt, response, extra):\n    return 0.5\n")
        status, found = run(capsys, keys | path)
        assert status == 0 and found["reward call"] == [("ok", found["reward call"][0][1])]
        assert found["reward call"][0][1].startswith("returns 0.5 for the response '")

    def test_login_data_types_and_temporary_folder_are_checked_before_workers_start(
        self, keys: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        pytest.importorskip("wandb")
        monkeypatch.setenv("HOME", str(tmp_path))
        for name in ("WANDB_API_KEY", "WANDB_MODE", "RAY_TMPDIR"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setenv("TMPDIR", "/" + "x" * 50)
        faults = {"trainer.logger": "[console,wandb]", "actor_rollout_ref.rollout.dtype": "bfloat16"}
        status, found = run(capsys, keys | faults)
        assert status == 1
        assert_problem(found, "loggers", "no API key was found", "set WANDB_MODE=offline")
        [(severity, text)] = found["data types"]
        assert severity == "warning" and "trains in float32, but the rollout engines compute in bfloat16" in text
        [(severity, text)] = found["sockets"]
        assert severity == "warning" and "has 51 bytes" in text and "set RAY_TMPDIR" in text
        monkeypatch.setenv("WANDB_MODE", "offline")
        monkeypatch.delenv("TMPDIR")
        status, found = run(capsys, keys | {"trainer.logger": "[console,wandb]"})
        assert status == 0, found
        for check in ("loggers", "data types", "sockets"):
            assert found[check][0][0] == "ok", found[check]

    def test_faults_of_machine_and_data_are_all_found_at_once(
        self, keys: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        (tmp_path / "file").write_text("")
        monkeypatch.setattr(backends, "HELLO_TIMEOUT_S", 0.3)
        monkeypatch.setattr(versions, "versions", lambda: installed_versions() | {"transformers": "4.40.0"})
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        faults = {
            "trainer.default_local_dir": tmp_path / "file" / "run",
            "data.prompt_key": "question",
            f"{TEACHER}.server_port": port,
            "ray_init.num_cpus": 1,
        }
        with socket.create_server(("0.0.0.0", 0)) as used:
            status, found = run(capsys, keys | faults | {"trainer.metrics_port": used.getsockname()[1]})
        assert status == 1
        assert_problem(found, "versions", "found transformers 4.40.0", "pip install -c constraints/cpu.txt")
        assert_problem(found, "devices", "has 1 CPU slots, expected 2", "raise ray_init.num_cpus")
        assert_problem(found, "ports", "cannot be used for /metrics", "0 for a free one")
        assert_problem(found, "run folder", "is a file", "choose a folder of your own")
        assert_problem(found, "data.train_files", "has no column 'question'", "set data.prompt_key")
        assert_problem(found, "teacher default", "Connection refused", "teacher/start_server.sh")

    def test_ray_address_without_cluster_is_found(
        self, keys: dict[str, Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        with socket.create_server(("127.0.0.1", 0)) as closed:
            port = closed.getsockname()[1]
        _, found = run(capsys, keys | {"ray_init.address": f"127.0.0.1:{port}", "ray_init.num_cpus": "null"})
        assert_problem(found, "ports", "Connection refused", "check `ray status`")

    def test_slow_name_lookups_are_a_warning(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine_checks, "SLOW_LOOKUP_S", 0.05)
        monkeypatch.setattr(socket, "getnameinfo", lambda *_: time.sleep(0.1))
        warned = machine_checks.name_lookup_findings()
        assert {finding.severity for finding in warned} == {"warning"} and "::ffff:127.0.0.1 " in warned[0].text
        monkeypatch.setattr(socket, "getnameinfo", lambda *_: None)
        assert [finding.severity for finding in machine_checks.name_lookup_findings()] == ["ok"]

    def test_teacher_of_another_model_or_with_too_low_limits_is_found(
        self, keys: dict[str, Any], capsys: pytest.CaptureFixture[str]
    ) -> None:
        other = FakeEngine(replace(INFO, tokenizer_fingerprint="another"))
        with running_proxy() as proxy, running_worker(proxy.backend_port, other):
            status, found = run(capsys, keys | {f"{TEACHER}.server_port": proxy.frontend_port})
        assert status == 1
        assert_problem(found, "teacher default", "does not fit the student's", "of one model family")
        _, found = run(capsys, keys | {"data.max_response_length": 30})
        assert_problem(found, "teacher default", "scores at most 32 tokens", "a larger MAX_MODEL_LEN")
        _, found = run(capsys, keys | {f"{TEACHER}.top_k": 8})
        assert_problem(found, "teacher default", "returns at most 4 ids", "a larger N_LOGPROBS")

    def test_port_of_another_program_is_not_mistaken_for_a_teacher(
        self, keys: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(backends, "HELLO_TIMEOUT_S", 0.3)
        with socket.create_server(("127.0.0.1", 0)) as server:
            _, found = run(capsys, keys | {f"{TEACHER}.server_port": server.getsockname()[1]})
        assert_problem(found, "teacher default", "another program uses the port", f"correct {TEACHER}.server_port")

    def test_faults_of_the_model_folder_are_found(
        self, keys: dict[str, Any], student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        _, found = run(capsys, keys | {MODEL: "/nowhere/at/all"})
        assert_problem(found, "student", "does not exist", "expected a Hugging Face model folder")
        corrupt = shutil.copytree(student, tmp_path / "corrupt")
        (corrupt / "tokenizer.json").write_text('{"model": ')
        _, found = run(capsys, keys | {MODEL: corrupt})
        assert_problem(found, "student", "tokenizer", "copy the original tokenizer files")
        cut = shutil.copytree(student, tmp_path / "cut")
        weights = (cut / "model.safetensors").read_bytes()
        (cut / "model.safetensors").write_bytes(weights[: len(weights) // 2])
        _, found = run(capsys, keys | {MODEL: cut})
        assert_problem(found, "student", "model.safetensors", "again")

    def test_chat_data_without_chat_template_is_found(
        self, keys: dict[str, Any], student: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        plain = shutil.copytree(student, tmp_path / "plain", ignore=shutil.ignore_patterns("chat_template*"))
        settings = json.loads((plain / "tokenizer_config.json").read_text())
        settings.pop("chat_template", None)
        (plain / "tokenizer_config.json").write_text(json.dumps(settings))
        status, found = run(capsys, keys | {MODEL: plain})
        assert status == 1
        assert_problem(found, "chat template", "has no chat template", "put chat_template.jinja into its folder")

    def test_strings_for_a_tokenizer_with_chat_template_are_a_warning(
        self, keys: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        status, found = run(capsys, keys | {"data.train_files": write_rows(tmp_path / "s.parquet", prompt=["1+2"] * 3)})
        assert status == 0
        assert [severity for severity, _ in found["chat template"]] == ["warning"]

    def test_invalid_configuration_is_one_problem(self, capsys: pytest.CaptureFixture[str]) -> None:
        status, found = run(capsys, {"trainer.nnodes": "two"})
        assert status == 1
        assert_problem(found, "configuration", "trainer.nnodes", "got 'two'")


class TestMachineChecks:
    def test_small_shared_memory_is_a_problem_on_cuda_only(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shared_checks.shutil, "disk_usage", lambda path: SimpleNamespace(total=64 << 20, free=0))
        config = base_config()
        (found,) = machine_checks.shared_memory_findings(config, "cuda")
        assert found.severity == "problem" and "64.0 MiB" in found.text and "--shm-size" in found.text
        assert machine_checks.shared_memory_findings(config, "cpu")[0].severity == "warning"

    @pytest.mark.parametrize(
        ("overrides", "per_weight", "per_adapter_weight"),
        [
            (["dtype=bfloat16"], 2 + 12 + 2, 0),
            (["dtype=bfloat16", "use_distributed_optimizer=false"], 2 + 12 + 2, 0),
            (["dtype=float32"], 4 + 12 + 4, 0),
            (["dtype=float32", "use_distributed_optimizer=false"], 4 + 8 + 4, 0),
            (["dtype=bfloat16", "lora"], 2, 2 + 12),
            (["fsdp_config.dtype=bfloat16"], 4 + 8 + 2, 0),
            (["fsdp_config.dtype=bfloat16", "lora"], 2, 4 + 8),
        ],
    )
    def test_checkpoint_has_weights_optimizer_state_and_the_folder_huggingface(
        self, student: Path, overrides: list[str], per_weight: int, per_adapter_weight: int
    ) -> None:
        actor, is_fsdp = "actor_rollout_ref.actor", overrides[0].startswith("fsdp_config")
        keys = [f"{MODEL}={student}", f"{actor}.strategy={'fsdp' if is_fsdp else 'megatron'}"]
        for each in overrides:
            section = "" if is_fsdp else "megatron."
            keys.append(f"{actor}.lora.rank=4" if each == "lora" else f"{actor}.{section}{each}")
        config = base_config(*keys)
        memory = read_actor_memory(config)
        expected = per_weight * memory.n_weights + per_adapter_weight * memory.n_adapters
        assert machine_checks.checkpoint_bytes(config) == expected

    def test_variable_that_the_hybrid_engine_refuses_is_found(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = base_config("actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync")
        monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
        [found] = machine_checks.transport_findings(config)
        assert found.severity == "problem" and "unset PYTORCH_CUDA_ALLOC_CONF" in found.text
        monkeypatch.delenv("PYTORCH_CUDA_ALLOC_CONF")
        assert [finding.severity for finding in machine_checks.transport_findings(config)] == ["ok"]

    def test_hidden_gpus_leave_the_cpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(machine_checks, "driver_release", lambda: "580.95.05")
        for visible, device in (("", "cpu"), ("1", "cuda")):
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
            assert machine_checks.device_of(base_config("trainer.device=auto")) == device
        assert machine_checks.device_of(base_config("trainer.device=cuda")) == "cuda"

    def test_tested_versions_are_those_of_the_constraints(self) -> None:
        assert {"torch", "ray", "transformers", "megatron-core"} <= versions.tested_versions("cpu").keys()


class TestLiveFindings:
    @pytest.mark.parametrize(
        ("dtype", "loss", "severity"),
        [
            ("float32", 4e-9, "ok"), ("float32", -9e-4, "ok"), ("float32", 0.002, "problem"),
            ("float32", np.nan, "problem"), ("bfloat16", 0.002, "ok"), ("bfloat16", 0.02, "problem"),
        ],
    )  # fmt: skip
    def test_loss_of_a_perfect_teacher_must_be_zero(self, dtype: str, loss: float, severity: str) -> None:
        finding = live_checks.loss_finding({"actor/distill_loss": loss}, dtype)
        assert finding.severity == severity
        assert ("gkd.kernel_backend=torch" in finding.text) is (severity == "problem")

    @pytest.mark.parametrize(
        ("changed", "bound", "severity"),
        [(1e-7, 0.004, "ok"), (0.01, 0.004, "problem"), (0.01, 0.25, "ok"), (np.nan, 0.25, "problem")],
    )
    def test_mismatch_of_changed_weights_is_a_problem(self, changed: float, bound: float, severity: str) -> None:
        differences = {"the folder's weights": 1e-7, "rollout worker 0 after an update": changed}
        finding = live_checks.mismatch_finding(differences, bound)
        assert finding.severity == severity and "rollout worker 0 after an update" in finding.text
        assert ("use one dtype" in finding.text) is (severity == "problem")

    def test_live_configuration_keeps_the_layout_and_saves_nothing(self, tmp_path: Path) -> None:
        config = base_config("actor_rollout_ref.rollout.n=8", "gkd.distill_loss_type=jsd", "trainer.save_freq=1")
        live = live_checks.live_config(config, tmp_path)
        actor, optim = live.actor_rollout_ref.actor, config.actor_rollout_ref.actor.optim
        assert replace(actor, optim=optim) == config.actor_rollout_ref.actor
        assert live.actor_rollout_ref.rollout.max_model_len == 3072
        assert live.trainer.save_freq == -1 and live.trainer.default_local_dir == str(tmp_path)

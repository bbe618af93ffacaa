"""The actor on a simulated GPU: the tests of ``tests/integration/actor`` with ``trainer.device=cuda``, and others.

Each test runs pytest in a separate process, because PyTorch looks for devices once.
"""

from __future__ import annotations

import json
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

from recipe_gkd.commands.gpu_smoke.isolation import last_lines, run_with_deadline
from tests.gpu_paths import simulated_gpu
from tests.gpu_paths.simulated_gpu.build import compiler

ACTOR = "tests/integration/actor"
SIMULATED = "tests/gpu_paths/simulated_gpu"
ON_CPU_ONLY = {
    "test_layouts.py::TestLogits::test_logits_have_only_loss_rows_in_dtype_of_head[overrides0-expected0]":
        "a GPU computes logits in float32 by default",
    "test_moe.py::TestTraining::test_training_on_layout_equals_reference_and_exports_all_experts[tensor 2 x expert 2]":
        "gloo does not gather parts of different lengths, as NCCL does",
    "test_offload.py::TestTraining::test_actor_that_fails_to_update_offloads_and_remains_usable":
        "limits the size of files, in which the states of a CPU are kept",
    "test_offload.py::test_resident_memory_drops_by_size_of_states": "measures the memory of the process",
    "test_out_of_memory.py::test_lack_of_memory_without_split_names_sizes_and_keys": "the message is that of a CPU",
}  # fmt: skip
"""Tests of ``tests/integration/actor`` that do not apply to the simulated GPU, with the reasons."""
LAYOUT = f"{ACTOR}/test_layouts.py::TestTraining::test_training_on_layout_equals_reference"
MOE = f"{ACTOR}/test_moe.py::TestTraining::test_training_on_layout_equals_reference_and_exports_all_experts"
SELECTED = [
    f"{SIMULATED}/checks_of_device.py",
    f"{SIMULATED}/checks_of_actor.py",
    *(
        f"{LAYOUT}[{name}]"
        for name in (
            "one process",
            "tensor 2 x pipeline 2, sequence parallel",
            "pipeline 2, interleaved",
            "tensor 2 x data 2, overlapped",
            "context 2 x tensor 2, sequence parallel",
        )
    ),
    f"{MOE}[pipeline 2 x expert 2, overlapped]",
    f"{ACTOR}/test_fsdp.py::test_training_equals_reference",
    f"{ACTOR}/test_objectives.py::test_training_equals_plain_program",
    f"{ACTOR}/test_offload.py::TestOnGpu",
    f"{ACTOR}/test_fsdp_lora.py::test_training_equals_peft",
    f"{ACTOR}/test_data_parallel_gpu.py",
    f"{ACTOR}/test_layers_gpu.py",
]
UNIT = [
    "tests/unit/actor/test_attention_kernels.py::TestOnGpu::test_attend_varlen_and_in_blocks_equal_float64",
    "tests/unit/actor/test_fsdp_packing.py::TestOnGpu",
    "tests/unit/actor/test_offload.py",
    "tests/unit/actor/test_rotary.py",
    "tests/unit/losses/test_float32_head.py",
    "tests/unit/runtime/test_phase_memory.py",
]
SMOKE_CHECKS = [
    "actor", "actor_float32", "actor_fsdp", "actor_lora", "actor_offload", "actor_tp2", "checkpoint", "transport_ipc",
    "transport_collective",
]  # fmt: skip

DEADLINE_S = 1500.0
"""Limit of a pytest that runs about 150 tests, below the limit of the one test that starts it."""

pytestmark = pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler (g++)")


def run_pytest(*selected: str, excluded: tuple[str, ...] = ()) -> Counter[str]:
    """Run tests on the simulated GPU, and return the number of those that passed and were skipped.

    Raises:
        AssertionError: A test failed, or pytest did not end in time.
    """
    with tempfile.TemporaryDirectory(prefix="simulated-gpu-") as folder:
        report, log = Path(folder, "report.xml"), Path(folder, "log")
        options = ["-n", "0", "-q", "-m", "not slow", "-p", "no:cacheprovider", f"--junitxml={report}", "--tb=short"]
        deselected = [f"--deselect={each}" for each in excluded]
        variables = simulated_gpu.environment() | {"GKD_TEST_DEVICE": "cuda", "PYTEST_ADDOPTS": ""}
        command = [sys.executable, "-m", "pytest", *options, *deselected, *selected]
        status = run_with_deadline(command, variables=variables, log=log, deadline_s=DEADLINE_S)
        assert status == 0, "\n".join([f"pytest ended with status {status}", *last_lines(log, 80)])
        suite = ET.parse(report).getroot().find("testsuite")
        assert suite is not None
        n_skipped = int(suite.attrib["skipped"])
        return Counter(passed=int(suite.attrib["tests"]) - n_skipped, skipped=n_skipped)


@pytest.mark.slow
def test_selected_tests_pass() -> None:
    counts = run_pytest(*SELECTED, *UNIT)
    assert counts["passed"] >= 100
    assert counts["skipped"] <= 10  # they need Transformer Engine, or several GPUs


@pytest.mark.slow
def test_all_tests_of_the_actor_pass() -> None:
    counts = run_pytest(ACTOR, excluded=tuple(f"{ACTOR}/{name}" for name in ON_CPU_ONLY))
    assert counts["passed"] >= 190
    assert counts["skipped"] <= 10


@pytest.mark.slow
def test_dead_receiver_over_nccl_is_an_error() -> None:
    test = "tests/integration/weight_sync/test_nccl_gpu.py::test_dead_receiver_is_an_error_and_the_sender_continues"
    assert run_pytest(test) == Counter(passed=2, skipped=0)


@pytest.mark.slow
def test_gpu_smoke_passes() -> None:
    """The layers and losses use the Triton kernels, in Triton's interpreter."""
    with tempfile.TemporaryDirectory(prefix="simulated-gpu-") as folder:
        result, log = Path(folder, "result.json"), Path(folder, "log")
        command = [sys.executable, "-m", "recipe_gkd", "gpu_smoke", "--device", "cuda", "--json", str(result)]
        variables = simulated_gpu.environment() | {"TRITON_INTERPRET": "1"}
        run_with_deadline([*command, "--only", *SMOKE_CHECKS], variables=variables, log=log, deadline_s=DEADLINE_S)
        found = {check["name"]: check["status"] for check in json.loads(result.read_text())["checks"]}
        expected = dict.fromkeys(SMOKE_CHECKS, "passed") | {"machine": "FAILED"}  # torch is built for CPUs
        assert found == expected, "\n".join(last_lines(log, 80))

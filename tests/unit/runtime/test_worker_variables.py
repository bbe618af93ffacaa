"""Variables of the driver that workers get."""

from __future__ import annotations

import os
import subprocess

from recipe_gkd.runtime.worker_variables import FIXED, FORWARDED_PREFIXES, PER_NODE, worker_variables
from tests._support.repository import REPO


class TestWorkerVariables:
    def test_only_variables_of_libraries_are_forwarded(self) -> None:
        driver = {"NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "TORCH_LOGS": "x", "VLLM_X": "1"}
        driver["RES_OPTIONS"] = "timeout:2"
        assert worker_variables({}, driver | {"HOME": "/root"}, {}) == driver

    def test_config_precedes_driver_and_driver_precedes_defaults(self) -> None:
        defaults = {"VLLM_LOGGING_LEVEL": "WARNING", "NCCL_DEBUG": "WARN", "OMP_NUM_THREADS": "1"}
        driver = {"VLLM_LOGGING_LEVEL": "DEBUG", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "8"}
        extra = {"NCCL_DEBUG": "TRACE", "OMP_NUM_THREADS": "2"}
        expected = {"VLLM_LOGGING_LEVEL": "DEBUG", "NCCL_DEBUG": "TRACE", "OMP_NUM_THREADS": "2"}
        assert worker_variables(defaults, driver, extra) == expected
        assert worker_variables(defaults, driver, {})["OMP_NUM_THREADS"] == "1"

    def test_variables_of_one_node_or_process_are_not_forwarded(self) -> None:
        driver = dict.fromkeys([*PER_NODE, *FIXED], "of the driver")
        defaults = {"CUDA_VISIBLE_DEVICES": "", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        assert worker_variables(defaults, driver, {}) == defaults


def test_job_scripts_pass_on_the_same_variables() -> None:
    """A script that submits a Ray job passes variables of its shell on to the driver of the job."""
    names = [f"{prefix}A" if prefix.endswith("_") else prefix for prefix in FORWARDED_PREFIXES]
    others = ["OTHER_A", "MY_NCCL_A"]
    done = subprocess.run(
        ["bash", "-c", 'source launch/forwarded.bash; find_forwarded; printf "%s\\n" "${forwarded[@]}"'],
        env={"PATH": os.environ["PATH"]} | dict.fromkeys([*names, *others], "value"),
        cwd=REPO,
        capture_output=True,
        text=True,
        timeout=20,
        check=True,
    )
    assert sorted(done.stdout.split()) == sorted(f"{name}=value" for name in names)

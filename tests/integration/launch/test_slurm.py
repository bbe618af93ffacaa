"""launch/slurm.sbatch: a job of two nodes that is saved before its time limit and requeued."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import ray

from tests._support import fake_slurm
from tests._support.ports import free_port
from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S, wait_until

SCRIPT = REPO / "launch" / "slurm.sbatch"


@pytest.mark.slow
def test_job_of_two_nodes_is_saved_and_requeued(tmp_path: Path) -> None:
    fake_slurm.install(tmp_path, sys.executable)
    job_id = str(os.getpid())
    environment = os.environ | {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "PYTHON": str(tmp_path / "python"),
        "EVENTS": str(tmp_path / "events"),
        "RAY_PORT": str(free_port()),
        "NODES_TIMEOUT_S": "100",
        "SLURM_SUBMIT_DIR": str(REPO),
        "SLURM_JOB_ID": job_id,
        "SLURM_JOB_NODELIST": "node-[1-2]",
        "SLURM_CPUS_PER_TASK": "1",
    }
    events, output = tmp_path / "events", tmp_path / "output"
    events.touch()
    try:
        with output.open("w") as file:
            command = ["bash", str(SCRIPT), "--config-name", "quickstart", "gkd.beta=0.5"]
            job = subprocess.Popen(command, env=environment, stdout=file, stderr=subprocess.STDOUT)
        wait_until(lambda: job.poll() is not None or "tasks ran on" in events.read_text())
        assert "tasks ran on 2 nodes" in events.read_text(), output.read_text()
        job.send_signal(signal.SIGUSR1)
        assert job.wait(PATIENCE_S) == 75, output.read_text()
    finally:
        job.terminate()
        job.wait(PATIENCE_S)
        shutil.rmtree(f"/tmp/ray_{job_id}", ignore_errors=True)
    lines = events.read_text().splitlines()
    address = f"{ray.util.get_node_ip_address()}:{environment['RAY_PORT']}"
    keys = f"--config-name quickstart gkd.beta=0.5 ray_init.address={address}"
    assert f"training -m recipe_gkd.main_gkd {keys}" in lines
    removal = f"srun --overlap --nodes=2 --ntasks=2 rm -rf /tmp/ray_{job_id}"
    assert lines[-3:] == ["training got SIGUSR1", removal, f"scontrol requeue {job_id}"]
    assert not Path(f"/tmp/ray_{job_id}").exists()
    assert [line for line in lines if "--exclude=node-1" in line and f"--address={address}" in line]

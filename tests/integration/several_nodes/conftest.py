"""Fixtures: a network of nodes, a teacher with keys on one of them, and trainings on Ray clusters of others."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests._support.base_config import CONFIG_NAME
from tests._support.network_nodes import Network, Node, network, ray_cluster, unavailable
from tests._support.repository import REPO
from tests._support.training_command import make_model
from tests._support.waiting import PATIENCE_S, wait_until

TEACHER_PORT = 15555
TIMEOUT_S = 15
"""Deadlines of generation, weight sync and update."""


@dataclass
class TrainingOnNodes:
    """A training whose driver runs on a node.

    Attributes:
        node: Node of the driver.
        process: Process that waits for the driver.
        log: File with the driver's output.
    """

    node: Node
    process: subprocess.Popen[bytes]
    folder: Path
    log: Path

    @property
    def output(self) -> str:
        """Text that the driver has printed."""
        return self.log.read_text(errors="replace")

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Metrics of the steps so far."""
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def await_step(self, step: int, timeout_s: float = PATIENCE_S) -> None:
        """Wait until ``step`` steps are trained. Fail if the training ends before."""
        wait_until(lambda: len(self.metrics) >= step or self.process.poll() is not None, timeout_s)
        assert self.process.poll() is None or len(self.metrics) >= step, self.output

    def finish(self, timeout_s: float = PATIENCE_S) -> int:
        """Wait for the end, and return the exit status."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the training did not end within {timeout_s:g} s:\n{self.output}")


@dataclass(frozen=True)
class Laboratory:
    """Network with a shared folder of student, prompts and keys, and a node with a teacher."""

    network: Network
    teacher: Node

    def train(self, node: Node, name: str, *overrides: str) -> TrainingOnNodes:
        """Start a training on a node.

        Args:
            node: Node of the driver.
            name: Name of the run folder.
            overrides: Config overrides in addition to those of all runs.
        """
        shared = self.network.shared
        folder, log = shared / name, shared / f"{name}.log"
        command = (sys.executable, "-m", "recipe_gkd.main_gkd", "--config-name", CONFIG_NAME)
        keys = (*settings(shared), f"actor_rollout_ref.teacher.server_ip={self.teacher.address}")
        folder_key = f"trainer.default_local_dir={folder}"
        process = node.start(*command, *keys, folder_key, *overrides, cwd=shared, log=log)
        return TrainingOnNodes(node, process, folder, log)

    @contextmanager
    def ray_nodes(self, *cpus: int) -> Iterator[list[Node]]:
        """Add nodes with the given numbers of CPU slots, start Ray on them, and end them. The first one is the head."""
        nodes = [self.network.add_node() for _ in cpus]
        with ray_cluster(nodes, cpus):
            yield nodes
        assert [line for node in nodes for line in node.processes()] == []


def settings(shared: Path) -> list[str]:
    """Return the overrides of every run: float32 on CPUs, two actor ranks, short sequences and deadlines."""
    return [
        f"data.train_files={shared}/train.parquet",
        "data.max_prompt_length=16",
        "data.max_response_length=12",
        "data.train_batch_size=8",
        f"actor_rollout_ref.model.path={shared}/student",
        f"actor_rollout_ref.nccl_timeout={TIMEOUT_S}",
        "actor_rollout_ref.actor.megatron.dtype=float32",
        "actor_rollout_ref.actor.optim.lr=0.003",
        f"actor_rollout_ref.actor.timeout_s={TIMEOUT_S}",
        "actor_rollout_ref.rollout.dtype=float32",
        f"actor_rollout_ref.rollout.timeout_s={TIMEOUT_S}",
        "actor_rollout_ref.rollout.kv_cache_memory_megabytes=32",
        f"actor_rollout_ref.teacher.server_port={TEACHER_PORT}",
        f"actor_rollout_ref.teacher.auth_dir={shared}/keys",
        f"actor_rollout_ref.teacher.timeout_s={TIMEOUT_S}",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=2",
        "trainer.scheduler=sync",
        "trainer.save_freq=-1",
        "trainer.startup_timeout_s=600",
    ]


def make_inputs(shared: Path) -> None:
    """Create student, teacher, prompts and keys."""
    from recipe_gkd.addition.task import make_splits, write_parquet
    from teacher.wire.make_keys import make_keys

    make_model(shared / "student", seed=1)
    make_model(shared / "teacher", seed=2)
    write_parquet(make_splits(0, n_train=24, n_held_out=8, n_dev=8).train, shared / "train.parquet")
    make_keys(shared / "keys")


def start_teacher(node: Node, shared: Path) -> None:
    """Start a teacher service with keys on a node. It ends with the node."""
    variables = {
        "PYTHON": sys.executable,
        "CKPT_PATH": f"{shared}/teacher",
        "AUTH_DIR": f"{shared}/keys",
        "BIND": node.address,
        "PROXY_FRONTEND_PORT": str(TEACHER_PORT),
        "HTTP_PORT": "-1",
        "RUN_DIR": f"{shared}/teacher_service",
        "N_LOGPROBS": "8",
        "DTYPE": "float32",
        "MAX_MODEL_LEN": "64",
    }
    started = node.run("bash", str(REPO / "teacher/start_server.sh"), timeout_s=PATIENCE_S, **variables)
    assert started.returncode == 0, started.stdout + started.stderr


@pytest.fixture(scope="package")
def laboratory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Laboratory]:
    """Network with the inputs of a training and a teacher. Tests add the nodes of their Ray clusters."""
    if reason := unavailable():
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("several_nodes")
    make_inputs(folder)
    with network(folder) as created:
        teacher = created.add_node()
        start_teacher(teacher, folder)
        yield Laboratory(created, teacher)
    assert [line for node in created.nodes for line in node.processes()] == []

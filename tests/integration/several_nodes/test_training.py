"""Complete trainings whose actor pool, rollout pool and teacher are on different nodes."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from typing import Any

import pytest

from tests._support.waiting import wait_until
from tests.integration.several_nodes.conftest import TEACHER_PORT, Laboratory, TrainingOnNodes

pytestmark = pytest.mark.slow

STEPS = "trainer.total_training_steps=4"
COMPARED = ("actor/kl_loss", "actor/entropy", "actor/grad_norm", "actor/lr", "actor/n_tokens", "training/staleness_max")
ROW = re.compile(r"^(\w+) +(\d) of \d +\w+ (10\.77\.0\.\d+) ", re.MULTILINE)
"""Row of the driver's table of workers: pool, rank, address."""


@pytest.fixture(scope="module")
def on_one_node(laboratory: Laboratory) -> TrainingOnNodes:
    """Training whose workers are all on one node, with a Ray cluster that it starts itself."""
    run = laboratory.train(laboratory.network.add_node(), "one_node", STEPS, "ray_init.num_cpus=3")
    assert run.finish() == 0, run.output
    return run


def assert_equal(lines: Sequence[dict[str, Any]], expected_lines: Sequence[dict[str, Any]]) -> None:
    """Compare the metrics of two runs of four steps."""
    assert len(lines) == len(expected_lines) == 4
    for line, expected in zip(lines, expected_lines, strict=True):
        for name in COMPARED:
            assert line[name] == pytest.approx(expected[name], rel=1e-4, abs=1e-6), name


class TestTraining:
    def test_pools_and_teacher_on_three_nodes_give_metrics_of_one_node(
        self, laboratory: Laboratory, on_one_node: TrainingOnNodes
    ) -> None:
        with laboratory.ray_nodes(2, 1) as (first, second):
            run = laboratory.train(first, "three_nodes", STEPS, "ray_init.address=auto")
            assert run.finish() == 0, run.output
        addresses = {f"{pool} {rank}": address for pool, rank, address in ROW.findall(run.output)}
        assert addresses == {"actor 0": first.address, "actor 1": first.address, "rollout 0": second.address}
        assert_equal(run.metrics, on_one_node.metrics)

    def test_actor_pool_on_two_nodes_gives_metrics_of_one_node(
        self, laboratory: Laboratory, on_one_node: TrainingOnNodes
    ) -> None:
        """Each data-parallel rank and its scoring worker are on a separate node; the rollout worker is on one."""
        pool = "trainer.nnodes=2", "trainer.n_gpus_per_node=1", "ray_init.address=auto"
        with laboratory.ray_nodes(2, 1) as nodes:
            run = laboratory.train(nodes[0], "two_actor_nodes", STEPS, *pool)
            assert run.finish() == 0, run.output
        actors = {address for pool_name, _, address in ROW.findall(run.output) if pool_name == "actor"}
        assert actors == {node.address for node in nodes}
        assert_equal(run.metrics, on_one_node.metrics)

    def test_link_to_teacher_that_loses_packets_gives_metrics_of_one_node(
        self, laboratory: Laboratory, on_one_node: TrainingOnNodes
    ) -> None:
        relay = laboratory.network.add_node()
        log = laboratory.network.shared / "relay.log"
        addresses = f"{relay.address}:{TEACHER_PORT}", f"{laboratory.teacher.address}:{TEACHER_PORT}"
        program = (sys.executable, "-m", "tests._support.tcp_relay", "--listen", addresses[0], "--to", addresses[1])
        relay.start(*program, "--lost-share", "0.3", log=log)
        wait_until(lambda: "ready" in log.read_text())
        node = laboratory.network.add_node()
        server = f"actor_rollout_ref.teacher.server_ip={relay.address}"
        run = laboratory.train(node, "lossy", STEPS, "ray_init.num_cpus=3", server)
        assert run.finish() == 0, run.output
        assert_equal(run.metrics, on_one_node.metrics)
        n_chunks, n_delayed = map(int, re.findall(r"chunks (\d+) delayed (\d+)", log.read_text())[-1])
        assert n_delayed > 10 and 0.1 < n_delayed / n_chunks < 0.5

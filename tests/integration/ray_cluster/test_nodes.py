"""Pools and workers on a Ray cluster of two nodes, which ``two_nodes.py`` starts in a separate process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests._support.waiting import PATIENCE_S
from tests.integration.ray_cluster.two_nodes import JSON_PREFIX


@pytest.fixture(scope="module")
def facts() -> dict[str, Any]:
    program = Path(__file__).with_name("two_nodes.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=PATIENCE_S)
    line = next((line for line in done.stdout.splitlines() if line.startswith(JSON_PREFIX)), None)
    assert line, done.stdout + done.stderr
    facts: dict[str, Any] = json.loads(line.removeprefix(JSON_PREFIX))
    return facts


class TestPools:
    def test_hybrid_engine_places_rollout_worker_on_gpu_of_its_actor_rank(self, facts: dict[str, Any]) -> None:
        actors, rollouts = ([(node, gpu) for node, gpu, _ in facts[pool]] for pool in ("actors", "rollouts"))
        assert actors == rollouts
        assert actors[0][0] == actors[1][0] != actors[2][0] == actors[3][0]
        assert len(set(actors)) == 4

    def test_too_few_nodes_lists_request_and_cluster(self, facts: dict[str, Any]) -> None:
        assert "actor pool: 3 x 1 CPU slots" in facts["refusal"] and "node 1: 3 CPU, 2 GPU" in facts["refusal"]

    def test_ranks_fill_node_after_node_as_check_devices_prints(self, facts: dict[str, Any]) -> None:
        assert facts["status"] == 0, facts["errors"]
        rows = [line.split() for line in facts["output"].splitlines() if line.startswith(("actor ", "rollout "))]
        assert [row[:4] for row in rows] == [
            *(["actor", str(rank), "of", "4"] for rank in range(4)),
            *(["rollout", str(rank), "of", "2"] for rank in range(2)),
        ]
        on_second = [f"({facts['second'][:8]})" in row for row in rows]
        assert on_second[0] == on_second[1] != on_second[2] == on_second[3]
        assert on_second[4] != on_second[5]


class TestEnvironment:
    def test_variables_of_driver_and_config_reach_workers_of_running_nodes(self, facts: dict[str, Any]) -> None:
        expected = {
            "NCCL_SOCKET_IFNAME": "eth7",
            "NCCL_DEBUG": "INFO",  # of ray_init.env_vars, not of the driver
            "VLLM_LOGGING_LEVEL": "DEBUG",  # of the driver, not the project's default
            "VLLM_HOST_IP": None,  # differs between nodes
            "MY_SETTING": "1",
        }
        assert facts["variables"] == [expected] * 4

    def test_problem_of_every_node_is_listed(self, facts: dict[str, Any]) -> None:
        lines = [line for line in facts["node_problems"].splitlines() if "no CUDA support" in line]
        assert len(lines) == 2 and facts["second"][:8] in "".join(lines)
        assert "set trainer.check_nodes=false" in facts["node_problems"]


class TestScoring:
    def test_rows_go_to_the_node_that_trains_on_them(self, facts: dict[str, Any]) -> None:
        scored = facts["scored"]
        assert scored["homes"] == [0, 1, 1, 0, 1, 1] and len(set(scored["nodes"])) == 2
        assert scored["places"] == [[scored["nodes"][home]] for home in scored["homes"]]

    def test_rows_outlive_the_scoring_workers_and_keys_are_sent_without_a_folder(self, facts: dict[str, Any]) -> None:
        assert facts["scored"]["workers"] == ["list"] * 6
        assert facts["scored"]["secret_is_hidden"]


class TestFailures:
    def test_diagnosis_has_stacks_of_workers_on_all_nodes(self, facts: dict[str, Any]) -> None:
        assert len(facts["stacks"]) == 8
        assert "hang_by_intention" in facts["stacks"][f"actor-worker-{facts['hanging']}.stacks.txt"]
        assert "stopped (SIGSTOP?)" in facts["stacks"][f"actor-worker-{facts['stopped']}.stacks.txt"]

    def test_stop_kills_a_stopped_worker_on_another_node(self, facts: dict[str, Any]) -> None:
        assert facts["actors_running"] == []

    def test_worker_of_a_dead_node_is_named(self, facts: dict[str, Any]) -> None:
        worker, dead = facts["death"]["worker"], facts["death"]["dead"]
        named = int(worker.split()[2])  # rollout worker 2 of 4
        ranks = [rank for rank, (node, _, _) in enumerate(facts["rollouts"]) if node == facts["second"]]
        assert named in ranks and named in dead and set(dead) <= set(ranks)
        assert facts["second"][:8] in facts["death"]["what"]

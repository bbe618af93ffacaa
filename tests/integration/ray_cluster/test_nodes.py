"""Pools and workers on several nodes: a Ray cluster of two, within one process of its own (``two_nodes.py``)."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def told() -> dict[str, Any]:
    program = Path(__file__).with_name("two_nodes.py")
    done = subprocess.run([sys.executable, str(program)], capture_output=True, text=True, timeout=200)
    response = next((line for line in done.stdout.splitlines() if line.startswith("told ")), None)
    assert response, done.stdout + done.stderr
    told: dict[str, Any] = json.loads(response.removeprefix("told "))
    print({key: value for key, value in told.items() if key.endswith("_s") or key == "death"})
    return told


def test_shared_gpus_pair_the_actor_and_the_rollout_worker_of_a_rank_on_every_node(told: dict[str, Any]) -> None:
    actors, rollouts = ([(node, gpu) for node, gpu, _ in told[pool]] for pool in ("actors", "rollouts"))
    assert actors == rollouts
    assert actors[0][0] == actors[1][0] != actors[2][0] == actors[3][0]
    assert len(set(actors)) == 4


def test_shared_pools_go_to_a_node_that_is_free_rather_than_wait_for_one_that_another_job_holds(
    told: dict[str, Any],
) -> None:
    nodes = [held for held, _ in told["beside"]]
    assert [landed for _, landed in told["beside"]] == [[node] for node in reversed(nodes)]
    assert told["beside_s"] < 10


def test_too_few_nodes_say_what_was_asked_and_what_there_is(told: dict[str, Any]) -> None:
    assert "actor pool: 3 x 1 CPU slots" in told["refused"] and "node 1: 3 CPU, 2 GPU" in told["refused"]


def test_each_pool_is_spread_with_ranks_node_by_node_as_check_devices_shows(told: dict[str, Any]) -> None:
    assert told["status"] == 0, told["errors"]
    rows = [line.split() for line in told["output"].splitlines() if line.startswith(("actor ", "rollout "))]
    assert [row[:4] for row in rows] == [
        *(["actor", str(rank), "of", "4"] for rank in range(4)),
        *(["rollout", str(rank), "of", "2"] for rank in range(2)),
    ]
    there = [f"({told['second'][:8]})" in row for row in rows]
    assert there[0] == there[1] != there[2] == there[3]
    assert there[4] != there[5]


def test_a_diagnosis_shows_the_stacks_of_workers_on_all_nodes(told: dict[str, Any]) -> None:
    hanging, stopped = told["silent"]
    assert len(told["stacks"]) == 8
    assert "hang_by_intention" in told["stacks"][f"actor-worker-{hanging}.stacks.txt"]
    assert "stopped (SIGSTOP?)" in told["stacks"][f"actor-worker-{stopped}.stacks.txt"]
    assert told["diagnosis_s"] < 3.2


def test_stop_ends_a_stopped_worker_on_another_node(told: dict[str, Any]) -> None:
    assert told["left"] == []
    assert told["stop_s"] < 5


def test_when_a_node_dies_its_worker_is_named_and_the_rest_can_be_stopped(told: dict[str, Any]) -> None:
    message = told["death"]["message"]
    named = int(re.match(r"generate: rollout worker (\d) of 4 died", message)[1])  # type: ignore[index]
    ranks = [rank for rank, place in enumerate(told["rollouts"]) if place[0] == told["second"]]
    assert named in ranks and named in told["dead"] and set(told["dead"]) <= set(ranks)
    assert told["second"][:8] in message
    assert told["stop_after_death_s"] < 5.5

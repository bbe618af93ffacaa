"""Checks of all nodes, with replies in place of Ray."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from recipe_gkd.errors import DeadlineError, ResourceError
from recipe_gkd.ray_cluster import node_checks
from recipe_gkd.ray_cluster.node_checks import check_nodes
from tests._support.base_config import base_config
from tests._support.errors import raises

POOLS: list[Any] = [SimpleNamespace(group="actor"), SimpleNamespace(group="rollout")]


class Cluster:
    """Nodes ``aa`` (both pools) and ``bb`` (rollout), and the calls that they received."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.problems: dict[str, Any] = {}
        self.calls: dict[str, tuple[Any, ...]] = {}
        tables = {"actor": {0: "aa"}, "rollout": {0: "aa", 1: "bb"}}
        monkeypatch.setattr(node_checks, "placement_group_table", lambda group: {"bundles_to_node_id": tables[group]})
        monkeypatch.setattr(node_checks, "run_on_node", self.run)
        node = SimpleNamespace(address_info={"session_dir": "/ray/session"})
        monkeypatch.setattr(node_checks.ray._private.worker.global_worker, "node", node)
        nodes = [
            dict(NodeID=name, NodeManagerHostname=f"host-{name}", NodeManagerAddress="10.0.0.1")
            for name in ("aa", "bb")
        ]
        monkeypatch.setattr(node_checks.ray, "nodes", lambda: nodes)

    async def run(self, node: str, function: Any, *args: Any) -> Any:
        self.calls[node] = args
        reply = self.problems.get(node, [])
        if isinstance(reply, Exception):
            raise reply
        return await reply if asyncio.iscoroutine(reply) else reply


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(monkeypatch)


def check(*overrides: str, device: str = "cuda", timeout_s: float = 5) -> None:
    asyncio.run(check_nodes(base_config(*overrides), device, POOLS, timeout_s=timeout_s))


class TestCheckNodes:
    def test_run_folder_is_checked_on_nodes_of_actors_only(
        self, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("NCCL_DEBUG", "INFO")
        check("+ray_init.env_vars.TRITON_CACHE_DIR=/fast", "trainer.default_local_dir=/runs/1")
        device, folders, variables = cluster.calls["aa"]
        assert device == "cuda" and folders["Ray's session"] == "/ray/session"
        assert folders["trainer.default_local_dir"] == "/runs/1"
        assert variables["TRITON_CACHE_DIR"] == "/fast" and variables["NCCL_DEBUG"] == "INFO"
        assert cluster.calls["bb"][1] == {"Ray's session": "/ray/session"}

    def test_problems_of_all_nodes_are_listed_with_remedy(self, cluster: Cluster) -> None:
        cluster.problems = {"aa": ["no compiler", "full disk"], "bb": RayActorError()}
        with pytest.raises(ResourceError) as caught:
            check()
        lines = str(caught.value).splitlines()
        assert lines[1:3] == [f"  node host-aa 10.0.0.1 (aa): {problem}" for problem in ("no compiler", "full disk")]
        assert "node host-bb 10.0.0.1 (bb): the check failed with RayActorError" in lines[3]
        assert "trainer.check_nodes=false" in lines[-1]

    def test_switched_off_problems_are_warnings(self, cluster: Cluster, caplog: pytest.LogCaptureFixture) -> None:
        cluster.problems = {"bb": ["no compiler"]}
        check("trainer.check_nodes=false")
        assert "node host-bb 10.0.0.1 (bb): no compiler" in caplog.text

    def test_silent_node_is_named_at_the_deadline(self, cluster: Cluster) -> None:
        cluster.problems = {"bb": asyncio.sleep(3600)}
        with raises(DeadlineError, missing=("node host-bb 10.0.0.1 (bb)",), waited_s=0.1):
            check(timeout_s=0.1)

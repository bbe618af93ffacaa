"""Check of the nodes of a run, with replies in place of Ray."""

from __future__ import annotations

import asyncio
import logging
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError

from recipe_gkd.errors import DeadlineError, MemoryBudgetError
from recipe_gkd.memory_budget import check, phases
from recipe_gkd.memory_budget.actor_states import ActorMemory
from teacher.common.sizes import GIB
from tests._support.base_config import gpu_config
from tests._support.errors import raises

HYBRID = ("actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync")
POOLS: list[Any] = [SimpleNamespace(group="actor", spec=SimpleNamespace(n_per_node=2))]


STUDENT = ActorMemory(stages=[{"params": GIB, "grads": GIB, "optimizer": GIB}], n_weights=GIB)


class TestCheckBudget:
    def run(self, replies: dict[str, Any], monkeypatch: pytest.MonkeyPatch, *overrides: str) -> list[tuple[Any, ...]]:
        """Check nodes that reply with the memory of a slot, an error or silence; return the calls of the nodes."""
        calls = []

        async def run_on_node(node: str, _: Any, *arguments: Any) -> Any:
            calls.append((node, *arguments))
            if isinstance(replies[node], Exception):
                raise replies[node]
            return f"host-{node}", (await replies[node] if asyncio.iscoroutine(replies[node]) else replies[node])

        table = {"bundles_to_node_id": dict(enumerate(replies))}
        monkeypatch.setattr(check, "placement_group_table", lambda _: table)
        monkeypatch.setattr(check, "run_on_node", run_on_node)
        monkeypatch.setattr(phases, "read_actor_memory", lambda _: STUDENT)
        asyncio.run(check.check_budget(gpu_config(*overrides), "cpu", POOLS, timeout_s=0.2))
        return calls

    def test_table_is_logged(self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.INFO):
            assert self.run({"aa": 8 * GIB}, monkeypatch, *HYBRID) == [("aa", "cpu", 2)]
        assert "8.00 GiB" in caplog.text and "generate" in caplog.text

    def test_node_with_too_little_memory_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with raises(MemoryBudgetError, node="node host-bb (bb)"):
            self.run({"aa": 8 * GIB, "bb": 5 * GIB}, monkeypatch, *HYBRID)

    def test_node_with_unknown_memory_is_not_checked(
        self, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        self.run({"aa": None, "bb": RayActorError()}, monkeypatch, *HYBRID)
        assert "the memory of 2 of 2 nodes is unknown" in caplog.text

    def test_silent_node_is_named_at_the_deadline(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with raises(DeadlineError, phase="memory of the slots", missing=("node aa",), waited_s=0.2):
            self.run({"aa": asyncio.sleep(3600)}, monkeypatch, *HYBRID)

    def test_without_hybrid_engine_nothing_is_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        assert self.run({"aa": 1}, monkeypatch) == []

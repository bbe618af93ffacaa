"""Restarts of the actor ranks: errors that cause one, and their number, with fake workers."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from recipe_gkd.errors import DeadlineError, GkdError, ResourceError, WeightSyncError, WorkerDied, WorkerError
from recipe_gkd.ray_cluster import actor_restarts, new_workers
from recipe_gkd.ray_cluster.actor_restarts import ActorRestarts
from recipe_gkd.ray_cluster.node_probe import ActorLocation
from tests._support.errors import raises


class Actors:
    """A fake group of two ranks. ``ranks_dead`` has the dead ranks, for each look at them."""

    def __init__(self, *ranks_dead: list[int]) -> None:
        self._ranks_dead = iter(ranks_dead)
        self.handles = ["first 0", "first 1"]

    def __len__(self) -> int:
        return 2

    def label(self, rank: int) -> str:
        return f"actor worker {rank} of 2"

    async def dead(self) -> list[int]:
        return next(self._ranks_dead)

    def replace(self, rank: int, handle: Any) -> None:
        self.handles[rank] = handle


@pytest.fixture(autouse=True)
def killed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Handles that were killed."""
    handles: list[str] = []

    async def kill_workers(some: list[str], *, timeout_s: float) -> None:
        handles.extend(some)

    async def locate(some: list[str]) -> list[ActorLocation]:
        return [ActorLocation(7, "node", "", False, "") for _ in some]

    monkeypatch.setattr(actor_restarts, "kill_workers", kill_workers)
    monkeypatch.setattr(new_workers, "locate", locate)
    return handles


def restarts_of(actors: Any, *outcomes: Exception | str, allowed: int = 1) -> ActorRestarts[str]:
    """Return restarts whose set-ups have these outcomes."""
    results = iter(outcomes)

    async def set_up() -> str:
        outcome = next(results)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    async def save_state(error: GkdError) -> None:
        return None

    return ActorRestarts(actors, lambda rank: f"new {rank}", set_up, allowed=allowed, save_state=save_state)


def silent(label: str) -> DeadlineError:
    error = DeadlineError("no answer")
    error.silent = [label]
    return error


def sync_that_waited_for(label: str) -> WeightSyncError:
    error = WeightSyncError("failed")
    error.__cause__ = silent(label)
    return error


@pytest.mark.parametrize(
    ("error", "dead"),
    [
        pytest.param(WorkerDied("update: actor worker 1 died"), [1], id="dead"),
        pytest.param(WorkerError("actor worker 0: connection closed by peer"), [1], id="dead, reported by another"),
        pytest.param(silent("actor worker 1 of 2"), [], id="silent"),
        pytest.param(sync_that_waited_for("actor worker 0 of 2"), [], id="silent in a weight sync"),
    ],
)
def test_all_ranks_are_replaced_after_one_is_lost(error: GkdError, dead: list[int], killed: list[str]) -> None:
    actors = Actors(dead)
    restarts = restarts_of(actors, "reports")
    assert asyncio.run(restarts.restart(error)) == "reports"
    assert killed == ["first 0", "first 1"] and actors.handles == ["new 0", "new 1"]
    assert restarts.n_restarts == 1


@pytest.mark.parametrize(
    "error", [WorkerError("actor worker 0 failed: out of memory"), silent("rollout worker 1 of 2"), GkdError("other")]
)
def test_other_errors_end_the_run(error: GkdError, killed: list[str]) -> None:
    restarts = restarts_of(Actors([]))
    with pytest.raises(type(error)) as caught:
        asyncio.run(restarts.restart(error))
    assert caught.value is error and not killed and restarts.n_restarts == 0


def test_error_is_raised_when_no_restart_is_left(killed: list[str], caplog: pytest.LogCaptureFixture) -> None:
    restarts = restarts_of(Actors([0], [1]), "reports")
    asyncio.run(restarts.restart(WorkerDied("first")))
    second = WorkerDied("second")
    with pytest.raises(WorkerDied) as caught:
        asyncio.run(restarts.restart(second))
    assert caught.value is second
    assert len(killed) == 2
    assert "actor worker 1 of 2 was not started again: trainer.max_actor_restarts=1 is used up" in caplog.text


@pytest.mark.parametrize("allowed", [1, 2])
def test_death_during_a_long_set_up_is_another_restart(
    allowed: int, killed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(actor_restarts, "LOST_NODE_NOTICE_S", 0.0)
    death = WorkerDied("in the set-up")
    restarts = restarts_of(Actors([0], [1]), death, "reports", allowed=allowed)
    if allowed == 1:
        with pytest.raises(WorkerDied) as caught:
            asyncio.run(restarts.restart(WorkerDied("first")))
        assert caught.value is death
    else:
        assert asyncio.run(restarts.restart(WorkerDied("first"))) == "reports"
    assert len(killed) == 2 * allowed == 2 * restarts.n_restarts


def test_deaths_on_a_node_that_ray_does_not_know_to_be_lost_are_one_restart(killed: list[str]) -> None:
    deaths = WorkerDied("on the lost node"), WorkerDied("on the lost node")
    restarts = restarts_of(Actors([0], [1], [1]), *deaths, "reports", allowed=1)
    assert asyncio.run(restarts.restart(WorkerDied("first"))) == "reports"
    assert len(killed) == 6 and restarts.n_restarts == 1


def test_ranks_that_find_no_room_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def locate(some: list[str]) -> list[ActorLocation]:
        return [ActorLocation(pid, "", "", False, "") for pid in (7, 0)]

    monkeypatch.setattr(new_workers, "locate", locate)
    monkeypatch.setattr(new_workers, "PLACEMENT_TIMEOUT_S", 0.0)
    actors: Any = SimpleNamespace(handles=["a", "b"], label=Actors().label)
    with raises(ResourceError, workers=("actor worker 1 of 2",)):
        asyncio.run(new_workers.set_up_in_new_processes(actors, range(2), asyncio.sleep(3600)))

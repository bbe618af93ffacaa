from __future__ import annotations

import asyncio
from typing import Any

from recipe_gkd.errors import GkdError, WeightSyncError
from recipe_gkd.weight_sync.cleanup import drop_update


class Rollouts:
    """Rollout pool whose workers reply to ``drop_weights`` with the given results or errors."""

    def __init__(self, *replies: str | GkdError | None) -> None:
        self._replies = replies

    def __len__(self) -> int:
        return len(self._replies)

    def label(self, rank: int) -> str:
        return f"worker {rank}"

    async def call_one(self, rank: int, method: object, *args: Any, timeout_s: float, phase: str) -> str | None:
        reply = self._replies[rank]
        if isinstance(reply, GkdError):
            raise reply
        return reply


def outcome_of(*replies: str | GkdError | None) -> str:
    rollouts: Any = Rollouts(*replies)
    dropped = asyncio.run(
        drop_update(rollouts, error := WeightSyncError("cut"), phase="send", started=0.0, timeout_s=1.0)
    )
    assert dropped.cause is error
    return str(dropped)


class TestDropUpdate:
    def test_invalid_workers_are_named(self) -> None:
        assert outcome_of(None, "mixed", "mixed") == "invalid until a complete sync: worker 1, worker 2"

    def test_without_invalid_workers_states_only_what_was_replied(self) -> None:
        """A worker that has committed keeps the new version, so the text does not name a version."""
        complete = "every worker that replied has a complete version"
        assert outcome_of(None, None) == complete
        assert outcome_of(None, GkdError("worker 1 failed")) == f"{complete}; worker 1 failed"

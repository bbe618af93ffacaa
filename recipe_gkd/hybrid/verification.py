"""Check of rollout engines after they woke: log-probabilities of a fixed request against the actor's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from recipe_gkd.errors import WeightSyncError

MAX_REQUEST_TOKENS = 32


def request_ids(prompt_ids: Sequence[int]) -> list[int]:
    """Return the token ids of the fixed request: the start of a prompt, repeated if it has only one id."""
    ids = [int(token_id) for token_id in prompt_ids[:MAX_REQUEST_TOKENS]]
    return ids if len(ids) > 1 else ids * 2


def largest_difference(
    expected: Sequence[float], got_by_engine: Mapping[str, Sequence[float]], bound: float | None
) -> float:
    """Return the largest mean difference between the log-probabilities of the actor and of an engine.

    Args:
        expected: The actor's log-probabilities.
        got_by_engine: Name of a rollout worker -> its log-probabilities of the same tokens.
        bound: Largest difference in nats; see :func:`~recipe_gkd.hybrid.sync_probe.mismatch_bound`. None: no limit.

    Raises:
        WeightSyncError: The difference exceeds the bound.
    """
    differences = {name: float(np.abs(np.subtract(expected, got)).mean()) for name, got in got_by_engine.items()}
    wrong = {} if bound is None else {name: diff for name, diff in differences.items() if not diff <= bound}
    if wrong:
        listed = ", ".join(f"{name}: {difference:.3g}" for name, difference in wrong.items())
        raise WeightSyncError(
            f"rollout engines woke with wrong weights: their log-probabilities of {len(expected) + 1} fixed tokens "
            f"differ from the actor's by {listed} nats on average, expected at most {bound:g} "
            "(actor_rollout_ref.rollout.mismatch_bound). Nothing was generated with them",
            remedy="set actor_rollout_ref.rollout.sleep_level=0 to keep the engines awake, and report this",
            invalid=tuple(wrong),
        )
    return max(differences.values())

"""Rewards in metrics and in files of responses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from recipe_gkd.data.samples import Reward


def mean_numbers(numbers: Sequence[Mapping[str, float]], prefix: str = "") -> dict[str, float]:
    """Return the mean of each number over the responses that have it.

    Args:
        numbers: Numbers of each response, by name.
        prefix: First part of the names in the result.
    """
    names = dict.fromkeys(name for each in numbers for name in each)
    return {prefix + name: float(np.mean([each[name] for each in numbers if name in each])) for name in names}


def scores_PN(rewards: Sequence[Reward | None], n: int) -> npt.NDArray[np.float64]:
    """Return the scores of ``n`` responses to each prompt, NaN for a response without a reward."""
    return np.array([np.nan if reward is None else reward.score for reward in rewards], np.float64).reshape(-1, n)


def raw_field(name: str, text: str, raw: str | None) -> dict[str, str]:
    """Return a field of a JSON object for a response with its special tokens. Empty if it has no more than ``text``."""
    return {} if raw is None or raw == text else {name: raw}


def reward_fields(reward: Reward | None) -> dict[str, Any]:
    """Return the fields of a JSON object for a response: ``reward``, and ``numbers`` if there are any."""
    if reward is None:
        return {"reward": None}
    return {"reward": reward.score, **({"numbers": dict(reward.numbers)} if reward.numbers else {})}

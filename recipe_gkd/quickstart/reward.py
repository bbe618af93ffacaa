"""Reward function of the quickstart: 1 for an exact answer, else 0.

``custom_reward_function.path=recipe_gkd/quickstart/reward.py``
"""

from __future__ import annotations

from typing import Any

from recipe_gkd.addition.task import is_exact


def compute_score(prompt: object, response: str, ground_truth: str, extra: dict[str, Any]) -> float:
    """Return the reward of a response.

    Args:
        prompt: Not used.
        response: Text of the response.
        ground_truth: The whole correct answer, from column ``answer`` of the data.
        extra: Not used.
    """
    return float(is_exact(response, ground_truth))

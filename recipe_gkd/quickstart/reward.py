"""The reward of the arithmetic task: 1 for an exact answer, else 0.

``custom_reward_function.path=recipe_gkd/quickstart/reward.py``
"""

from __future__ import annotations

from typing import Any

from recipe_gkd.quickstart.task import is_exact


def compute_score(prompt: Any, answer: str, ground_truth: str, extra: dict[str, Any]) -> float:
    """`ground_truth`: the whole right answer, the column `answer` of the data."""
    return float(is_exact(answer, ground_truth))

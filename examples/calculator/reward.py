"""Reward of the example: 1 if the last turn is the sum."""

from __future__ import annotations

from typing import Any


def compute_score(response: str, ground_truth: str, extra: dict[str, Any]) -> dict[str, float]:
    """Return 1 for the correct sum, and the share of conversations with a correct call of the calculator.

    Args:
        response: Text of the last turn.
        ground_truth: The sum.
        extra: Has the conversation.
    """
    results = [message["content"] for message in extra["conversation"]["messages"] if message["role"] == "tool"]
    return {"score": float(response == ground_truth), "called_correctly": float(ground_truth in results)}

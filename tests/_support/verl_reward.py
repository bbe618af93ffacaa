"""A reward function with verl's signature and a dict result. The rewards of a random model's responses differ."""

from __future__ import annotations

from typing import Any


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, Any] | None = None
) -> dict[str, float]:
    """Return the fraction of digits among the characters of a response."""
    if data_source != "quickstart/addition" or "=" not in ground_truth:
        raise ValueError(f"got data_source={data_source!r}, ground_truth={ground_truth!r}")
    n_digits = sum(character.isdigit() for character in solution_str)
    return {"score": n_digits / max(1, len(solution_str)), "n_digits": n_digits}

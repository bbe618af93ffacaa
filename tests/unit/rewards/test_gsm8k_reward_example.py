"""``docs/examples/gsm8k_reward.py``: numbers in responses."""

from __future__ import annotations

import runpy

import pytest

from tests._support.repository import REPO

compute_score = runpy.run_path(str(REPO / "docs" / "examples" / "gsm8k_reward.py"))["compute_score"]


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("6 * 3 = 18\n#### 18", "18", 1.0),
        ("#### 18\nso the answer is 19", "18", 1.0),
        ("#### 3\n#### 18", "18", 1.0),
        ("#### $1,200", "1200", 1.0),
        ("she has -5 dollars", "-5", 1.0),
        ("#### 18.00", "18", 1.0),
        ("#### 0.5", "0.50", 1.0),
        ("first 18, then 20.", "18", 0.0),
        ("first 20, then 18.", "18", 1.0),
        ("#### eighteen", "18", 0.0),
        ("", "18", 0.0),
        ("#### 180", "18", 0.0),
        ("#### 18", "eighteen", 0.0),
        ("#### 18", "$18", 1.0),
    ],
)
def test_answer_is_the_marked_number_or_the_last_one(response: str, truth: str, score: float) -> None:
    assert compute_score(response, truth) == {"score": score, "has_format": "####" in response}

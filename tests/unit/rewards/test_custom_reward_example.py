"""The example of ``docs/examples`` works as documented."""

from __future__ import annotations

import ast
import asyncio
import re

import pytest

from recipe_gkd.rewards import RewardScorer
from tests._support.base_config import base_config
from tests._support.repository import REPO
from tests._support.reward_files import item, settings

EXAMPLE = REPO / "docs" / "examples" / "custom_reward.py"


@pytest.mark.parametrize(
    ("response", "reward"),
    [("1 + 1 = 2", 1.0), ("so it is 1,234", 0.0), ("three", 0.0), ("2" + " " * 499 + "2", 0.9)],
)
def test_custom_reward_example_scores_the_last_number(response: str, reward: float) -> None:
    example = item(response=response, ground_truth="2", extra={"max_chars": 401})
    with RewardScorer(settings(EXAMPLE)) as scorer:
        [found] = asyncio.run(scorer.score([example]))
    assert found.score == pytest.approx(reward)


def test_keys_in_custom_reward_example_are_a_valid_configuration() -> None:
    overrides = re.findall(r"[\w.]+=\S+", ast.get_docstring(ast.parse(EXAMPLE.read_text())) or "")
    config = base_config(*overrides)
    assert config.gkd.use_rl_loss and len(overrides) == 4

"""Check of the reward functions: each is imported, and its parameters are accepted."""

from __future__ import annotations

from dataclasses import replace

from recipe_gkd.commands.doctor.findings import Finding, findings_of
from recipe_gkd.config import Config
from recipe_gkd.config.reward_functions import reward_functions
from recipe_gkd.config.validate import needs_rewards
from recipe_gkd.rewards import RewardScorer
from recipe_gkd.rewards.items import TruthUse

CHECK = "reward function"


def reward_findings(config: Config) -> tuple[TruthUse, list[Finding]]:
    """Load the reward functions in a process of their own, and call none of them.

    Returns:
        Use of the ground truth, and the findings; none if the run computes no rewards.
    """
    if not needs_rewards(config):
        return "unused", []
    section = config.custom_reward_function
    truth_use: TruthUse = "required"

    def load() -> list[Finding]:
        nonlocal truth_use
        with RewardScorer(replace(section, num_workers=1)) as scorer:
            truth_use = scorer.truth_use
        names = ", ".join(function.description for function in reward_functions(section))
        return [Finding(CHECK, "ok", names + ("" if truth_use == "required" else "; no ground truth is needed"))]

    found = list(findings_of(CHECK, load))
    return truth_use, found

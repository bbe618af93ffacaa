"""Check of the reward functions: each is imported, and its parameters are accepted."""

from __future__ import annotations

from dataclasses import replace

from recipe_gkd.commands.doctor.findings import Finding, findings_of
from recipe_gkd.config import Config
from recipe_gkd.config.reward_functions import reward_functions
from recipe_gkd.config.validate import needs_rewards
from recipe_gkd.rewards import RewardScorer

CHECK = "reward function"


def reward_findings(config: Config) -> tuple[bool, list[Finding]]:
    """Load the reward functions in a process of their own, and call none of them.

    Returns:
        True if a function needs a ground truth, and the findings. Both are empty if the run computes no rewards.
    """
    if not needs_rewards(config):
        return False, []
    section = config.custom_reward_function
    reads_truth = True

    def load() -> list[Finding]:
        nonlocal reads_truth
        with RewardScorer(replace(section, num_workers=1)) as scorer:
            reads_truth = scorer.reads_truth
        names = ", ".join(function.description for function in reward_functions(section))
        return [Finding(CHECK, "ok", names + ("" if reads_truth else "; it needs no ground truth"))]

    found = list(findings_of(CHECK, load))
    return reads_truth, found

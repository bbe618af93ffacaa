"""Rewards: the user's function in processes of its own, what it is given, and advantages made of what it says."""

from recipe_gkd.rewards.items import RewardItem, RewardItems
from recipe_gkd.rewards.scorer import RewardScorer

__all__ = ["RewardItem", "RewardItems", "RewardScorer"]

"""User reward functions, which run in separate processes, and the advantages that follow from their rewards."""

from recipe_gkd.rewards.items import RewardItem, RewardItems
from recipe_gkd.rewards.scorer import RewardScorer

__all__ = ["RewardItem", "RewardItems", "RewardScorer"]

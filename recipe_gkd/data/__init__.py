"""Prompts, and the records that travel from rollout to teacher to actor."""

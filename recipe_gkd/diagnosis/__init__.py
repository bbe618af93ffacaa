"""What a run leaves behind when a worker dies or does not answer: who, where, in which state, and doing what."""

from recipe_gkd.diagnosis.collect import diagnose

__all__ = ["diagnose"]

"""Ranges of response positions for the metrics ``actor/kl_loss_at/N``."""

POSITION_BUCKETS = (0, 32, 128, 512, 2048)
"""``actor/kl_loss_at/N`` is the mean over response positions from N to the next of these numbers."""

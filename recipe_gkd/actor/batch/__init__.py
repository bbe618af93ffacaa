"""Micro-batches: their plan, packed rows of tokens, and the copy to the device."""

"""Divergences between a teacher's top-k and a student's vocab-parallel logits: pure functions of tensors.

A torch process group is passed in where the vocabulary is divided (None: it is whole); nothing else is known here.
"""

from recipe_gkd.losses.forward_kl import forward_kl

__all__ = ["forward_kl"]

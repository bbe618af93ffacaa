"""Distillation objectives on vocab-parallel logits: pure functions of tensors.

A torch process group is passed in where the vocabulary is divided (None: it is whole); nothing else is known here.

    question.py, reading.py    all that a loss needs of the logits, with its analytic gradient
    fused_head.py              the same, from hidden states and the output layer
    chunk.py, triton_chunk.py  the arithmetic that touches every logit, for CPU and GPU
    buckets.py, divergences.py teacher and student on the teacher's top-k, and what is computed of them
    sampled.py, policy.py      losses on the sampled token alone
    topk.py                    the whole way in one call
"""

from recipe_gkd.losses.divergences import Divergence
from recipe_gkd.losses.topk import topk_divergence

__all__ = ["Divergence", "topk_divergence"]

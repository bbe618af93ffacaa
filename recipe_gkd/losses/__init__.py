"""Distillation objectives on vocab-parallel logits, as pure functions of tensors.

A torch process group is a parameter where the vocabulary is sharded; None stands for a whole vocabulary.

    registry.py                        names of all distillation losses
    divergences.py, distributions.py   divergences on the support and the tail
    sampled_token.py, policy.py        losses on the sampled token
    custom.py                          a loss from a user's file (``gkd.custom_loss``)
    position_weights.py                weights of tokens from a user's file (``gkd.position_weights``)
    logits_query.py, log_stats.py      student statistics of the logits, with an analytic gradient
    fused_head.py, student_output.py   the same statistics from hidden states and the output layer
    kernel_backend.py, *_kernels.py    operations that touch every logit, in PyTorch and in Triton
    topk.py                            a divergence from logits in one call
"""

from recipe_gkd.losses.custom import LossInputs, LossOutputs
from recipe_gkd.losses.divergences import Divergence
from recipe_gkd.losses.sampled_token import k1, k2, k3
from recipe_gkd.losses.topk import topk_divergence

__all__ = ["Divergence", "LossInputs", "LossOutputs", "k1", "k2", "k3", "topk_divergence"]

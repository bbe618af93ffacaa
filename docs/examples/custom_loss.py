"""A custom distillation loss: forward KL where the teacher is uncertain, reverse KL elsewhere, and an entropy bonus.

Run with ``gkd.custom_loss.path=docs/examples/custom_loss.py gkd.custom_loss.name=entropy_gated_kl``.
"""

import torch

from recipe_gkd.losses import LossInputs, LossOutputs


def entropy_gated_kl(inputs: LossInputs) -> LossOutputs:
    """Return the loss of each response token. B is the teacher's top-k and, last, all other ids as one bucket."""
    p_TB, log_p_TB, log_q_TB = inputs.teacher_probs_TB, inputs.teacher_logps_TB, inputs.student_logps_TB
    forward_T = (p_TB * (log_p_TB - log_q_TB)).sum(1)
    reverse_T = (log_q_TB.exp() * (log_q_TB - log_p_TB)).sum(1)
    is_uncertain_T = -(p_TB * log_p_TB).sum(1) > 1.0  # entropy of the teacher, in nats
    loss_T = torch.where(is_uncertain_T, forward_T, reverse_T) - 0.01 * inputs.student_entropy_T
    return LossOutputs(loss_T=loss_T, metrics={"forward_kl": forward_T, "uncertain_fraction": is_uncertain_T})

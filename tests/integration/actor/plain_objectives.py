"""Every objective of ``gkd.*`` on whole float64 distributions, one response at a time."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.data.samples import Sample
from recipe_gkd.losses import Divergence
from recipe_gkd.losses.registry import sampled_token_loss_names
from tests._support.dense_losses import dense_divergence


def plain_objective(gkd: GkdConfig, samples: Sequence[tuple[Sample, Tensor]]) -> dict[str, Tensor]:
    """Return the loss and its terms, by metric name.

    Args:
        gkd: Configuration of the objective.
        samples: Samples with a response, each with the float64 logits [T, V] that predict it.
    """
    distill, policy, cross_entropy = [], [], []
    for sample, logits_TV in samples:
        log_q_TV = logits_TV.log_softmax(1)
        log_q_T = log_q_TV.gather(1, torch.as_tensor(sample.response.ids).long()[:, None])[:, 0]
        is_scored = bool((sample.teacher.ids_TK >= 0).any())
        if is_scored:
            distill.append(distillation(gkd, sample, logits_TV, log_q_T))
        if not sample.is_reference:
            policy.append(policy_loss(gkd, sample, log_q_T))
        elif not is_scored and not sample.is_skipped:
            cross_entropy.append(-log_q_T)
    terms = {"distill": mean(gkd, distill), "pg": mean(gkd, policy), "sft": mean(gkd, cross_entropy)}
    loss = gkd.distill_loss_coef * terms["distill"]
    found = {"actor/distill_loss": terms["distill"], "actor/kl_loss": torch.cat(distill).mean()}
    if gkd.token_clip is not None and gkd.distill_loss_type not in sampled_token_loss_names():
        found["actor/kl_clipfrac"] = (torch.cat(distill) >= gkd.token_clip).double().mean()
    if gkd.use_rl_loss:
        loss = loss + gkd.rl_loss_coef * terms["pg"]
        found["actor/pg_loss"] = terms["pg"]
    if gkd.sft_share:
        loss = loss + gkd.sft_loss_coef * terms["sft"]
    if cross_entropy:
        found["actor/sft_loss"] = terms["sft"]
    sampled = [logits_TV for sample, logits_TV in samples if not sample.is_reference]
    entropies = torch.cat([-(logits_TV.softmax(1) * logits_TV.log_softmax(1)).sum(1) for logits_TV in sampled])
    return found | {"actor/loss": loss, "actor/entropy": entropies.mean()}


def mean(gkd: GkdConfig, responses: list[Tensor]) -> Tensor:
    """Return the mean over the tokens, or over the responses of the mean over their tokens."""
    if not responses:
        return torch.zeros((), dtype=torch.float64)
    if gkd.loss_agg_mode == "token-mean":
        return torch.cat(responses).mean()
    return torch.stack([response_T.mean() for response_T in responses]).mean()


def policy_loss(gkd: GkdConfig, sample: Sample, log_q_T: Tensor) -> Tensor:
    """Return the clipped surrogate of GRPO at each token."""
    ratio_T = (log_q_T - torch.as_tensor(sample.response.logprobs)).exp()
    clipped_T = ratio_T.clamp(1 - gkd.clip_ratio_low, 1 + gkd.clip_ratio_high)
    loss_T = -torch.minimum(ratio_T * sample.advantage, clipped_T * sample.advantage)
    return loss_T.clamp(max=-gkd.clip_ratio_c * sample.advantage) if sample.advantage < 0 else loss_T


def distillation(gkd: GkdConfig, sample: Sample, logits_TV: Tensor, log_q_T: Tensor) -> Tensor:
    """Return the distillation loss at each token."""
    if gkd.distill_loss_type in sampled_token_loss_names():
        return sampled_token_loss(gkd, sample, logits_TV, log_q_T)
    divergence = Divergence(
        kind=gkd.distill_loss_type,
        tail=gkd.tail,
        temperature=gkd.distill_temperature,
        parameters={"beta": gkd.beta, "rkl_ratio": gkd.rkl_ratio, "skew_alpha": gkd.skew_alpha},
    )
    loss_T = divergence_of(sample, logits_TV, divergence)
    return loss_T if gkd.token_clip is None else loss_T.clamp(max=gkd.token_clip)


def divergence_of(sample: Sample, logits_TV: Tensor, divergence: Divergence) -> Tensor:
    """Return a divergence of student and teacher at each token."""
    logps_TK, ids_TK = torch.as_tensor(sample.teacher.logps_TK), torch.as_tensor(sample.teacher.ids_TK).long()
    return dense_divergence(logits_TV, logps_TK, ids_TK, divergence, logits_TV.shape[1])


def sampled_token_loss(gkd: GkdConfig, sample: Sample, logits_TV: Tensor, log_q_T: Tensor) -> Tensor:
    """Return k1, k2 or k3 with importance weights at each token."""
    r_T = torch.as_tensor(sample.teacher.sampled_logps_T).double() - log_q_T
    weight_T = (log_q_T.detach() - torch.as_tensor(sample.response.logprobs)).exp()
    weight_T = {
        "none": torch.ones_like(weight_T),
        "truncate": weight_T.clamp(max=gkd.importance_cap),
        "mask": weight_T * (weight_T <= gkd.importance_cap),
    }[gkd.importance]
    if gkd.distill_loss_type == "k2":
        return weight_T * r_T**2 / 2
    if gkd.distill_loss_type == "k3":
        return weight_T * (r_T.exp() - 1 - r_T)
    baseline_T = torch.full_like(r_T, sample.baseline)
    if gkd.baseline == "expected":
        baseline_T = -divergence_of(sample, logits_TV, Divergence(kind="reverse_kl")).detach()
    advantage_T = (r_T.detach() - baseline_T) / sample.scale
    surrogate_T = -advantage_T * log_q_T
    return weight_T * (surrogate_T - surrogate_T.detach() - r_T.detach())

"""Every objective of ``gkd.*`` written plainly: whole float64 distributions, one answer after the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.data.samples import Sample

LEAST_TAIL = 2.0**-24


def plain_objective(gkd: GkdConfig, samples: Sequence[tuple[Sample, Tensor]]) -> dict[str, Tensor]:
    distill, policy, given = [], [], []
    for sample, logits_TV in samples:
        log_q_TV = logits_TV.log_softmax(1)
        log_q_T = log_q_TV.gather(1, torch.as_tensor(sample.response.ids).long()[:, None])[:, 0]
        asked = bool((sample.teacher.ids_TK >= 0).any())
        if asked:
            distill.append(distillation(gkd, sample, logits_TV, log_q_T))
        if not sample.is_reference:
            ratio_T = (log_q_T - torch.as_tensor(sample.response.logprobs)).exp()
            bounded_T = ratio_T.clamp(1 - gkd.clip_ratio_low, 1 + gkd.clip_ratio_high)
            loss_T = -torch.minimum(ratio_T * sample.advantage, bounded_T * sample.advantage)
            policy.append(loss_T.clamp(max=-gkd.clip_ratio_c * sample.advantage) if sample.advantage < 0 else loss_T)
        elif not asked and not sample.is_skipped:
            given.append(-log_q_T)
    parts = {"distill": mean(gkd, distill), "pg": mean(gkd, policy), "sft": mean(gkd, given)}
    loss = gkd.distill_loss_coef * parts["distill"]
    found = {"actor/distill_loss": parts["distill"], "actor/kl_loss": torch.cat(distill).mean()}
    if gkd.use_rl_loss:
        loss = loss + gkd.rl_loss_coef * parts["pg"]
        found["actor/pg_loss"] = parts["pg"]
    if gkd.sft_share:
        loss = loss + gkd.sft_loss_coef * parts["sft"]
        found["actor/sft_loss"] = parts["sft"]
    sampled = [logits for sample, logits in samples if not sample.is_reference]
    entropies = torch.cat([-(logits.softmax(1) * logits.log_softmax(1)).sum(1) for logits in sampled])
    return found | {"actor/loss": loss, "actor/entropy": entropies.mean()}


def mean(gkd: GkdConfig, responses: list[Tensor]) -> Tensor:
    if not responses:
        return torch.zeros((), dtype=torch.float64)
    if gkd.loss_agg_mode == "token-mean":
        return torch.cat(responses).mean()
    return torch.stack([response.mean() for response in responses]).mean()


def distillation(gkd: GkdConfig, sample: Sample, logits_TV: Tensor, log_q_T: Tensor) -> Tensor:
    r_T = torch.as_tensor(sample.teacher.sampled_logps_T).double() - log_q_T
    w_T = (log_q_T.detach() - torch.as_tensor(sample.response.logprobs)).exp()
    w_T = {"none": torch.ones_like(w_T), "truncate": w_T.clamp(max=gkd.importance_cap),
           "mask": w_T * (w_T <= gkd.importance_cap)}[gkd.importance]  # fmt: skip
    if gkd.distill_loss_type == "k1":
        if gkd.baseline == "expected":
            p_TC, q_TC = buckets(gkd, sample, logits_TV)
            baseline_T = (q_TC * (p_TC / q_TC).log()).sum(1).detach()
        else:
            baseline_T = torch.full_like(r_T, sample.baseline)
        advantage_T = (r_T.detach() - baseline_T) / sample.scale
        surrogate_T = -advantage_T * log_q_T
        return w_T * (surrogate_T - surrogate_T.detach() - r_T.detach())
    if gkd.distill_loss_type == "k2":
        return w_T * r_T**2 / 2
    if gkd.distill_loss_type == "k3":
        return w_T * (r_T.exp() - 1 - r_T)
    p_TC, q_TC = buckets(gkd, sample, logits_TV)
    if gkd.tail != "bucket":
        p_TC, q_TC = p_TC[:, :-1], q_TC[:, :-1]
    if gkd.tail == "renormalize":
        p_TC, q_TC = p_TC / p_TC.sum(1, keepdim=True), q_TC / q_TC.sum(1, keepdim=True)

    def kl(a_TC: Tensor, b_TC: Tensor) -> Tensor:
        return (a_TC * (a_TC / b_TC).log()).sum(1)

    def mix(share: float) -> Tensor:
        return share * p_TC + (1 - share) * q_TC

    return {
        "forward_kl": lambda: kl(p_TC, q_TC),
        "reverse_kl": lambda: kl(q_TC, p_TC),
        "kl_rkl": lambda: (1 - gkd.rkl_ratio) * kl(p_TC, q_TC) + gkd.rkl_ratio * kl(q_TC, p_TC),
        "jsd": lambda: gkd.beta * kl(p_TC, mix(gkd.beta)) + (1 - gkd.beta) * kl(q_TC, mix(gkd.beta)),
        "skewed_forward_kl": lambda: kl(p_TC, mix(gkd.skew_alpha)),
        "skewed_reverse_kl": lambda: kl(q_TC, mix(1 - gkd.skew_alpha)),
        "tvd": lambda: (p_TC - q_TC).abs().sum(1) / 2,
    }[gkd.distill_loss_type]()


def buckets(gkd: GkdConfig, sample: Sample, logits_TV: Tensor) -> tuple[Tensor, Tensor]:
    """Of teacher and student: the teacher's ids, and all others."""
    p_TK = torch.as_tensor(sample.teacher.logps_TK).double().exp()
    q_TV = (logits_TV / gkd.distill_temperature).softmax(1)
    ids_TK = torch.as_tensor(sample.teacher.ids_TK).long()
    off_T1 = q_TV.scatter(1, ids_TK, 0).sum(1, keepdim=True)
    p_TC = torch.cat([p_TK, (1 - p_TK.sum(1, keepdim=True)).clamp(min=LEAST_TAIL)], 1)
    return p_TC, torch.cat([q_TV.gather(1, ids_TK), off_T1], 1)

"""The objective: distillation, a policy loss on a reward and cross-entropy with given answers, as configured.

Axis names: T response tokens of a micro-batch, K teacher top-k, B = K + 1 buckets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.actor.device_batch import DeviceBatch
from recipe_gkd.actor.loss_metrics import POSITION_BUCKETS
from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.losses.diagnostics import entropy, topk_overlap
from recipe_gkd.losses.distributions import BucketedDistributions, distributions, valid_entries
from recipe_gkd.losses.divergences import Divergence, reverse_kl
from recipe_gkd.losses.logits_query import LogitsQuery, StudentLogStats
from recipe_gkd.losses.policy import grpo_loss
from recipe_gkd.losses.sampled_token import importance_weights, k1, k2, k3
from recipe_gkd.losses.student_output import Student


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Of one micro-batch; the same on every tensor-parallel rank."""

    loss_T: Tensor
    """Weighted so that its sum over the global batch, divided by the number of response tokens, is the objective."""
    sums: dict[str, Tensor]
    """Scalars, float64, to be added up over the global batch; see :mod:`~recipe_gkd.actor.loss_metrics`."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    gkd: GkdConfig
    vocab_size: int
    """Ids from here on are padding of the output layer: no distribution has them."""
    tp_group: ProcessGroup | None
    n_teachers: int = 1

    def __call__(self, student: Student, batch: DeviceBatch) -> Losses:
        gkd = self.gkd
        valid_TK = valid_entries(batch.logps_TK, batch.ids_TK, self.vocab_size)
        sums = self._overlap(student, batch, valid_TK)  # before the gradient takes the place of the logits
        stats = student.read(
            LogitsQuery(
                ids_TK=batch.ids_TK,
                valid_TK=valid_TK,
                sampled_T=batch.response_ids_T,
                vocab_size=self.vocab_size,
                temperature=gkd.distill_temperature,
            )
        )
        logp_T = stats.sampled_logp_T
        buckets = distributions(stats.log_mass_TB, batch.logps_TK, valid_TK, "bucket")

        distill_T = self._distill(stats, buckets, batch, valid_TK)
        loss_T = gkd.distill_loss_coef * batch.weights["distill"] * distill_T
        found = {"distill": batch.weights["distill"] * distill_T, "kl": distill_T * batch.has_teacher_T}
        if gkd.use_rl_loss:
            policy_T, clipped_T = grpo_loss(
                logp_T,
                batch.sampling_logps_T,
                batch.advantages_T,
                clip_low=gkd.clip_ratio_low,
                clip_high=gkd.clip_ratio_high,
                clip_c=gkd.clip_ratio_c,
            )
            loss_T = loss_T + gkd.rl_loss_coef * batch.weights["pg"] * policy_T
            found |= {"pg": batch.weights["pg"] * policy_T, "clipped": clipped_T * ~batch.is_reference_T}
        if gkd.sft_share:
            loss_T = loss_T - gkd.sft_loss_coef * batch.weights["sft"] * logp_T
            found["sft"] = -batch.weights["sft"] * logp_T
        found |= {"loss": loss_T} | self._differences(stats, buckets, batch, found["kl"])
        sums |= {name: value_T.detach().sum(dtype=torch.float64) for name, value_T in found.items()}
        return Losses(loss_T=loss_T, sums=sums)

    @cached_property
    def _divergence(self) -> Divergence | None:
        """None for losses on the sampled token alone."""
        gkd = self.gkd
        match gkd.distill_loss_type:
            case "k1" | "k2" | "k3":
                return None
            case kind:
                return Divergence(
                    kind=kind,
                    tail=gkd.tail,
                    temperature=gkd.distill_temperature,
                    beta=gkd.beta,
                    rkl_ratio=gkd.rkl_ratio,
                    skew_alpha=gkd.skew_alpha,
                )

    def _distill(self, stats: StudentLogStats, buckets: BucketedDistributions, batch: DeviceBatch, valid_TK: Tensor) -> Tensor:
        """[T], arbitrary but finite where no teacher has said anything."""
        gkd, logp_T, teacher_logp_T = self.gkd, stats.sampled_logp_T, batch.teacher_logps_T
        if self._divergence is not None:
            if gkd.tail != "bucket":
                buckets = distributions(stats.log_mass_TB, batch.logps_TK, valid_TK, gkd.tail)
            return self._divergence.of(buckets).to(logp_T.dtype)
        match gkd.distill_loss_type:
            case "k1":
                by_position = gkd.baseline == "expected"
                baseline_T = -reverse_kl(buckets).detach() if by_position else batch.baselines_T
                estimate_T = k1(logp_T, teacher_logp_T, baseline_T, batch.scales_T)
            case "k2":
                estimate_T = k2(logp_T, teacher_logp_T)
            case _:
                estimate_T = k3(logp_T, teacher_logp_T)
        return estimate_T * importance_weights(logp_T, batch.sampling_logps_T, gkd.importance, gkd.importance_cap)

    @torch.no_grad()
    def _differences(self, stats: StudentLogStats, buckets: BucketedDistributions, batch: DeviceBatch, kl_T: Tensor) -> dict[str, Tensor]:
        """How student and teacher differ, beside the loss: [T] each, 0 where a token does not count."""
        asked_T, sampled_T = batch.has_teacher_T, ~batch.is_reference_T
        p_TB, q_TB = buckets.p_TC, buckets.q_TC
        grown_T = stats.sampled_logp_T - batch.sampling_logps_T > math.log(self.gkd.importance_cap)
        found = {
            "teacher_topk_mass": p_TB[:, :-1].sum(1) * asked_T,
            "student_topk_mass": q_TB[:, :-1].sum(1) * asked_T,
            "teacher_tail_mass": p_TB[:, -1] * asked_T,
            "student_tail_mass": q_TB[:, -1] * asked_T,
            "teacher_topk_entropy": entropy(p_TB) * asked_T,
            "student_topk_entropy": entropy(q_TB) * asked_T,
            "entropy": stats.entropy_T * sampled_T,
            "above_cap": grown_T * sampled_T,
            "n_asked": asked_T,
            "n_sampled": sampled_T,
            "n_tokens": torch.ones_like(asked_T),
        }
        for number, start in enumerate(POSITION_BUCKETS):
            there_T = asked_T & (batch.position_buckets_T == number)
            found |= {f"kl_at_{start}": kl_T * there_T, f"n_at_{start}": there_T}
        for number in range(self.n_teachers):
            its_T = asked_T & (batch.teacher_numbers_T == number)
            found |= {f"kl_of_{number}": kl_T * its_T, f"n_of_{number}": its_T}
        return found

    def _overlap(self, student: Student, batch: DeviceBatch, valid_TK: Tensor) -> dict[str, Tensor]:
        rows_R = batch.overlap_rows_R
        share_R = topk_overlap(
            student.logits(rows_R),
            batch.ids_TK[rows_R],
            valid_TK[rows_R],
            vocab_size=self.vocab_size,
            tp_group=self.tp_group,
        )
        return {
            "overlap": share_R.nansum(dtype=torch.float64),
            "n_overlap": (~share_R.isnan()).sum(dtype=torch.float64),
        }

"""The objective: distillation, a policy loss on a reward and cross-entropy with given answers, as configured.

Axis names: T response tokens of a micro-batch, K teacher top-k, B = K + 1 buckets.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.actor.device_batch import DeviceBatch
from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.losses.buckets import outcomes, present_entries
from recipe_gkd.losses.diagnostics import entropy, topk_overlap
from recipe_gkd.losses.divergences import Divergence, reverse_kl
from recipe_gkd.losses.policy import grpo_loss
from recipe_gkd.losses.question import Question, Reading
from recipe_gkd.losses.sampled import importance_weights, k1, k2, k3
from recipe_gkd.losses.student import Student

OVERLAP_ROWS = 8
"""Positions of a micro-batch at which the student's own top-k is looked for."""
POSITION_BUCKETS = (0, 32, 128, 512, 2048)
"""``actor/kl_loss_at/N``: the mean over response positions from N to the next of these."""


@dataclass(frozen=True, kw_only=True)
class Losses:
    """Of one micro-batch; the same on every tensor-parallel rank."""

    loss_T: Tensor
    """Weighted so that its sum over the global batch, divided by the number of response tokens, is the objective."""
    sums: dict[str, Tensor]
    """Scalars, float64, to be added up over the global batch: numerators and denominators of :func:`metrics`."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    gkd: GkdConfig
    vocab_size: int
    tp_group: ProcessGroup | None

    def __call__(self, student: Student, batch: DeviceBatch) -> Losses:
        present_TK = present_entries(batch.logps_TK, batch.ids_TK, self.vocab_size)
        question = Question(
            ids_TK=batch.ids_TK,
            present_TK=present_TK,
            picked_T=batch.answer_ids_T,
            vocab_size=self.vocab_size,
            temperature=self.gkd.distill_temperature,
        )
        sums = self._overlap(student, batch, present_TK)  # before the gradient takes the place of the logits
        reading = student.read(question)
        logp_T = reading.picked_logp_T

        distill_T = self._distill(reading, batch, present_TK)
        loss_T = self.gkd.distill_loss_coef * batch.weights["distill"] * distill_T
        sums |= {
            "distill": (batch.weights["distill"] * distill_T).detach(),
            "kl": distill_T.detach() * batch.has_teacher_T,
            "entropy": reading.entropy_T,
        }
        if self.gkd.use_rl_loss:
            clip = {"clip_low": self.gkd.clip_ratio_low, "clip_high": self.gkd.clip_ratio_high}
            policy_T, clipped_T = grpo_loss(logp_T, batch.sampling_logps_T, batch.advantages_T, **clip)
            loss_T = loss_T + self.gkd.rl_loss_coef * batch.weights["pg"] * policy_T
            sums |= {"pg": (batch.weights["pg"] * policy_T).detach(), "clipped": clipped_T * ~batch.is_given_T}
        if self.gkd.sft_share:
            loss_T = loss_T - self.gkd.sft_loss_coef * batch.weights["sft"] * logp_T
            sums["sft"] = -(batch.weights["sft"] * logp_T).detach()
        sums |= self._diagnostics(reading, batch, present_TK, sums["kl"]) | {"loss": loss_T.detach()}
        return Losses(loss_T=loss_T, sums={name: value_T.sum(dtype=torch.float64) for name, value_T in sums.items()})

    def _distill(self, reading: Reading, batch: DeviceBatch, present_TK: Tensor) -> Tensor:
        """[T], arbitrary but finite where the teacher was not asked."""
        gkd, logp_T, teacher_logp_T = self.gkd, reading.picked_logp_T, batch.teacher_logps_T
        match gkd.distill_loss_type:
            case "k1":
                baseline_T = batch.baselines_T
                if gkd.baseline == "expected":
                    baseline_T = -reverse_kl(outcomes(reading.u_TB, batch.logps_TK, present_TK, "bucket")).detach()
                estimate_T = k1(logp_T, teacher_logp_T, baseline_T, batch.scales_T)
            case "k2":
                estimate_T = k2(logp_T, teacher_logp_T)
            case "k3":
                estimate_T = k3(logp_T, teacher_logp_T)
            case kind:
                divergence = Divergence(
                    kind=kind, tail=gkd.tail, beta=gkd.beta, rkl_ratio=gkd.rkl_ratio, skew_alpha=gkd.skew_alpha
                )
                return divergence(outcomes(reading.u_TB, batch.logps_TK, present_TK, gkd.tail)).to(logp_T.dtype)
        return estimate_T * importance_weights(logp_T, batch.sampling_logps_T, gkd.importance, gkd.importance_cap)

    @torch.no_grad()
    def _diagnostics(self, reading: Reading, batch: DeviceBatch, present_TK: Tensor, kl_T: Tensor) -> dict[str, Tensor]:
        both = outcomes(reading.u_TB, batch.logps_TK, present_TK, "bucket")
        asked_T, sampled_T = batch.has_teacher_T, ~batch.is_given_T
        capped_T = reading.picked_logp_T - batch.sampling_logps_T > math.log(self.gkd.importance_cap)
        found = {
            "teacher_topk_mass": both.p_TC[:, :-1].sum(1) * asked_T,
            "student_topk_mass": both.q_TC[:, :-1].sum(1) * asked_T,
            "teacher_tail_mass": both.p_TC[:, -1] * asked_T,
            "student_tail_mass": both.q_TC[:, -1] * asked_T,
            "teacher_entropy": entropy(both.p_TC) * asked_T,
            "above_cap": capped_T * sampled_T,
            "n_asked": asked_T,
            "n_sampled": sampled_T,
            "n_tokens": torch.ones_like(asked_T),
        }
        bucket_T = torch.bucketize(batch.positions_T, batch.positions_T.new_tensor(POSITION_BUCKETS), right=True) - 1
        for number, start in enumerate(POSITION_BUCKETS):
            there_T = asked_T & (bucket_T == number)
            found |= {f"kl_at_{start}": kl_T * there_T, f"n_at_{start}": there_T}
        return found

    def _overlap(self, student: Student, batch: DeviceBatch, present_TK: Tensor) -> dict[str, Tensor]:
        (rows_A,) = present_TK.any(1).nonzero(as_tuple=True)
        rows_R = rows_A[:: max(1, -(-len(rows_A) // OVERLAP_ROWS))]
        share_R = topk_overlap(
            student.logits(rows_R),
            batch.ids_TK[rows_R],
            present_TK[rows_R],
            vocab_size=self.vocab_size,
            tp_group=self.tp_group,
        )
        return {"overlap": share_R, "n_overlap": torch.ones_like(share_R)}


def names_of_sums(gkd: GkdConfig) -> tuple[str, ...]:
    """Of :attr:`Losses.sums`, in an order that every rank knows, also those that have no loss to compute."""
    parts = [*(["pg", "clipped"] if gkd.use_rl_loss else []), *(["sft"] if gkd.sft_share else [])]
    positions = [name for start in POSITION_BUCKETS for name in (f"kl_at_{start}", f"n_at_{start}")]
    tokens = [
        "loss",
        "distill",
        "kl",
        "entropy",
        "n_tokens",
        "n_asked",
        "n_sampled",
        "above_cap",
        "overlap",
        "n_overlap",
    ]
    masses = [f"{whose}_{what}" for whose in ("teacher", "student") for what in ("topk_mass", "tail_mass")]
    return (*tokens, *masses, "teacher_entropy", *parts, *positions)


def metrics(gkd: GkdConfig, sums: dict[str, float]) -> dict[str, float]:
    """What a dashboard shows of the sums over a global batch. See docs/objectives.md for each."""

    def mean(name: str, of: str) -> float:
        return sums[name] / max(sums[of], 1)

    found = {
        "actor/loss": mean("loss", "n_tokens"),
        "actor/kl_loss": mean("kl", "n_asked"),
        "actor/distill_loss": mean("distill", "n_tokens"),
        "actor/distill_coef": gkd.distill_loss_coef,
        "actor/entropy": mean("entropy", "n_tokens"),
        "actor/n_tokens": sums["n_tokens"],
        "actor/teacher_entropy": mean("teacher_entropy", "n_asked"),
        "actor/topk_overlap": mean("overlap", "n_overlap"),
        "actor/above_importance_cap": mean("above_cap", "n_sampled"),
    }
    for name in ("teacher_topk_mass", "student_topk_mass", "teacher_tail_mass", "student_tail_mass"):
        found[f"actor/{name}"] = mean(name, "n_asked")
    if gkd.use_rl_loss:
        found |= {"actor/pg_loss": mean("pg", "n_tokens"), "actor/pg_clipfrac": mean("clipped", "n_sampled")}
    if gkd.sft_share:
        found["actor/sft_loss"] = mean("sft", "n_tokens")
    for start in POSITION_BUCKETS:
        if sums[f"n_at_{start}"]:
            found[f"actor/kl_loss_at/{start}"] = mean(f"kl_at_{start}", f"n_at_{start}")
    return found

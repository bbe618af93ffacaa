"""The objective: a weighted sum of distillation, a policy loss on a reward, and cross-entropy on reference responses.

Shape suffixes: T response tokens of a micro-batch, K teacher top-k, B = K + 1 buckets (tail last), R positions of the
top-k overlap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.actor.device_batch import DeviceBatch
from recipe_gkd.actor.distillation import DistillationInputs, DistillationTerm
from recipe_gkd.actor.loss_metrics import POSITION_BUCKETS, sum_names
from recipe_gkd.config.conditions import uses_custom_loss
from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.losses.diagnostics import entropy, topk_overlap
from recipe_gkd.losses.distributions import bucketed_distributions, valid_entries
from recipe_gkd.losses.logits_query import LogitsQuery
from recipe_gkd.losses.policy import grpo_loss
from recipe_gkd.losses.rollout_mismatch import RolloutMismatch
from recipe_gkd.losses.student_output import Student


@dataclass(frozen=True, kw_only=True)
class MicroBatchLosses:
    """Loss and sums of one micro-batch, identical on every tensor-parallel rank.

    Attributes:
        loss_T: Weighted loss of each token. Its sum over the global batch, divided by the number of response tokens,
            is the objective.
        sums: Scalars by name, float64, to be summed over the global batch; see
            :mod:`~recipe_gkd.actor.loss_metrics`.
        maxima: Scalars by name, float64, whose maximum over the global batch is a metric.
    """

    loss_T: Tensor
    sums: dict[str, Tensor]
    maxima: dict[str, Tensor]


@dataclass(frozen=True, kw_only=True)
class Objective:
    """The objective of a configuration.

    Attributes:
        gkd: Configuration of the objective.
        vocab_size: Number of real ids. Ids from here on are padding of the output layer and have probability 0.
        tp_group: Group over which the vocabulary is sharded; None if it is whole.
        n_teachers: Number of teachers.
        cp_group: Group that divides the sequences; None if they are whole.
    """

    gkd: GkdConfig
    vocab_size: int
    tp_group: ProcessGroup | None
    n_teachers: int = 1
    cp_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        sum_names(self.gkd, ())  # imports the custom loss, so that a file missing on this node fails at set-up

    def __call__(self, student: Student, batch: DeviceBatch) -> MicroBatchLosses:
        """Return the loss of one micro-batch. Collective over ``tp_group``.

        Raises:
            ConfigError: The custom loss returned an invalid output, or the kernel backend cannot run here.
        """
        gkd = self.gkd
        valid_TK = valid_entries(batch.logps_TK, batch.ids_TK, self.vocab_size)
        sums = self._overlap(student, batch, valid_TK)  # before the gradient overwrites the logits
        inputs = self._read_student(student, batch, valid_TK)
        logp_T = inputs.stats.sampled_logp_T

        distill = self._distill(inputs)
        weighted_T = batch.weights["distill"] * distill.loss_T
        loss_T = gkd.distill_loss_coef * weighted_T
        values = {"distill": weighted_T, "kl": distill.loss_T * batch.has_teacher_T}
        values |= {f"custom/{name}": value_T * batch.has_teacher_T for name, value_T in distill.metrics.items()}
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
            values |= {"pg": batch.weights["pg"] * policy_T, "clipped": clipped_T * ~batch.is_reference_T}
        if gkd.sft_share:
            loss_T = loss_T - gkd.sft_loss_coef * batch.weights["sft"] * logp_T
            values["sft"] = -batch.weights["sft"] * logp_T
        values |= {"loss": loss_T} | self._differences(inputs, values["kl"])
        mismatch = RolloutMismatch.of(logp_T, batch.sampling_logps_T, ~batch.is_reference_T, batch.is_current_T)
        values |= {
            "rollout_probs_diff": mismatch.probs_diff_T,
            "rollout_kl": mismatch.kl_T,
            "rollout_kl_capped": mismatch.kl_capped_T,
            "rollout_current_diff": mismatch.current_diff_T,
            "n_current": batch.is_current_T,
        }
        sums |= _sums(values)
        maxima = {"actor/rollout_probs_diff_max": mismatch.max_probs_diff()}
        return MicroBatchLosses(loss_T=loss_T, sums=sums, maxima=maxima)

    @cached_property
    def _distill(self) -> DistillationTerm:
        return DistillationTerm(self.gkd, self.cp_group)

    def _read_student(self, student: Student, batch: DeviceBatch, valid_TK: Tensor) -> DistillationInputs:
        query = LogitsQuery(
            ids_TK=batch.ids_TK,
            valid_TK=valid_TK,
            sampled_T=batch.response_ids_T,
            vocab_size=self.vocab_size,
            temperature=self.gkd.distill_temperature,
            entropy_has_gradient=uses_custom_loss(self.gkd),
        )
        stats = student.compute_log_stats(query, kernel_backend=self.gkd.kernel_backend)
        buckets = bucketed_distributions(stats.log_mass_TB, batch.logps_TK, valid_TK, "bucket")
        return DistillationInputs(batch=batch, stats=stats, buckets=buckets, valid_TK=valid_TK)

    @torch.no_grad()
    def _differences(self, inputs: DistillationInputs, kl_T: Tensor) -> dict[str, Tensor]:
        """Return measures of the difference between student and teacher, [T] by name; 0 for other tokens."""
        batch, stats, buckets = inputs.batch, inputs.stats, inputs.buckets
        scored_T, sampled_T = batch.has_teacher_T, ~batch.is_reference_T
        p_TB, q_TB = buckets.p_TC, buckets.q_TC
        above_cap_T = stats.sampled_logp_T - batch.sampling_logps_T > math.log(self.gkd.importance_cap)
        values = {
            "teacher_topk_mass": p_TB[:, :-1].sum(1) * scored_T,
            "student_topk_mass": q_TB[:, :-1].sum(1) * scored_T,
            "teacher_tail_mass": p_TB[:, -1] * scored_T,
            "student_tail_mass": q_TB[:, -1] * scored_T,
            "teacher_topk_entropy": entropy(p_TB) * scored_T,
            "student_topk_entropy": entropy(q_TB) * scored_T,
            "entropy": stats.entropy_T * sampled_T,
            "above_cap": above_cap_T * sampled_T,
            "n_scored": scored_T,
            "n_sampled": sampled_T,
            "n_tokens": torch.ones_like(scored_T),
        }
        for number, start in enumerate(POSITION_BUCKETS):
            in_bucket_T = scored_T & (batch.position_buckets_T == number)
            values |= {f"kl_at_{start}": kl_T * in_bucket_T, f"n_at_{start}": in_bucket_T}
        for number in range(self.n_teachers):
            by_teacher_T = scored_T & (batch.teacher_numbers_T == number)
            values |= {f"kl_of_{number}": kl_T * by_teacher_T, f"n_of_{number}": by_teacher_T}
        return values

    def _overlap(self, student: Student, batch: DeviceBatch, valid_TK: Tensor) -> dict[str, Tensor]:
        rows_R = batch.overlap_rows_R
        fraction_R = topk_overlap(
            student.logits(rows_R),
            batch.ids_TK[rows_R],
            valid_TK[rows_R],
            vocab_size=self.vocab_size,
            tp_group=self.tp_group,
        )
        return {
            "overlap": fraction_R.nansum(dtype=torch.float64),
            "n_overlap": (~fraction_R.isnan()).sum(dtype=torch.float64),
        }


@torch.no_grad()
def _sums(values: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the sum of each [T], float64. One stack and one sum are faster than a sum of each."""
    return dict(zip(values, torch.stack(list(values.values())).sum(1, dtype=torch.float64), strict=True))

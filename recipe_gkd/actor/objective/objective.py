"""The objective: a weighted sum of distillation, a policy loss on a reward, and cross-entropy on reference responses.

Shape suffixes: T response tokens of a micro-batch, K teacher top-k, B = K + 1 buckets (tail last), R positions of the
top-k overlap.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.actor.batch.device_batch import DeviceBatch
from recipe_gkd.actor.objective.distillation import DistillationInputs, DistillationTerm
from recipe_gkd.actor.objective.loss_metrics import OVERLAP, POSITION_WEIGHT, TokenValues, sum_tokens, token_means
from recipe_gkd.config.conditions import trains_on_references, uses_custom_loss
from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.losses.diagnostics import topk_overlap
from recipe_gkd.losses.distributions import bucketed_distributions, valid_entries
from recipe_gkd.losses.logits_query import LogitsQuery
from recipe_gkd.losses.policy import grpo_loss
from recipe_gkd.losses.rollout_mismatch import RolloutMismatch
from recipe_gkd.losses.student_output import StudentOutput


@dataclass(frozen=True, kw_only=True)
class MicroBatchLosses:
    """Loss and sums of one micro-batch, identical on every tensor-parallel rank.

    Attributes:
        loss_T: Weighted loss of each token. Its sum over the global batch, divided by the number of response tokens,
            is the objective.
        sums: Scalars by name, float64, to be summed over the global batch; see
            :mod:`~recipe_gkd.actor.objective.loss_metrics`.
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
        teachers: Names of the teachers, by number.
        cp_group: Group that divides the sequences; None if they are whole.
    """

    gkd: GkdConfig
    vocab_size: int
    tp_group: ProcessGroup | None
    teachers: Sequence[str] = ("default",)
    cp_group: ProcessGroup | None = None

    def __post_init__(self) -> None:
        token_means(self.gkd, self.teachers)  # imports the custom loss: a file that this node lacks fails at set-up

    def __call__(self, student: StudentOutput, batch: DeviceBatch) -> MicroBatchLosses:
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
        losses = {"kl": distill.loss_T, "distill": batch.weights["distill"] * distill.loss_T}
        if (position_T := self._distill.position_weights(inputs)) is not None:
            losses |= {POSITION_WEIGHT: position_T, "distill": losses["distill"] * position_T}
        losses |= {f"custom/{name}": value_T for name, value_T in distill.metrics.items()}
        loss_T = gkd.distill_loss_coef * losses["distill"]
        if gkd.use_rl_loss:
            policy_T, losses["clipped"] = grpo_loss(
                logp_T,
                batch.sampling_logps_T,
                batch.advantages_T,
                clip_low=gkd.clip_ratio_low,
                clip_high=gkd.clip_ratio_high,
                clip_c=gkd.clip_ratio_c,
            )
            losses["pg"] = batch.weights["pg"] * policy_T
            loss_T = loss_T + gkd.rl_loss_coef * losses["pg"]
        if trains_on_references(gkd):
            losses["sft"] = -batch.weights["sft"] * logp_T
            loss_T = loss_T + gkd.sft_loss_coef * losses["sft"]
        losses["total"] = loss_T
        mismatch = RolloutMismatch.of(logp_T, batch.sampling_logps_T, ~batch.is_reference_T, batch.is_current_T)
        values = TokenValues(batch=batch, stats=inputs.stats, buckets=inputs.buckets, mismatch=mismatch, losses=losses)
        sums |= sum_tokens(token_means(gkd, self.teachers), values)
        maxima = {"actor/rollout_probs_diff_max": mismatch.max_probs_diff()}
        return MicroBatchLosses(loss_T=loss_T, sums=sums, maxima=maxima)

    @cached_property
    def _distill(self) -> DistillationTerm:
        return DistillationTerm(self.gkd, self.cp_group)

    def _read_student(self, student: StudentOutput, batch: DeviceBatch, valid_TK: Tensor) -> DistillationInputs:
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

    def _overlap(self, student: StudentOutput, batch: DeviceBatch, valid_TK: Tensor) -> dict[str, Tensor]:
        rows_R = batch.overlap_rows_R
        fraction_R = topk_overlap(
            student.logits(rows_R),
            batch.ids_TK[rows_R],
            valid_TK[rows_R],
            vocab_size=self.vocab_size,
            tp_group=self.tp_group,
        )
        total, number = fraction_R.nansum(dtype=torch.float64), (~fraction_R.isnan()).sum(dtype=torch.float64)
        return dict(zip(OVERLAP, (total, number), strict=True))

"""The distillation term of the objective, as the configuration selects it.

Shape suffixes: T response tokens of a micro-batch, K teacher top-k, B = K + 1 buckets (tail last).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.actor.batch import token_fields
from recipe_gkd.actor.batch.device_batch import DeviceBatch
from recipe_gkd.actor.objective.context_tokens import ContextTokens
from recipe_gkd.config.conditions import has_position_weights, uses_custom_loss, uses_sampled_token_loss
from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.losses.custom import LossInputs, load_custom_loss
from recipe_gkd.losses.distributions import BucketedDistributions, bucketed_distributions
from recipe_gkd.losses.divergences import reverse_kl
from recipe_gkd.losses.logits_query import StudentLogStats
from recipe_gkd.losses.position_weights import load_position_weights
from recipe_gkd.losses.registry import get_divergence, get_sampled_token_loss
from recipe_gkd.losses.sampled_token import importance_weights


@dataclass(frozen=True, kw_only=True)
class DistillationInputs:
    """Student and teacher at the response tokens of a micro-batch.

    Attributes:
        batch: Micro-batch.
        stats: Student's statistics.
        buckets: Student and teacher on the support and the tail.
        valid_TK: Valid entries of the support, bool.
    """

    batch: DeviceBatch
    stats: StudentLogStats
    buckets: BucketedDistributions
    valid_TK: Tensor


@dataclass(frozen=True, kw_only=True)
class DistillationLoss:
    """Loss of each token, finite but arbitrary at tokens that no teacher scored.

    Attributes:
        loss_T: Loss, with gradient.
        metrics: Metrics of a custom loss, [T] by name.
    """

    loss_T: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class DistillationTerm:
    """The distillation loss of a configuration: a divergence, a loss on the sampled token, or a custom loss.

    Attributes:
        gkd: Configuration of the objective.
        cp_group: Context-parallel group; None if this rank has all tokens of each response.
    """

    gkd: GkdConfig
    cp_group: ProcessGroup | None = None

    def __call__(self, inputs: DistillationInputs) -> DistillationLoss:
        """Return the loss of each token.

        Raises:
            ConfigError: An output of the custom loss is invalid.
        """
        if uses_custom_loss(self.gkd):
            return self._custom_loss(inputs)
        if uses_sampled_token_loss(self.gkd):
            return DistillationLoss(loss_T=self._sampled_token_loss(inputs))
        return DistillationLoss(loss_T=self._divergence_loss(inputs))

    def position_weights(self, inputs: DistillationInputs) -> Tensor | None:
        """Return the weight of each token from the data and the user's function, [T]. None if the run has no weights.

        Raises:
            CustomLossError: A weight of the function is invalid.
        """
        gkd = self.gkd
        if not has_position_weights(gkd):
            return None
        weights_T = torch.ones_like(inputs.stats.sampled_logp_T)
        if gkd.position_weights_key is not None:
            weights_T = weights_T * inputs.batch.data_weights_T
        if gkd.position_weights is not None:
            values, uids_T, own_T = self._of_whole_responses(inputs)
            if values.n_tokens:
                weights_T = weights_T * load_position_weights(gkd.position_weights)(values, uids_T=uids_T)[own_T]
        return weights_T

    def _divergence_loss(self, inputs: DistillationInputs) -> Tensor:
        buckets, stats = inputs.buckets, inputs.stats
        if self.gkd.tail != "bucket":
            buckets = bucketed_distributions(stats.log_mass_TB, inputs.batch.logps_TK, inputs.valid_TK, self.gkd.tail)
        loss_T: Tensor = get_divergence(self.gkd.distill_loss_type)(buckets, values=vars(self.gkd))
        if self.gkd.token_clip is not None:  # A bound of each outcome's term could invert the gradient.
            loss_T = loss_T.clamp(max=self.gkd.token_clip)
        return loss_T.to(stats.sampled_logp_T.dtype)

    def _sampled_token_loss(self, inputs: DistillationInputs) -> Tensor:
        gkd, batch, logp_T = self.gkd, inputs.batch, inputs.stats.sampled_logp_T
        loss = get_sampled_token_loss(gkd.distill_loss_type)
        uses_expected = "baseline_T" in loss.parameters and gkd.baseline == "expected"
        baseline_T = -reverse_kl(inputs.buckets).detach() if uses_expected else batch.baselines_T
        loss_T = loss(
            logp_T, batch.teacher_sampled_logps_T, values={"baseline_T": baseline_T, "scale_T": batch.scales_T}
        )
        weights_T = importance_weights(logp_T, batch.sampling_logps_T, gkd.importance, gkd.importance_cap)
        return loss_T * weights_T

    def _custom_loss(self, inputs: DistillationInputs) -> DistillationLoss:
        path, name = self.gkd.custom_loss.path, self.gkd.custom_loss.name
        assert path is not None and name is not None  # validated with the configuration
        loss = load_custom_loss(path, name)
        logp_T, (values, uids_T, own_T) = inputs.stats.sampled_logp_T, self._of_whole_responses(inputs)
        if not values.n_tokens:  # an empty micro-batch fills up the schedule; user code need not support it
            return DistillationLoss(loss_T=logp_T, metrics=dict.fromkeys(loss.metric_names, logp_T))
        outputs = loss(values, uids_T=uids_T)
        metrics = {name: value_T[own_T] for name, value_T in outputs.metrics.items()}
        return DistillationLoss(loss_T=outputs.loss_T[own_T].to(logp_T.dtype), metrics=metrics)

    def _of_whole_responses(self, inputs: DistillationInputs) -> tuple[LossInputs, Tensor, Tensor | slice]:
        """Return the inputs of a user's function, which may combine the tokens of a response. Collective.

        Returns:
            Inputs of the tokens of all context ranks, the uids of their samples, and the tokens of this rank.
        """
        values, uids_T = loss_inputs(inputs), inputs.batch.uids_T
        if self.cp_group is None:
            return values, uids_T, slice(None)
        tokens = ContextTokens.of(values.sequence_T, values.positions_T, self.cp_group)
        return _gather_inputs(values, tokens), tokens.gather(uids_T), tokens.own_T


def _gather_inputs(values: LossInputs, tokens: ContextTokens) -> LossInputs:
    """Return the inputs of all context ranks, one response after the other. Collective."""
    names = [field.name for field in dataclasses.fields(values)]
    return LossInputs(**{name: tokens.gather(getattr(values, name)) for name in names})


def loss_inputs(inputs: DistillationInputs) -> LossInputs:
    """Return the inputs of a custom loss, for the tokens of this rank."""
    batch, stats, buckets = inputs.batch, inputs.stats, inputs.buckets
    names = {one.name for one in dataclasses.fields(LossInputs)}
    of_batch = {name: getattr(batch, name) for name in token_fields.NAMES if name in names}
    has_reward_T = ~batch.rewards_T.isnan()
    return LossInputs(
        student_logps_TB=buckets.log_q_TC,
        student_sampled_logps_T=stats.sampled_logp_T,
        student_entropy_T=stats.entropy_T,
        teacher_logps_TB=buckets.log_p_TC,
        teacher_probs_TB=buckets.p_TC,
        teacher_ids_TK=torch.where(inputs.valid_TK, batch.ids_TK, -1),
        valid_TB=buckets.valid_TC,
        has_reward_T=has_reward_T,
        **of_batch | {"rewards_T": batch.rewards_T.where(has_reward_T, 0)},
    )

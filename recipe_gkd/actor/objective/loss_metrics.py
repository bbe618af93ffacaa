"""Metrics of an update: means of token values over the global batch, and maxima over it.

A metric is declared here and nowhere else, as a :class:`TokenMean`: its name, its value at each token, and the tokens
that it is a mean over. The ranks add up numerators and denominators (:func:`sum_names`), so that the metric does not
depend on micro-batches or ranks. ``docs/objectives.md`` explains the metrics.

Shape suffixes: T response tokens of a micro-batch, B = K + 1 buckets (tail last).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from recipe_gkd.actor.batch.device_batch import DeviceBatch
from recipe_gkd.actor.batch.position_buckets import POSITION_BUCKETS
from recipe_gkd.config.conditions import (
    distills_references,
    has_position_weights,
    trains_on_references,
    uses_custom_loss,
    uses_sampled_token_loss,
)
from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.errors import ConfigError
from recipe_gkd.losses.custom import load_custom_loss
from recipe_gkd.losses.diagnostics import entropy
from recipe_gkd.losses.distributions import BucketedDistributions
from recipe_gkd.losses.logits_query import StudentLogStats
from recipe_gkd.losses.position_weights import load_position_weights
from recipe_gkd.losses.rollout_mismatch import RolloutMismatch

MAXIMA = ("actor/rollout_probs_diff_max",)
"""Metrics that are maxima over the sampled tokens of the global batch, all at least 0."""
OVERLAP = ("actor/topk_overlap", "n_overlap")
"""Numerator and denominator of the only mean over a selection of rows. The objective computes it first, because the
gradient overwrites the logits."""
ROUTING = ("actor/routing_agreement", "n_routed")
"""Numerator and denominator of the mean over choices of experts, which each rank counts in its own layers."""

POSITION_WEIGHT = "position_weight"
"""Name of the weights of tokens among the losses of a micro-batch."""

# Metrics of an update that are no means.
OTHER_METRICS = (
    "actor/n_tokens",
    "actor/distill_coef",
    "actor/grad_norm",
    "actor/lr",
    "actor/micro_batches",
    "actor/oom_splits",
    "actor/max_token_len",
    OVERLAP[0],
    ROUTING[0],
    *MAXIMA,
)


@dataclass(frozen=True, kw_only=True)
class TokenValues:
    """Values of the response tokens of a micro-batch from which metrics are computed.

    Attributes:
        batch: Micro-batch.
        stats: Student's statistics.
        buckets: Student and teacher on the support and the tail.
        mismatch: Difference between the rollout engine and the trainer.
        losses: Loss of each token by term, [T]: ``total``, ``kl`` (the distillation loss without weight), ``distill``,
            ``pg``, ``sft`` (weighted), ``clipped`` (bool), ``custom/<name>`` of a custom loss, and
            :data:`POSITION_WEIGHT`.
    """

    batch: DeviceBatch
    stats: StudentLogStats
    buckets: BucketedDistributions
    mismatch: RolloutMismatch
    losses: dict[str, Tensor]


@dataclass(frozen=True)
class Tokens:
    """Tokens that a metric is a mean over.

    Attributes:
        name: Name of their number among the sums.
        mask: Function that returns True for these tokens, [T].
    """

    name: str
    mask: Callable[[DeviceBatch], Tensor]


@dataclass(frozen=True)
class TokenMean:
    """A metric.

    Attributes:
        over: Tokens of the mean.
        value: Function that returns the value at each token, [T].
        needs: Tokens without which there is no metric. A term of the objective is a mean over all tokens, but only some
            of them have it.
    """

    name: str
    over: Tokens
    value: Callable[[TokenValues], Tensor]
    needs: Tokens | None = None

    @property
    def counted(self) -> tuple[Tokens, ...]:
        """Tokens whose number the metric needs."""
        return (self.over,) if self.needs is None else (self.over, self.needs)


ALL = Tokens("n_tokens", lambda batch: torch.ones_like(batch.has_teacher_T))
SCORED = Tokens("n_scored", lambda batch: batch.has_teacher_T)
SAMPLED = Tokens("n_sampled", lambda batch: ~batch.is_reference_T)
REFERENCE = Tokens("n_reference", lambda batch: batch.is_reference_T)
CURRENT = Tokens("n_current", lambda batch: batch.is_current_T)

_MEANS = (
    TokenMean("actor/loss", ALL, lambda values: values.losses["total"]),
    TokenMean("actor/kl_loss", SCORED, lambda values: values.losses["kl"]),
    TokenMean("actor/distill_loss", ALL, lambda values: values.losses["distill"], SCORED),
    TokenMean("actor/entropy", SAMPLED, lambda values: values.stats.entropy_T),
    TokenMean("actor/rollout_probs_diff_mean", SAMPLED, lambda values: values.mismatch.probs_diff_T),
    TokenMean("actor/rollout_kl", SAMPLED, lambda values: values.mismatch.kl_T),
    TokenMean("actor/rollout_kl_capped", SAMPLED, lambda values: values.mismatch.kl_capped_T),
    TokenMean("actor/rollout_log_prob_diff", CURRENT, lambda values: values.mismatch.current_diff_T),
    TokenMean("actor/teacher_topk_mass", SCORED, lambda values: values.buckets.p_TC[:, :-1].sum(1)),
    TokenMean("actor/student_topk_mass", SCORED, lambda values: values.buckets.q_TC[:, :-1].sum(1)),
    TokenMean("actor/teacher_tail_mass", SCORED, lambda values: values.buckets.p_TC[:, -1]),
    TokenMean("actor/student_tail_mass", SCORED, lambda values: values.buckets.q_TC[:, -1]),
    TokenMean("actor/teacher_topk_entropy", SCORED, lambda values: entropy(values.buckets.p_TC)),
    TokenMean("actor/student_topk_entropy", SCORED, lambda values: entropy(values.buckets.q_TC)),
)
_POLICY_MEANS = (
    TokenMean("actor/pg_loss", ALL, lambda values: values.losses["pg"], SAMPLED),
    TokenMean("actor/pg_clipfrac", SAMPLED, lambda values: values.losses["clipped"]),
)
_REFERENCE_MEANS = (TokenMean("actor/sft_loss", ALL, lambda values: values.losses["sft"], REFERENCE),)


def _clipped(token_clip: float) -> TokenMean:
    return TokenMean("actor/kl_clipfrac", SCORED, lambda values: values.losses["kl"] >= token_clip)


def token_means(gkd: GkdConfig, teachers: Sequence[str]) -> list[TokenMean]:
    """Return the metrics of a configuration.

    Args:
        gkd: Configuration of the objective.
        teachers: Names of the teachers, by number.

    Raises:
        ConfigError: A metric of the custom loss has the name of another metric.
    """
    found = [*_MEANS, _above_cap(gkd.importance_cap)]
    if gkd.token_clip is not None and not (uses_custom_loss(gkd) or uses_sampled_token_loss(gkd)):
        found.append(_clipped(gkd.token_clip))
    if has_position_weights(gkd):
        if gkd.position_weights is not None:
            load_position_weights(gkd.position_weights)  # a file that this node lacks fails here
        found.append(TokenMean("actor/position_weight", SCORED, lambda values: values.losses[POSITION_WEIGHT]))
    found += [*_POLICY_MEANS] if gkd.use_rl_loss else []
    found += [*_REFERENCE_MEANS] if trains_on_references(gkd) and not distills_references(gkd) else []
    found += [_kl_of_teacher(number, name) for number, name in enumerate(teachers)]
    found += [_kl_at(number) for number in range(len(POSITION_BUCKETS))]
    return [*found, *_custom_means(gkd, reserved={*(mean.name for mean in found), *OTHER_METRICS})]


def _above_cap(cap: float) -> TokenMean:
    def is_above_T(values: TokenValues) -> Tensor:
        return values.stats.sampled_logp_T - values.batch.sampling_logps_T > math.log(cap)

    return TokenMean("actor/above_importance_cap", SAMPLED, is_above_T)


def _kl_of_teacher(number: int, name: str) -> TokenMean:
    tokens = Tokens(f"n_of_{number}", lambda batch: batch.has_teacher_T & (batch.teacher_numbers_T == number))
    return TokenMean(f"teacher/{name}/kl_loss", tokens, lambda values: values.losses["kl"])


def _kl_at(number: int) -> TokenMean:
    tokens = Tokens(f"n_at_{number}", lambda batch: batch.has_teacher_T & (batch.position_buckets_T == number))
    return TokenMean(f"actor/kl_loss_at/{POSITION_BUCKETS[number]}", tokens, lambda values: values.losses["kl"])


def _custom_means(gkd: GkdConfig, reserved: set[str]) -> Iterator[TokenMean]:
    if gkd.custom_loss.path is None or gkd.custom_loss.name is None:
        return
    loss = load_custom_loss(gkd.custom_loss.path, gkd.custom_loss.name)
    if taken := sorted(reserved & {f"actor/{name}" for name in loss.metric_names}):
        raise ConfigError(
            f"{loss.label} returned metrics whose names are in use: {', '.join(taken)}",
            remedy="rename them",
            keys=("gkd.custom_loss",),
        )
    for name in loss.metric_names:
        yield TokenMean(f"actor/{name}", SCORED, partial(_custom_value, name))


def _custom_value(name: str, values: TokenValues) -> Tensor:
    return values.losses[f"custom/{name}"]


@torch.no_grad()
def sum_tokens(means: Sequence[TokenMean], values: TokenValues) -> dict[str, Tensor]:
    """Return numerators and denominators of the metrics of one micro-batch, float64, by name."""
    masks = {tokens.name: tokens.mask(values.batch) for mean in means for tokens in mean.counted}
    found = {mean.name: mean.value(values) * masks[mean.over.name] for mean in means} | masks
    # One stack and one sum are faster than a sum of each.
    return dict(zip(found, torch.stack(list(found.values())).sum(1, dtype=torch.float64), strict=True))


def sum_names(gkd: GkdConfig, teachers: Sequence[str]) -> list[str]:
    """Return the names of all sums of a micro-batch, in the same order on every rank."""
    means = token_means(gkd, teachers)
    counted = {tokens.name for mean in means for tokens in mean.counted}
    return sorted({*counted, *(mean.name for mean in means), *OVERLAP})


def compute_loss_metrics(
    gkd: GkdConfig, teachers: Sequence[str], sums: dict[str, float], maxima: dict[str, float]
) -> dict[str, float]:
    """Return the metrics of an update. A mean or maximum over no tokens is omitted.

    Args:
        gkd: Configuration of the objective.
        teachers: Names of the teachers, by number.
        sums: Sums over the global batch, by name. Those of ``ROUTING`` may be missing.
        maxima: Maxima over the global batch or the ranks, by name.
    """
    found = {name: value for name, value in maxima.items() if name not in MAXIMA or sums["n_sampled"]}
    means = [mean for mean in token_means(gkd, teachers) if mean.needs is None or sums[mean.needs.name]]
    quotients = {mean.name: mean.over.name for mean in means} | dict([OVERLAP, ROUTING])
    found |= {name: sums[name] / sums[number] for name, number in quotients.items() if sums.get(number)}
    return found | {"actor/n_tokens": sums["n_tokens"], "actor/distill_coef": gkd.distill_loss_coef}

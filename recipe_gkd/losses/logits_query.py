"""Records between a loss and the logits: the query, the student's statistics, and the gradient to write.

Shape suffixes: T positions, W = V / tp vocabulary columns of one rank, K support ids, B = K + 1 buckets (tail last),
H softmaxes.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LogitsQuery:
    """Statistics that a loss requests at each position. Identical on every rank of a tensor-parallel group.

    Attributes:
        ids_TK: Support, global token ids, int64. Each id has its own bucket. Valid ids of one row are distinct.
        valid_TK: True for the entries of ``ids_TK`` that exist, bool. A valid id is in [0, vocab_size). All other ids
            of the vocabulary form the tail.
        sampled_T: Sampled token, int64, inside or outside the support. An id of the padding has probability 0
            and no gradient.
        vocab_size: Number of real ids. Columns from here on are padding and have probability 0.
        temperature: Temperature of the buckets. The sampled token and the entropy are at temperature 1.
        entropy_has_gradient: True if a loss differentiates ``StudentLogStats.entropy_T``.
    """

    ids_TK: Tensor
    valid_TK: Tensor
    sampled_T: Tensor
    vocab_size: int
    temperature: float = 1.0
    entropy_has_gradient: bool = False


@dataclass(frozen=True, kw_only=True)
class StudentLogStats:
    """Statistics of the student's distributions. Identical on every rank; float32, or float64 for float64 logits.

    The tail is a logsumexp over its own ids. The form 1 - sum(q) would lose all digits once the support holds nearly
    all of the mass.

    Attributes:
        log_mass_TB: Log mass of each bucket at the query's temperature, up to one constant per row; -inf for an
            invalid bucket. ``log_mass_TB.log_softmax(1)`` is the student's log-probability of each bucket.
            Differentiable.
        sampled_logp_T: Log-probability of the sampled token under the whole distribution. Differentiable.
        entropy_T: Entropy of the whole distribution, in nats. Differentiable if the query requests it.
    """

    log_mass_TB: Tensor
    sampled_logp_T: Tensor
    entropy_T: Tensor


@dataclass(frozen=True, kw_only=True)
class SoftmaxSpec:
    """A softmax over the vocabulary columns of one rank: its support and its temperature.

    Attributes:
        columns_TK: Columns of the support ids in this rank's shard, int64, in [0, W).
        is_local_TK: True for valid ids in this rank's shard, bool. The other entries of ``columns_TK`` are 0.
        real_columns: Number of columns that are not padding.
        inverse_temperature: 1 / temperature.
    """

    columns_TK: Tensor
    is_local_TK: Tensor
    real_columns: int
    inverse_temperature: float

    def rows(self, part: slice) -> SoftmaxSpec:
        """Return the same softmax at a slice of the positions."""
        return SoftmaxSpec(
            columns_TK=self.columns_TK[part],
            is_local_TK=self.is_local_TK[part],
            real_columns=self.real_columns,
            inverse_temperature=self.inverse_temperature,
        )


@dataclass(frozen=True, kw_only=True)
class GradientSpec:
    """Coefficients of the gradient in the logits.

    With ``x_h = (logit - max_h) / temperature_h`` the gradient in a logit is the sum of these terms:

    - for each softmax h, off its support: ``exp(x_h) * (grad_tail_h + grad_slope_h * x_h) / temperature_h``;
    - on the support of the first softmax: ``grad_support``;
    - at the sampled token: ``grad_sampled``.

    It is 0 in the padding.

    Attributes:
        softmaxes: One or two softmaxes. Only the first has a support.
        max_TH: Largest logit of each tail over all ranks, not divided by the temperature. Finite for an empty tail.
        grad_tail_TH: Coefficient of ``exp(x)``.
        grad_slope_TH: Coefficient of ``x exp(x)``; None if the entropy has no gradient.
        grad_support_TK: Gradient at the support ids; 0 for an id of another rank.
        sampled_columns_T1: Column of the sampled token; 0 for an id of another rank.
        grad_sampled_T1: Gradient at the sampled token; 0 for an id of another rank.
    """

    softmaxes: list[SoftmaxSpec]
    max_TH: Tensor
    grad_tail_TH: Tensor
    grad_slope_TH: Tensor | None
    grad_support_TK: Tensor
    sampled_columns_T1: Tensor
    grad_sampled_T1: Tensor

    def rows(self, part: slice) -> GradientSpec:
        """Return the coefficients at a slice of the positions."""
        return GradientSpec(
            softmaxes=[softmax.rows(part) for softmax in self.softmaxes],
            max_TH=self.max_TH[part],
            grad_tail_TH=self.grad_tail_TH[part],
            grad_slope_TH=None if self.grad_slope_TH is None else self.grad_slope_TH[part],
            grad_support_TK=self.grad_support_TK[part],
            sampled_columns_T1=self.sampled_columns_T1[part],
            grad_sampled_T1=self.grad_sampled_T1[part],
        )


def local_columns(ids: Tensor, valid: Tensor, first_column: int, width: int) -> tuple[Tensor, Tensor]:
    """Return the columns of global ids in one rank's shard.

    Args:
        ids: Global token ids, int64, any shape.
        valid: True for the ids that exist, bool, the same shape.
        first_column: Global id of the shard's first column.
        width: Number of columns of the shard.

    Returns:
        Columns (0 for ids of other ranks) and a bool mask of the ids in this shard.
    """
    is_local = valid & (ids >= first_column) & (ids < first_column + width)
    return (ids - first_column).where(is_local, 0), is_local


def softmax_specs(query: LogitsQuery, first_column: int, width: int) -> list[SoftmaxSpec]:
    """Return the softmaxes that a query needs on one rank.

    The first has the buckets. At a temperature other than 1 the second has the whole vocabulary at temperature 1, for
    the sampled token and the entropy.
    """
    real_columns = min(max(query.vocab_size - first_column, 0), width)
    columns_TK, is_local_TK = local_columns(query.ids_TK, query.valid_TK, first_column, width)
    buckets = SoftmaxSpec(
        columns_TK=columns_TK,
        is_local_TK=is_local_TK,
        real_columns=real_columns,
        inverse_temperature=1 / query.temperature,
    )
    if query.temperature == 1:
        return [buckets]
    whole = SoftmaxSpec(
        columns_TK=columns_TK[:, :0], is_local_TK=is_local_TK[:, :0], real_columns=real_columns, inverse_temperature=1.0
    )
    return [buckets, whole]

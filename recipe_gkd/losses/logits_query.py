"""What a loss asks of the student at each position, and what it is told: it depends on the logits only through that.

Axis names: T positions, V vocabulary, W = V / tp columns of one rank, K support ids, B = K + 1 buckets, the tail last.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class LogitsQuery:
    """The same on every rank of a tensor-parallel group."""

    ids_TK: Tensor
    """int64, global: the buckets of one id each. Those present in one row are distinct."""
    valid_TK: Tensor
    """bool: which of them are there; all other ids are the tail. A present id is in [0, vocab_size)."""
    sampled_T: Tensor
    """int64: one id at each position (the sampled token), in the support or not."""
    vocab_size: int
    """Columns from here on are padding, and belong to no distribution."""
    temperature: float = 1.0
    """Of the buckets; the picked id's logprob is always at temperature 1."""


@dataclass(frozen=True, kw_only=True)
class StudentLogStats:
    """The same on every rank. float32, or float64 for float64 logits."""

    log_mass_TB: Tensor
    """Log masses of the buckets at the temperature, up to a constant of the row; -inf for a bucket that is not there.
    ``log_mass_TB.log_softmax(1)`` are the student's log-probabilities of the buckets. Differentiable in the logits.

    The tail is a logsumexp over its own ids, never 1 - sum(q), of which no digit is right once the support holds nearly
    all of the mass."""
    sampled_logp_T: Tensor
    """Of the picked ids, under the whole distribution at temperature 1. Differentiable in the logits."""
    entropy_T: Tensor
    """Of the whole distribution at temperature 1, in nats. Detached."""


@dataclass(frozen=True, kw_only=True)
class SoftmaxSpec:
    """Buckets in the columns of one rank, and the temperature at which they are read."""

    columns_TK: Tensor
    """int64, in [0, W)."""
    own_TK: Tensor
    """bool: the entries that are present and among this rank's columns; the others point at column 0."""
    real_columns: int
    """Columns from here on are padding."""
    inverse_temperature: float

    def rows(self, part: slice) -> SoftmaxSpec:
        return SoftmaxSpec(
            columns_TK=self.columns_TK[part],
            own_TK=self.own_TK[part],
            real_columns=self.real_columns,
            inverse_temperature=self.inverse_temperature,
        )


@dataclass(frozen=True, kw_only=True)
class Backward:
    """What the gradient in the logits is made of: at each position the sum over heads of

    grad_tail exp((logit - top) / temperature) / temperature off the head's support, ``grad_support_TK`` on the support
    of the first head, and ``grad_picked_T1`` at the picked column; 0 in the padding.
    """

    softmaxes: list[SoftmaxSpec]
    top_TH: Tensor
    """Largest logit of the tail on all ranks, not divided by the temperature. Finite, also where there is no tail."""
    grad_tail_TH: Tensor
    grad_support_TK: Tensor
    """0 where another rank has the id, as the next but one."""
    picked_columns_T1: Tensor
    grad_picked_T1: Tensor

    def rows(self, part: slice) -> Backward:
        return Backward(
            softmaxes=[head.rows(part) for head in self.softmaxes],
            top_TH=self.top_TH[part],
            grad_tail_TH=self.grad_tail_TH[part],
            grad_support_TK=self.grad_support_TK[part],
            picked_columns_T1=self.picked_columns_T1[part],
            grad_picked_T1=self.grad_picked_T1[part],
        )


def local_columns(ids: Tensor, present: Tensor, first_column: int, width: int) -> tuple[Tensor, Tensor]:
    """Columns of the ids, and which of them this rank has."""
    own = present & (ids >= first_column) & (ids < first_column + width)
    return (ids - first_column).where(own, 0), own


def heads_of(query: LogitsQuery, first_column: int, width: int) -> list[SoftmaxSpec]:
    """The buckets; and, if those are at another temperature than 1, the whole vocabulary as one bucket at that."""
    real_columns = min(max(query.vocab_size - first_column, 0), width)
    columns_TK, own_TK = local_columns(query.ids_TK, query.valid_TK, first_column, width)
    softmaxes = [
        SoftmaxSpec(
            columns_TK=columns_TK,
            own_TK=own_TK,
            real_columns=real_columns,
            inverse_temperature=1 / query.temperature,
        )
    ]
    if query.temperature != 1:
        none_T0, no_T0 = columns_TK[:, :0], own_TK[:, :0]
        softmaxes.append(SoftmaxSpec(columns_TK=none_T0, own_TK=no_T0, real_columns=real_columns, inverse_temperature=1.0))
    return softmaxes

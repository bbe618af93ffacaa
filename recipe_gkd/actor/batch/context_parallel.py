"""Context parallelism: division of each sequence of a packed row among ranks.

The layout is Megatron's and Transformer Engine's for packed rows. Each sequence is padded to a multiple of 2 C tokens,
where C is the number of context ranks, and cut into 2 C chunks. Rank r holds the chunks r and 2 C - 1 - r of each
sequence, so that all ranks have equal shares of the work of causal attention. All other operations of the model and the
loss are local to a token; only attention needs whole sequences.

Transformer Engine exchanges keys and values between the ranks, the local attention exchanges heads; see
:mod:`~recipe_gkd.actor.head_exchange`.

Inputs and outputs are numpy arrays. Shape suffixes: N tokens of the whole padded row, M = N / C rows of one rank, T
response tokens, X layers and experts of a token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from recipe_gkd.actor.batch import token_fields
from recipe_gkd.actor.batch.packing import Allocate, PackedBatch


@dataclass(frozen=True, kw_only=True)
class ContextShard(PackedBatch):
    """One context rank's part of a packed micro-batch.

    ``token_ids_N`` has the M rows of this rank, and ``loss_rows_T`` are indices into them. All arrays [T] have only the
    response tokens that these rows predict. ``lengths`` belong to the whole padded row.

    Attributes:
        own_rows_M: Rows of the whole padded row that this rank holds, int64.
        cp_size: Number of context ranks.
    """

    own_rows_M: np.ndarray
    cp_size: int

    @property
    def position_ids_N(self) -> np.ndarray:
        """Position of each of this rank's rows in its sequence, int32 [M]."""
        return super().position_ids_N[self.own_rows_M]


def shard_for_context(
    packed: PackedBatch,
    weights: Mapping[str, np.ndarray],
    *,
    cp_rank: int,
    cp_size: int,
    multiple_of: int = 1,
    allocate: Allocate = np.empty,
) -> tuple[PackedBatch, dict[str, np.ndarray]]:
    """Return one context rank's rows of a packed micro-batch, and the weights of its response tokens.

    The weights are computed from whole responses before this call, so the loss terms are the same for any number of
    context ranks.

    Args:
        packed: Micro-batch of whole sequences.
        weights: Weight of each response token in each loss term, [T] by name.
        cp_rank: Context rank.
        cp_size: Number of context ranks.
        multiple_of: The number of this rank's rows is padded to a multiple of this.
        allocate: Allocates the arrays of the response tokens.
    """
    if cp_size == 1:
        return packed, dict(weights)
    padded = padded_lengths(packed.lengths, cp_size=cp_size, multiple_of=multiple_of)
    lengths = np.pad(packed.lengths, (0, len(padded) - len(packed.lengths)))
    row_of = _insert_padding(lengths, padded)
    whole_ids_N = np.zeros(int(padded.sum()), dtype=packed.token_ids_N.dtype)
    whole_ids_N[row_of] = packed.token_ids_N
    own_rows_M = zigzag_rows(padded, cp_rank, cp_size)
    own_index_N = np.full(len(whole_ids_N), -1, dtype=np.int64)
    own_index_N[own_rows_M] = np.arange(len(own_rows_M))
    loss_rows_T = own_index_N[row_of[packed.loss_rows_T]]
    is_own_T = loss_rows_T >= 0
    n_own = int(is_own_T.sum())
    own: dict[str, np.ndarray] = {}
    for name in (*token_fields.NAMES, "logps_TK", "ids_TK"):
        whole = getattr(packed, name)
        own[name] = np.compress(is_own_T, whole, axis=0, out=allocate((n_own, *whole.shape[1:]), whole.dtype))
    routed_NX = packed.routed_experts_NX
    if routed_NX is not None:
        whole_NX = np.full((len(whole_ids_N), *routed_NX.shape[1:]), -1, routed_NX.dtype)
        whole_NX[row_of] = routed_NX
        own["routed_experts_NX"] = whole_NX[own_rows_M]
    own["loss_rows_T"] = loss_rows_T[is_own_T].astype(packed.loss_rows_T.dtype)
    shard = ContextShard(
        **own, token_ids_N=whole_ids_N[own_rows_M], lengths=padded.tolist(), own_rows_M=own_rows_M, cp_size=cp_size
    )
    return shard, {name: weights_T[is_own_T] for name, weights_T in weights.items()}


def padded_lengths(lengths: Sequence[int], *, cp_size: int, multiple_of: int = 1) -> np.ndarray:
    """Return the lengths of the sequences of a row with the padding for its division, int64.

    A last sequence consists of padding if the rows of each rank would not be a multiple of ``multiple_of``.

    Args:
        lengths: Lengths of the sequences before.
        cp_size: Number of context ranks.
        multiple_of: The number of rows of each rank is padded to a multiple of this.
    """
    if cp_size == 1:
        return np.asarray(lengths)  # nothing is divided
    padded = -(-np.asarray(lengths) // (2 * cp_size)) * 2 * cp_size
    n_padding = -int(padded.sum()) % (cp_size * math.lcm(2, multiple_of))
    return np.append(padded, n_padding) if n_padding else padded


def zigzag_rows(padded_lengths: Sequence[int] | np.ndarray, cp_rank: int, cp_size: int) -> np.ndarray:
    """Return the rows of a padded row that a context rank holds, in order, int64 [M].

    Args:
        padded_lengths: Lengths of the sequences, multiples of ``2 * cp_size``.
        cp_rank: Context rank.
        cp_size: Number of context ranks.
    """
    chunks = np.asarray(padded_lengths) // (2 * cp_size)
    starts = np.cumsum(padded_lengths) - padded_lengths
    first = np.stack([starts + cp_rank * chunks, starts + (2 * cp_size - 1 - cp_rank) * chunks], 1).ravel()
    return _ranges(first, np.repeat(chunks, 2))


def gathered_rows(packed: PackedBatch) -> np.ndarray | None:
    """Return the rows of the whole padded row in the order of the context ranks, int64 [N]; None without a shard."""
    if not isinstance(packed, ContextShard):
        return None
    ranks = range(packed.cp_size)
    return np.concatenate([zigzag_rows(packed.lengths, cp_rank, packed.cp_size) for cp_rank in ranks])


def _insert_padding(lengths: np.ndarray, padded: np.ndarray) -> np.ndarray:
    """Return the row of each token after each sequence is padded on the right, int64."""
    return _ranges(np.cumsum(padded) - padded, lengths)


def _ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the concatenation of ``arange(start, start + length)``, int64."""
    offsets = np.repeat(starts - (np.cumsum(lengths) - lengths), lengths)
    return (np.arange(int(lengths.sum())) + offsets).astype(np.int64)

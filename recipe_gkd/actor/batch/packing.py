"""Division of a shard into micro-batches, and packed rows of tokens.

Inputs and outputs are numpy arrays. Shape suffixes: N tokens of a packed row, T response tokens in it, K teacher top-k,
X layers and experts of a token, P tokens with experts of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipe_gkd.actor.batch.token_fields import TokenFields, pack_fields
from recipe_gkd.data.samples import Sample


def micro_batches(samples: Sequence[Sample], *, micro_batch_size: int, max_token_len: int | None) -> list[list[Sample]]:
    """Divide a shard into micro-batches by the lengths of its samples. Samples without response tokens are left out.

    Args:
        samples: Shard of one data-parallel rank.
        micro_batch_size: Samples per micro-batch if ``max_token_len`` is None.
        max_token_len: Maximum number of tokens per micro-batch, filled by first fit in descending order of length. A
            longer sample gets a separate micro-batch.
    """
    samples = [sample for sample in samples if len(sample.response.ids)]
    if max_token_len is None:
        return [list(samples[i : i + micro_batch_size]) for i in range(0, len(samples), micro_batch_size)]
    bins: list[list[Sample]] = []
    tokens: list[int] = []
    lengths = [input_length(sample) for sample in samples]
    for position in sorted(range(len(samples)), key=lambda i: -lengths[i]):
        sample, length = samples[position], lengths[position]
        for index, used in enumerate(tokens):
            if used + length <= max_token_len:
                bins[index].append(sample)
                tokens[index] += length
                break
        else:
            bins.append([sample])
            tokens.append(length)
    return bins


def input_length(sample: Sample) -> int:
    """Return the number of input tokens. The last response token is not an input: it predicts nothing."""
    return max(sample.n_tokens - 1, 0) if len(sample.response.ids) else 0


@dataclass(frozen=True, kw_only=True)
class PackedBatch(TokenFields[np.ndarray]):
    """A micro-batch as one row of tokens, with one entry per response token for the loss.

    Indices and ids are int32, which halves the bytes that are copied to the device; they are widened there.

    Attributes:
        token_ids_N: Input token ids, int32 [N].
        lengths: Lengths of the sequences in order. Their sum is N.
        logps_TK: Teacher's top-k log-probabilities, float32 [T, K], or float16 if the scores are; -inf in unused
            entries. K is 0 if the teacher's arrays are omitted.
        ids_TK: Teacher's top-k token ids, int32 [T, K]; -1 in unused entries.
        routed_experts_NX: Experts that the engine chose for each token, int16 [N, layers, experts of a token]; -1 where
            the actor chooses. None if no sample has experts.
    """

    token_ids_N: np.ndarray
    lengths: list[int]
    logps_TK: np.ndarray
    ids_TK: np.ndarray
    routed_experts_NX: np.ndarray | None = None

    @property
    def position_ids_N(self) -> np.ndarray:
        """Position of each token in its sequence, int32 [N]."""
        return _positions(np.asarray(self.lengths))


Allocate = Callable[[tuple[int, ...], Any], np.ndarray]
"""Function that returns an uninitialized array of a shape and dtype, such as ``np.empty``."""


def pack(
    samples: Sequence[Sample],
    *,
    multiple_of: int = 1,
    with_teacher: bool = True,
    version: int | None = None,
    allocate: Allocate = np.empty,
) -> PackedBatch:
    """Concatenate samples to one row of tokens. The samples must have passed ``check_samples``.

    Args:
        samples: Samples of one micro-batch; may be empty.
        multiple_of: The number of tokens is padded to a multiple of this with a last sequence of zeros, and is at
            least this.
        with_teacher: Pack the teacher's top-k, which only the last pipeline stage reads. Otherwise its arrays are
            [T, 0].
        version: Version of the actor's weights. None if no token counts as sampled by them.
        allocate: Allocates the teacher's arrays.
    """
    prompt_lengths = np.array([len(sample.prompt.ids) for sample in samples], dtype=np.int64)
    response_lengths = np.array([len(sample.response.ids) for sample in samples], dtype=np.int64)
    input_lengths = np.array([sample.n_tokens for sample in samples], dtype=np.int64) - 1
    ids = [part for sample in samples for part in _input_ids(sample)]
    lengths = packed_lengths(input_lengths.tolist(), multiple_of=multiple_of)
    ids += [np.zeros(n_padding, np.int32) for n_padding in lengths[len(samples) :]]
    positions_T = _positions(response_lengths)
    first_rows = np.cumsum(input_lengths) - input_lengths + prompt_lengths - 1

    no_teacher = np.empty((len(positions_T), 0), np.float32), np.empty((len(positions_T), 0), np.int32)
    logps_TK, ids_TK = _pack_teacher(samples, allocate) if with_teacher else no_teacher
    sequence = np.cumsum(response_lengths > 0) - 1  # empty responses have no index
    return PackedBatch(
        token_ids_N=np.concatenate([np.empty(0, np.int32), *ids], dtype=np.int32, casting="same_kind"),
        lengths=lengths,
        loss_rows_T=np.repeat(first_rows, response_lengths).astype(np.int32) + _offsets(samples, positions_T),
        positions_T=positions_T,
        sequence_T=np.repeat(sequence, response_lengths).astype(np.int32),
        logps_TK=logps_TK,
        ids_TK=ids_TK,
        routed_experts_NX=_pack_routed_experts(samples, lengths),
        **pack_fields(samples, version),
    )


def packed_lengths(lengths: Sequence[int], *, multiple_of: int = 1) -> list[int]:
    """Return the lengths of the sequences of a packed row: its samples, and a last sequence of padding.

    Args:
        lengths: Number of input tokens of each sample.
        multiple_of: The sum is padded to a multiple of this, and is at least this.
    """
    total = sum(lengths)
    n_padding = -total % multiple_of if total else multiple_of
    return [*lengths, n_padding] if n_padding else [*lengths]


def _input_ids(sample: Sample) -> tuple[np.ndarray, ...]:
    """Return the ids of all tokens but the last, in parts."""
    prompt_ids, response_ids = sample.prompt.ids, sample.response.sequence_ids
    return (prompt_ids, response_ids[:-1]) if len(response_ids) else (prompt_ids[:-1],)


def _offsets(samples: Sequence[Sample], positions_T: np.ndarray) -> np.ndarray:
    """Return the index of each response token among the tokens after its prompt, int32 [T]."""
    if all(sample.response.inserted is None for sample in samples):
        return positions_T
    return np.concatenate([sample.response.offsets_T for sample in samples])


def _positions(lengths: np.ndarray) -> np.ndarray:
    """Return the concatenation of ``arange(length)`` for each length, int32."""
    starts = (np.cumsum(lengths) - lengths).astype(np.int32)
    return np.arange(lengths.sum(), dtype=np.int32) - np.repeat(starts, lengths)


def _pack_teacher(samples: Sequence[Sample], allocate: Allocate) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities and ids, [T, K] each, where K is the largest top-k of the samples."""
    scores = [sample.top_k for sample in samples]
    k = max((score.ids_TK.shape[1] for score in scores), default=1)
    shape = (sum(len(score.ids_TK) for score in scores), k)
    # A response without scores has one unused entry per token, whose type does not matter.
    dtypes = {score.logps_TK.dtype for score in scores}
    if np.dtype(np.float16) in dtypes:
        dtypes = {score.logps_TK.dtype for score in scores if score.is_scored_T.any()}
    logps_TK, ids_TK = (
        allocate(shape, np.float16 if dtypes == {np.dtype(np.float16)} else np.float32),
        allocate(shape, np.int32),
    )
    row = 0
    for score in scores:
        rows = slice(row, row := row + len(score.ids_TK))
        width = score.ids_TK.shape[1]
        logps_TK[rows, :width], ids_TK[rows, :width] = score.logps_TK, score.ids_TK
        if width < k:
            logps_TK[rows, width:], ids_TK[rows, width:] = -np.inf, -1
    return logps_TK, ids_TK


def _pack_routed_experts(samples: Sequence[Sample], lengths: Sequence[int]) -> np.ndarray | None:
    """Return the experts of all input tokens, [N, layers, experts of a token]; None if no sample has them."""
    routed = [sample.response.routed_experts_PX for sample in samples]
    shape = next((rows_PX.shape[1:] for rows_PX in routed if rows_PX is not None), None)
    if shape is None:
        return None
    packed_NX = np.full((sum(lengths), *shape), -1, np.int16)
    starts = np.cumsum([0, *lengths])
    for rows_PX, start, length in zip(routed, starts, lengths, strict=False):  # a last sequence is padding
        if rows_PX is not None:
            packed_NX[start : start + length][: len(rows_PX)] = rows_PX[:length]
    return packed_NX


def bucket_by_length(lengths: Sequence[int], least_fill: float = 0.75) -> list[np.ndarray]:
    """Group the sequences of a packed row into right-padded blocks of similar length.

    Args:
        least_fill: Minimum fraction of real positions per sequence of a block.

    Returns:
        Blocks, int64 [R, S] each: indices of rows, -1 for padding. Every row of the input is in one block.
    """
    starts = np.cumsum([0, *lengths])
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if groups and lengths[index] >= least_fill * lengths[groups[-1][0]]:
            groups[-1].append(index)
        else:
            groups.append([index])
    blocks = []
    for group in groups:
        block = np.full((len(group), lengths[group[0]]), -1, dtype=np.int64)
        for row, index in enumerate(group):
            block[row, : lengths[index]] = np.arange(starts[index], starts[index + 1])
        blocks.append(block)
    return blocks

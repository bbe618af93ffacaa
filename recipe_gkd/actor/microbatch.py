"""Division of a shard into micro-batches, and packed rows of tokens.

Inputs and outputs are numpy arrays. Shape suffixes: N tokens of a packed row, T response tokens in it, K teacher top-k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from recipe_gkd.data.samples import Sample


def micro_batches(samples: Sequence[Sample], *, micro_batch_size: int, max_token_len: int | None) -> list[list[Sample]]:
    """Divide a shard into micro-batches by the lengths of its samples. Samples without response tokens are left out.

    Args:
        samples: Shard of one data-parallel rank.
        micro_batch_size: Samples per micro-batch if ``max_token_len`` is None.
        max_token_len: Maximum number of tokens per micro-batch, filled by first fit in descending order of length. A
            longer sample gets a micro-batch of its own.
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
class PackedBatch:
    """A micro-batch as one row of tokens, with one entry per response token for the loss.

    Indices and ids are int32, which halves the bytes that are copied to the device; they are widened there.

    Attributes:
        token_ids_N: Input token ids, int32 [N].
        lengths: Lengths of the sequences in order. Their sum is N.
        loss_rows_T: Row whose logits predict the response token: its position - 1, int32 [T].
        logps_TK: Teacher's top-k log-probabilities, float32 [T, K], or float16 if the scores are; -inf in unused
            entries. K is 0 if the teacher's arrays are omitted.
        ids_TK: Teacher's top-k token ids, int32 [T, K]; -1 in unused entries.
        uids_T: Uid of the sample, int64 [T].
        response_ids_T: Response token id, int32 [T].
        positions_T: Position in the response, from 0, int32 [T].
        sequence_T: Index of the token's response in the micro-batch, int32 [T].
        sampling_logps_T: Log-probability at temperature 1 under the weights that sampled the token, float32 [T]; 0 for
            reference responses.
        teacher_logps_T: Teacher's log-probability of the response token at ``gkd.distill_temperature``, float32 [T].
        has_teacher_T: True if a teacher has scored the token, bool [T].
        is_skipped_T: True if the teacher's score was requested and not received, bool [T].
        teacher_numbers_T: Index of the teacher, int32 [T].
        is_reference_T: True if the token belongs to a reference response of the data set, bool [T].
        is_current_T: True if the actor's present weights sampled the token, bool [T].
        rewards_T: Reward of the response, float32 [T]; NaN without a reward.
        advantages_T: Advantage of the response, float32 [T]; see :class:`~recipe_gkd.data.samples.Sample`.
        baselines_T: Baseline of the response, float32 [T].
        scales_T: Scale of the response, float32 [T].
    """

    token_ids_N: np.ndarray
    lengths: list[int]
    loss_rows_T: np.ndarray
    logps_TK: np.ndarray
    ids_TK: np.ndarray
    uids_T: np.ndarray
    response_ids_T: np.ndarray
    positions_T: np.ndarray
    sequence_T: np.ndarray
    sampling_logps_T: np.ndarray
    teacher_logps_T: np.ndarray
    has_teacher_T: np.ndarray
    is_skipped_T: np.ndarray
    teacher_numbers_T: np.ndarray
    is_reference_T: np.ndarray
    is_current_T: np.ndarray
    rewards_T: np.ndarray
    advantages_T: np.ndarray
    baselines_T: np.ndarray
    scales_T: np.ndarray

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
    input_lengths = prompt_lengths + response_lengths - 1
    ids = [part for sample in samples for part in _input_ids(sample)]
    lengths = packed_lengths(input_lengths.tolist(), multiple_of=multiple_of)
    ids += [np.zeros(n_padding, np.int32) for n_padding in lengths[len(samples) :]]
    positions_T = _positions(response_lengths)
    first_rows = np.cumsum(input_lengths) - input_lengths + prompt_lengths - 1

    def of_tokens(arrays: Iterable[np.ndarray], dtype: Any) -> np.ndarray:
        return np.concatenate([np.empty(0, dtype), *arrays], dtype=dtype, casting="same_kind")

    def of_samples(values: Iterable[float], dtype: Any) -> np.ndarray:
        return np.repeat(np.array(list(values), dtype), response_lengths)

    no_teacher = np.empty((len(positions_T), 0), np.float32), np.empty((len(positions_T), 0), np.int32)
    logps_TK, ids_TK = _pack_teacher(samples, allocate) if with_teacher else no_teacher
    return PackedBatch(
        token_ids_N=of_tokens(ids, np.int32),
        lengths=lengths,
        loss_rows_T=of_samples(first_rows, np.int32) + positions_T,
        logps_TK=logps_TK,
        ids_TK=ids_TK,
        uids_T=of_samples((sample.prompt.uid for sample in samples), np.int64),
        response_ids_T=of_tokens((sample.response.ids for sample in samples), np.int32),
        positions_T=positions_T,
        sequence_T=of_samples(np.cumsum(response_lengths > 0) - 1, np.int32),  # empty responses have no index
        sampling_logps_T=of_tokens((sample.response.logprobs for sample in samples), np.float32),
        teacher_logps_T=of_tokens((sample.teacher.sampled_logps_T for sample in samples), np.float32),
        has_teacher_T=of_tokens((sample.teacher.is_scored_T for sample in samples), np.bool_),
        is_skipped_T=of_samples((sample.is_skipped for sample in samples), np.bool_),
        teacher_numbers_T=of_samples((sample.teacher_number for sample in samples), np.int32),
        is_reference_T=of_samples((sample.is_reference for sample in samples), np.bool_),
        is_current_T=of_tokens((_is_current(sample, version) for sample in samples), np.bool_),
        rewards_T=of_samples((np.nan if sample.reward is None else sample.reward for sample in samples), np.float32),
        advantages_T=of_samples((sample.advantage for sample in samples), np.float32),
        baselines_T=of_samples((sample.baseline for sample in samples), np.float32),
        scales_T=of_samples((sample.scale for sample in samples), np.float32),
    )


def packed_lengths(lengths: Sequence[int], *, multiple_of: int = 1) -> list[int]:
    """Return the lengths of the sequences of a packed row: those of its samples, and of a last sequence of padding.

    Args:
        lengths: Number of input tokens of each sample.
        multiple_of: The sum is padded to a multiple of this, and is at least this.
    """
    total = sum(lengths)
    n_padding = -total % multiple_of if total else multiple_of
    return [*lengths, n_padding] if n_padding else [*lengths]


def _is_current(sample: Sample, version: int | None) -> np.ndarray:
    """Return True for the tokens that weights of ``version`` sampled, bool [T]. Reference responses have none."""
    versions_T = sample.response.versions_T
    return np.zeros(len(versions_T), np.bool_) if sample.is_reference or version is None else versions_T == version


def _input_ids(sample: Sample) -> tuple[np.ndarray, ...]:
    """Return the ids of all tokens but the last, in parts."""
    prompt_ids, response_ids = sample.prompt.ids, sample.response.ids
    return (prompt_ids, response_ids[:-1]) if len(response_ids) else (prompt_ids[:-1],)


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


def bucket_by_length(lengths: Sequence[int], least_fill: float = 0.75) -> list[np.ndarray]:
    """Group the sequences of a packed row into right-padded blocks of similar length.

    Args:
        lengths: Lengths of the sequences.
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

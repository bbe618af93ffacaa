"""Division of a batch into shards of the data-parallel ranks, micro-batches, and packed rows of tokens.

Inputs and outputs are numpy arrays. Shape suffixes: N tokens of a packed row, T response tokens in it, K teacher top-k.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import DataError

TEACHER_MASS_TOLERANCE = 5e-3
"""Amount by which the probabilities of a teacher's top-k may sum to more than 1.

1e-3 of it is for bfloat16 engines. The rest is for ``teacher.wire_dtype=float16``: it changes log-probabilities above
-16 by at most 2^-8, and their sum therefore by at most 0.4 %. The losses divide such a row by its sum.
"""


def shard_batch(samples: Sequence[Sample], dp_size: int) -> list[list[Sample]]:
    """Divide a global batch into shards with similar numbers of tokens.

    Samples are assigned in descending order of length, each to the smallest shard (Graham 1969, Bounds on
    Multiprocessing Timing Anomalies: the largest shard has at most 4/3 of the optimum).

    Args:
        samples: Global batch.
        dp_size: Number of shards.

    Returns:
        The shards, each in the order of the batch. A shard may be empty.
    """
    shards: list[list[int]] = [[] for _ in range(dp_size)]
    tokens = [0] * dp_size
    for index in sorted(range(len(samples)), key=lambda i: -_input_length(samples[i])):
        smallest = tokens.index(min(tokens))
        shards[smallest].append(index)
        tokens[smallest] += _input_length(samples[index])
    return [[samples[index] for index in sorted(shard)] for shard in shards]


def micro_batches(samples: Sequence[Sample], *, micro_batch_size: int, max_token_len: int | None) -> list[list[Sample]]:
    """Divide a shard into micro-batches. Samples without response tokens are left out.

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
    for sample in sorted(samples, key=lambda sample: -_input_length(sample)):
        length = _input_length(sample)
        for index, used in enumerate(tokens):
            if used + length <= max_token_len:
                bins[index].append(sample)
                tokens[index] += length
                break
        else:
            bins.append([sample])
            tokens.append(length)
    return bins


def _input_length(sample: Sample) -> int:
    """Return the number of input tokens. The last response token is not an input: it predicts nothing."""
    return max(sample.n_tokens - 1, 0) if len(sample.response.ids) else 0


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """A micro-batch as one row of tokens, with one entry per response token for the loss.

    Attributes:
        token_ids_N: Input token ids, int64 [N].
        lengths: Lengths of the sequences in order. Their sum is N.
        loss_rows_T: Row whose logits predict the response token: its position - 1, int64 [T].
        logps_TK: Teacher's top-k log-probabilities, float32 [T, K]; -inf in unused entries.
        ids_TK: Teacher's top-k token ids, int64 [T, K]; -1 in unused entries.
        uids_T: Uid of the sample, int64 [T].
        response_ids_T: Response token id, int64 [T].
        positions_T: Position in the response, from 0, int64 [T].
        response_lengths_T: Length of the response, int64 [T].
        sampling_logps_T: Log-probability at temperature 1 under the weights that sampled the token, float32 [T]; 0 for
            reference responses.
        teacher_logps_T: Teacher's log-probability of the response token at ``gkd.distill_temperature``, float32 [T].
        has_teacher_T: True if a teacher has scored the token, bool [T].
        is_skipped_T: True if the teacher's score was requested and not received, bool [T].
        teacher_numbers_T: Index of the teacher, int64 [T].
        is_reference_T: True if the token belongs to a reference response of the data set, bool [T].
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
    response_lengths_T: np.ndarray
    sampling_logps_T: np.ndarray
    teacher_logps_T: np.ndarray
    has_teacher_T: np.ndarray
    is_skipped_T: np.ndarray
    teacher_numbers_T: np.ndarray
    is_reference_T: np.ndarray
    rewards_T: np.ndarray
    advantages_T: np.ndarray
    baselines_T: np.ndarray
    scales_T: np.ndarray

    @property
    def position_ids_N(self) -> np.ndarray:
        """Position of each token in its sequence, int64 [N]."""
        return np.concatenate([np.arange(length, dtype=np.int64) for length in self.lengths])


def pack(samples: Sequence[Sample], *, multiple_of: int = 1) -> PackedBatch:
    """Concatenate samples to one row of tokens.

    Args:
        samples: Samples of one micro-batch; may be empty.
        multiple_of: The number of tokens is padded to a multiple of this with a last sequence of zeros, and is at
            least this.

    Raises:
        DataError: A sample has no prompt token, or its log-probabilities are invalid.
    """
    for sample in samples:
        _check_sample(sample)
    ids = [sample.token_ids[:-1] for sample in samples]
    lengths = [len(row) for row in ids]
    starts = np.cumsum([0, *lengths])
    total = int(starts[-1])
    rows = [
        start + len(sample.prompt.ids) - 1 + np.arange(len(sample.response.ids))
        for sample, start in zip(samples, starts, strict=False)
    ]
    if n_padding := -total % multiple_of if total else multiple_of:
        ids.append(np.zeros(n_padding))
        lengths.append(n_padding)
    logps_TK, ids_TK = _pack_teacher(samples)
    response_lengths = [len(sample.response.ids) for sample in samples]

    def of_tokens(arrays: Iterable[np.ndarray], dtype: type) -> np.ndarray:
        return np.concatenate([np.zeros(0), *arrays]).astype(dtype)

    def of_samples(values: Iterable[float], dtype: type) -> np.ndarray:
        return np.repeat(list(values), response_lengths).astype(dtype)

    return PackedBatch(
        token_ids_N=np.concatenate(ids).astype(np.int64),
        lengths=lengths,
        loss_rows_T=of_tokens(rows, np.int64),
        logps_TK=logps_TK,
        ids_TK=ids_TK,
        uids_T=of_samples((sample.prompt.uid for sample in samples), np.int64),
        response_ids_T=of_tokens((sample.response.ids for sample in samples), np.int64),
        positions_T=of_tokens(map(np.arange, response_lengths), np.int64),
        response_lengths_T=of_samples(response_lengths, np.int64),
        sampling_logps_T=of_tokens((sample.response.logprobs for sample in samples), np.float32),
        teacher_logps_T=of_tokens((sample.teacher.sampled_logps_T for sample in samples), np.float32),
        has_teacher_T=np.asarray((ids_TK >= 0).any(1)),
        is_skipped_T=of_samples((sample.is_skipped for sample in samples), np.bool_),
        teacher_numbers_T=of_samples((sample.teacher_number for sample in samples), np.int64),
        is_reference_T=of_samples((sample.is_reference for sample in samples), np.bool_),
        rewards_T=of_samples((np.nan if sample.reward is None else sample.reward for sample in samples), np.float32),
        advantages_T=of_samples((sample.advantage for sample in samples), np.float32),
        baselines_T=of_samples((sample.baseline for sample in samples), np.float32),
        scales_T=of_samples((sample.scale for sample in samples), np.float32),
    )


def _pack_teacher(samples: Sequence[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities and ids, [T, K] each, where K is the largest top-k of the samples."""
    k = max((sample.teacher.ids_TK.shape[1] for sample in samples), default=1)
    n_tokens = sum(len(sample.response.ids) for sample in samples)
    logps_TK = np.full((n_tokens, k), -np.inf, dtype=np.float32)
    ids_TK = np.full((n_tokens, k), -1, dtype=np.int64)
    row = 0
    for sample in samples:
        rows = slice(row, row := row + len(sample.response.ids))
        width = sample.teacher.ids_TK.shape[1]
        logps_TK[rows, :width] = sample.teacher.logps_TK
        ids_TK[rows, :width] = sample.teacher.ids_TK
    return logps_TK, ids_TK


def _check_sample(sample: Sample) -> None:
    if not len(sample.prompt.ids):
        raise DataError(
            f"sample {sample.prompt.uid} has no prompt token; expected at least 1, because the first response token is "
            "predicted from it"
        )
    mass_T = np.exp(sample.teacher.logps_TK.astype(np.float64)).sum(1)
    if not (mass_T <= 1 + TEACHER_MASS_TOLERANCE).all():  # also true for NaN
        raise DataError(
            f"sample {sample.prompt.uid}: the teacher's top-k has probability {mass_T.max():.4g} at response position "
            f"{int(np.argmax(np.nan_to_num(mass_T, nan=np.inf)))}; expected log-probabilities that sum to at most 1"
        )
    for model, logps_T in (("teacher", sample.teacher.sampled_logps_T), ("student", sample.response.logprobs)):
        if not (logps_T <= TEACHER_MASS_TOLERANCE).all():
            raise DataError(
                f"sample {sample.prompt.uid}: the {model}'s log-probability of a response token is "
                f"{np.max(logps_T):.4g}; expected at most 0"
            )


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

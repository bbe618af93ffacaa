"""Samples -> shards of the data-parallel ranks -> micro-batches -> packed rows. Pure: numpy in, numpy out.

Axis names: N tokens of a packed row, T response tokens in it, K teacher top-k.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import DataError

TEACHER_MASS_TOLERANCE = 5e-3
"""By how much the probabilities of a teacher's top-k may sum to more than 1: 1e-3 of it for bfloat16 engines, the rest
for ``teacher.wire_dtype=float16``, which moves log-probabilities above -16 by 2^-8 at most, and so their sum by 0.4 %.
The losses divide such a row by its sum."""


def shard_batch(samples: Sequence[Sample], dp_size: int) -> list[list[Sample]]:
    """Divide a global batch into ``dp_size`` shards of nearly equal token counts, each in the order of the batch.

    Longest first, always to the shard that has least (Graham 1969: at most 4/3 of the best division).
    """
    shards: list[list[int]] = [[] for _ in range(dp_size)]
    tokens = [0] * dp_size
    for index in sorted(range(len(samples)), key=lambda i: -_input_length(samples[i])):
        lightest = tokens.index(min(tokens))
        shards[lightest].append(index)
        tokens[lightest] += _input_length(samples[index])
    return [[samples[index] for index in sorted(shard)] for shard in shards]


def micro_batches(samples: Sequence[Sample], *, micro_batch_size: int, max_token_len: int | None) -> list[list[Sample]]:
    """Divide a shard by tokens, up to ``max_token_len`` (first fit, longest first), or by samples where that is None.

    A sample longer than ``max_token_len`` gets a micro-batch of its own. Samples without a response take no part.
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
    """Tokens of the forward pass: nothing is predicted from the last token of a response."""
    return max(sample.n_tokens - 1, 0) if len(sample.response.ids) else 0


@dataclass(frozen=True, kw_only=True)
class PackedBatch:
    """A micro-batch as one row of tokens, and the teacher's rows for those of its positions that predict a response."""

    token_ids_N: np.ndarray
    """int64."""
    lengths: list[int]
    """Of the sequences, in order; their sum is N."""
    loss_rows_T: np.ndarray
    """int64: the row p - 1 whose logits predict response token p."""
    logps_TK: np.ndarray
    """float32; -inf where a sample has fewer than K entries."""
    ids_TK: np.ndarray
    """int64; -1 there."""
    uids_T: np.ndarray
    """int64: whose token it is."""
    response_ids_T: np.ndarray
    """int64: the response tokens themselves."""
    positions_T: np.ndarray
    """int64: their positions in the answers, from 0."""
    response_lengths_T: np.ndarray
    """int64: of the answer that it belongs to."""
    sampling_logps_T: np.ndarray
    """float32, under the weights that sampled it."""
    teacher_logps_T: np.ndarray
    """float32, the teacher's of the token."""
    has_teacher_T: np.ndarray
    """bool: whether a teacher has said what it thinks of the token."""
    is_skipped_T: np.ndarray
    """bool: it was asked, and gave no answer."""
    teacher_numbers_T: np.ndarray
    """int64: which teacher."""
    is_reference_T: np.ndarray
    """bool: it is of the data, not sampled."""
    rewards_T: np.ndarray
    """Reward of the response, float32; nan if it has none."""
    advantages_T: np.ndarray
    """float32, of the answer; see :class:`Sample`."""
    baselines_T: np.ndarray
    """float32, likewise."""
    scales_T: np.ndarray
    """float32, likewise."""

    @property
    def position_ids_N(self) -> np.ndarray:
        return np.concatenate([np.arange(length, dtype=np.int64) for length in self.lengths])


def pack(samples: Sequence[Sample], *, multiple_of: int = 1) -> PackedBatch:
    """One packed row; a last sequence of zeros fills it up to a multiple of ``multiple_of`` tokens, and never to none.

    Raises :class:`DataError` for a sample without a prompt, or with teacher rows that are no log-probabilities.
    """
    for sample in samples:
        _check(sample)
    ids = [sample.token_ids[:-1] for sample in samples]
    lengths = [len(row) for row in ids]
    starts = np.cumsum([0, *lengths])
    total = int(starts[-1])
    rows = [
        start + len(sample.prompt.ids) - 1 + np.arange(len(sample.response.ids))
        for sample, start in zip(samples, starts, strict=False)
    ]
    if filler := -total % multiple_of if total else multiple_of:
        ids.append(np.zeros(filler))
        lengths.append(filler)
    k = max((sample.teacher.ids_TK.shape[1] for sample in samples), default=1)
    n_tokens = sum(len(row) for row in rows)
    logps_TK = np.full((n_tokens, k), -np.inf, dtype=np.float32)
    ids_TK = np.full((n_tokens, k), -1, dtype=np.int64)
    row = 0
    for sample in samples:
        rows_of_sample = slice(row, row := row + len(sample.response.ids))
        width = sample.teacher.ids_TK.shape[1]
        logps_TK[rows_of_sample, :width] = sample.teacher.logps_TK
        ids_TK[rows_of_sample, :width] = sample.teacher.ids_TK
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


def _check(sample: Sample) -> None:
    if not len(sample.prompt.ids):
        raise DataError(f"sample {sample.prompt.uid} has no prompt token, so nothing predicts its first response token")
    mass_T = np.exp(sample.teacher.logps_TK.astype(np.float64)).sum(1)
    if not (mass_T <= 1 + TEACHER_MASS_TOLERANCE).all():  # also catches nan
        raise DataError(
            f"sample {sample.prompt.uid}: the teacher's top-k has probability {mass_T.max():.4g} at response position "
            f"{int(np.argmax(np.nan_to_num(mass_T, nan=np.inf)))}; expected log-probabilities that sum to at most 1"
        )
    for whose, logps_T in (("teacher", sample.teacher.sampled_logps_T), ("student", sample.response.logprobs)):
        if not (logps_T <= TEACHER_MASS_TOLERANCE).all():
            raise DataError(
                f"sample {sample.prompt.uid}: the {whose}'s log-probability of a response token is "
                f"{np.max(logps_T):.4g}; expected at most 0"
            )


def bucket_by_length(lengths: Sequence[int], least_fill: float = 0.75) -> list[np.ndarray]:
    """Group the sequences of a packed row into right-padded blocks, each filled to ``least_fill`` or more in each line.

    Returns int64 arrays [sequences, longest]: row numbers, -1 for padding. Every row of the input is in one of them.
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
        for line, index in enumerate(group):
            block[line, : lengths[index]] = np.arange(starts[index], starts[index + 1])
        blocks.append(block)
    return blocks

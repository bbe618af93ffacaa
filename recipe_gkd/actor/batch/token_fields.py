"""Table of the values that every response token of a micro-batch has. A field is declared here and nowhere else.

Packing (:mod:`~recipe_gkd.actor.batch.packing`), the copy to the device (:mod:`~recipe_gkd.actor.batch.staging`,
:mod:`~recipe_gkd.actor.batch.device_batch`), the division among context ranks
(:mod:`~recipe_gkd.actor.batch.context_parallel`) and the inputs of a custom loss (by equal names,
:class:`~recipe_gkd.losses.LossInputs`) follow from it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import DTypeLike

from recipe_gkd.data.samples import Sample
from recipe_gkd.data.weights import expanded

A = TypeVar("A")
"""Array of the host (``np.ndarray``) or of the device (``Tensor``)."""
_DTYPE, _OF_TOKENS, _OF_SAMPLE = "dtype", "of_tokens", "of_sample"


def _of_sample(dtype: DTypeLike, source: Callable[[Sample], float]) -> dict[str, object]:
    """Describe a field with one value for all tokens of a sample."""
    return {_DTYPE: dtype, _OF_SAMPLE: source}


def _of_tokens(dtype: DTypeLike, source: Callable[[Sample, int | None], np.ndarray]) -> dict[str, object]:
    """Describe a field with a value for each token. ``source`` gets the sample and the version of the weights."""
    return {_DTYPE: dtype, _OF_TOKENS: source}


def _of_row(dtype: DTypeLike) -> dict[str, object]:
    """Describe a field that follows from the lengths of the packed sequences."""
    return {_DTYPE: dtype}


def _is_current(sample: Sample, version: int | None) -> np.ndarray:
    """Return True for the tokens that weights of ``version`` sampled, bool [T]. Reference responses have none."""
    versions_T = sample.response.versions_T
    return np.zeros(len(versions_T), np.bool_) if sample.is_reference or version is None else versions_T == version


@dataclass(frozen=True, kw_only=True)
class TokenFields(Generic[A]):
    """Values of the response tokens of a micro-batch, [T] each.

    The dtypes apply to the host. The device has int64 for int32, and float32.

    Attributes:
        loss_rows_T: Row whose logits predict the token: its position in the packed row - 1, int32.
        positions_T: Position in the response, from 0, int32.
        sequence_T: Index of the token's response in the micro-batch, int32.
        starts_T: Index in the whole response of position 0, int32; see :class:`~recipe_gkd.data.samples.Response`.
        uids_T: Uid of the sample, int64.
        response_ids_T: Token id, int32.
        sampling_logps_T: Log-probability at temperature 1 under the weights that sampled the token, float32; 0 for
            reference responses.
        teacher_sampled_logps_T: Teacher's log-probability of the token at ``gkd.distill_temperature``, float32; 0 if no
            teacher has scored it.
        has_teacher_T: True if a teacher has scored the token, bool.
        is_skipped_T: True if the teacher's score was requested and not received, bool.
        teacher_numbers_T: Index of the teacher, int32.
        is_reference_T: True if the token belongs to a reference response of the data set, bool.
        is_current_T: True if the actor's present weights sampled the token, bool.
        rewards_T: Reward of the response, float32; NaN without a reward.
        advantages_T: Advantage of the response or of its turn, float32; see :class:`~recipe_gkd.data.samples.Sample`.
        baselines_T: Baseline of the response, float32.
        scales_T: Scale of the response, float32.
        data_weights_T: Weight of the token from a column of the data (``gkd.position_weights_key``), float32.
    """

    loss_rows_T: A = field(metadata=_of_row(np.int32))
    positions_T: A = field(metadata=_of_row(np.int32))
    sequence_T: A = field(metadata=_of_row(np.int32))
    starts_T: A = field(metadata=_of_sample(np.int32, lambda sample: sample.response.start))
    uids_T: A = field(metadata=_of_sample(np.int64, lambda sample: sample.prompt.uid))
    response_ids_T: A = field(metadata=_of_tokens(np.int32, lambda sample, _: sample.response.ids))
    sampling_logps_T: A = field(metadata=_of_tokens(np.float32, lambda sample, _: sample.response.logprobs))
    teacher_sampled_logps_T: A = field(
        metadata=_of_tokens(np.float32, lambda sample, _: sample.teacher.sampled_logps_T)
    )
    has_teacher_T: A = field(metadata=_of_tokens(np.bool_, lambda sample, _: sample.teacher.is_scored_T))
    is_skipped_T: A = field(metadata=_of_sample(np.bool_, lambda sample: sample.is_skipped))
    teacher_numbers_T: A = field(metadata=_of_sample(np.int32, lambda sample: sample.teacher_number))
    is_reference_T: A = field(metadata=_of_sample(np.bool_, lambda sample: sample.is_reference))
    is_current_T: A = field(metadata=_of_tokens(np.bool_, _is_current))
    rewards_T: A = field(
        metadata=_of_sample(np.float32, lambda sample: np.nan if sample.reward is None else sample.reward)
    )
    advantages_T: A = field(
        metadata=_of_tokens(np.float32, lambda sample, _: np.broadcast_to(sample.advantage, len(sample.response.ids)))
    )
    baselines_T: A = field(metadata=_of_sample(np.float32, lambda sample: sample.baseline))
    scales_T: A = field(metadata=_of_sample(np.float32, lambda sample: sample.scale))
    data_weights_T: A = field(
        metadata=_of_tokens(np.float32, lambda sample, _: expanded(sample.prompt.weights, len(sample.response.ids)))
    )


NAMES = tuple(one.name for one in fields(TokenFields))


def pack_fields(samples: Sequence[Sample], version: int | None) -> dict[str, np.ndarray]:
    """Return the fields that are read from samples, [T] each, one response after the other.

    Args:
        samples: Samples of one micro-batch.
        version: Version of the actor's weights. None if no token counts as sampled by them.
    """
    lengths = [len(sample.response.ids) for sample in samples]
    packed: dict[str, np.ndarray] = {}
    for one in fields(TokenFields):
        dtype = one.metadata[_DTYPE]
        if source := one.metadata.get(_OF_SAMPLE):
            packed[one.name] = np.repeat(np.array([source(sample) for sample in samples], dtype), lengths)
        elif source := one.metadata.get(_OF_TOKENS):
            parts = [np.empty(0, dtype), *(source(sample, version) for sample in samples)]
            packed[one.name] = np.concatenate(parts, dtype=dtype, casting="same_kind")
    return packed

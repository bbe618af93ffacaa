"""Wire types of a single field each: sequences, settings and scores of a request, and a service status."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from teacher.errors import TeacherProtocolError, TeacherRequestError, short
from teacher.records import LogitSettings, ScoredSequence, TeacherSequence
from teacher.status import ServiceStatus
from teacher.wire.fields import Checked, Content, Integer, WireType, as_received
from teacher.wire.limits import LIMITS
from teacher.wire.request_checks import check_sequences, check_temperature


class Sequences(WireType):
    """Sequences to score. The arrays are copied, so the caller may change them while the message is queued.

    If any sequence has support ids or scored ranges, the arrays of all token ids are followed by one of each sequence
    with its support ids, [T, 0] for none. If any has scored ranges, one of each with their starts and ends follows,
    [2, R], or [2, 0] for none.
    """

    entries = ("prompt_lens", "with_top_k", "arrays")

    def load(self, content: Content, name: str) -> list[TeacherSequence]:
        """Return the sequences."""
        arrays, lens = content.arrays, _list(content, "prompt_lens")
        with_top_k = _list(content, "with_top_k")
        if not lens or len(arrays) not in (len(lens), 2 * len(lens), 3 * len(lens)):
            raise TeacherProtocolError(
                f"expected prompt_lens for {len(arrays)} arrays, or for a half or a third of them, got {short(lens)}",
                entry="prompt_lens",
            )
        if len(with_top_k) != len(lens) or not all(type(flag) is bool for flag in with_top_k):
            raise TeacherProtocolError(
                f"expected {len(lens)} booleans in with_top_k, got {short(with_top_k)}", entry="with_top_k"
            )
        support, ranges = (
            [None if not array.size else array for array in arrays[kind * len(lens) : (kind + 1) * len(lens)]]
            or [None] * len(lens)
            for kind in (1, 2)
        )
        sequences = [
            TeacherSequence(
                ids_N,
                n,
                scored_ranges=None if bounds_2R is None else bounds_2R.T,
                support_ids_TJ=support_TJ,
                with_top_k=flag,
            )
            for ids_N, n, bounds_2R, support_TJ, flag in zip(
                arrays[: len(lens)], lens, ranges, support, with_top_k, strict=True
            )
        ]
        try:
            check_sequences(sequences)
        except TeacherRequestError as error:
            raise as_received(error) from None
        return sequences

    def store(self, content: Content, name: str, value: Any) -> None:
        """Add the sequences.

        Raises:
            TeacherRequestError: They cannot be sent; see ``check_sequences``.
        """
        check_sequences(value)
        content.header["prompt_lens"] = [sequence.prompt_len for sequence in value]
        content.header["with_top_k"] = [sequence.with_top_k for sequence in value]
        content.arrays += [sequence.token_ids.copy() for sequence in value]
        has_ranges = any(sequence.scored_ranges is not None for sequence in value)
        if has_ranges or any(sequence.n_support for sequence in value):
            content.arrays += [
                np.empty((sequence.n_scored, 0), np.int32)
                if sequence.support_ids_TJ is None
                else sequence.support_ids_TJ.copy()
                for sequence in value
            ]
        if has_ranges:
            content.arrays += [
                np.empty((2, 0), np.int32)
                if sequence.scored_ranges is None
                else np.array(sequence.scored_ranges.T, order="C")
                for sequence in value
            ]

    def __str__(self) -> str:
        return (
            "for each of them int32 [N]; with support ids or ranges then for each of them int32 [T,J]; with ranges "
            "then for each of them int32 [2,R]"
        )


def _list(content: Content, entry: str) -> list[Any]:
    value = content.header.get(entry)
    if not isinstance(value, list):
        raise TeacherProtocolError(f"expected a list in {entry}, got {short(value)}", entry=entry)
    return value


class Settings(WireType):
    """Settings of the logits, as two header entries."""

    entries = ("temperature", "n_ids")
    _temperature = Checked(check_temperature, "")
    _n_ids = Integer(0, LIMITS.vocab_size)

    def load(self, content: Content, name: str) -> LogitSettings:
        """Return the settings."""
        return LogitSettings(self._temperature.load(content, "temperature"), self._n_ids.load(content, "n_ids"))

    def store(self, content: Content, name: str, value: LogitSettings) -> None:
        """Add the settings."""
        self._temperature.store(content, "temperature", value.temperature)
        self._n_ids.store(content, "n_ids", value.n_ids)

    def __str__(self) -> str:
        return f"number from {LIMITS.min_temperature:g} to {LIMITS.max_temperature:.0f}, and {self._n_ids}"


class Scores(WireType):
    """Scores of sequences. The arrays are not copied: a received score is a view of the frames.

    Log-probabilities of support ids follow in the columns after the top k. Their ids are not sent back.
    """

    entries = ("arrays",)

    def load(self, content: Content, name: str) -> list[ScoredSequence]:
        """Return the scores."""
        arrays = content.arrays
        if not arrays or len(arrays) % 3:
            raise TeacherProtocolError(
                f"a score reply has three arrays per sequence, got {len(arrays)} arrays", entry="arrays"
            )
        scored = []
        for i, (logps_TK, ids_TK, sampled_T) in enumerate(zip(arrays[::3], arrays[1::3], arrays[2::3], strict=True)):
            got = [(array.dtype.str, array.shape) for array in (logps_TK, ids_TK, sampled_T)]
            shape, k = logps_TK.shape, ids_TK.shape[-1]
            if (
                len(shape) != 2
                or got[0][0] not in ("<f4", "<f2")
                or got[1:] != [("<i4", (shape[0], k)), ("<f4", shape[:1])]
                or not 0 <= k <= shape[1]
            ):
                raise TeacherProtocolError(f"expected {self}, got {short(got)}", sequence=i)
            if k == shape[1]:
                scored.append(ScoredSequence(logps_TK, ids_TK, sampled_T))
            else:
                scored.append(ScoredSequence(logps_TK[:, :k], ids_TK, sampled_T, logps_TK[:, k:]))
        return scored

    def store(self, content: Content, name: str, value: Any) -> None:
        """Add the arrays."""
        for sequence in value:
            logps, support_TJ = sequence.topk_logps_TK, sequence.support_logps_TJ
            if support_TJ is not None:
                logps = np.concatenate([logps, support_TJ], axis=1) if logps.shape[1] else support_TJ
            content.arrays += (logps, sequence.topk_ids_TK, sequence.sampled_logps_T)

    def __str__(self) -> str:
        return "for each sequence float32 or float16 [T,K+J], int32 [T,K], float32 [T]"


class StatusText(WireType):
    """Service status as JSON text in an array, because a header is limited in size."""

    entries = ("arrays",)

    def load(self, content: Content, name: str) -> ServiceStatus:
        """Return the status."""
        got = [(array.dtype.str, array.nbytes) for array in content.arrays]
        if len(got) != 1 or got[0][0] != "|u1" or got[0][1] > LIMITS.status_bytes:
            raise TeacherProtocolError(f"expected {self}, got {short(got)}", entry="arrays")
        try:
            values = json.loads(content.arrays[0].tobytes())
        except (ValueError, RecursionError) as error:
            raise TeacherProtocolError(f"the status is no JSON: {short(error)}", entry="arrays") from None
        return ServiceStatus.from_dict(values)

    def store(self, content: Content, name: str, value: ServiceStatus) -> None:
        """Add the text."""
        content.arrays.append(np.frombuffer(json.dumps(value.to_dict()).encode(), np.uint8))

    def __str__(self) -> str:
        return f"uint8: JSON of at most {LIMITS.status_bytes} bytes"

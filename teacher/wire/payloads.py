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
    """Sequences to score. The arrays are copied, so the caller may change them while the message is queued."""

    entries = ("prompt_lens", "arrays")

    def load(self, content: Content, name: str) -> list[TeacherSequence]:
        """Return the sequences."""
        arrays, lens = content.arrays, content.header.get("prompt_lens")
        if not isinstance(lens, list) or len(lens) != len(arrays):
            raise TeacherProtocolError(f"expected {len(arrays)} prompt_lens, got {short(lens)}", entry="prompt_lens")
        sequences = [TeacherSequence(ids_N, n) for ids_N, n in zip(arrays, lens, strict=True)]
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
        content.arrays += [sequence.token_ids.copy() for sequence in value]

    def __str__(self) -> str:
        return "for each of them int32 [N]"


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
    """Scores of sequences. The arrays are not copied: a received score is a view of the frames."""

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
            shape = logps_TK.shape
            if len(shape) != 2 or got[0][0] not in ("<f4", "<f2") or got[1:] != [("<i4", shape), ("<f4", shape[:1])]:
                raise TeacherProtocolError(f"expected {self}, got {short(got)}", sequence=i)
            scored.append(ScoredSequence(logps_TK, ids_TK, sampled_T))
        return scored

    def store(self, content: Content, name: str, value: Any) -> None:
        """Add the arrays."""
        for sequence in value:
            content.arrays += (sequence.topk_logps_TK, sequence.topk_ids_TK, sequence.sampled_logps_T)

    def __str__(self) -> str:
        return "for each sequence float32 or float16 [T,K], int32 [T,K], float32 [T]"


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

"""`RecordedTeacher`: scores of reference responses from a recording, without a model."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recipe_gkd.config.keys import TEACHER
from recipe_gkd.teachers.recorded.layout import MANIFEST, PATH_KEY, Manifest, read_manifest
from teacher.errors import TeacherError, TeacherRequestError, TeacherSetupError
from teacher.records import ScoredSequence, TeacherInfo, TeacherSequence

_CACHED_GROUPS = 32
_RECORD = "python -m recipe_gkd record"


class RecordedTeacher:
    """A teacher backend whose scores were recorded. It has the scores of recorded responses only.

    A request may end before the recorded response does (``gkd.max_loss_position``).

    Lifecycle::

        teacher = RecordedTeacher(Path("recording"), top_k=64, temperature=1.0)   # reads the prompts
        info = teacher.hello()
        scored = teacher.submit(sequences).result()
        teacher.close()
    """

    def __init__(self, folder: Path, *, top_k: int | None = None, temperature: float = 1.0) -> None:
        """Open a recording.

        Args:
            folder: Folder of the recording.
            top_k: Number of log-probabilities per position. None: all.
            temperature: Temperature of the requests.

        Raises:
            TeacherSetupError: The folder has no complete recording, or it has another temperature or fewer
                log-probabilities.
        """
        manifest = read_manifest(folder)
        if manifest is None:
            problem = f"has no {MANIFEST}" if folder.is_dir() else "does not exist"
            remedy = f"correct the path, or make a recording with {_RECORD} --out {folder}"
            raise TeacherSetupError(f"{PATH_KEY}={folder} {problem}", path=folder, options=(PATH_KEY,), remedy=remedy)
        _check(manifest, folder, top_k, temperature)
        self._source, self._temperature, self._top_k = manifest.source, temperature, top_k or 0
        self._files = [
            pq.ParquetFile(folder / shard.file, memory_map=True, page_checksum_verification=True)
            for shard in manifest.shards
        ]
        self._ends = [_group_ends(file) for file in self._files]
        self._rows: defaultdict[bytes, list[tuple[int, int]]] = defaultdict(list)
        for number, file in enumerate(self._files):
            for row, prompt in enumerate(_lists(file.read(["prompt_ids"]), "prompt_ids")):
                self._rows[_digest(prompt)].append((number, row))
        self._group = lru_cache(_CACHED_GROUPS)(self._read_group)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="recorded-teacher")  # parquet files are not thread-safe

    def hello(self, timeout_s: float | None = None) -> TeacherInfo:
        """Return the recorded teacher's model and limits."""
        return self._source.info()

    def submit(
        self, sequences: Sequence[TeacherSequence], timeout_s: float | None = None, *, temperature: float = 1.0
    ) -> Future[list[ScoredSequence]]:
        """Read the scores of sequences; see `TeacherBackend`.

        Returns:
            Future of the scores. It fails with `TeacherRequestError` if a sequence is not recorded.
        """
        return self._reader.submit(self._read, list(sequences), temperature)

    def has_prompt(self, prompt_ids: np.ndarray) -> bool:
        """Return True if a response after this prompt, int32 [P], is recorded."""
        return _digest(prompt_ids) in self._rows

    def restrict_ids(self, n_ids: int) -> None:
        """Refuse to exclude ids, because the recorded distributions have them.

        Raises:
            TeacherSetupError: ``n_ids`` is not 0.
        """
        if n_ids:
            raise TeacherSetupError(
                f"the recording of {self._source.model_name} has tokens from the id {n_ids} on in its distributions",
                options=(PATH_KEY,),
                remedy=f"record again with this student and {TEACHER}.vocabulary=compatible",
            )

    def close(self) -> None:
        """Cancel the open requests and close the files."""
        self._reader.shutdown(wait=True, cancel_futures=True)
        for file in self._files:
            file.close()

    def _read(self, sequences: Sequence[TeacherSequence], temperature: float) -> list[ScoredSequence]:
        if temperature != self._temperature:
            raise TeacherRequestError(
                f"temperature {temperature:g}: the recording has {self._temperature:g}", argument="temperature"
            )
        return [self._scores(position, sequence) for position, sequence in enumerate(sequences)]

    def _scores(self, position: int, sequence: TeacherSequence) -> ScoredSequence:
        if sequence.scored_ranges is not None:
            raise TeacherRequestError(
                "a conversation: the recording has responses of one turn", sequence=position, argument="scored_ranges"
            )
        prompt, response = np.split(np.asarray(sequence.token_ids, np.int32), [sequence.prompt_len])
        candidates = self._rows.get(_digest(prompt), [])
        for number, row in candidates:
            group = bisect_right(self._ends[number], row)
            table = self._group(number, group)
            index = row - (self._ends[number][group - 1] if group else 0)
            recorded = _value(table, "response_ids", index)
            if len(recorded) >= len(response) and np.array_equal(recorded[: len(response)], response):
                return self._scored(table, index, len(response))
        what = "another response after this prompt" if candidates else "no response after this prompt"
        raise TeacherRequestError(
            f"the recording has {what} ({len(prompt)} tokens, then {len(response)})",
            sequence=position,
            options=(PATH_KEY,),
            remedy="record these data with the same tokenizer, chat template and teacher prompt",
        )

    def _scored(self, table: pa.Table, index: int, n_rows: int) -> ScoredSequence:
        shape = (-1, self._source.top_k)
        logps_TK = _value(table, "topk_logps", index).reshape(shape)[:n_rows].astype(np.float32)
        ids_TK = _value(table, "topk_ids", index).reshape(shape)[:n_rows]
        scored = ScoredSequence(logps_TK, ids_TK, _value(table, "sampled_logps", index)[:n_rows])
        return scored.reduced(self._top_k, "float32")

    def _read_group(self, number: int, group: int) -> pa.Table:
        try:
            return self._files[number].read_row_group(group)
        except (OSError, pa.ArrowException) as error:
            raise TeacherError(
                f"a file of the recording is damaged: {error}", options=(PATH_KEY,), remedy="copy or record it again"
            ) from error


def _check(manifest: Manifest, folder: Path, top_k: int | None, temperature: float) -> None:
    source = manifest.source
    if manifest.n_rows < source.n_responses:
        raise TeacherSetupError(
            f"{folder} has {manifest.n_rows} of {source.n_responses} responses",
            path=folder,
            options=(PATH_KEY,),
            remedy=f"run the same {_RECORD} command again, which continues",
        )
    if top_k is not None and top_k > source.top_k:
        raise TeacherSetupError(
            f"{folder} has the top {source.top_k}, expected at least {TEACHER}.top_k={top_k}",
            path=folder,
            options=(f"{TEACHER}.top_k",),
            remedy="lower it, or record more",
        )
    if temperature != source.temperature:
        raise TeacherSetupError(
            f"{folder} was recorded at temperature {source.temperature:g}, expected gkd.distill_temperature="
            f"{temperature:g}",
            path=folder,
            options=("gkd.distill_temperature",),
            remedy="use the recorded temperature, or record again",
        )


def _group_ends(file: pq.ParquetFile) -> list[int]:
    """Return the number of rows up to the end of each row group."""
    return list(accumulate(file.metadata.row_group(group).num_rows for group in range(file.num_row_groups)))


def _digest(prompt: np.ndarray) -> bytes:
    return hashlib.blake2b(np.ascontiguousarray(prompt, np.int32).tobytes(), digest_size=16).digest()


def _lists(table: pa.Table, name: str) -> Any:
    """Yield each list of a column as an array."""
    for chunk in table.column(name).chunks:
        values, offsets = chunk.values.to_numpy(), chunk.offsets.to_numpy()
        yield from (values[start:end] for start, end in pairwise(offsets))


def _value(table: pa.Table, name: str, index: int) -> np.ndarray:
    """Return one list of a column as an array."""
    return np.asarray(table.column(name)[index].values.to_numpy())

"""Writer of a recording. A recording that was interrupted is continued after its last complete file."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recipe_gkd.data.samples import Sample, TeacherTopK
from recipe_gkd.errors import DataError
from recipe_gkd.runtime.durable_files import sync_file, sync_folder
from recipe_gkd.teachers.recorded.layout import Manifest, RecordingSource, Shard, read_manifest, schema

ROW_GROUP_BYTES = 128 << 10
"""Size of a row group, which is read as a whole for a single response."""


class RecordingWriter:
    """Writer of one folder.

    Lifecycle::

        writer = RecordingWriter(folder, source)
        for samples in remaining[writer.n_done :]: # in the order of the data
            writer.write(samples)                  # one file

    Attributes:
        n_done: Number of responses that are recorded.
    """

    def __init__(self, folder: Path, source: RecordingSource) -> None:
        """Open a new or an interrupted recording, and delete incomplete files.

        Raises:
            DataError: The folder has a recording of something else, or other files.
            TeacherSetupError: Its manifest or a file is damaged.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        found = read_manifest(folder)
        if found is None and any(folder.iterdir()):
            raise DataError(f"{folder} has files but no recording", remedy="choose an empty folder with --out")
        if found is not None and found.source != source:
            raise DataError(
                f"{folder} has a recording of something else: {_difference(found.source, source)}",
                remedy="choose another folder with --out, or use the same data, teacher and settings",
            )
        self._manifest = found or Manifest(source=source)
        self._manifest.write(folder)
        for file in folder.glob("part-*"):
            if file.name not in {shard.file for shard in self._manifest.shards}:
                file.unlink()

    @property
    def n_done(self) -> int:
        """Number of responses that are recorded."""
        return self._manifest.n_rows

    def write(self, samples: Sequence[Sample]) -> None:
        """Write the scores of samples as one file, and add it to the manifest."""
        source = self._manifest.source
        table = _table(samples, schema(source.dtype), np.dtype(source.dtype))
        file = self._folder / f"part-{len(self._manifest.shards):05d}.parquet"
        rows_per_group = max(1, ROW_GROUP_BYTES * len(samples) // max(table.nbytes, 1))
        options = dict(compression="zstd", use_dictionary=False, write_page_checksum=True)
        pq.write_table(table, file, row_group_size=rows_per_group, **options)
        sync_file(file)
        sync_folder(self._folder)
        content = file.read_bytes()
        shard = Shard(
            file=file.name, n_rows=len(samples), n_bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
        )
        self._manifest = self._manifest.with_shard(shard)
        self._manifest.write(self._folder)


def _table(samples: Sequence[Sample], columns: pa.Schema, dtype: np.dtype) -> pa.Table:
    rows: dict[str, list[np.ndarray]] = {name: [] for name in columns.names}
    for sample in samples:
        scores = sample.teacher
        assert isinstance(scores, TeacherTopK), "the rows are in this process"
        rows["prompt_ids"].append(sample.prompt.ids_for_teacher)
        rows["response_ids"].append(sample.response.ids)
        rows["sampled_logps"].append(scores.sampled_logps_T)
        rows["topk_ids"].append(scores.ids_TK.reshape(-1))
        rows["topk_logps"].append(scores.logps_TK.reshape(-1).astype(dtype, copy=False))
    return pa.table({name: pa.array(values, columns.field(name).type) for name, values in rows.items()}, columns)


def _difference(found: RecordingSource, expected: RecordingSource) -> str:
    """Return the first properties that differ, with both values."""
    ours, theirs = asdict(expected), asdict(found)
    pairs = [f"{name} is {theirs[name]!r}, expected {value!r}" for name, value in ours.items() if theirs[name] != value]
    return "; ".join(pairs[:3])

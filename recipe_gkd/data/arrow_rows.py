"""Rows of parquet, Arrow and csv files. No other module of the data set imports pyarrow."""

from __future__ import annotations

import csv
import gzip
import logging
import sys
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

from recipe_gkd.data.values import Unreadable
from recipe_gkd.errors import DataError

log = logging.getLogger(__name__)

ArrowError = pa.ArrowException
Batches = tuple[pa.Schema, list[pa.RecordBatch]]
"""Columns, and the rows in batches."""
_BATCH_ROWS, _BATCH_BYTES = 8192, 64 << 20


class ArrowRows:
    """Rows of parquet, Arrow and csv files, in record batches."""

    adds_nulls = True

    def __init__(self, path: Path, batches: Batches) -> None:
        self.path, (self._schema, found) = path, batches
        self._batches = [batch for batch in found if batch.num_rows]
        self.columns = list(self._schema.names)
        self._starts = [0, *accumulate(batch.num_rows for batch in self._batches)]
        self._reported: set[str] = set()

    def __len__(self) -> int:
        return self._starts[-1]

    def values(self, index: int) -> Mapping[str, object]:
        """Return the values of a row by column; see :class:`recipe_gkd.data.files.StoredRows`."""
        number = bisect_right(self._starts, index) - 1
        return _ArrowRow(self, self._batches[number], index - self._starts[number])

    def report(self, column: str, error: Exception) -> Unreadable:
        """Return a value that cannot be read, and log a warning for the first one of the column."""
        if column not in self._reported:
            self._reported.add(column)
            log.warning("%s: column %s has values that cannot be read (%s)", self.path, column, error)
        return Unreadable(f"{type(error).__name__}: {error}")

    def place(self, index: int) -> str:
        """Return the place of a row in the file."""
        return f"row {index}"

    def line(self, index: int) -> int | None:
        """Return None, because a row need not be a line."""
        return None

    def fields(self, path: Sequence[str]) -> list[str]:
        """Return the names of the fields of the objects at ``path``."""
        if path[0] not in self.columns:
            return []
        found = self._schema.field(path[0]).type
        for name in path[1:]:
            if not pa.types.is_struct(found) or found.get_field_index(name) < 0:
                return []
            found = found.field(name).type
        return [field.name for field in found] if pa.types.is_struct(found) else []

    def has_field(self, path: Sequence[str]) -> bool:
        """Return True if there is a nested field at ``path``."""
        return path[-1] in self.fields(path[:-1])

    def describe(self, column: str) -> tuple[str, int]:
        """Return the type of a column, and its number of nulls."""
        index = self._schema.get_field_index(column)
        return f"{self._schema.field(index).type!s:.60}", sum(batch.column(index).null_count for batch in self._batches)


class _ArrowRow(Mapping[str, object]):
    """Values of one row, each converted when it is read, so that a column that is not read cannot fail."""

    def __init__(self, rows: ArrowRows, batch: pa.RecordBatch, index: int) -> None:
        self._rows, self._batch, self._index = rows, batch, index

    def __getitem__(self, name: str) -> object:
        number = self._batch.schema.get_field_index(name)
        if number < 0:
            raise KeyError(name)
        try:
            return self._batch.column(number)[self._index].as_py()
        except (pa.ArrowException, ValueError, OverflowError, TypeError, ImportError) as error:
            return self._rows.report(name, error)

    def __iter__(self) -> Iterator[str]:
        return iter(self._rows.columns)

    def __len__(self) -> int:
        return len(self._rows.columns)


def read_parquet(path: Path) -> Batches:
    """Read by batches, because Arrow refuses more than 2 GiB of nested text at a time."""
    with pq.ParquetFile(path) as file:
        groups = [file.metadata.row_group(index) for index in range(file.metadata.num_row_groups)]
        n_bytes = max((group.total_byte_size // max(1, group.num_rows) for group in groups), default=0)
        size = max(1, min(_BATCH_ROWS, _BATCH_BYTES // max(1, n_bytes)))
        while True:
            try:
                return file.schema_arrow, list(file.iter_batches(batch_size=size))
            except pa.ArrowNotImplementedError:  # repeated text takes less space in the file than in memory
                if size == 1:
                    raise
                size = max(1, size // 16)


def read_ipc(path: Path) -> Batches:
    """Read a file or a stream of Arrow, or a feather file."""
    with path.open("rb") as file:
        magic = file.read(6)
    with pa.OSFile(str(path)) as source:
        if magic == b"ARROW1":
            reader = pa.ipc.open_file(source)
            return reader.schema, [reader.get_batch(index) for index in range(reader.num_record_batches)]
        if magic.startswith(b"FEA1"):
            table = feather.read_table(str(path))
            return table.schema, table.to_batches()
        stream = pa.ipc.open_stream(source)
        return stream.schema, list(stream)


def read_csv(path: Path) -> Batches:
    """Read all values as text. Python's reader names the line of a mistake, which Arrow's does not."""
    limit = csv.field_size_limit(sys.maxsize)
    opened = gzip.open if path.name.endswith(".gz") else open
    batches: list[pa.RecordBatch] = []
    try:
        with opened(path, "rt", encoding="utf-8-sig", newline="") as file:
            reader = csv.reader(file, strict=True)
            names = next(reader, None)
            if not names:
                what = f"data file {path} is empty; expected a first line with the names of the columns"
                raise DataError(what, file=path, line=1)
            schema = pa.schema([(name, pa.string()) for name in names])
            rows: list[list[str]] = []
            for row in reader:
                if row and len(row) != len(names):
                    n_line, found = reader.line_num, len(row)
                    what = f"data file {path}: line {n_line} has {found} values; expected {len(names)}, as line 1"
                    raise DataError(what, file=path, line=n_line)
                rows += [row] if row else []
                if len(rows) >= _BATCH_ROWS:
                    batches.append(_text_batch(rows, schema))
                    rows = []
            batches.append(_text_batch(rows, schema))
            return schema, batches
    except csv.Error as error:
        what = f"data file {path}: line {reader.line_num}: {error}"
        raise DataError(what, remedy="correct the line", file=path, line=reader.line_num) from error
    except UnicodeDecodeError as error:
        line = reader.line_num + 1
        what = f"data file {path}: near line {line}: {error}"
        raise DataError(what, remedy="save the file as UTF-8", file=path, line=line) from error
    finally:
        csv.field_size_limit(limit)


def _text_batch(rows: list[list[str]], schema: pa.Schema) -> pa.RecordBatch:
    columns = zip(*rows, strict=True) if rows else [()] * len(schema)
    return pa.record_batch([pa.array(column, pa.string()) for column in columns], schema=schema)

"""Tables of parquet files, and their columns."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from recipe_gkd.errors import DataError


def read_table(files: list[str], prompt_key: str) -> pa.Table:
    """Read parquet files into one table.

    Args:
        files: Paths of the files. ``~`` is expanded.
        prompt_key: Column that every file must have.

    Returns:
        All rows in the order of the files. A column that a file does not have is null in its rows.

    Raises:
        DataError: No file was given, or a file is missing, unreadable, empty or does not match the others.
    """
    if not files:
        raise DataError("no data file was given; set data.train_files to one or more parquet files")
    tables = [_read_file(Path(name).expanduser(), prompt_key) for name in files]
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(
            f"the columns of {', '.join(files)} do not fit together: {error}. Give a column one type in all files"
        ) from error


def _read_file(path: Path, prompt_key: str) -> pa.Table:
    if not path.is_file():
        raise DataError(f"data file {path} does not exist (working directory: {Path.cwd()}); correct the path")
    try:
        names = Counter(pq.read_schema(path).names)
        if duplicates := [column for column, count in names.items() if count > 1]:
            raise DataError(f"data file {path}: two columns are named {duplicates[0]}; rename or remove one of them")
        table = pq.read_table(path)
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"data file {path} cannot be read as parquet: {error}") from error
    if prompt_key not in table.column_names:
        raise DataError(
            f"data file {path} has no column {prompt_key!r}; it has: {', '.join(table.column_names) or 'none'}. "
            "Set data.prompt_key to the column of the prompts"
        )
    if table.num_rows == 0:
        raise DataError(f"data file {path} has no rows; remove it from the data files")
    return table


def column_path(table: pa.Table, key: str, *, setting: str, purpose: str) -> list[str]:
    """Return the path to a column, or to a field of a structure column.

    Args:
        table: Table with the column.
        key: Name of the column, or names of a structure column and its nested fields, joined by dots.
        setting: Configuration key that has the value ``key``, for the error message.
        purpose: Purpose of the column, which completes "Set ... to the column", for the error message.

    Returns:
        Name of the column, followed by the names of the nested fields.

    Raises:
        DataError: The table has no such column or field.
    """
    if key in table.column_names:
        return [key]
    path = key.split(".")
    fields: Any = table.schema
    for depth, name in enumerate(path):
        names = [field.name for field in fields] if isinstance(fields, pa.Schema | pa.StructType) else []
        if name not in names:
            field_hint = f"column {'.'.join(path[:depth])} has {', '.join(names) or 'no fields'}" if depth else ""
            raise DataError(
                f"{setting}={key}: the data has no such column; "
                + (field_hint or f"it has: {', '.join(names)}")
                + f". Set {setting} to the column {purpose}"
            )
        field = fields.field(name)
        fields = field.type if isinstance(field, pa.Field) else field
    return path


def column_at(table: pa.Table, path: list[str]) -> pa.ChunkedArray:
    """Return the column or nested field at a path of :func:`column_path`."""
    column = table.column(path[0])
    for name in path[1:]:
        column = pc.struct_field(column, [name])
    return column

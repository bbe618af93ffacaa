"""Tables of parquet, jsonl, json and csv files, and their columns."""

from __future__ import annotations

import csv
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq

from recipe_gkd.errors import DataError

MESSAGES = "messages"
"""Column of whole conversations, as in TRL's data. A final assistant message is the reference response."""
PROMPT_KEY_HINT = "Set data.prompt_key to the column of the prompts"
SUFFIXES = (".parquet", ".jsonl", ".json", ".csv")


def read_table(files: list[str], prompt_key: str, response_key: str = "response") -> pa.Table:
    """Read data files into one table.

    Args:
        files: Paths of parquet, jsonl, json or csv files, or of folders that contain them. ``~`` is expanded. A file
            with another suffix is read as parquet. The values of a csv file are text.
        prompt_key: Column that every file must have. A file with a column ``messages`` instead, or if ``prompt_key`` is
            ``messages``, is split: a final assistant message becomes the reference response, the rest the prompt.
        response_key: Column that receives the reference responses of ``messages``, if the file does not have it.

    Returns:
        All rows in the order of the files. A column that a file does not have is null in its rows.

    Raises:
        DataError: No file was given, or a file is missing, unreadable, empty or does not match the others.
    """
    if not files:
        raise DataError("no data file was given; set data.train_files to one or more data files")
    paths = [path for name in files for path in _files_at(Path(name).expanduser())]
    tables = [_read_file(path, prompt_key, response_key) for path in paths]
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(
            f"the columns of {', '.join(files)} do not fit together: {error}. Give a column one type in all files"
        ) from error


def _files_at(path: Path) -> list[Path]:
    """Return the file itself, or the data files of a folder and its subfolders, sorted by path.

    Hidden files and folders are skipped, such as the copies that an editor makes.
    """
    if not path.is_dir():
        return [path]
    found = sorted(
        file
        for file in path.rglob("*")
        if file.suffix in SUFFIXES
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not found:
        raise DataError(f"data folder {path} contains no file with a suffix of {', '.join(SUFFIXES)}; correct the path")
    return found


def _read_file(path: Path, prompt_key: str, response_key: str) -> pa.Table:
    if not path.is_file():
        raise DataError(f"data file {path} does not exist (working directory: {Path.cwd()}); correct the path")
    kind = path.suffix[1:] if path.suffix in SUFFIXES else "parquet"
    try:
        table = {"parquet": _read_parquet, "csv": _read_csv}.get(kind, _read_json)(path)
    except (pa.ArrowException, OSError, ValueError, OverflowError, csv.Error) as error:
        raise DataError(f"data file {path} cannot be read as {kind}: {error}") from error
    if prompt_key == MESSAGES or prompt_key not in table.column_names:
        table = _split_messages(table, prompt_key, response_key)
    if prompt_key not in table.column_names:
        raise DataError(
            f"data file {path} has no column {prompt_key!r}; it has: {', '.join(table.column_names) or 'none'}. "
            f"{PROMPT_KEY_HINT}"
        )
    if table.num_rows == 0:
        raise DataError(f"data file {path} has no rows; remove it from the data files")
    return table


def _read_parquet(path: Path) -> pa.Table:
    _refuse_duplicates(path, pq.read_schema(path).names)
    return pq.read_table(path)


def _read_csv(path: Path) -> pa.Table:
    with path.open(encoding="utf-8-sig", newline="") as file:
        names = next(csv.reader(file), [])
    _refuse_duplicates(path, names)
    return pa_csv.read_csv(
        path,
        # A row must fit into a block. The default of 1 MiB is too small for long texts.
        read_options=pa_csv.ReadOptions(block_size=min(max(path.stat().st_size, 1 << 20), (1 << 31) - 1)),
        parse_options=pa_csv.ParseOptions(newlines_in_values=True),
        convert_options=pa_csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())),
    )


def _read_json(path: Path) -> pa.Table:
    """Read a JSON list of objects, or one object per line.

    pyarrow's reader is not used, because it converts text that looks like a date.
    """
    text = path.read_text(encoding="utf-8-sig")
    try:
        rows = (
            json.loads(text)
            if text.lstrip().startswith("[")
            else [json.loads(line) for line in text.split("\n") if line.strip()]
        )
    except json.JSONDecodeError as error:
        raise ValueError(f"{error}; expected a list of objects, or one object per line") from error
    if not all(isinstance(row, dict) for row in rows):
        raise ValueError("expected a list of objects, or one object per line")
    names = list(dict.fromkeys(name for row in rows for name in row))
    return pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})


def _refuse_duplicates(path: Path, names: list[str]) -> None:
    if duplicates := [column for column, count in Counter(names).items() if count > 1]:
        raise DataError(f"data file {path}: two columns are named {duplicates[0]}; rename or remove one of them")


def _split_messages(table: pa.Table, prompt_key: str, response_key: str) -> pa.Table:
    """Return ``table`` with the column ``messages`` split into prompts and reference responses, if it has chats."""
    if MESSAGES not in table.column_names or not _is_list(table.schema.field(MESSAGES).type):
        return table
    prompts: list[Any] = []
    responses: list[Any] = []
    for messages in table.column(MESSAGES).to_pylist():
        last: dict[str, Any] = (messages[-1] if messages else None) or {}
        ends_with_response = isinstance(last, dict) and last.get("role") == "assistant"
        prompts.append(messages[:-1] if ends_with_response else messages)
        responses.append(last.get("content") if ends_with_response else None)
    column_type = table.schema.field(MESSAGES).type
    table = table.drop_columns([MESSAGES]).append_column(prompt_key, pa.array(prompts, column_type))
    if response_key not in table.column_names and any(response is not None for response in responses):
        table = table.append_column(response_key, pa.array(responses))
    return table


def _is_list(column_type: pa.DataType) -> bool:
    return pa.types.is_list(column_type) or pa.types.is_large_list(column_type)


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

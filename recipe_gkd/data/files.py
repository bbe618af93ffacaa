"""Data files: find them, and store the rows of each by its format.

Rows are stored as compactly as in the file, and become Python objects one at a time (:mod:`recipe_gkd.data.rows`). JSON
stays text: a column of Arrow would need one type, and give each object the fields of all others.
"""

from __future__ import annotations

import csv
import gzip
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from recipe_gkd.data.arrow_rows import ArrowError, ArrowRows, read_csv, read_ipc, read_parquet
from recipe_gkd.data.json_rows import JsonRows
from recipe_gkd.errors import DataError

_COMPRESSED = ".gz"
_JSON, _CSV, _ARROW = (".jsonl", ".json"), ".csv", (".arrow", ".feather")
SUFFIXES = (".parquet", *_ARROW, *_JSON, _CSV, *(suffix + _COMPRESSED for suffix in (*_JSON, _CSV)))
FORMATS = "parquet, arrow, feather, jsonl, json or csv; the last three also with .gz"
_METADATA = ("dataset_info.json", "state.json", "dataset_dict.json")
"""Files beside the data in folders that Hugging Face's ``save_to_disk`` writes."""


class StoredRows(Protocol):
    """Rows of one data file.

    Attributes:
        adds_nulls: True if its format gives each object the fields of all others, with the value null.
    """

    path: Path
    columns: list[str]
    adds_nulls: bool

    def __len__(self) -> int: ...

    def values(self, index: int) -> Mapping[str, object]:
        """Return the values of a row by column. A value may be :class:`Unreadable`."""

    def place(self, index: int) -> str:
        """Return the place of a row in the file, such as ``line 3``."""

    def line(self, index: int) -> int | None:
        """Return the number of a row's line, starting at 1. None if the format has no lines."""

    def fields(self, path: Sequence[str]) -> list[str]:
        """Return the names of the fields of the objects in a column, or in a nested field."""

    def has_field(self, path: Sequence[str]) -> bool:
        """Return True if there is a nested field at ``path``."""

    def describe(self, column: str) -> tuple[str, int]:
        """Return the type of a column, and its number of nulls."""


def find_files(names: Sequence[str]) -> list[Path]:
    """Return the data files at paths.

    Args:
        names: Paths of files, or of folders that contain them. A path that does not exist and has commas is a
            list of paths.

    Raises:
        DataError: There are no paths, or a folder contains no data file.
    """
    if not names:
        raise DataError("no data file was given", remedy="set data.train_files to one or more data files")
    paths = [Path(part) for name in names for part in _split_at_commas(name)]
    return [file for path in paths for file in _files_at(path)]


def _split_at_commas(name: str) -> list[str]:
    if "," not in name or Path(name).exists():
        return [name]
    return [part.strip() for part in name.split(",") if part.strip()]


def _files_at(path: Path) -> list[Path]:
    """Return the file itself, or the data files of a folder and its subfolders, sorted by path.

    Hidden files and folders are skipped, such as the copies that an editor makes.
    """
    if not path.is_dir():
        return [path]
    found = sorted(
        file
        for file in path.rglob("*")
        if file.name.endswith(SUFFIXES)
        and file.name not in _METADATA
        and file.is_file()
        and not any(part.startswith(".") for part in file.relative_to(path).parts)
    )
    if not found:
        what = f"data folder {path} contains no file with a suffix of {', '.join(SUFFIXES)}"
        raise DataError(what, remedy="correct the path", file=path)
    return found


def read_file(path: Path) -> StoredRows:
    """Read a data file. A file with another suffix than :data:`SUFFIXES` is read as parquet.

    Raises:
        DataError: The file is missing, cannot be read, or has no rows, or two columns have the same name.
    """
    if not path.is_file():
        what = f"data file {path} does not exist (working directory: {Path.cwd()})"
        raise DataError(what, remedy="correct the path", file=path)
    suffix = Path(path.name.removesuffix(_COMPRESSED)).suffix if path.name.endswith(SUFFIXES) else ".parquet"
    rows: StoredRows
    try:
        if suffix in _JSON:
            rows = JsonRows(path, _read_bytes(path))
        elif suffix == _CSV:
            rows = ArrowRows(path, read_csv(path))
        else:
            rows = ArrowRows(path, read_ipc(path) if suffix in _ARROW else read_parquet(path))
    except DataError:
        raise
    except (ArrowError, OSError, EOFError, ValueError, OverflowError, csv.Error) as error:
        hint = "" if path.name.endswith(SUFFIXES) else f"its suffix is none of the formats: {FORMATS}"
        what = f"data file {path} cannot be read as {suffix[1:]}: {error}"
        raise DataError(what, details=(hint,) if hint else (), file=path) from error
    if duplicates := [column for column, count in Counter(rows.columns).items() if count > 1]:
        what = f"data file {path}: two columns are named {duplicates[0]}"
        raise DataError(what, remedy="rename or remove one of them", file=path, column=duplicates[0])
    return rows


def _read_bytes(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.name.endswith(_COMPRESSED) else path.read_bytes()

"""Rows of a data set: the only form in which other modules see its data, whatever the format of the files."""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import copy
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, overload

import numpy as np

from recipe_gkd.config.schema import DataConfig
from recipe_gkd.data.files import StoredRows, find_files, read_file
from recipe_gkd.data.messages import Message, content_of, conversation_of, read_prompt, role_of, tool_calls_of
from recipe_gkd.data.tools import Tools, read_tools
from recipe_gkd.data.values import ColumnPath, RowColumns, Unreadable, nested_value, without_nulls
from recipe_gkd.errors import DataError

log = logging.getLogger(__name__)

TRAINING, VALIDATION = "the training data", "the validation data"
CONVERSATIONS = ("messages", "conversations")
"""Columns of whole conversations, as TRL and ShareGPT have. A final assistant message is the reference response."""
COMPLETION = "completion"
"""Column of the reference responses beside ``prompt`` in TRL's data."""
VERL_TRUTH = ("reward_model", "ground_truth")
"""Path of the ground truth in files that were prepared for verl."""
PROMPT_KEY_REMEDY = "set data.prompt_key to the column of the prompts"


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """A row of a data set. Each part is made when it is read first, so that a column that is not read cannot fail.

    Each property raises a :class:`DataError` with file, row and column if the value cannot be used.

    Attributes:
        index: Index of the row in the data set, starting at 0.
        file: File of the row.
        line: Line of the row in the file, starting at 1. None if the file has no lines.
        where: Name of the data set, file and place of the row, for messages.
        values: Values by column, as the file has them.
        columns: Columns that the parts come from.
        adds_nulls: True if the format of the file adds null fields to objects.
    """

    index: int
    file: Path
    line: int | None
    where: str
    values: Mapping[str, object]
    columns: RowColumns
    adds_nulls: bool

    @contextmanager
    def locate_errors(self, column: str = "") -> Iterator[None]:
        """Add file, row, line and column to a data error of the block that has no row."""
        try:
            yield
        except DataError as error:
            if error.row is None:
                error.file, error.row, error.line = self.file, self.index, self.line
                error.column = error.column or column
            raise

    def value(self, path: ColumnPath) -> object:
        """Return the value of a column or nested field, None if the row has none."""
        column = self.values.get(path[0])
        if isinstance(column, Unreadable):
            with self.locate_errors(path[0]):
                what = f"{self.where}: the column {path[0]} cannot be read: {column.reason}"
                raise DataError(what, remedy="correct the column")
        return nested_value(column, path[1:])

    def prompt_at(self, path: ColumnPath) -> str | list[Message] | None:
        """Return the prompt in another column than the student's, None if the row has none."""
        value, column = self.value(path), ".".join(path)
        return None if value is None else self._read_prompt(value, column)

    def _read_prompt(self, value: object, column: str) -> str | list[Message]:
        with self.locate_errors(column):
            return read_prompt(value, f"{self.where}, column {column}", drop_nulls=self.adds_nulls)

    @cached_property
    def _prompt_value(self) -> object:
        """Value of the prompt column, which is converted once."""
        return self.value((self.columns.prompt,))

    @cached_property
    def _conversation(self) -> tuple[str, object, Message | None] | None:
        """Column of a whole conversation, its prompt, and its final assistant message. None if the row has a prompt.

        The messages are not checked yet.
        """
        key = self.columns.prompt
        if key not in CONVERSATIONS and self._prompt_value is not None:
            return None
        names = [key] if key in CONVERSATIONS else CONVERSATIONS
        for name in names:
            if (value := self.value((name,))) is not None:
                with self.locate_errors(name):
                    messages = conversation_of(value, f"{self.where}, column {name}")
                if isinstance(messages, list) and messages and role_of(messages[-1]) == "assistant":
                    return name, messages[:-1], messages[-1]
                return name, messages, None
        return None

    @cached_property
    def prompt(self) -> str | list[Message]:
        """Prompt: a text, or messages whose contents are texts. A conversation without its final assistant message."""
        if self._conversation is None:
            return self._read_prompt(self._prompt_value, self.columns.prompt)
        name, messages, _ = self._conversation
        return self._read_prompt(messages, name)

    @cached_property
    def response(self) -> str | None:
        """Reference response, None if the row has none."""
        for name in (self.columns.response, *((COMPLETION,) if self._reads_completion else ())):
            if (value := self.value((name,))) is not None:
                with self.locate_errors(name):
                    return self._response_text(value, name)
        name, _, final = self._conversation or ("", None, None)
        if final is None:
            return None
        with self.locate_errors(name):
            return self._text_of(final, f"{self.where}, column {name}: the final message")

    @property
    def _reads_completion(self) -> bool:
        return self.columns.response not in self.columns.names

    def _response_text(self, value: object, name: str) -> str:
        if isinstance(value, str):
            return value
        if isinstance(value, list) and len(value) == 1 and role_of(value[0]) == "assistant":
            text = self._text_of(value[0], f"{self.where}, column {name}: the message")
            if text:
                return text
        raise DataError(
            f"{self.where}: the response in column {name!r} is {value!r:.200}; expected a string, or a list of one "
            "assistant message with a text",
            remedy="correct or remove the row",
        )

    @staticmethod
    def _text_of(message: Message, label: str) -> str | None:
        """Return the text of a message that is the reference response."""
        if tool_calls_of(message, label):
            raise DataError(
                f"{label} calls a tool; expected a text only, because a reference response is trained on as text, "
                "without its calls",
                remedy="remove the row, or end the conversation with the response after the call, or train without "
                "reference responses (gkd.sft_share=0 gkd.warmup_steps=0)",
            )
        return content_of(message, f"{label}: its content")

    @property
    def has_final_response(self) -> bool:
        """True if the row is a conversation that ends with a message of the assistant."""
        return self._conversation is not None and self._conversation[2] is not None

    @cached_property
    def tools(self) -> Tools | None:
        """Tools that the chat template describes: of the row, or else of ``rollout.tools``; None without any."""
        if (path := self.columns.tools) is None:
            return self.columns.default_tools
        value, column = self.value(path), ".".join(path)
        with self.locate_errors(column):
            return read_tools(value, self.where, column, drop_nulls=self.adds_nulls) or self.columns.default_tools

    @property
    def ground_truth(self) -> object:
        """Ground truth as the file has it, None without one."""
        return None if self.columns.truth is None else self.value(self.columns.truth)

    @property
    def data_source(self) -> object:
        """Name of the data source, None without one."""
        return self.value((self.columns.data_source,))

    @cached_property
    def extra(self) -> dict[str, Any]:
        """All columns except for the prompt and, if it is not nested, the ground truth, as the file has them.

        A value that cannot be read is None. A reference response that is the end of a conversation has a column.
        """
        truth = self.columns.truth
        used = {self.columns.prompt if self._conversation is None else self._conversation[0]}
        used |= {self.columns.prompt, *(truth if truth is not None and len(truth) == 1 else ())}
        found = {name: self.values.get(name) for name in self.columns.names if name not in used}
        found = {name: None if isinstance(value, Unreadable) else value for name, value in found.items()}
        if self.columns.tools is not None and self.adds_nulls and self.columns.tools[0] in found:
            found[self.columns.tools[0]] = without_nulls(found[self.columns.tools[0]])
        if self._conversation is not None and self.columns.response not in found:
            found[self.columns.response] = None
            with suppress(DataError):  # matters only if it is trained on
                found[self.columns.response] = self.response
        return found


class DataSet(Sequence[Row]):
    """Rows of data files, in the order of the files.

    Attributes:
        name: Name of the data set, for messages.
        columns: Names of all columns. A row of a file without one of them has no value there.
    """

    def __init__(self, stored: Sequence[StoredRows], config: DataConfig, name: str) -> None:
        """Combine files.

        Args:
            stored: Rows of each file.
            config: Names of the columns.
            name: Name of the data set, for messages.

        Raises:
            DataError: There is no column ``data.tools_key``.
        """
        self.name, self._stored, self._config = name, stored, config
        self.columns = list(dict.fromkeys(column for file in stored for column in file.columns))
        self._starts = [0, *accumulate(map(len, stored))]
        self._selected: np.ndarray | None = None
        self._tools: ColumnPath | None = None
        self._default_tools: Tools | None = None
        if (key := config.tools_key) is not None:
            self._tools = self.find(key, setting="data.tools_key", purpose="with the tools of each prompt")

    @property
    def default_tools(self) -> Tools | None:
        """Tools of rows that have none (``rollout.tools``)."""
        return self._default_tools

    @default_tools.setter
    def default_tools(self, tools: Tools | None) -> None:
        self._default_tools = tools
        vars(self).pop("_row_columns", None)

    @cached_property
    def _row_columns(self) -> RowColumns:
        try:
            truth: ColumnPath | None = self.truth_path
        except DataError:
            truth = None
        return RowColumns(
            names=self.columns,
            prompt=self._config.prompt_key,
            response=self._config.response_key,
            tools=self._tools,
            default_tools=self.default_tools,
            truth=truth,
            data_source=self._config.data_source_key,
        )

    def __len__(self) -> int:
        return self._starts[-1] if self._selected is None else len(self._selected)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> DataSet: ...

    def __getitem__(self, index: int | slice) -> Row | DataSet:
        """Return a row, or for a slice a data set of rows."""
        if isinstance(index, slice):
            return self.take(range(len(self))[index])
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        return self._row(index % len(self), self._row_columns)

    def __iter__(self) -> Iterator[Row]:
        return (self._row(index, self._row_columns) for index in range(len(self)))

    def _row(self, index: int, columns: RowColumns) -> Row:
        number = index if self._selected is None else int(self._selected[index])
        which = bisect_right(self._starts, number) - 1
        file, at = self._stored[which], number - self._starts[which]
        where = f"row {index} of {self.name} ({file.path}, {file.place(at)})"
        return Row(
            index=index,
            file=file.path,
            line=file.line(at),
            where=where,
            values=file.values(at),
            columns=columns,
            adds_nulls=file.adds_nulls,
        )

    def take(self, rows: Sequence[int]) -> DataSet:
        """Return a data set of some rows, which have new indices and share their memory with this one."""
        found = copy(self)
        chosen = np.asarray(rows, np.int64)
        found._selected = chosen if self._selected is None else self._selected[chosen]
        return found

    def limited_to(self, max_samples: int) -> DataSet:
        """Return at most ``max_samples`` rows: random ones by ``data.seed`` with ``data.shuffle``, else the first.

        -1 and 0 return all rows.
        """
        if max_samples < 1 or max_samples >= len(self):
            return self
        rows = np.arange(max_samples)
        if self._config.shuffle:
            rows = np.sort(np.random.default_rng(self._config.seed).choice(len(self), max_samples, replace=False))
        log.info("%s: %d of %d rows are used", self.name, max_samples, len(self))
        return self.take(rows.tolist())

    def values_at(self, path: ColumnPath) -> Iterator[object]:
        """Yield the value of a column or nested field in each row, None for rows without one."""
        return (row.value(path) for row in self)

    def data_sources(self) -> Iterator[object]:
        """Yield the name of each row's data source, None for rows without one."""
        return self.values_at((self._config.data_source_key,))

    def find(self, key: str, *, setting: str, purpose: str) -> ColumnPath:
        """Return the path to a column, or to a nested field of objects in a column.

        Args:
            key: Name of the column, or names of a column and of nested fields, joined by dots.
            setting: Configuration key that has the value ``key``, for the error.
            purpose: Purpose of the column, which completes "set ... to the column", for the error.

        Raises:
            DataError: The data set has no such column or field.
        """
        if key in self.columns:
            return (key,)
        path = tuple(key.split("."))
        if self._has(path):
            return path
        depth = next(depth for depth in range(len(path)) if not self._has(path[: depth + 1]))
        names = self._fields(path[:depth]) if depth else self.columns
        hint = f"column {'.'.join(path[:depth])} has {', '.join(names) or 'no fields'}"
        if not depth:
            hint = f"it has: {', '.join(names)}"
        raise DataError(
            f"{setting}={key}: the data has no such column; {hint}",
            remedy=f"set {setting} to the column {purpose}",
            column=key,
            existing=tuple(names),
        )

    def _has(self, path: ColumnPath) -> bool:
        return path[0] in self.columns if len(path) == 1 else any(file.has_field(path) for file in self._stored)

    def _fields(self, path: ColumnPath) -> list[str]:
        return list(dict.fromkeys(name for file in self._stored for name in file.fields(path)))

    def field_names(self, path: ColumnPath = ()) -> Iterator[str]:
        """Yield the names of columns and of the fields of their objects, joined by dots."""
        for name in self._fields(path) if path else self.columns:
            nested = list(self.field_names((*path, name)))
            yield from nested or [".".join((*path, name))]

    @cached_property
    def truth_path(self) -> ColumnPath:
        """Path of the ground truth: ``data.ground_truth_key``, or verl's if the default is absent.

        Raises:
            DataError: There is no such column.
        """
        key = self._config.ground_truth_key
        if key == VERL_TRUTH[-1] and key not in self.columns and self._has(VERL_TRUTH):
            log.info("%s: the ground truth is %s, as in verl's files", self.name, ".".join(VERL_TRUTH))
            return VERL_TRUTH
        return self.find(
            key, setting="data.ground_truth_key", purpose="that the reward function compares responses with"
        )

    @property
    def has_responses(self) -> bool:
        """True if there is a column that reference responses can come from."""
        return any(name in self.columns for name in (self._config.response_key, COMPLETION, *CONVERSATIONS))

    def describe(self, column: str) -> tuple[str, int]:
        """Return the type of a column in each format, and its number of nulls in all files."""
        found = [file.describe(column) for file in self._stored if column in file.columns]
        n_absent = sum(len(file) for file in self._stored if column not in file.columns)
        return " or ".join(dict.fromkeys(kind for kind, _ in found)), sum(n for _, n in found) + n_absent


def read_data_set(files: Sequence[str], config: DataConfig, name: str = TRAINING, max_samples: int = -1) -> DataSet:
    """Read data files.

    Args:
        files: Paths of data files, or of folders that contain them; see :func:`recipe_gkd.data.files.find_files`.
        config: Names of the columns.
        name: Name of the data set, for messages.
        max_samples: Number of rows to use; see :meth:`DataSet.limited_to`.

    Raises:
        DataError: No file was given, or a file is missing, unreadable or empty, or has no prompts.
    """
    stored = [read_file(path) for path in find_files(files)]
    key = config.prompt_key
    for file in stored:
        if not {key, *CONVERSATIONS} & set(file.columns):
            raise DataError(
                f"data file {file.path} has no column {key!r}; it has: {', '.join(file.columns) or 'none'}",
                remedy=PROMPT_KEY_REMEDY,
                file=file.path,
                column=key,
                existing=tuple(file.columns),
            )
        if not len(file):
            remedy = "remove it from the data files"
            raise DataError(f"data file {file.path} has no rows", remedy=remedy, file=file.path)
    return DataSet(stored, config, name).limited_to(max_samples)

"""Prompts of teachers that see something else than the student, such as a reference solution.

The teacher's prompt of a row is made in this order:

1. the value of ``data.teacher_prompt_key``; without it, the student's prompt
2. ``prompt_template`` replaces the last user message, or a prompt that is a string
3. the chat template formats it, with the teacher's system message and arguments, or else the student's

The response follows this prompt, so the teacher still returns one row per response token.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from recipe_gkd.config.prompt_template import PROMPT, fill, template_fields
from recipe_gkd.config.schema import Config
from recipe_gkd.config.teachers import TEACHER, PromptSettings, prompt_settings
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.tables import column_at, column_path
from recipe_gkd.data.tokenization import ChatTemplate, render_prompt, tokenize_prompt
from recipe_gkd.data.tools import Tools
from recipe_gkd.errors import DataError
from recipe_gkd.teacher_routing.routes import Routes


@dataclass(frozen=True)
class TeacherPrompts:
    """Prompts of all teachers for the rows of a data set.

    Attributes:
        ids: Token ids of the teacher's prompt for each prompt of the data set, int32 [P]. None: the student's prompt.
        longest: Length of the longest prompt of each teacher that has one of its own, in tokens, by name.
        fingerprint: Hash of all ids, 32 hexadecimal digits.
    """

    ids: Sequence[np.ndarray | None]
    longest: Mapping[str, int]
    fingerprint: str


def make_teacher_prompts(data: PromptData, routes: Routes, config: Config, tokenizer: Any) -> TeacherPrompts | None:
    """Tokenize the teachers' prompts of a data set.

    Args:
        data: Tokenized prompts of the student.
        routes: Teacher of each row.
        config: Configuration of the run.
        tokenizer: Tokenizer of the student.

    Returns:
        None if every teacher sees the student's prompts.

    Raises:
        DataError: A column is missing, a value cannot be used, or a prompt ends differently than the student's.
    """
    every = prompt_settings(config.actor_rollout_ref.teacher, config.data)
    settings = {name: found for name in routes.used if (found := every[name]) is not None}
    if not settings:
        return None
    prompts = data.raw_prompts()  # once for all teachers, because it is a copy
    builders = {
        name: _PromptBuilder(name, found, data, prompts, config=config, tokenizer=tokenizer)
        for name, found in settings.items()
    }
    ids: list[np.ndarray | None] = []
    longest = dict.fromkeys(builders, 0)
    digest = hashlib.blake2b(digest_size=16)
    for index, row in enumerate(data.rows):
        name = routes.names[routes.number_of(row)]
        of_row = builders[name].ids_of(index) if name in builders else None
        ids.append(of_row)
        digest.update(b"-" if of_row is None else len(of_row).to_bytes(8, "little") + of_row.tobytes())
        if of_row is not None:
            longest[name] = max(longest[name], len(of_row))
    return TeacherPrompts(ids, longest, digest.hexdigest())


class _PromptBuilder:
    """Prompts of one teacher."""

    def __init__(
        self,
        name: str,
        settings: PromptSettings,
        data: PromptData,
        prompts: Sequence[Any],
        *,
        config: Config,
        tokenizer: Any,
    ) -> None:
        teacher = config.actor_rollout_ref.teacher
        self._name, self._data, self._tokenizer = name, data, tokenizer
        entry = teacher.teachers.get(name)
        own = f"{TEACHER}.teachers.{name}"
        self._key = own if entry and entry.prompt_template is not None else TEACHER
        has_kwargs = entry is not None and entry.apply_chat_template_kwargs is not None
        self._kwargs_key = f"{own if has_kwargs else TEACHER}.apply_chat_template_kwargs"
        self._allows_mismatch = teacher.allow_prompt_mismatch
        self._template = settings.template
        fields = template_fields(settings.template) if settings.template else []
        self._columns = {field: self._field_values(field) for field in fields if field != PROMPT}
        self._student_prompts, self._student_template = prompts, data.template
        self._teacher_template = _template_of_teacher(settings, data.template)
        self._prompts: list[Any] | None = None
        if key := settings.prompt_key:
            path = column_path(data.table, key, setting="data.teacher_prompt_key", purpose="of the teacher's prompts")
            self._prompts = column_at(data.table, path).to_pylist()

    def ids_of(self, index: int) -> np.ndarray:
        """Return the token ids of the teacher's prompt for prompt ``index`` of the data set, int32 [P]."""
        row = self._data.rows[index]
        where = f"row {row} of {self._data.name}, prompt of teacher {self._name}"
        student = self._student_prompts[row]
        own = self._prompts[row] if self._prompts is not None else None
        prompt = self._filled(student if own is None else own, row, where)
        tools = self._data.tools[row]
        ids = tokenize_prompt(prompt, self._tokenizer, where, template=self._teacher_template, tools=tools)
        if not self._allows_mismatch:
            self._check_end(student, prompt, where, tools)
        return ids

    def _check_end(self, student: Any, teacher: Any, where: str, tools: Tools | None) -> None:
        of_student = _generation_prompt(student, self._tokenizer, where, self._student_template, tools)
        of_teacher = _generation_prompt(teacher, self._tokenizer, where, self._teacher_template, tools)
        if of_student != of_teacher:
            raise DataError(
                f"{where}: the prompts of student and teacher end differently. The student's response follows "
                f"{of_student!r}, but the teacher would score it after {of_teacher!r}. Give both the same arguments of "
                f"the chat template (data.apply_chat_template_kwargs, {self._kwargs_key}) and the "
                f"same kind of prompt, text or messages; or set {TEACHER}.allow_prompt_mismatch=true"
            )

    def _field_values(self, field: str) -> list[Any]:
        table, setting = self._data.table, f"{self._key}.prompt_template"
        try:
            path = column_path(table, field, setting=setting, purpose="")
        except DataError:
            raise DataError(
                f"{setting}={self._template!r} has the field {{{field}}}, but the data has no such column; expected "
                f"{{{PROMPT}}}, the replaced text, or one of: {', '.join(_column_names(table.schema))}. Correct the "
                "field; write {{ and }} for braces"
            ) from None
        values: list[Any] = column_at(table, path).to_pylist()
        return values

    def _filled(self, prompt: Any, row: int, where: str) -> Any:
        """Return the prompt with the filled template as its last user message, or as its text."""
        if self._template is None:
            return prompt
        if isinstance(prompt, str):
            return self._fill(prompt, row, where)
        messages = list(prompt) if isinstance(prompt, list) else []
        roles = [message.get("role") if isinstance(message, dict) else None for message in messages]
        if "user" in roles:
            last = len(roles) - 1 - roles[::-1].index("user")
            if isinstance(text := messages[last].get("content"), str):
                messages[last] = messages[last] | {"content": self._fill(text, row, where)}
                return messages
        raise DataError(
            f"{where}: {self._key}.prompt_template replaces the last user message, but the prompt {prompt!r:.200} has "
            "none with a text; remove the row or the template"
        )

    def _fill(self, text: str, row: int, where: str) -> str:
        assert self._template is not None
        values = {field: _as_text(column[row]) for field, column in self._columns.items()}
        if absent := [field for field, value in values.items() if value is None]:
            raise DataError(
                f"{where}: the column {absent[0]} is null, but {self._key}.prompt_template has the field "
                f"{{{absent[0]}}}; fill it in, or remove the row or the field"
            )
        return fill(self._template, {field: value or "" for field, value in values.items()} | {PROMPT: text})


def _column_names(fields: Iterable[pa.Field], prefix: str = "") -> Iterator[str]:
    """Yield the names of columns and of the fields of structure columns, joined by dots."""
    for field in fields:
        if isinstance(field.type, pa.StructType):
            yield from _column_names(field.type, f"{prefix}{field.name}.")
        else:
            yield prefix + field.name


def _as_text(value: Any) -> str | None:
    """Return a value of a column as text, None for null."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else str(value)


def _template_of_teacher(settings: PromptSettings, student: ChatTemplate) -> ChatTemplate:
    return ChatTemplate(
        kwargs=student.kwargs if settings.kwargs is None else settings.kwargs,
        system_prompt=student.system_prompt if settings.system_prompt is None else settings.system_prompt or None,
    )


def _generation_prompt(prompt: Any, tokenizer: Any, where: str, template: ChatTemplate, tools: Tools | None) -> str:
    """Return the text that the chat template adds after the last message. A prompt that is a string has none."""
    if isinstance(prompt, str):
        return ""
    without, complete = (
        render_prompt(prompt, tokenizer, where, template=template, tools=tools, add_generation_prompt=adds)
        for adds in (False, True)
    )
    pairs = zip(without, complete, strict=False)
    n_common = next((n for n, (a, b) in enumerate(pairs) if a != b), min(len(without), len(complete)))
    return complete[n_common:]

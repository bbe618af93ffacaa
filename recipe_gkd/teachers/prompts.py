"""Prompts of teachers that see something else than the student, such as a reference solution.

The teacher's prompt of a row is made in this order:

1. the value of ``data.teacher_prompt_key``; without it, the student's prompt
2. ``prompt_template`` replaces the last user message, or a prompt that is a string
3. the chat template formats it, with the teacher's system message and arguments, or else the student's

The response follows this prompt, so the teacher still returns one row per response token.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from recipe_gkd.config.keys import TEACHER
from recipe_gkd.config.prompt_settings import PromptSettings, prompt_settings
from recipe_gkd.config.prompt_template import PROMPT, fill, template_fields
from recipe_gkd.config.schema import Config
from recipe_gkd.data.fingerprints import PromptFingerprint
from recipe_gkd.data.messages import Message
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import ColumnPath, Row
from recipe_gkd.data.tokenization import ChatTemplate, render_prompt, tokenize_prompt
from recipe_gkd.data.tools import Tools
from recipe_gkd.data.values import without_nulls
from recipe_gkd.errors import DataError
from recipe_gkd.teachers.routes import Routes

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True)
class TeacherPrompts:
    """Prompts of all teachers for the rows of a data set.

    Attributes:
        ids: Token ids of the teacher's prompt for each prompt of the data set, int32 [P]. None: the student's prompt.
        longest: Length of the longest prompt of each teacher with its own prompt, in tokens, by name.
        fingerprint: Hash of what the prompts are made from.
    """

    ids: Sequence[np.ndarray | None]
    longest: Mapping[str, int]
    fingerprint: str


def make_teacher_prompts(
    data: PromptData, routes: Routes, config: Config, tokenizer: PreTrainedTokenizerBase
) -> TeacherPrompts | None:
    """Tokenize the teachers' prompts of a data set.

    Args:
        data: Tokenized prompts of the student.
        routes: Teacher of each row.

    Returns:
        None if every teacher sees the student's prompts.

    Raises:
        DataError: A column is missing, a value cannot be used, or a prompt ends differently than the student's.
    """
    every = prompt_settings(config.actor_rollout_ref.teacher, config.data)
    settings = {name: found for name in routes.used if (found := every[name]) is not None}
    if not settings:
        return None
    builders = {
        name: _PromptBuilder(name, found, data, config=config, tokenizer=tokenizer) for name, found in settings.items()
    }
    ids: list[np.ndarray | None] = []
    longest = dict.fromkeys(builders, 0)
    numbers = {name: number for number, name in enumerate(builders)}
    inputs = PromptFingerprint(tokenizer, *(builder.template for builder in builders.values()))
    for row in map(data.data_set.__getitem__, data.rows):
        name = routes.names[routes.number_of(row.index)]
        inputs.add(numbers.get(name))
        if name not in builders:
            ids.append(None)
            continue
        prompt, of_row = builders[name].prompt_of(row)
        ids.append(of_row)
        inputs.add_prompt(prompt, row.tools)
        longest[name] = max(longest[name], len(of_row))
    return TeacherPrompts(ids, longest, inputs.hexdigest())


class _PromptBuilder:
    """Prompts of one teacher.

    Attributes:
        template: Settings of the teacher's chat template.
    """

    def __init__(
        self,
        name: str,
        settings: PromptSettings,
        data: PromptData,
        *,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
    ) -> None:
        teacher = config.actor_rollout_ref.teacher
        self._name, self._data_set, self._tokenizer = name, data.data_set, tokenizer
        entry = teacher.teachers.get(name)
        own = f"{TEACHER}.teachers.{name}"
        self._key = own if entry and entry.prompt_template is not None else TEACHER
        has_kwargs = entry is not None and entry.apply_chat_template_kwargs is not None
        self._kwargs_key = f"{own if has_kwargs else TEACHER}.apply_chat_template_kwargs"
        self._allows_mismatch = teacher.allow_prompt_mismatch
        self._text_template = settings.template
        fields = template_fields(settings.template) if settings.template else []
        self._columns = {field: self._path_of_field(field) for field in fields if field != PROMPT}
        self._student_template = data.template
        self.template = _template_of_teacher(settings, data.template)
        self._prompt_path: ColumnPath | None = None
        if key := settings.prompt_key:
            self._prompt_path = data.data_set.find(
                key, setting="data.teacher_prompt_key", purpose="of the teacher's prompts"
            )

    def prompt_of(self, row: Row) -> tuple[str | list[Message], np.ndarray]:
        """Return the teacher's prompt for a row before the chat template, and its token ids, int32 [P]."""
        where = f"{row.where}, prompt of teacher {self._name}"
        try:
            own = None if self._prompt_path is None else row.prompt_at(self._prompt_path)
        except DataError as error:
            raise error.located(phase=f"prompt of teacher {self._name}").replaced(
                row=row.index, column=".".join(self._prompt_path or ())
            ) from error
        prompt = self._filled(row.prompt if own is None else own, row, where)
        ids = tokenize_prompt(prompt, self._tokenizer, where, template=self.template, tools=row.tools)
        if not self._allows_mismatch:
            self._check_end(row, prompt, where)
        return prompt, ids

    def _check_end(self, row: Row, prompt: str | list[Message], where: str) -> None:
        of_student = _generation_prompt(row.prompt, self._tokenizer, where, self._student_template, row.tools)
        of_teacher = _generation_prompt(prompt, self._tokenizer, where, self.template, row.tools)
        if of_student != of_teacher:
            raise DataError(
                f"{where}: the prompts of student and teacher end differently. The student's response follows "
                f"{of_student!r}, but the teacher would score it after {of_teacher!r}",
                row=row.index,
                remedy="give both the same arguments of the chat template (data.apply_chat_template_kwargs, "
                f"{self._kwargs_key}) and the same kind of prompt, text or messages; or set "
                f"{TEACHER}.allow_prompt_mismatch=true",
            )

    def _path_of_field(self, field: str) -> ColumnPath:
        setting = f"{self._key}.prompt_template"
        try:
            return self._data_set.find(field, setting=setting, purpose="")
        except DataError:
            raise DataError(
                f"{setting}={self._text_template!r} has the field {{{field}}}, but the data has no such column; "
                f"expected {{{PROMPT}}}, the replaced text, or one of: {', '.join(self._data_set.field_names())}",
                column=field,
                remedy="correct the field; write {{ and }} for braces",
            ) from None

    def _filled(self, prompt: str | list[Message], row: Row, where: str) -> str | list[Message]:
        """Return the prompt with the filled template as its last user message, or as its text."""
        if self._text_template is None:
            return prompt
        if isinstance(prompt, str):
            return self._fill(prompt, row, where)
        messages = list(prompt)
        roles = [message["role"] for message in messages]
        if "user" in roles:
            last = len(roles) - 1 - roles[::-1].index("user")
            if isinstance(text := messages[last].get("content"), str):
                messages[last] = messages[last] | {"content": self._fill(text, row, where)}
                return messages
        raise DataError(
            f"{where}: {self._key}.prompt_template replaces the last user message, but the prompt {prompt!r:.200} has "
            "none with a text",
            row=row.index,
            remedy="remove the row or the template",
        )

    def _fill(self, text: str, row: Row, where: str) -> str:
        assert self._text_template is not None
        values = {field: _as_text(row.value(path), row) for field, path in self._columns.items()}
        if absent := [field for field, value in values.items() if value is None]:
            raise DataError(
                f"{where}: the column {absent[0]} is null, but {self._key}.prompt_template has the field "
                f"{{{absent[0]}}}",
                row=row.index,
                column=absent[0],
                remedy="fill it in, or remove the row or the field",
            )
        return fill(self._text_template, {field: value or "" for field, value in values.items()} | {PROMPT: text})


def _as_text(value: object, row: Row) -> str | None:
    """Return a value of a column as text, None for null. An object has the fields of its row only."""
    if value is None or isinstance(value, str):
        return value
    value = without_nulls(value) if row.adds_nulls else value
    return json.dumps(value, ensure_ascii=False, default=str) if isinstance(value, list | dict) else str(value)


def _template_of_teacher(settings: PromptSettings, student: ChatTemplate) -> ChatTemplate:
    return ChatTemplate(
        kwargs=student.kwargs if settings.kwargs is None else settings.kwargs,
        system_prompt=student.system_prompt if settings.system_prompt is None else settings.system_prompt or None,
    )


def _generation_prompt(
    prompt: str | list[Message],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    template: ChatTemplate,
    tools: Tools | None,
) -> str:
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

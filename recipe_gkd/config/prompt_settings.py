"""Prompts that each teacher sees, if they differ from the student's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipe_gkd.config.schema import DataConfig, TeacherConfig
    from recipe_gkd.config.schema.teacher import TeacherEntry

DEFAULT = "default"  # name of the teacher at server_ip:server_port


@dataclass(frozen=True)
class PromptSettings:
    """Differences between the prompts of a teacher and of the student.

    Attributes:
        prompt_key: Column of the teacher's prompts. None: the student's prompts.
        template: Template of the last user message. None: unchanged.
        system_prompt: System message of prompts that have none. None: the student's; empty: none.
        kwargs: Arguments of the chat template. None: the student's.
    """

    prompt_key: str | None = None
    template: str | None = None
    system_prompt: str | None = None
    kwargs: Mapping[str, Any] | None = None


def prompt_settings(teacher: TeacherConfig, data: DataConfig) -> dict[str, PromptSettings | None]:
    """Return the prompt settings of each teacher by name, None for a teacher that sees the student's prompts."""
    entries: Mapping[str, TeacherEntry | TeacherConfig] = teacher.teachers or {DEFAULT: teacher}
    found = {
        name: PromptSettings(
            prompt_key=data.teacher_prompt_key,
            template=_own(entry.prompt_template, teacher.prompt_template) or None,
            system_prompt=_own(entry.system_prompt, teacher.system_prompt),
            kwargs=_own(entry.apply_chat_template_kwargs, teacher.apply_chat_template_kwargs),
        )
        for name, entry in entries.items()
    }
    return {name: None if settings == PromptSettings() else settings for name, settings in found.items()}


def _own(value: Any, default: Any) -> Any:
    return default if value is None else value

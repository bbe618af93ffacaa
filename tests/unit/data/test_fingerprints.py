"""Fingerprints of prompts: hashes of their inputs, so that a template with a date does not change them."""

from __future__ import annotations

import datetime
from typing import Any

import pytest

from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.data.fingerprints import FORMAT, can_compare
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.teachers.prompts import make_teacher_prompts
from recipe_gkd.teachers.routes import Routes
from tests._support.base_config import base_config
from tests._support.data_sets import data_set_of

CHAT = [{"role": "user", "content": "1"}]
SYSTEM = [{"role": "system", "content": "1"}, {"role": "user", "content": "2"}]
TOOL = {"type": "function", "function": {"name": "add"}}
DATED = (
    "{{ strftime_now('%d') }}+{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)
KEY = "actor_rollout_ref.teacher"


def on_day(day: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Set the date that templates print."""

    class Clock(datetime.datetime):
        @classmethod
        def now(cls, tz: Any = None) -> Any:
            return cls(2026, 7, day)

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Clock)


def read(*overrides: str, columns: dict[str, Any] | None = None, template: str = DATED) -> PromptData:
    """Return prompts of the student, and with keys of the teacher's prompts also those."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = template
    config = base_config(*overrides)
    data = PromptData(data_set_of(columns or {"prompt": [CHAT, SYSTEM]}, config.data), config.data, tokenizer)
    prompts = make_teacher_prompts(data, Routes(("default",)), config, tokenizer)
    if prompts is not None:
        data.set_teacher_prompts(prompts.ids, prompts.fingerprint)
    return data


def test_date_in_the_template_changes_ids_only(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for day in (25, 26):
        on_day(day, monkeypatch)
        found.append(read(f"{KEY}.prompt_template='9;{{prompt}}'"))
    first, second = found
    assert first.ids[0].tolist() != second.ids[0].tolist()
    assert first.prompt(0, 0).ids_for_teacher.tolist() != second.prompt(0, 0).ids_for_teacher.tolist()
    assert first.fingerprint == second.fingerprint
    assert first.teacher_prompts_fingerprint == second.teacher_prompts_fingerprint != ""


def test_each_input_changes_the_fingerprint() -> None:
    tools = {"prompt": [CHAT, SYSTEM], "tools": [[TOOL], None]}
    variants = [
        read(),
        read(template=DATED + " "),
        read("data.system_prompt='2'"),
        read("data.apply_chat_template_kwargs.a=1"),
        read(columns={"prompt": [SYSTEM, CHAT]}),
        read(columns={"prompt": [CHAT, CHAT]}),
        read("data.tools_key=tools", columns=tools),
    ]
    assert len({data.fingerprint for data in variants}) == len(variants)
    assert read(columns=tools).fingerprint == variants[0].fingerprint  # not read


def test_each_input_changes_the_fingerprint_of_the_teacher() -> None:
    columns = {"prompt": [CHAT, SYSTEM], "hint": ["3", "4"], "own": [CHAT, CHAT]}
    template = f"{KEY}.prompt_template="
    variants = [
        read(template + "'{hint}{prompt}'", columns=columns),
        read(template + "'{prompt}{hint}'", columns=columns),
        read(template + "'{hint}{prompt}'", columns=columns | {"hint": ["3", "5"]}),
        read(template + "'{hint}{prompt}'", columns=columns, template=DATED + " "),
        read(template + "'{hint}{prompt}'", f"{KEY}.system_prompt='7'", columns=columns),
        read(template + "'{hint}{prompt}'", f"{KEY}.apply_chat_template_kwargs.a=1", columns=columns),
        read("data.teacher_prompt_key=own", columns=columns),
        read("data.teacher_prompt_key=own", columns=columns | {"own": [SYSTEM, CHAT]}),
    ]
    assert len({data.teacher_prompts_fingerprint for data in variants}) == len(variants)


def test_only_fingerprints_of_the_same_inputs_are_compared() -> None:
    assert can_compare(f"{FORMAT}1", f"{FORMAT}2") and can_compare("1", "2")
    assert not can_compare("1", f"{FORMAT}1") and not can_compare("", f"{FORMAT}1")

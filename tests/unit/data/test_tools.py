"""Tools of prompts: ``data.tools_key``."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest

from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.commands.data.inspect import describe_prompts
from recipe_gkd.config import Config
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.errors import DataError
from recipe_gkd.teachers.prompts import make_teacher_prompts
from recipe_gkd.teachers.routes import Routes
from tests._support.base_config import base_config
from tests._support.data_sets import data_set_of
from tests._support.errors import raises

CHAT = [{"role": "user", "content": "1"}]
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
SUB = {"type": "function", "function": {"name": "sub", "description": "1-1"}}
NULL = {"type": "function", "function": {"name": "pow", "default": None}}
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool | tojson }};{% endfor %}"
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}={% endif %}"
)


@pytest.fixture
def tokenizer() -> Any:
    found = build_tokenizer()
    found.chat_template = TEMPLATE
    return found


def read(tokenizer: Any, columns: dict[str, Any], *overrides: str) -> tuple[PromptData, Config]:
    config = base_config(*overrides)
    return PromptData(data_set_of(columns, config.data), config.data, tokenizer), config


@pytest.mark.parametrize("as_text", [False, True])
def test_prompts_are_those_of_the_template_with_tools(tokenizer: Any, as_text: bool) -> None:
    """A row without tools is that of a data set without them. Parquet's null fields are dropped."""
    tools: list[Any] = [[ADD, NULL if as_text else SUB], None, []]  # a null in JSON text is the user's
    column = [None if each is None else json.dumps(each) for each in tools] if as_text else tools
    data, _ = read(tokenizer, {"prompt": [CHAT] * 3, "functions": column}, "data.tools_key=functions")
    expected = [
        tokenizer.apply_chat_template(CHAT, tools=each or None, add_generation_prompt=True, return_dict=False)
        for each in tools
    ]
    assert [ids.tolist() for ids in data.ids] == expected and len(expected[0]) > len(expected[1])


def test_key_changes_the_fingerprint_only_with_tools(tokenizer: Any) -> None:
    def fingerprint(tools: list[Any], *overrides: str) -> str:
        return read(tokenizer, {"prompt": [CHAT], "tools": pa.array(tools, pa.string())}, *overrides)[0].fingerprint

    plain, key = fingerprint([None]), "data.tools_key=tools"
    assert fingerprint([None], key) == fingerprint([json.dumps([ADD])]) == plain
    assert len({plain, fingerprint([json.dumps([ADD])], key), fingerprint([json.dumps([SUB])], key)}) == 3


@pytest.mark.parametrize(
    ("columns", "row", "column", "existing"),
    [
        ({"prompt": [CHAT]}, None, "tools", ("prompt",)),
        ({"prompt": [CHAT], "tools": ["{"]}, 0, "tools", None),
        ({"prompt": [CHAT], "tools": ['{"a": 1}']}, 0, "tools", None),
        ({"prompt": [CHAT], "tools": [["add"]]}, 0, "tools", None),
        ({"prompt": ["1"], "tools": [[ADD]]}, 0, "prompt", None),
    ],
)
def test_unusable_tools_are_refused(
    tokenizer: Any, columns: dict[str, Any], row: int | None, column: str, existing: tuple[str, ...] | None
) -> None:
    with raises(DataError, row=row, column=column, existing=existing):
        read(tokenizer, columns, "data.tools_key=tools")


def test_template_that_ignores_tools_is_reported(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer.chat_template = TEMPLATE.replace("tools or []", "[]")
    with caplog.at_level(logging.WARNING):
        data, config = read(tokenizer, {"prompt": [CHAT], "tools": [[ADD]]}, "data.tools_key=tools")
    assert "chat template ignores the tools of data.tools_key=tools" in caplog.text
    lines = list(describe_prompts(data.data_set, config.data, tokenizer, 0))
    assert "1 of 1 prompts have tools, which the chat template ignores" in lines


def test_plain_text_beside_a_template_is_reported(tokenizer: Any, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        read(tokenizer, {"prompt": ["1"]})
    assert "the prompts are plain text, which gets no chat template, but the tokenizer has one" in caplog.text


def test_teacher_sees_the_tools(tokenizer: Any) -> None:
    overrides = ("data.tools_key=tools", "actor_rollout_ref.teacher.system_prompt='2'")
    data, config = read(tokenizer, {"prompt": [CHAT], "tools": [[ADD]]}, *overrides)
    prompts = make_teacher_prompts(data, Routes(("default",)), config, tokenizer)
    assert prompts is not None and prompts.ids[0] is not None
    messages = [{"role": "system", "content": "2"}, *CHAT]
    expected = tokenizer.apply_chat_template(messages, tools=[ADD], add_generation_prompt=True, return_dict=False)
    assert prompts.ids[0].tolist() == expected


def test_truncation_error_names_the_row(tokenizer: Any) -> None:
    config = replace(base_config().data, max_prompt_length=1, filter_overlong_prompts=False)
    with raises(DataError, row=0, column="prompt"):
        PromptData(data_set_of({"prompt": [CHAT]}, config, "the held-out data"), config, tokenizer)

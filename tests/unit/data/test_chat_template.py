"""Settings of the chat template: ``data.apply_chat_template_kwargs`` and ``data.system_prompt``."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jinja2
import pytest

from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.tokenization import ChatTemplate, render_prompt, tokenize_prompt
from recipe_gkd.errors import DataError
from tests._support.base_config import base_config
from tests._support.data_sets import data_set_of
from tests._support.errors import raises

CONFIG = base_config().data
CHAT = [{"role": "user", "content": "1"}]
WITH_SYSTEM = [{"role": "system", "content": "9"}, *CHAT]
FULL = ChatTemplate({"enable_thinking": False}, "2")


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    found = build_tokenizer()
    found.chat_template = (
        "{% for tool in tools or [] %}{{ tool }}{% endfor %}"
        "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{{ ';' if enable_thinking is false else '' }}{% endif %}"
    )
    return found


@pytest.mark.parametrize(
    ("prompt", "template", "text"),
    [
        (CHAT, ChatTemplate(), "<|user|>1<|assistant|>"),
        (CHAT, FULL, "2<|user|>1<|assistant|>;"),
        (WITH_SYSTEM, FULL, "9<|user|>1<|assistant|>;"),
        ("3", FULL, "3"),
    ],
)
def test_tokens_are_those_of_the_rendered_text(tokenizer: Any, prompt: Any, template: ChatTemplate, text: str) -> None:
    assert render_prompt(prompt, tokenizer, "row 0", template=template) == text
    ids = tokenize_prompt(prompt, tokenizer, "row 0", template=template)
    assert ids.tolist() == tokenizer(text, add_special_tokens=False)["input_ids"]


def test_render_prompt_without_generation_prompt_and_with_tools(tokenizer: Any) -> None:
    assert render_prompt(CHAT, tokenizer, "row 0", template=FULL, add_generation_prompt=False) == "2<|user|>1"
    assert render_prompt(CHAT, tokenizer, "row 0", tools=[{"name": "add"}]).startswith("{'name': 'add'}<|user|>")


def test_template_that_refuses_the_arguments_names_the_row(tokenizer: Any) -> None:
    with raises(DataError) as caught:
        tokenize_prompt(CHAT, tokenizer, "row 7", template=ChatTemplate({"tokenize": False, "chat_template": "{{"}))
    assert isinstance(caught.value.__cause__, jinja2.TemplateError) and str(caught.value).startswith("row 7: ")


def test_keys_change_prompts_and_fingerprint(tokenizer: Any) -> None:
    data_set = data_set_of({"prompt": [CHAT, WITH_SYSTEM]})

    def read(**values: Any) -> PromptData:
        return PromptData(data_set, replace(CONFIG, **values), tokenizer)

    keyed = read(apply_chat_template_kwargs={"enable_thinking": False}, system_prompt="2")
    texts = ["2<|user|>1<|assistant|>;", "9<|user|>1<|assistant|>;"]
    assert [tokenizer.decode(ids) for ids in keyed.ids] == texts
    others = [read(), read(system_prompt="2"), read(apply_chat_template_kwargs={"enable_thinking": False}), keyed]
    assert len({data.fingerprint for data in others}) == 4

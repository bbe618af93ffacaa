"""Turns whose text a parser of tool calls cannot read, and parsers that read no text."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from recipe_gkd.config.environments import PARSER
from recipe_gkd.data.samples import Response
from recipe_gkd.errors import ConfigError
from recipe_gkd.rollout.vllm.tool_calls import MessageParser
from tests._support.conversations import TOKENIZER
from tests._support.errors import raises


def turn(text: str) -> Response:
    ids = np.array(TOKENIZER(text, add_special_tokens=False)["input_ids"], np.int32)
    return Response(
        uid=0,
        ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        finish_reason="stop",
        weights_version=0,
        versions_T=np.zeros(len(ids), np.int32),
    )


def with_parser(monkeypatch: pytest.MonkeyPatch, error: Exception, *, fails_on: str) -> None:
    """Replace vLLM's parser by one that raises an error for a text."""

    class Parser:
        def __init__(self, *_: Any) -> None: ...

        def extract_tool_calls(self, text: str, request: Any) -> Any:
            if text == fails_on:
                raise error

    monkeypatch.setattr(MessageParser, "_find", lambda self, name: Parser)
    monkeypatch.setattr(MessageParser, "_request_class", lambda self, **_: None, raising=False)


@pytest.mark.parametrize("error", [ValueError("a digit"), TypeError("no name"), AttributeError("no text")])
def test_text_that_a_parser_fails_on_is_content(error: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    with_parser(monkeypatch, error, fails_on="1+2")
    message = MessageParser(TOKENIZER, "granite", ()).message(turn("1+2"), None)
    assert message == {"role": "assistant", "content": "1+2"}


def test_lists_of_tools_are_kept_up_to_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    with_parser(monkeypatch, ValueError(), fails_on="1")
    monkeypatch.setattr(MessageParser, "_tool_class", lambda self, **tool: tool, raising=False)
    parser = MessageParser(TOKENIZER, "hermes", ())
    tools = [[{"name": str(number)}] for number in range(100)]
    assert [parser._described(each) for each in tools] == tools
    assert parser._described(tools[-1]) is parser._described(tools[-1])
    assert parser._describe.cache_info().currsize < 100


def test_parser_of_other_than_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with_parser(monkeypatch, NotImplementedError("use another"), fails_on="")
    with raises(ConfigError, keys=(PARSER,)):
        MessageParser(TOKENIZER, "openai", ())


@pytest.mark.slow
def test_parsers_of_vllm() -> None:
    """A malformed call is content, and a parser without text is refused."""
    pytest.importorskip("vllm")
    with raises(ConfigError, keys=(PARSER,)):
        MessageParser(TOKENIZER, "openai", ())
    text = '<tool_call>[{"name": 5}]</tool_call>'
    message = MessageParser(TOKENIZER, "granite", ()).message(turn(text), None)
    assert message["role"] == "assistant" and "tool_calls" not in message

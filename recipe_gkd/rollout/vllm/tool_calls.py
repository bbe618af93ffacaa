"""Conversion of a turn's tokens to a message, with vLLM's parsers of tool calls."""

from __future__ import annotations

import json
import logging
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_gkd.config.environments import PARSER
from recipe_gkd.data.messages import Message, parsed_arguments
from recipe_gkd.data.samples import Response
from recipe_gkd.errors import ConfigError, WorkerError
from teacher.common.vllm_setup import TESTED_VLLM

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CACHED_TOOL_LISTS = 64
"""Number of lists of tools that are kept in vLLM's form. Each row of the data can have its own tools."""


class MessageParser:
    """Parser of the turns of a model.

    Args:
        tokenizer: Tokenizer of the model.
        name: Name of vLLM's tool parser. None: messages have no tool calls.
        end_ids: Ids that end a turn. They are no part of the content.

    Raises:
        ConfigError: vLLM has no such parser of text, or it cannot be used with this tokenizer.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, name: str | None, end_ids: Collection[int]) -> None:
        self._tokenizer, self._name, self._end_ids = tokenizer, name, frozenset(end_ids)
        self._describe = lru_cache(_CACHED_TOOL_LISTS)(self._parse_schemas)
        self._parser_class: Any = None
        if name is not None:
            self._parser_class = self._find(name)
            try:
                self._extract("", None)  # a tokenizer without the parser's special tokens fails here
            except NotImplementedError as error:
                raise ConfigError(
                    f"{PARSER}={name}: this parser of vLLM does not parse text: {error}",
                    remedy="use another parser, or rollout.environment, which can parse turns itself",
                    keys=(PARSER,),
                ) from error

    def _find(self, name: str) -> Any:
        from recipe_gkd.rollout.vllm import compat  # noqa: F401 - prepares the process for vLLM

        try:
            from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest, ChatCompletionToolsParam
            from vllm.tool_parsers import ToolParserManager
        except ImportError as error:
            raise WorkerError(
                f"the installed vLLM has no tool parsers where version {TESTED_VLLM} has them: {error}",
                remedy=f"install vLLM {TESTED_VLLM}",
            ) from error
        # Some parsers log each text that they cannot parse, with a traceback. A student makes many of them.
        logging.getLogger("vllm.tool_parsers").setLevel(logging.CRITICAL)
        self._request_class, self._tool_class = ChatCompletionRequest, ChatCompletionToolsParam
        try:
            return ToolParserManager.get_tool_parser(name)
        except KeyError:
            names = ", ".join(ToolParserManager.list_registered())
            raise ConfigError(
                f"{PARSER}={name}: vLLM has no such tool parser", remedy=f"use one of: {names}", keys=(PARSER,)
            ) from None

    def message(self, response: Response, tools: Sequence[Any] | None) -> Message:
        """Return a turn as a message. Text that the parser refuses is content without tool calls."""
        ids = response.ids.tolist()
        if ids and ids[-1] in self._end_ids:
            ids = ids[:-1]
        text = str(self._tokenizer.decode(ids, skip_special_tokens=False))
        if self._parser_class is None:
            return {"role": "assistant", "content": text}
        try:
            found = self._extract(text, tools)
        except Exception:  # noqa: BLE001 - the parsers of vLLM raise errors of many types for a student's text
            return {"role": "assistant", "content": text}
        if not found.tools_called:
            return {"role": "assistant", "content": text}
        calls = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.function.name, "arguments": parsed_arguments(call.function.arguments)},
            }
            for call in found.tool_calls
        ]
        return {"role": "assistant", "content": found.content or "", "tool_calls": calls}

    def _extract(self, text: str, tools: Sequence[Any] | None) -> Any:
        described = self._described(tools)
        try:
            parser = self._parser_class(self._tokenizer, described)
        except (RuntimeError, ValueError, KeyError) as error:
            raise ConfigError(
                f"{PARSER}={self._name} cannot be used with the student's tokenizer: {error}",
                remedy="use the parser of the student's model family",
                keys=(PARSER,),
            ) from error
        return parser.extract_tool_calls(
            text, self._request_class(messages=[], model="", seed=None, tools=described or None)
        )

    def _described(self, tools: Sequence[Any] | None) -> list[Any]:
        """Return schemas in vLLM's form."""
        return self._describe(json.dumps(list(tools), sort_keys=True, default=str)) if tools else []

    def _parse_schemas(self, text: str) -> list[Any]:
        try:
            return [self._tool_class(**tool) for tool in json.loads(text)]
        except (TypeError, ValueError):  # schemas of another form, which the parser does not need
            return []


def message_parser(
    folder: str, name: str | None, end_ids: Collection[int], *, trust_remote_code: bool
) -> MessageParser:
    """Return the parser of the turns of the model in a folder; see :class:`MessageParser`."""
    from recipe_gkd.model_files import load_tokenizer

    return MessageParser(load_tokenizer(Path(folder), trust_remote_code=trust_remote_code), name, end_ids)

"""Conversations of tests: a tokenizer with a tool template, and a scripted student in place of a replica."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from recipe_gkd.config import Config
from recipe_gkd.config.environments import EnvironmentSettings
from recipe_gkd.conversations.open_batch import Batch
from recipe_gkd.conversations.stage import ConversationStage, SendTurns
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.rollout.turns import Turn, TurnRequest
from recipe_gkd.runtime.user_code import load_attribute
from tests._support import environments
from tests._support.base_config import base_config
from tests._support.data_sets import data_set_of
from tests._support.repository import REPO

TOKENIZER = load_attribute(str(REPO / "examples/calculator/conversations.py"), "build_tokenizer", key="")()
FILE = environments.__file__
QWEN3 = """{%- set last = namespace(query=-1) -%}
{%- for m in messages -%}{%- if m.role == 'user' -%}{%- set last.query = loop.index0 -%}{%- endif -%}{%- endfor -%}
{%- for m in messages -%}
{%- set parts = m.content.split('</think>') -%}
{%- set reasoning = parts[0].split('<think>')[-1].strip('\\n') if parts | length > 1 else '' -%}
{%- set content = parts[-1].lstrip('\\n') -%}
{{- '<|' + m.role + '|>' -}}
{%- if m.role != 'assistant' -%}{{- m.content -}}
{%- elif loop.index0 > last.query and (loop.last or reasoning) -%}
{{- '<think>\\n' + reasoning + '\\n</think>\\n\\n' + content -}}
{%- else -%}{{- content -}}{%- endif -%}
{%- for c in m.tool_calls or [] -%}{{- '<tool_call>' + c.function.arguments | tojson + '</tool_call>' -}}{%- endfor -%}
{{- '<|end|>' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"""
"""Template with the rules of Qwen3's for reasoning: it stands in turns behind the last message of a user only."""
CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def configured(*overrides: str) -> Config:
    """Return a configuration of conversations."""
    return base_config(
        "data.ground_truth_key=truth", "data.max_prompt_length=64", "data.max_response_length=200",
        "rollout.environment_timeout_s=20", *overrides,
    )  # fmt: skip


def settings_of(*overrides: str) -> EnvironmentSettings:
    """Return the settings of the processes."""
    return EnvironmentSettings.of(configured(*overrides))


def prompt_data(
    config: Config, *names: str, tools: Any = None, tokenizer: PreTrainedTokenizerBase = TOKENIZER
) -> PromptData:
    """Return a data set with one prompt ``1+1=`` for each name."""
    columns = {
        "prompt": [[{"role": "user", "content": "1+1="}] for _ in names],
        "name": list(names),
        "truth": ["2" for _ in names],
    }
    data_set = data_set_of(columns, config.data)
    data_set.default_tools = tools
    return PromptData(data_set, config.data, tokenizer)


def prompts_of(data: PromptData, first_uid: int = 0) -> list[Prompt]:
    """Return one prompt for each row."""
    return [data.prompt(index, first_uid + index) for index in range(len(data))]


def with_chat_template(text: str) -> PreTrainedTokenizerBase:
    """Return the tokenizer with another chat template."""
    changed = copy.deepcopy(TOKENIZER)
    changed.chat_template = text
    return changed


Student = Callable[[TurnRequest], str]
"""Function that returns the text of a turn. A turn is cut at its maximum length."""


def turn_of(request: TurnRequest, text: str, version: int = 0) -> Turn:
    """Return a turn with this text, and with log-probabilities that depend on the tokens."""
    ids = np.array(TOKENIZER(text + TOKENIZER.eos_token, add_special_tokens=False)["input_ids"], np.int32)
    is_cut, ids = len(ids) > request.max_tokens, ids[: request.max_tokens]
    calls = [json.loads(call) for call in CALL.findall(text)]
    message: dict[str, Any] = {"role": "assistant", "content": CALL.sub("", text)}
    if calls:
        message["tool_calls"] = [
            {"id": f"call{number}", "type": "function", "function": call} for number, call in enumerate(calls)
        ]
    response = Response(
        uid=request.prompt.uid,
        ids=ids,
        logprobs=(-1 - ids / 100).astype(np.float32),
        finish_reason="length" if is_cut else "stop",
        weights_version=version,
        versions_T=np.full(len(ids), version, np.int32),
    )
    return Turn(response=response, message=message)


def scripted(student: Student, requests: list[TurnRequest] | None = None) -> SendTurns:
    """Return a replica whose student is a function. It records the requests."""

    async def send(batch: Sequence[TurnRequest]) -> AsyncGenerator[list[Turn]]:
        for request in batch:
            if requests is not None:
                requests.append(request)
            yield [turn_of(request, student(request))]

    return send


async def all_of(
    stage: ConversationStage, data: PromptData, send: SendTurns, prompts: Sequence[Prompt] | None = None, step: int = 3
) -> dict[int, Response]:
    """Return all conversations of a data set, by uid."""
    found: dict[int, Response] = {}
    batch = Batch(data=data, replica=0, step=step)
    async for responses in stage.generate(batch, prompts or prompts_of(data), send):
        found |= {response.uid: response for response in responses}
    return found


def text_of(ids: Sequence[int] | np.ndarray) -> str:
    """Return the text of ids, with all special tokens."""
    return str(TOKENIZER.decode(list(map(int, ids)), skip_special_tokens=False))

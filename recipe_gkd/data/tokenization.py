"""Tokenization of prompts and reference responses."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from recipe_gkd.config.schema import DataConfig
from recipe_gkd.errors import DataError


@dataclass(frozen=True)
class ChatTemplate:
    """Settings of the tokenizer's chat template for the prompts of one model.

    Attributes:
        kwargs: Arguments of the template, such as ``enable_thinking``.
        system_prompt: System message of chats that have none. None adds none.
    """

    kwargs: Mapping[str, Any] = field(default_factory=dict)
    system_prompt: str | None = None


def tokenize_prompt(
    prompt: Any,
    tokenizer: Any,
    where: str,
    *,
    template: ChatTemplate = ChatTemplate(),
    tools: Sequence[Any] | None = None,
) -> np.ndarray:
    """Return the token ids of a prompt, int32 [P].

    Args:
        prompt: Text, or a list of chat messages that the tokenizer's chat template formats.
        tokenizer: Tokenizer of the student.
        where: Row of the prompt, for error messages.
        template: Settings of the chat template.
        tools: Schemas of the tools that the template describes.

    Raises:
        DataError: The prompt is neither of these, or has no tokens, or the template refuses it.
    """
    if isinstance(prompt, str):
        if tools:
            raise DataError(
                f"{where}: the prompt is plain text, which gets no chat template, so its tools cannot be described; "
                "write it as a list of messages, or set data.tools_key=null"
            )
        ids = tokenizer(prompt)["input_ids"]
        bos = tokenizer.bos_token_id
        if bos is not None and list(ids[:2]) == [bos, bos]:  # the text starts with one, and the tokenizer adds another
            ids = ids[1:]
    else:
        ids = _apply_template(prompt, tokenizer, where, template, tools, tokenize=True, add_generation_prompt=True)
    if len(ids) == 0:
        raise DataError(f"{where}: the prompt has no tokens; remove the row")
    return np.asarray(ids, dtype=np.int32)


def render_prompt(
    prompt: Any,
    tokenizer: Any,
    where: str,
    *,
    template: ChatTemplate = ChatTemplate(),
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Return the text of a prompt before tokenization.

    Args:
        prompt: Text, or a list of chat messages.
        tokenizer: Tokenizer of the student.
        where: Row of the prompt, for error messages.
        template: Settings of the chat template.
        tools: Schemas of the tools that the template describes.
        add_generation_prompt: False to leave out what the template adds after the last message.

    Raises:
        DataError: The prompt is neither of these, or the template refuses it.
    """
    if isinstance(prompt, str):
        return prompt
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    return str(_apply_template(prompt, tokenizer, where, template, tools, **options))


def _apply_template(
    prompt: Any,
    tokenizer: Any,
    where: str,
    template: ChatTemplate,
    tools: Sequence[Any] | None,
    **options: bool,
) -> Any:
    """Return the text or the token ids of a chat, as the tokenizer's ``apply_chat_template`` with ``options`` does."""
    if not _is_chat(prompt):
        raise DataError(
            f"{where}: the prompt is {prompt!r:.200}; expected a string, or a list of "
            "{'role': ..., 'content': ...} messages that is not empty"
        )
    messages = _messages_without_nulls(prompt, where)
    if template.system_prompt is not None and all(message["role"] != "system" for message in messages):
        messages = [{"role": "system", "content": template.system_prompt}, *messages]
    arguments = {**template.kwargs, **({} if tools is None else {"tools": tools}), **options}
    try:
        return tokenizer.apply_chat_template(messages, return_dict=False, **arguments)
    except Exception as error:  # errors of jinja and of the template's raise_exception have no common base
        raise DataError(f"{where}: the tokenizer's chat template refused the prompt: {error}") from error


def truncate_prompt(ids: np.ndarray, config: DataConfig, where: str) -> np.ndarray:
    """Return an overlong prompt cut as ``data.truncation`` specifies, int32 [P] with P = ``max_prompt_length``.

    Args:
        ids: Token ids of the prompt.
        config: Settings of the data.
        where: Row of the prompt, for error messages.

    Raises:
        DataError: ``data.truncation=error``.
    """
    limit = config.max_prompt_length
    if config.truncation == "error":
        raise DataError(
            f"{where}: the prompt has {len(ids)} tokens, more than data.max_prompt_length={limit}; "
            "raise it, set data.filter_overlong_prompts=true, or data.truncation to left, right or middle"
        )
    if config.truncation == "left":
        return ids[-limit:]
    if config.truncation == "right":
        return ids[:limit]
    head = limit // 2
    return np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]])


def tokenize_references(
    table: pa.Table, rows: list[int], config: DataConfig, tokenizer: Any, end_ids: Collection[int | None]
) -> list[np.ndarray]:
    """Return the token ids of reference responses, each int32 [T] with T at most ``max_response_length``.

    Args:
        table: Data set with the column ``data.response_key``.
        rows: Rows whose reference responses are needed.
        config: Settings of the data.
        tokenizer: Tokenizer of the student.
        end_ids: Ids that end a response. The EOS token is appended to responses that end with another id.

    Raises:
        DataError: The column is missing, a response is empty or not text, or the tokenizer has no EOS token.
    """
    key, limit = config.response_key, config.max_response_length
    remedy = "Set data.response_key to the column of the reference responses, or gkd.sft_share=0 to train without them"
    if key not in table.column_names:
        raise DataError(
            f"gkd.sft_share is above 0, but the data has no column data.response_key={key}; it has: "
            f"{', '.join(table.column_names)}. {remedy}"
        )
    if tokenizer.eos_token_id is None:
        raise DataError(
            "the student's tokenizer has no end-of-sequence token, which reference responses end with: set eos_token "
            "in its tokenizer_config.json, or gkd.sft_share=0"
        )
    texts = table.column(key).to_pylist()
    references = []
    for row in rows:
        text = texts[row]
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] if isinstance(text, str) else []
        if len(ids) == 0:
            raise DataError(
                f"row {row} of the training data: the response in column {key!r} is {text!r:.200}; expected a string "
                f"that is not empty. Remove the row. {remedy}"
            )
        if ids[-1] not in end_ids:
            ids = [*ids, tokenizer.eos_token_id]
        references.append(np.asarray(ids[:limit], dtype=np.int32))
    return references


def _is_chat(prompt: Any) -> bool:
    return (
        isinstance(prompt, list)
        and len(prompt) > 0
        and all(isinstance(message, dict) and {"role", "content"} <= message.keys() for message in prompt)
    )


def _messages_without_nulls(prompt: list[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return the messages without null fields, because parquet gives every message the fields of all others.

    A message that calls tools needs no content and gets an empty one. Other messages without content are refused,
    because a template would print ``None``.
    """
    messages = []
    for number, message in enumerate(prompt):
        if message["content"] is None and not message.get("tool_calls"):
            raise DataError(
                f"{where}: the content of message {number} (role {message['role']!r}) is null; expected a string. Fill "
                "it in or remove the row; only a message with tool_calls may have no content"
            )
        messages.append({"content": ""} | {key: value for key, value in message.items() if value is not None})
    return messages

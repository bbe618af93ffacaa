"""Tokenization of prompts and reference responses."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from recipe_gkd.config.schema import DataConfig
from recipe_gkd.data.messages import Message
from recipe_gkd.data.rows import DataSet
from recipe_gkd.errors import DataError, ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


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
    prompt: str | list[Message],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    template: ChatTemplate = ChatTemplate(),
    tools: Sequence[Any] | None = None,
) -> np.ndarray:
    """Return the token ids of a prompt, int32 [P].

    Args:
        prompt: Text, or chat messages in their one form (:mod:`recipe_gkd.data.messages`).
        where: Row of the prompt, for error messages.
        template: Settings of the chat template.
        tools: Schemas of the tools that the template describes.

    Raises:
        DataError: The prompt has no tokens, or the template refuses it.
    """
    if isinstance(prompt, str):
        if tools:
            raise DataError(
                f"{where}: the prompt is plain text, which gets no chat template, so its tools cannot be described",
                remedy="write it as a list of messages, or set data.tools_key=null and rollout.tools=[]",
            )
        ids = tokenizer(prompt)["input_ids"]
        bos = tokenizer.bos_token_id
        if bos is not None and list(ids[:2]) == [bos, bos]:  # the text starts with one, and the tokenizer adds another
            ids = ids[1:]
    else:
        ids = _apply_template(prompt, tokenizer, where, template, tools, tokenize=True, add_generation_prompt=True)
    if len(ids) == 0:
        raise DataError(f"{where}: the prompt has no tokens", remedy="remove the row")
    return np.asarray(ids, dtype=np.int32)


def render_prompt(
    prompt: str | list[Message],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    *,
    template: ChatTemplate = ChatTemplate(),
    tools: Sequence[Any] | None = None,
    add_generation_prompt: bool = True,
) -> str:
    """Return the text of a prompt before tokenization.

    Args:
        prompt: Text, or chat messages in their one form.
        where: Row of the prompt, for error messages.
        template: Settings of the chat template.
        tools: Schemas of the tools that the template describes.
        add_generation_prompt: False to leave out what the template adds after the last message.

    Raises:
        DataError: The template refuses the prompt.
    """
    if isinstance(prompt, str):
        return prompt
    options = {"tokenize": False, "add_generation_prompt": add_generation_prompt}
    return str(_apply_template(prompt, tokenizer, where, template, tools, **options))


def _apply_template(
    messages: list[Message],
    tokenizer: PreTrainedTokenizerBase,
    where: str,
    template: ChatTemplate,
    tools: Sequence[Any] | None,
    **options: bool,
) -> Any:
    """Return the text or the token ids of a chat, as the tokenizer's ``apply_chat_template`` with ``options`` does."""
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
            f"{where}: the prompt has {len(ids)} tokens, more than data.max_prompt_length={limit}",
            remedy="raise it, set data.filter_overlong_prompts=true, or data.truncation to left, right or middle",
        )
    if config.truncation == "left":
        return ids[-limit:]
    if config.truncation == "right":
        return ids[:limit]
    head = limit // 2
    return np.concatenate([ids[:head], ids[len(ids) - (limit - head) :]])


def tokenize_references(
    data_set: DataSet,
    rows: Iterable[int],
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    end_ids: Collection[int | None],
) -> Iterator[tuple[str, np.ndarray]]:
    """Yield text and token ids of reference responses, each int32 [T] with T at most ``max_response_length``.

    Args:
        data_set: Data set with reference responses.
        rows: Rows whose reference responses are needed.
        config: Settings of the data.
        end_ids: Ids that end a response. The EOS token is appended to responses that end with another id.

    Raises:
        DataError: The column is missing, or a response is empty or not text.
        ModelError: The tokenizer has no EOS token.
    """
    key, limit = config.response_key, config.max_response_length
    without = "gkd.sft_share=0 gkd.warmup_steps=0"
    remedy = f"set data.response_key to the column of the reference responses, or {without} to train without them"
    if not data_set.has_responses:
        raise DataError(
            f"gkd.sft_share or gkd.warmup_steps is above 0, but the data has no column data.response_key={key}, only: "
            f"{', '.join(data_set.columns)}",
            remedy=remedy,
            column=key,
            existing=tuple(data_set.columns),
        )
    if tokenizer.eos_token_id is None:
        raise ModelError(
            "the student's tokenizer has no end-of-sequence token, which reference responses end with",
            remedy=f"set eos_token in its tokenizer_config.json, or {without}",
            names=("eos_token",),
        )
    for index in rows:
        row = data_set[index]
        text = row.response
        ids = tokenizer(text, add_special_tokens=False)["input_ids"] if text is not None else []
        if text is None or len(ids) == 0:
            with row.locate_errors(key):
                raise DataError(
                    f"{row.where}: the response in column {key!r} is {text!r:.200}; expected a string that is not "
                    "empty",
                    remedy=f"remove the row, {remedy}",
                )
        if ids[-1] not in end_ids:
            ids = [*ids, tokenizer.eos_token_id]
        yield text, np.asarray(ids[:limit], dtype=np.int32)

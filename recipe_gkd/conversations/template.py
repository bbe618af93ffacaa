"""Tokens between two turns, as the chat template writes them.

What the model sampled is never tokenized again. The template renders the conversation with a placeholder in place of
the last assistant message, once without the new messages and once with them and the beginning of the next assistant
message. The new tokens are what follows the placeholder in the second text, from the token on with which the model
ended its message.

A template may also write the conversation *before* the new messages in another way because of them, for example
without the reasoning of earlier turns. ``rollout.history`` says what the student sees then: ``keep`` appends the new
messages to the tokens as they are, and ``rewrite`` replaces all of them by the text that the template writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from recipe_gkd.config.schema.rollout import HistoryMode
from recipe_gkd.data.messages import Message
from recipe_gkd.data.tokenization import ChatTemplate, render_prompt, tokenize_prompt
from recipe_gkd.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "\N{SYMBOL FOR UNIT SEPARATOR}"
"""Content of the assistant message in the place of the sampled one. What the student sees does not contain it."""


@dataclass(frozen=True, kw_only=True)
class SampledTurn:
    """A turn of the student, and the conversation around it.

    Attributes:
        before: Messages before it.
        message: The turn.
        after: Messages after it, at least one.
        end_id: Last token of the turn.
    """

    before: list[Message]
    message: Message
    after: Sequence[Message]
    end_id: int


@dataclass(frozen=True, kw_only=True)
class NextTokens:
    """Tokens before the next turn.

    Attributes:
        ids: Token ids, int32 [N].
        is_rewrite: True if they replace all tokens of the conversation so far. False if they follow these.
    """

    ids: np.ndarray
    is_rewrite: bool


@dataclass(frozen=True)
class TurnTemplate:
    """Chat template of the student, between the turns of one conversation.

    Attributes:
        tokenizer: Tokenizer of the student.
        template: Settings of its chat template.
        history: Treatment of templates that write earlier messages differently (``rollout.history``).
        tools: Schemas of the tools that the template describes.
        where: Row of the prompt, for error messages.
    """

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate
    history: HistoryMode
    tools: Sequence[Any] | None
    where: str

    def next_tokens(self, turn: SampledTurn) -> NextTokens:
        """Return the tokens between a sampled turn and the next one.

        Raises:
            DataError: The template refuses the messages, or they cannot be appended to the sampled tokens.
        """
        may_append = self.history != "rewrite" or self.appends(turn)
        if may_append and (text := self._text_between(turn)) is not None:
            ids = np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)
            return NextTokens(ids=ids, is_rewrite=False)
        if self.history != "rewrite":
            raise DataError(
                f"{self.where}: the chat template writes the turns before {turn.after[-1]['role']!r} differently when "
                "this message follows, so it cannot be appended to the sampled tokens",
                remedy="set rollout.history=rewrite, or use another chat template",
            )
        chat = [*turn.before, turn.message, *turn.after]
        ids = tokenize_prompt(chat, self.tokenizer, self.where, template=self.template, tools=self.tools)
        return NextTokens(ids=ids, is_rewrite=True)

    def appends(self, turn: SampledTurn) -> bool:
        """Return True if the template writes the messages up to the turn alike with and without those after it."""
        so_far = [*turn.before, turn.message]
        prompt, without = self.render(turn.before), self.render(so_far, add_generation_prompt=False)
        return without.startswith(prompt) and self.render([*so_far, *turn.after]).startswith(without)

    def _text_between(self, turn: SampledTurn) -> str | None:
        """Return the text between a turn and the next one. None if it cannot be appended to the turn."""
        plain: list[Message] = [*turn.before, {**turn.message, "content": PLACEHOLDER}]
        without = self.render(plain, add_generation_prompt=False)
        complete = self.render([*plain, *turn.after])
        before = self.render(turn.before, add_generation_prompt=False)
        if complete.startswith(without) and without.startswith(before):
            behind = without[len(before) :]
            following = complete[len(before) :]
        else:  # what is before the turn has changed
            number, behind = without.count(PLACEHOLDER), without.rpartition(PLACEHOLDER)[2]
            following = complete.split(PLACEHOLDER, number)[-1]
            is_appended = 0 < number <= complete.count(PLACEHOLDER) and following.startswith(behind)
            if not is_appended or self.history == "refuse":
                return None
        end = str(self.tokenizer.convert_ids_to_tokens(int(turn.end_id)))
        if end in behind:
            closing = behind.rpartition(end)[2]
        else:  # the model ended with a token that the template does not write
            empty: Message = {"role": "assistant", "content": PLACEHOLDER}
            text = self.render([*turn.before, empty], add_generation_prompt=False)
            closing = text.rpartition(PLACEHOLDER)[2]
        return closing + following[len(behind) :]

    def render(self, messages: list[Message], *, add_generation_prompt: bool = True) -> str:
        """Return the text of messages.

        Args:
            add_generation_prompt: True to add the beginning of the next assistant message.

        Raises:
            DataError: The template refuses them.
        """
        return render_prompt(
            messages,
            self.tokenizer,
            self.where,
            template=self.template,
            tools=self.tools,
            add_generation_prompt=add_generation_prompt,
        )


def cut(content: str, tokenizer: PreTrainedTokenizerBase, limit: int, side: str) -> str:
    """Return the content of a message with at most ``limit`` tokens, and ``...`` where tokens were cut.

    Args:
        side: ``"left"``, ``"right"`` or ``"middle"``: part that is cut.
    """
    ids = tokenizer(content, add_special_tokens=False)["input_ids"]
    if len(ids) <= limit:
        return content
    head = {"left": 0, "right": limit, "middle": limit // 2}[side]
    first, last = (
        str(tokenizer.decode(part)) for part in (ids[:head], ids[len(ids) - (limit - head) :] if limit > head else [])
    )
    return f"{first}...{last}"

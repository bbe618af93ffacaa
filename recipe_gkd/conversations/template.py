"""Tokens between two turns, as the chat template writes them.

What the model sampled is never tokenized again. The template renders the conversation with a placeholder in place of
the last assistant message, once without the new messages and once with them and the beginning of the next assistant
message. The new tokens are those of the difference, and of what closes the assistant message behind the token with
which the model ended it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from recipe_gkd.config.environments import ENVIRONMENT, HISTORY, TOOLS
from recipe_gkd.data.messages import Message
from recipe_gkd.data.tokenization import ChatTemplate, render_prompt
from recipe_gkd.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

PLACEHOLDER = "\N{SYMBOL FOR UNIT SEPARATOR}"
"""Content of the assistant message in the place of the sampled one. It is rendered, and never tokenized."""
REASONING = f"<think>\n{PLACEHOLDER}\n</think>\n\n{PLACEHOLDER}"


@dataclass(frozen=True)
class TurnTemplate:
    """Chat template of the student, between the turns of a conversation.

    Attributes:
        tokenizer: Tokenizer of the student.
        template: Settings of its chat template.
    """

    tokenizer: PreTrainedTokenizerBase
    template: ChatTemplate

    def between(
        self,
        prompt: list[Message],
        assistant: Message,
        messages: Sequence[Message],
        *,
        tools: Sequence[Any] | None,
        end_id: int,
        where: str,
    ) -> np.ndarray:
        """Return the tokens between a sampled assistant message and the next one, int32 [N].

        Args:
            prompt: Messages of the prompt.
            assistant: The sampled message.
            messages: Messages that follow it.
            tools: Schemas of the tools that the template describes.
            end_id: Last token of the sampled message.
            where: Row of the prompt, for error messages.

        Raises:
            DataError: The template refuses the messages, or writes the prompt differently when others follow.
        """
        plain = [*prompt, {**assistant, "content": PLACEHOLDER}]
        without = self._render(plain, tools, where, add_generation_prompt=False)
        complete = self._render([*plain, *messages], tools, where, add_generation_prompt=True)
        if not complete.startswith(without):
            raise DataError(
                f"{where}: the chat template writes the turns before {messages[-1]['role']!r} differently when this "
                "message follows, so it cannot be appended to the sampled tokens",
                remedy="use another chat template, or turn off what removes parts of earlier turns",
            )
        end = str(self.tokenizer.convert_ids_to_tokens(int(end_id)))
        closing_at = without.rfind(end)
        prefix = self._render(prompt, tools, where, add_generation_prompt=True)
        if closing_at >= 0 and closing_at + len(end) > len(prefix):
            closing = without[closing_at + len(end) :]
        else:  # the model ended with a token that the template does not write
            empty: Message = {"role": "assistant", "content": PLACEHOLDER}
            closing = self._render([*prompt, empty], tools, where, add_generation_prompt=False).rpartition(PLACEHOLDER)[
                2
            ]
        text = closing + complete[len(without) :]
        return np.asarray(self.tokenizer(text, add_special_tokens=False)["input_ids"], np.int32)

    def _render(
        self, messages: list[Message], tools: Sequence[Any] | None, where: str, *, add_generation_prompt: bool
    ) -> str:
        return render_prompt(
            messages,
            self.tokenizer,
            where,
            template=self.template,
            tools=tools,
            add_generation_prompt=add_generation_prompt,
        )

    def check(
        self, prompt: str | list[Message], tools: Sequence[Any] | None, where: str, *, roles: Sequence[str], keeps: bool
    ) -> None:
        """Check that messages can be appended to a conversation, with the first prompt of the data.

        Args:
            prompt: Prompt of the row.
            tools: Schemas of the tools.
            roles: Roles of the messages that may follow an assistant message.
            keeps: True if earlier turns keep what the template would remove from them.

        Raises:
            DataError: The prompt is text.
            ConfigError: The template cannot append messages, or changes earlier turns.
        """
        if isinstance(prompt, str) or not getattr(self.tokenizer, "chat_template", None):
            raise DataError(
                f"{where}: conversations need prompts that are lists of messages, and a tokenizer with a chat template",
                remedy="write the prompts as messages, and use a chat model, or set rollout.environment=null and "
                "rollout.tools=[]",
            )
        for role in roles:
            for content in (PLACEHOLDER, REASONING):
                assistant: Message = {"role": "assistant", "content": content}
                follow: Message = {"role": role, "content": PLACEHOLDER}
                if role == "tool":
                    call = {"name": "f", "arguments": {}}
                    assistant["tool_calls"] = [{"id": "call00000", "type": "function", "function": call}]
                    follow |= {"tool_call_id": "call00000", "name": "f"}
                self._check_role(prompt, [assistant, follow], tools, where, keeps=keeps or content == PLACEHOLDER)

    def _check_role(
        self, prompt: list[Message], turn: list[Message], tools: Sequence[Any] | None, where: str, *, keeps: bool
    ) -> None:
        assistant, follow = turn
        try:
            without = self._render([*prompt, assistant], tools, where, add_generation_prompt=False)
            complete = self._render([*prompt, *turn], tools, where, add_generation_prompt=True)
        except DataError as error:
            raise ConfigError(
                f"the student's chat template refuses a message of the role {follow['role']!r} after an assistant "
                f"message: {error.what}",
                remedy="use a chat template with this role",
                keys=(ENVIRONMENT, TOOLS),
            ) from error
        if complete.startswith(without):
            return
        if assistant["content"] == REASONING:
            if keeps:
                return
            raise ConfigError(
                f"the student's chat template removes the reasoning of earlier turns when a message of the role "
                f"{follow['role']!r} follows, so a model that is used with it would see another conversation than the "
                "one that is sampled and trained on",
                remedy=f"set {HISTORY}=keep to keep the reasoning in the conversations of this run, or turn reasoning "
                "off (data.apply_chat_template_kwargs)",
                keys=(HISTORY,),
            )
        raise ConfigError(
            f"the student's chat template writes an assistant message differently when a message of the role "
            f"{follow['role']!r} follows it, so messages cannot be appended to sampled tokens",
            remedy="use another chat template",
            keys=(ENVIRONMENT, TOOLS),
        )


def describes(prompt: str | list[Message], turns: TurnTemplate, tools: Sequence[Any], where: str) -> bool:
    """Return True if the chat template prints tools."""
    if isinstance(prompt, str):
        return False
    with_tools, without = (
        render_prompt(prompt, turns.tokenizer, where, template=turns.template, tools=each) for each in (tools, None)
    )
    return with_tools != without


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

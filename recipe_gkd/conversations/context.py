"""Settings, tokenizer and environments, which all conversations of a run share, and the tokens between their turns."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from recipe_gkd.config import Config
from recipe_gkd.conversations.pool import EnvironmentPool
from recipe_gkd.conversations.template import NextTokens, SampledTurn, TurnTemplate, cut
from recipe_gkd.data.messages import Message
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import Row
from recipe_gkd.data.samples import Prompt
from recipe_gkd.data.tokenization import tokenize_prompt
from recipe_gkd.errors import DataError
from recipe_gkd.rollout.turns import Turn
from recipe_gkd.runtime.threads import in_thread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)


class ConversationContext:
    """Settings, tokenizer and environments of all conversations.

    Attributes:
        settings: Settings of the conversations.
        pool: Processes of the environments.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, pool: EnvironmentPool) -> None:
        self.settings, self._data, self.pool = config.rollout, config.data, pool
        self._tokenizer = tokenizer
        self._has_reported_tool = False

    @property
    def limits(self) -> tuple[int, int, float | None]:
        """Maximum number of tokens and of turns, and the time limit in seconds."""
        settings = self.settings
        return self._data.max_response_length, settings.max_turns, settings.conversation_timeout_s

    def first_prompt(self, data: PromptData, prompt: Prompt, row: Row, messages: list[Message] | None) -> Prompt:
        """Return the prompt of a conversation.

        Args:
            messages: Messages that the environment has set in place of the row's prompt, if any.

        Raises:
            DataError: They are too long, or a teacher has other prompts.
        """
        if messages is None:
            return prompt
        if prompt.teacher_ids is not None:
            raise DataError(
                f"{row.where}: reset returned a prompt, but the teacher has its own prompts, which it cannot replace",
                remedy="return None, or remove the prompt settings of the teacher",
                row=row.index,
            )
        ids = tokenize_prompt(messages, self._tokenizer, row.where, template=data.template, tools=row.tools)
        if len(ids) > self._data.max_prompt_length:
            raise DataError(
                f"{row.where}: reset returned a prompt of {len(ids)} tokens, more than data.max_prompt_length="
                f"{self._data.max_prompt_length}",
                remedy="raise it",
                row=row.index,
            )
        return replace(prompt, ids=ids)

    async def tokens_between(
        self, data: PromptData, row: Row, before: list[Message], turn: Turn, messages: list[Message]
    ) -> tuple[list[Message], NextTokens]:
        """Return messages, cut at ``rollout.max_tool_response_length``, and the tokens before the next turn.

        Args:
            before: Messages before the turn.
        """
        settings = self.settings
        template = TurnTemplate(self._tokenizer, data.template, settings.history, row.tools, row.where)

        def compute() -> tuple[list[Message], NextTokens]:
            limit, side, found = settings.max_tool_response_length, settings.tool_response_truncate_side, messages
            if limit is not None:
                found = [
                    message | {"content": cut(message["content"], self._tokenizer, limit, side)} for message in messages
                ]
            end_id = int(turn.response.ids[-1])
            sampled = SampledTurn(before=before, message=turn.message, after=found, end_id=end_id)
            return found, template.next_tokens(sampled)

        return await in_thread(compute)

    def report_tool_errors(self, result: dict[str, Any]) -> None:
        """Log the first call of a tool that failed. The student may have caused it."""
        if result["tool_errors"] and not self._has_reported_tool:
            self._has_reported_tool = True
            texts = [message["content"] for message in result["messages"] if message["content"].startswith("error: ")]
            log.warning(
                "a tool call failed, which the student sees: %s; conversation/tool_errors counts them", texts[0]
            )

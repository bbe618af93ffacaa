"""Turns of conversations: requests to a rollout worker, and their results."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from recipe_gkd.data.messages import Message
from recipe_gkd.data.samples import Prompt, Response


@dataclass(frozen=True, kw_only=True)
class TurnRequest:
    """Request for the next turn of a conversation.

    Attributes:
        prompt: Prompt of the sample, with all tokens before the turn.
        number: Number of the turn, starting at 0.
        max_tokens: Maximum length of the turn, in tokens.
        tools: Schemas of the tools, which some parsers of tool calls read.
    """

    prompt: Prompt
    number: int
    max_tokens: int
    tools: Sequence[Any] | None = None


@dataclass(frozen=True, kw_only=True)
class Turn:
    """Turn of the student.

    Attributes:
        response: Its tokens.
        message: The same as a message, with ``content``, and ``tool_calls`` if there are any.
    """

    response: Response
    message: Message

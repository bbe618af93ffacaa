"""Checks of the student's chat template before a run: it must describe tools, and messages must follow turns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from recipe_gkd.config.environments import ENVIRONMENT, HISTORY, TOOLS
from recipe_gkd.conversations.template import PLACEHOLDER, SampledTurn, TurnTemplate
from recipe_gkd.data.messages import Message
from recipe_gkd.errors import ConfigError, DataError

REASONING = f"<think>\n{PLACEHOLDER}\n</think>\n\n{PLACEHOLDER}"
"""Content of an assistant message with reasoning."""


def check_template(turns: TurnTemplate, prompt: str | list[Message], roles: Sequence[str]) -> None:
    """Check that messages can follow turns, with one prompt of the data.

    Args:
        turns: Template with the tools of the row.
        prompt: Prompt of the row.
        roles: Roles of the messages that may follow an assistant message.

    Raises:
        DataError: The prompt is text.
        ConfigError: The template cannot append messages, or it changes earlier turns (``rollout.history=refuse``).
    """
    if isinstance(prompt, str) or not getattr(turns.tokenizer, "chat_template", None):
        raise DataError(
            f"{turns.where}: conversations need prompts that are lists of messages, and a tokenizer with a chat "
            "template",
            remedy="write the prompts as messages, and use a chat model, or set rollout.environment=null and "
            "rollout.tools=[]",
        )
    for role in roles:
        for turn in _turns_before(prompt, role, roles):
            _check_turn(turns, turn)


def _turns_before(prompt: list[Message], role: str, roles: Sequence[str]) -> Iterator[SampledTurn]:
    """Yield turns that a message of a role follows: without and with reasoning, and after a tool call."""
    call = {"id": "call00000", "type": "function", "function": {"name": "f", "arguments": {}}}
    follow: Message = {"role": role, "content": PLACEHOLDER}
    from_tool: Message = {"role": "tool", "content": PLACEHOLDER, "tool_call_id": "call00000", "name": "f"}
    for content in (PLACEHOLDER, REASONING):
        plain: Message = {"role": "assistant", "content": content}
        calling: Message = {**plain, "tool_calls": [call]}
        turn = SampledTurn(before=prompt, message=plain, after=[follow], end_id=0)
        if role == "tool":
            yield replace(turn, message=calling, after=[from_tool])
        else:
            yield turn
            if "tool" in roles:
                yield replace(turn, before=[*prompt, calling, from_tool])


def _check_turn(turns: TurnTemplate, turn: SampledTurn) -> None:
    role = turn.after[-1]["role"]
    try:
        is_appended = turns.appends(turn)
    except DataError as error:
        raise ConfigError(
            f"the student's chat template refuses a message of the role {role!r} after an assistant message: "
            f"{error.what}",
            remedy="use a chat template with this role",
            keys=(ENVIRONMENT, TOOLS),
        ) from error
    if not is_appended and turns.history == "refuse":
        what = (
            "removes the reasoning of earlier turns"
            if turn.message["content"] == REASONING
            else "writes an assistant message differently"
        )
        raise ConfigError(
            f"the student's chat template {what} when a message of the role {role!r} follows, so a model that is used "
            "with it sees another conversation than the one that was sampled",
            remedy=f"set {HISTORY}=rewrite to sample and train with the conversation that the template writes, or "
            f"{HISTORY}=keep to leave earlier turns as they were sampled",
            keys=(HISTORY,),
        )
    try:
        turns.next_tokens(turn)
    except DataError as error:
        raise ConfigError(
            f"{HISTORY}={turns.history}: the student's chat template writes what follows an assistant message "
            f"differently when a message of the role {role!r} follows it, so messages cannot be appended to sampled "
            "tokens",
            remedy=f"set {HISTORY}=rewrite, or use another chat template",
            keys=(HISTORY,),
        ) from error


def check_teacher_prompt(turns: TurnTemplate, prompt: list[Message], roles: Sequence[str], ids: np.ndarray) -> None:
    """Check that a rewritten history begins with the prompt, whose place the prompt of a teacher takes.

    Args:
        roles: Roles of the messages that may follow an assistant message.
        ids: Token ids of the prompt, int32 [P].

    Raises:
        ConfigError: It does not.
    """
    found = [turns.next_tokens(turn) for role in roles for turn in _turns_before(prompt, role, roles)]
    if any(each.is_rewrite and not np.array_equal(each.ids[: len(ids)], ids) for each in found):
        raise ConfigError(
            f"{HISTORY}=rewrite with a teacher that has its own prompts: the student's chat template writes the "
            "prompt differently when turns follow it, so the teacher's prompt cannot take its place",
            remedy=f"set {HISTORY}=keep, or let the teacher see the student's prompts",
            keys=(HISTORY,),
        )


def describes_tools(turns: TurnTemplate, prompt: str | list[Message]) -> bool:
    """Return True if the chat template prints the tools."""
    return not isinstance(prompt, str) and turns.render(prompt) != replace(turns, tools=None).render(prompt)

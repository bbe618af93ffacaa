"""Prompts in their one form: a text, or a list of chat messages whose contents are texts.

Accepted forms of messages::

    [{"role": "user", "content": "2+2?"}]                              the form of this project
    [{"role": "user", "content": [{"type": "text", "text": "2+2?"}]}]  parts of a content are joined
    [{"from": "human", "value": "2+2?"}]                               ShareGPT
    '[{"role": "user", "content": "2+2?"}]'                            JSON text of each of them

The arguments of a tool call are an object, or as in OpenAI's form its JSON text.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

from recipe_gkd.data.values import is_list_of_objects, parse_json, without_nulls
from recipe_gkd.errors import DataError

Message = dict[str, Any]
"""A chat message with ``role``, ``content`` (text), and what else it has, such as ``tool_calls``. No field is null."""

SHAREGPT_ROLES = {
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "assistant": "assistant",
    "model": "assistant",
    "system": "system",
    "tool": "tool",
    "observation": "tool",
    "function_response": "tool",
}
_LIST_OF_OBJECTS = re.compile(r"\s*\[\s*\{")
_LOOKS_LIKE_MESSAGES = re.compile(r"\s*\[\s*\{\s*['\"](role|content|from|value)['\"]\s*:.*\]\s*", re.DOTALL)


def read_prompt(value: object, where: str, *, drop_nulls: bool = False) -> str | list[Message]:
    """Return a prompt in its one form.

    Args:
        value: Text, messages, or their JSON text.
        where: Row of the prompt, for error messages.
        drop_nulls: Drop null fields of tool calls too, because the format of the file adds them.

    Raises:
        DataError: The value is none of these, or a content is not text.
    """
    if isinstance(value, str):
        messages = _messages_in_text(value, where)
        return value if messages is None else read_messages(messages, where)
    return read_messages(value, where, drop_nulls=drop_nulls)


def read_messages(value: object, where: str, *, drop_nulls: bool = False) -> list[Message]:
    """Return messages in their one form; see :func:`read_prompt`."""
    if not is_list_of_objects(value) or not value:
        raise DataError(
            f"{where}: the prompt is {value!r:.200}; expected a string, or a list of {{'role': ..., 'content': ...}} "
            "messages that is not empty",
        )
    return [_message(message, number, where, drop_nulls) for number, message in enumerate(value)]


def conversation_of(value: object, where: str) -> object:
    """Return the messages of a conversation that may be JSON text. They are not checked."""
    return _messages_in_text(value, where) or value if isinstance(value, str) else value


def role_of(message: object) -> object:
    """Return the role of a message in any form, None if it has none."""
    if not isinstance(message, dict):
        return None
    role = message.get("role")
    return SHAREGPT_ROLES.get(str(message.get("from"))) if role is None else role


def content_of(message: Message, label: str) -> str | None:
    """Return the text of a message in any form, None if it has none.

    Args:
        message: Message before :func:`read_messages`.
        label: Row and number of the message, for error messages.

    Raises:
        DataError: The content is not text, and has other parts than text.
    """
    content = message.get("content")
    if content is None and message.get("role") is None:
        content = message.get("value")
    if content is None or isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise DataError(
            f"{label} is {content!r:.100} ({type(content).__name__}); expected a string, or a list of parts such as "
            "{'type': 'text', 'text': ...}",
            remedy="correct or remove the row",
        )
    return "".join(_text_of_part(part, label) for part in content)


def _text_of_part(part: object, label: str) -> str:
    if isinstance(part, str):
        return part
    fields = part if isinstance(part, dict) else {"type": type(part).__name__}
    kind, text = fields.get("type"), fields.get("text")
    if kind == "text" and isinstance(text, str):
        return text
    raise DataError(
        f"{label} has a part of type {kind!r}: {part!r:.100}; expected parts {{'type': 'text', 'text': ...}} only, "
        "because student and teacher see nothing but text",
        remedy="remove the part or the row",
    )


def _message(message: Message, number: int, where: str, drop_nulls: bool) -> Message:
    role = role_of(message)
    if not isinstance(role, str) or not role:
        sender = "role" if message.get("from") is None else "from"
        raise DataError(
            f"{where}: message {number} has {sender} {message.get(sender)!r:.100}; expected a role such as user, "
            "assistant, system or tool, or in ShareGPT's form a sender such as human or gpt",
            remedy="correct or remove the row",
        )
    label = f"{where}: the content of message {number} (role {role!r})"
    content, tool_calls = content_of(message, label), tool_calls_of(message, f"{where}: message {number}")
    if content is None and not tool_calls:
        raise DataError(
            f"{label} is null; expected a string, because only a message with tool_calls may have no content",
            remedy="fill it in or remove the row",
        )
    is_sharegpt = message.get("role") is None
    skipped = {"role", "content", "tool_calls", *(("from", "value") if is_sharegpt else ())}
    # Parquet gives every message the fields of all others, and templates test if a field exists.
    others = {key: value for key, value in message.items() if key not in skipped and value is not None}
    if tool_calls is not None:
        others["tool_calls"] = tool_calls
    if drop_nulls:
        others = {key: without_nulls(value) for key, value in others.items()}
    if tool_calls is not None:
        others["tool_calls"] = list(map(_with_parsed_arguments, others["tool_calls"]))
    return {"role": role, "content": content or "", **others}


def tool_calls_of(message: Message, label: str) -> list[dict[str, Any]] | None:
    """Return the tool calls of a message, which may be JSON text. None without any.

    Args:
        message: Message before :func:`read_messages`.
        label: Row and number of the message, for error messages.

    Raises:
        DataError: They are no list of objects.
    """
    found = calls = message.get("tool_calls")
    if isinstance(calls, str):
        with suppress(ValueError):  # reported below
            calls = parse_json(calls) if calls.strip() else None
    if calls is None or is_list_of_objects(calls):
        return calls
    raise DataError(
        f"{label} has the tool_calls {found!r:.200}; expected a list of objects, or its JSON text",
        remedy="correct or remove the row",
    )


def parsed_arguments(value: Any) -> Any:
    """Return the arguments of a tool call as an object, as chat templates expect them.

    In OpenAI's form they are the JSON text of an object. Other values are returned unchanged.
    """
    if isinstance(value, str):
        with suppress(ValueError):
            if isinstance(found := parse_json(value), dict):
                return found
    return value


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return a tool call whose arguments, in itself or in its ``function``, are an object."""
    parsed = dict(call)
    if "arguments" in call:
        parsed["arguments"] = parsed_arguments(call["arguments"])
    if isinstance(function := call.get("function"), dict):
        parsed["function"] = _with_parsed_arguments(function)
    return parsed


def _messages_in_text(text: str, where: str) -> list[Message] | None:
    """Return the messages of a JSON text. None if the text is something else.

    Raises:
        DataError: The text looks like messages, but is no JSON.
    """
    if not _LIST_OF_OBJECTS.match(text):
        return None
    try:
        found = parse_json(text)
    except json.JSONDecodeError as error:
        if error.msg == "Extra data" or not _LOOKS_LIKE_MESSAGES.fullmatch(text):
            return None  # a text that begins with an object
        raise DataError(
            f"{where}: the prompt {text!r:.200} looks like messages, but is no JSON ({error})",
            remedy="write messages as a list, or as JSON text (json.dumps), not as str() of a list",
        ) from None
    except ValueError:
        return None
    return found if is_list_of_objects(found) and all({"role", "from"} & each.keys() for each in found) else None

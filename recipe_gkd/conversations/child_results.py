"""Results of a user's environment: messages and steps, checked in its process.

This file imports only the standard library, because the process loads it by its path.
"""

from __future__ import annotations

import json
import math
from numbers import Real
from typing import Any

MESSAGE_ROLES = ("system", "user", "tool")
STEP_FIELDS = ("messages", "done", "reward", "info")


class CallFailed(Exception):
    """Call without a valid result.

    Attributes:
        fields: ``kind``, ``reason`` and ``trace`` of the failure, for the driver.
    """

    def __init__(self, kind: str, reason: str, trace: str = "") -> None:
        super().__init__(reason)
        self.fields = {"kind": kind, "reason": reason, "trace": trace}


def as_messages(value: object, method: str) -> list[dict[str, Any]] | None:
    """Return messages of the user's code as JSON has them, None for None and for an empty list.

    Raises:
        CallFailed: They are no messages.
    """
    if value is None:
        return None
    messages: list[Any] = value if isinstance(value, list) else [value]
    for message in messages:
        is_message = isinstance(message, dict) and message.get("role") in (*MESSAGE_ROLES, "assistant")
        if not is_message or not isinstance(message.get("content"), str):
            raise CallFailed(
                "result",
                f"{method} returned {message!r:.200}, expected messages {{'role': ..., 'content': text}} with a role "
                f"such as {', '.join(MESSAGE_ROLES)}",
            )
    found: list[dict[str, Any]] = json.loads(json.dumps(messages, default=str))
    return found or None


def as_step(value: object) -> dict[str, Any]:
    """Return the result of a step with all its fields.

    Raises:
        CallFailed: It is none of: None (the conversation ends), messages, or a dict with ``messages``, ``done``,
            ``reward`` and ``info``.
    """
    fields: dict[str, Any] = dict(value) if isinstance(value, dict) and "role" not in value else {"messages": value}
    if unknown := set(fields) - set(STEP_FIELDS):
        raise CallFailed(
            "result", f"step returned the fields {sorted(map(str, unknown))}, expected {', '.join(STEP_FIELDS)}"
        )
    messages = as_messages(fields.get("messages"), "step")
    if messages and any(message["role"] == "assistant" for message in messages):
        raise CallFailed("result", "step returned a message of the role assistant, whose messages the student writes")
    reward, info = fields.get("reward"), fields.get("info") or {}
    if reward is not None and (reward := finite(reward)) is None:
        raise CallFailed("result", f"step returned the reward {fields['reward']!r:.100}, expected a finite number")
    if not isinstance(info, dict):
        raise CallFailed("result", f"step returned the info {info!r:.100}, expected a dict")
    numbers = {str(name): finite(each) for name, each in info.items()}
    return {
        "messages": messages or [],
        "done": bool(fields.get("done", not messages)),
        "reward": reward,
        "info": {name: number for name, number in numbers.items() if number is not None},
    }


def finite(value: object) -> float | None:
    """Return a finite number as float, None for anything else."""
    try:
        number = float(value) if isinstance(value, Real) or hasattr(value, "__float__") else math.nan
    except (TypeError, ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None

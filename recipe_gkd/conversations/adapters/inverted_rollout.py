"""A rollout that requests completions, driven by its completions.

========= ======================================== ==================================================================
State     Entered by                               Next
========= ======================================== ==================================================================
running   ``start``; ``reply``                     parked; ended; failed
parked    a request that continues the history     running; failed, if there is another request at the same time
ended     the end of the rollout                   (last: its reward)
failed    a request that does not continue the     (last: each call raises the error)
          history; an error of the rollout
========= ======================================== ==================================================================

This file imports only the standard library: it runs in the Python of ``rollout.environment_python``.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]


class HistoryError(Exception):
    """Request that does not continue the conversation that the student is trained on."""


class RolloutFailed(Exception):
    """Rollout of ``verifiers`` that ended with errors."""


@dataclass(frozen=True)
class Request:
    """Request for a completion.

    Attributes:
        messages: Messages after the last assistant message; the first request has the whole prompt.
        tools: JSON schemas of the tools.
    """

    messages: list[Message]
    tools: list[dict[str, Any]]


class InvertedRollout:
    """A rollout whose requests for completions are returned to a caller, and whose caller sends the completions.

    Lifecycle::

        rollout = InvertedRollout(run)             # run() calls rollout.complete(...) for each completion
        request = await rollout.start()            # None: it has ended
        request = await rollout.reply(message)
        result = rollout.result                    # after the end
        await rollout.close()

    Attributes:
        source: Agent that requests the completions, None before the first request.
    """

    def __init__(self, run: Callable[[], Awaitable[Any]]) -> None:
        self._run, self.source = run, None
        self._history: list[Message] = []
        self._task: asyncio.Future[Any] | None = None
        self._next: asyncio.Future[Request | None] | None = None
        self._parked: asyncio.Future[Message] | None = None
        self._failure: Exception | None = None

    @property
    def result(self) -> Any:
        """Result of the rollout, after its end."""
        assert self._task is not None
        return self._task.result()

    async def start(self) -> Request | None:
        """Start the rollout, and return its first request."""
        self._next = asyncio.get_running_loop().create_future()
        self._task = asyncio.ensure_future(self._run())
        self._task.add_done_callback(self._end)
        return await self._next

    async def reply(self, message: Message) -> Request | None:
        """Complete the waiting request, and return the next one. None: the rollout has ended.

        Raises:
            HistoryError: A request does not continue the conversation.
            Exception: The rollout raised it.
        """
        assert self._task is not None
        if self._failure is not None:
            raise self._failure
        if self._task.done():
            return None
        self._history.append(plain(message))
        parked, self._parked = self._parked, None
        self._next = asyncio.get_running_loop().create_future()
        if parked is not None and not parked.done():
            parked.set_result(message)
        return await self._next

    async def complete(self, source: Any, messages: Sequence[Message], tools: Sequence[dict[str, Any]]) -> Message:
        """Return the completion of a request, when the caller has sent it.

        Args:
            source: Agent that requests it.
            messages: The whole history.
            tools: JSON schemas of the tools.

        Raises:
            HistoryError: The request does not continue the conversation, which fails.
        """
        history = [plain(message) for message in messages]
        if (problem := self._problem(source, history)) is not None:
            error = HistoryError(problem)
            self.fail(error)
            raise error
        new = history[len(self._history) :]
        self._history, self.source = history, source
        self._parked = parked = asyncio.get_running_loop().create_future()
        assert self._next is not None
        if not self._next.done():  # A caller that was cancelled does not wait any more.
            self._next.set_result(Request(new, list(tools)))
        return await parked

    def _problem(self, source: Any, history: Sequence[Message]) -> str | None:
        """Return the reason why a request does not continue the conversation, None if it does."""
        if self._failure is not None:
            return "the conversation has failed before"
        if self.source is None:
            return None
        advice = (
            "One conversation is one agent whose history only grows; use a harness without sub-agents and without "
            "compaction, such as agent.harness.id=null, and give other agents their own client"
        )
        if source != self.source:
            return f"a second agent requested a turn of the student. {advice}"
        if self._parked is not None:
            return f"a second turn was requested before the first one was sampled. {advice}"
        known = self._history
        for number, (old, new) in enumerate(zip(known, history, strict=False)):
            if _comparable(old) != _comparable(new):
                return f"message {number} of the history has changed, from {_shown(old)} to {_shown(new)}. {advice}"
        if len(history) <= len(known):
            return (
                f"the history has {len(history)} messages, but {len(known)} are already part of the conversation. "
                f"{advice}"
            )
        if any(message["role"] == "assistant" for message in history[len(known) :]):
            return f"the history has a new assistant message, which the student did not write. {advice}"
        return None

    def fail(self, error: Exception) -> None:
        """Fail the conversation, and end the rollout. Only the first error counts."""
        if self._failure is not None:
            return
        self._failure = error
        for waiting in (self._next, self._parked):
            if waiting is not None and not waiting.done():
                waiting.set_exception(error)
        if self._task is not None:
            self._task.cancel()

    def _end(self, ended: asyncio.Future[Any]) -> None:
        error = RolloutFailed("it was cancelled") if ended.cancelled() else ended.exception()
        if error is not None:
            self.fail(error if isinstance(error, Exception) else RolloutFailed(repr(error)))
        elif self._next is not None and not self._next.done():
            self._next.set_result(None)

    async def close(self) -> None:
        """Cancel the rollout, and wait until it has released its resources."""
        self.fail(RolloutFailed("its conversation was closed"))
        if self._next is not None and self._next.done() and not self._next.cancelled():
            self._next.exception()  # Nobody waits for it any more.
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})


def plain(message: Message) -> Message:
    """Return a message in the form of this project: text, and tool calls with parsed arguments.

    Raises:
        HistoryError: It has something else than text.
    """
    found: Message = {"role": message["role"], "content": _text(message.get("content"))}
    found |= {name: message[name] for name in ("tool_call_id", "name") if message.get(name)}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = with_arguments(calls, parse_json)
    return found


def with_arguments(calls: Sequence[dict[str, Any]], convert: Callable[[Any], Any]) -> list[dict[str, Any]]:
    """Return tool calls with their arguments in another form."""
    return [
        {
            "id": call["id"],
            "type": "function",
            "function": {"name": call["function"]["name"], "arguments": convert(call["function"]["arguments"])},
        }
        for call in calls
    ]


def _text(content: Any) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    if other := {str(part.get("type")) for part in content} - {"text"}:
        raise HistoryError(f"a message has {', '.join(sorted(other))}, but only text is supported")
    return "".join(part["text"] for part in content)


def parse_json(arguments: Any) -> Any:
    """Return the value of a text that is JSON. Another text, and anything else, stays as it is."""
    with contextlib.suppress(json.JSONDecodeError):
        return json.loads(arguments) if isinstance(arguments, str) else arguments
    return arguments


def _comparable(message: Message) -> Message:
    """Return what a repeated message must have in common with the first one."""
    return {**message, "content": message["content"].strip(), "name": None}


def _shown(message: Message) -> str:
    return repr({name: value for name, value in message.items() if value})[:200]

"""OpenAI-compatible endpoint of this process, whose completions are turns of students. It needs aiohttp.

It runs in the Python of ``rollout.environment_python``, where :mod:`inverted_rollout` is a module of the same folder.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or __package__:
    from recipe_gkd.conversations.adapters.inverted_rollout import (
        HistoryError,
        InvertedRollout,
        Message,
        with_arguments,
    )
else:  # loaded by its path
    from inverted_rollout import HistoryError, InvertedRollout, Message, with_arguments

SESSION_HEADER = "X-Session-ID"
"""Header in which the client of ``verifiers`` sends the id of a trace, which is the run of one agent."""
MAX_REQUEST_BYTES = 1 << 30


class Endpoint:
    """OpenAI-compatible endpoint on 127.0.0.1 whose completions are turns of students.

    Attributes:
        rollouts: Rollout of each trace.
    """

    def __init__(self) -> None:
        self.rollouts: dict[str, InvertedRollout] = {}

    @asynccontextmanager
    async def serve(self) -> AsyncIterator[str]:
        """Serve in the body, which receives the URL."""
        from aiohttp import web

        app = web.Application(client_max_size=MAX_REQUEST_BYTES)
        app.router.add_post("/v1/chat/completions", self._complete)
        app.router.add_route("*", "/{path:.*}", self._refuse)
        runner = web.AppRunner(app)
        await runner.setup()
        try:
            site = web.TCPSite(runner, "127.0.0.1", 0)
            await site.start()
            yield f"http://127.0.0.1:{runner.addresses[0][1]}/v1"
        finally:
            await runner.cleanup()

    async def _complete(self, request: Any) -> Any:
        from aiohttp import web

        body, trace = await request.json(), request.headers.get(SESSION_HEADER)
        rollout = self.rollouts.get(trace)
        if rollout is None:
            return web.json_response(_error("no conversation has this session"), status=404)
        try:
            message = await rollout.complete(trace, body["messages"], body.get("tools") or [])
        except Exception as error:  # noqa: BLE001 - any error of the conversation ends the rollout
            return web.json_response(_error(str(error)), status=400)
        if not body.get("stream"):
            return web.json_response(completion(message))
        return web.Response(body=events(message), content_type="text/event-stream")

    async def _refuse(self, request: Any) -> Any:
        """Fail a conversation whose harness uses another API. The list of models has no such effect."""
        from aiohttp import web

        rollout, what = self.rollouts.get(request.headers.get(SESSION_HEADER)), f"{request.method} {request.path}"
        error = HistoryError(
            f"the harness requested {what}, but only POST /v1/chat/completions is supported. Use a harness of the chat "
            "completions API, such as agent.harness.id=null"
        )
        if rollout is not None and request.method == "POST":
            rollout.fail(error)
        return web.json_response(_error(str(error)), status=404)


def _error(text: str) -> dict[str, Any]:
    return {"error": {"message": text, "type": "invalid_request_error"}}


def _wire(message: Message) -> Message:
    """Return the student's message as the API has it."""
    found: Message = {"role": "assistant", "content": message["content"]}
    if calls := message.get("tool_calls"):
        found["tool_calls"] = with_arguments(
            calls, lambda value: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        )
    return found


def _head(kind: str) -> dict[str, Any]:
    return {"id": "student", "object": kind, "created": 0, "model": "student"}


def _finish_reason(message: Message) -> str:
    return "tool_calls" if message.get("tool_calls") else "stop"


def completion(message: Message) -> dict[str, Any]:
    """Return a message as a completion."""
    choice = {"index": 0, "message": _wire(message), "finish_reason": _finish_reason(message), "logprobs": None}
    return _head("chat.completion") | {"choices": [choice]}


def events(message: Message) -> bytes:
    """Return a message as the events of a stream."""
    delta = _wire(message)
    for number, call in enumerate(delta.get("tool_calls", [])):
        call["index"] = number
    parts = [
        {"index": 0, "delta": delta, "finish_reason": None},
        {"index": 0, "delta": {}, "finish_reason": _finish_reason(message)},
    ]
    chunks = [json.dumps(_head("chat.completion.chunk") | {"choices": [part]}) for part in parts]
    return "".join(f"data: {chunk}\n\n" for chunk in [*chunks, "[DONE]"]).encode()

"""Program of the process that runs environments. It is started by its path and imports nothing of the project.

Its connection leads to :class:`~recipe_gkd.conversations.process.EnvironmentProcess`. One event loop runs the calls of
all conversations of the process. Plain functions run in threads. A further file is shared with the driver: each of its
numbers is the key of the conversation whose code the event loop, or a thread, executes at the moment. If the process
ends, the driver reads there which conversation has ended it.
"""

from __future__ import annotations

import asyncio
import contextvars
import importlib.util
import inspect
import json
import mmap
import queue
import socket
import sys
from collections.abc import Awaitable, Callable, Coroutine, Generator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

MESSAGE_ROLES = ("system", "user", "tool")
STEP_FIELDS = ("messages", "done", "reward", "info")
NO_KEY = -1


def load_file(path: str) -> ModuleType:
    """Import a file of the project by its path relative to this folder."""
    name = f"recipe_gkd_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


framing = load_file("framing.py")
user_child = load_file("../runtime/user_child.py")

CURRENT: contextvars.ContextVar[int] = contextvars.ContextVar("conversation", default=NO_KEY)
"""Key of the conversation that a task or a thread works for."""


class CallFailed(Exception):
    """Call without a valid result.

    Attributes:
        fields: ``kind``, ``reason`` and ``trace`` of the failure, for the driver.
    """

    def __init__(self, kind: str, reason: str, trace: str = "") -> None:
        super().__init__(reason)
        self.fields = {"kind": kind, "reason": reason, "trace": trace}


class Marks:
    """Keys of the conversations whose code is being executed: of the event loop, then of each thread."""

    def __init__(self, descriptor: int) -> None:
        self._keys = memoryview(mmap.mmap(descriptor, 0)).cast("q")
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        for slot in range(1, len(self._keys)):
            self._free.put(slot)

    @property
    def n_threads(self) -> int:
        """Number of threads that can be marked."""
        return len(self._keys) - 1

    def set_loop(self, key: int) -> None:
        """Mark the conversation of the event loop."""
        self._keys[0] = key

    def run_marked(self, function: Callable[[], Any]) -> Any:
        """Call a function in this thread, with the mark of its conversation."""
        slot = self._free.get()
        self._keys[slot] = CURRENT.get()
        try:
            return function()
        finally:
            self._keys[slot] = NO_KEY
            self._free.put(slot)


class MarkedCoroutine(Coroutine[Any, Any, Any]):
    """Coroutine of a task that marks its conversation whenever it runs."""

    def __init__(self, inner: Coroutine[Any, Any, Any], marks: Marks) -> None:
        self._inner, self._marks = inner, marks

    def send(self, value: Any) -> Any:
        """Continue the coroutine."""
        return self._marked(self._inner.send, value)

    def throw(self, *error: Any) -> Any:
        """Raise an exception in the coroutine."""
        return self._marked(self._inner.throw, *error)

    def close(self) -> None:
        """Close the coroutine."""
        self._inner.close()

    def __await__(self) -> Generator[Any, Any, Any]:
        return self._inner.__await__()

    def _marked(self, function: Callable[..., Any], *arguments: Any) -> Any:
        self._marks.set_loop(CURRENT.get())
        try:
            return function(*arguments)
        finally:
            self._marks.set_loop(NO_KEY)


@dataclass
class Loaded:
    """The user's code.

    Attributes:
        create: Function that creates the environment of a conversation.
        tools: JSON schemas of the tools that the chat template describes.
    """

    create: Callable[[], Any]
    tools: list[dict[str, Any]]


class ToolEnvironment:
    """Environment of ``rollout.tools``: it calls the functions that the model asks for, and ends without any call.

    An error of a call is its result, so that the model can react to it.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], worker: Worker) -> None:
        self._functions, self._worker = functions, worker

    async def reset(self, row: dict[str, Any]) -> None:
        """Keep the prompt of the row."""

    async def step(self, message: dict[str, Any], tool_calls: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the results of the calls. None without any."""
        if not tool_calls:
            return None
        found = await asyncio.gather(*(self._call(call) for call in tool_calls))
        return {"messages": [message for message, _ in found], "tool_errors": sum(failed for _, failed in found)}

    async def _call(self, call: dict[str, Any]) -> tuple[dict[str, Any], bool]:
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        function, failed = self._functions.get(name), True
        if function is None:
            content = f"error: there is no tool {name!r}; the tools are {', '.join(self._functions)}"
        elif not isinstance(arguments, dict):
            content = f"error: the arguments of {name} are no JSON object"
        elif (problem := _bind_problem(function, arguments)) is not None:
            content = f"error: {name}: {problem}"
        else:
            content, failed = await self._result(name, partial(function, **arguments), function)
        return {"role": "tool", "tool_call_id": call["id"], "name": name, "content": content}, failed

    async def _result(self, name: str, call: Callable[[], Any], function: Callable[..., Any]) -> tuple[str, bool]:
        try:
            result = await self._worker.within_deadline(self._worker.call(call, is_async=_is_async(function)))
        except CallFailed as failure:
            last_line = (failure.fields["trace"].splitlines() or [failure.fields["reason"]])[-1]
            reason = last_line if failure.fields["kind"] == "exception" else failure.fields["reason"]
            return f"error: {name}: {reason}", True
        return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str), False


class Worker:
    """Environments of the conversations of this process, and the calls of their methods."""

    def __init__(self, settings: dict[str, Any], marks: Marks, stacks: int) -> None:
        self._settings, self._marks, self._stacks = settings, marks, stacks
        self._threads = ThreadPoolExecutor(marks.n_threads, "environment")
        self._environments: dict[int, Any] = {}
        self.loaded = self._load()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer calls until the connection ends."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(lambda loop, coroutine, **options: asyncio.Task(
            MarkedCoroutine(coroutine, self._marks), loop=loop, **options
        ))  # fmt: skip
        watch = loop.create_task(user_child.watch_loop(self._settings["timeout_s"], self._stacks))
        open_calls: set[asyncio.Task[None]] = set()
        try:
            while True:
                call = await framing.receive(reader)
                context = contextvars.copy_context()
                context.run(CURRENT.set, call["key"])
                task = loop.create_task(self._answer(call, writer), context=context)
                open_calls.add(task)
                task.add_done_callback(open_calls.discard)
        finally:
            watch.cancel()

    async def _answer(self, call: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        try:
            reply = {"id": call["id"], "result": await self._run(call["method"], call["key"], call["arguments"])}
        except CallFailed as failure:
            reply = {"id": call["id"], "failure": failure.fields}
        try:
            content = framing.pack(reply)
        except Exception as error:  # noqa: BLE001 - pickle has no common error
            unsendable = CallFailed("result", f"its result cannot be sent: {type(error).__name__}: {error}")
            content = framing.pack({"id": call["id"], "failure": unsendable.fields})
        writer.write(content)

    async def _run(self, method: str, key: int, arguments: Sequence[Any]) -> Any:
        if method == "close":
            environment = self._environments.pop(key, None)
            close = getattr(environment, "close", None)
            return None if close is None else await self.within_deadline(self._call_method(close))
        if method == "reset":
            self._environments[key] = await self.within_deadline(self.call(self.loaded.create))
            return as_messages(await self._call_within(key, "reset", arguments), "reset")
        return as_step(await self._call_within(key, "step", arguments))

    async def _call_within(self, key: int, method: str, arguments: Sequence[Any]) -> Any:
        if key not in self._environments:
            raise CallFailed("exception", "it has no environment, because its reset failed")
        function = getattr(self._environments[key], method)
        work = self._call_method(function, *arguments)
        # Each tool has its own deadline.
        is_tool = isinstance(self._environments[key], ToolEnvironment)
        return await (work if is_tool else self.within_deadline(work))

    def _call_method(self, function: Callable[..., Any], *arguments: Any) -> Coroutine[Any, Any, Any]:
        return self.call(partial(function, *arguments), is_async=_is_async(function))

    async def call(self, function: Callable[[], Any], *, is_async: bool = False) -> Any:
        """Return the result of a function of the user. A plain function runs in a thread."""
        try:
            if is_async:
                return await function()
            context = contextvars.copy_context()
            marked = partial(context.run, self._marks.run_marked, function)
            return await asyncio.get_running_loop().run_in_executor(self._threads, marked)
        except CallFailed:
            raise
        except BaseException as error:  # the user's code may raise anything
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            raise CallFailed("exception", "it raised", user_child.user_trace(error)) from error

    async def within_deadline(self, work: Awaitable[Any]) -> Any:
        """Await a call of the user's code until its deadline."""
        timeout_s = self._settings["timeout_s"]
        try:
            async with asyncio.timeout(timeout_s):
                return await work
        except TimeoutError as error:
            trace = user_child.user_trace(error.__cause__ or error)
            raise CallFailed("timeout", f"it took longer than {timeout_s:g} s", trace) from error

    def _load(self) -> Loaded:
        """Import the user's files.

        Raises:
            CallFailed: One of them cannot be used. ``kind`` is the index of its key.
        """
        settings = self._settings
        if (spec := settings["environment"]) is not None:
            environment = self._import(spec, "environment", 0)
            for method in ("reset", "step"):
                if not callable(getattr(environment, method, None)):
                    raise CallFailed("0", f"its {spec['name']} has no method {method}")
            create = partial(environment, **settings["kwargs"])
            tools = [self._schema(tool, 0) for tool in getattr(environment, "tools", None) or []]
            return Loaded(create, tools)
        functions: dict[str, Callable[..., Any]] = {}
        for number, spec in enumerate(settings["tools"]):
            function = self._import(spec, f"tools_{number}", number)
            if spec["name"] in functions:
                raise CallFailed(str(number), f"there are two tools with the name {spec['name']}")
            functions[spec["name"]] = function
        tools = [self._schema(function, number) for number, function in enumerate(functions.values())]
        return Loaded(partial(ToolEnvironment, functions, self), tools)

    def _import(self, spec: dict[str, str], module: str, number: int) -> Callable[..., Any]:
        arguments = spec["path"], spec["name"], f"rollout_{module}"
        found = user_child.call_within(self._settings["load_timeout_s"], self._stacks, user_child.load, *arguments)
        if isinstance(found, str):
            raise CallFailed(str(number), found)
        assert callable(found)
        return found

    def _schema(self, tool: Any, number: int) -> dict[str, Any]:
        """Return the JSON schema of a tool, which may be a function."""
        if isinstance(tool, dict):
            return tool
        from transformers.utils import get_json_schema  # reads type hints and the docstring

        try:
            return dict(get_json_schema(tool))
        except Exception as error:
            name = getattr(tool, "__name__", repr(tool))
            raise CallFailed(
                str(number),
                f"{name} has no schema that a chat template could describe: {type(error).__name__}: {error}. Give each "
                "parameter a type hint and a line under Args in the docstring",
            ) from error


def as_messages(value: object, method: str) -> list[dict[str, Any]] | None:
    """Return messages of the user's code, None for none.

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
    return messages


def as_step(value: object) -> dict[str, Any]:
    """Return the result of a step with all its fields.

    Raises:
        CallFailed: It is none of: None (the conversation ends), messages, or a dict with ``messages``, ``done``,
            ``reward`` and ``info``.
    """
    fields: dict[str, Any] = dict(value) if isinstance(value, dict) and "role" not in value else {"messages": value}
    tool_errors = fields.pop("tool_errors", 0)
    if unknown := set(fields) - set(STEP_FIELDS):
        raise CallFailed(
            "result", f"step returned the fields {sorted(map(str, unknown))}, expected {', '.join(STEP_FIELDS)}"
        )
    messages = as_messages(fields.get("messages"), "step")
    if messages and any(message["role"] == "assistant" for message in messages):
        raise CallFailed("result", "step returned a message of the role assistant, whose messages the student writes")
    reward = fields.get("reward")
    if reward is not None:
        try:
            reward = float(reward)
        except (TypeError, ValueError):
            raise CallFailed("result", f"step returned the reward {reward!r:.100}, expected a number") from None
    info = fields.get("info") or {}
    if not isinstance(info, dict):
        raise CallFailed("result", f"step returned the info {info!r:.100}, expected a dict")
    return {
        "messages": messages or [],
        "done": bool(fields.get("done", not messages)),
        "reward": reward,
        "info": info,
        "tool_errors": tool_errors,
    }


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _bind_problem(function: Callable[..., Any], arguments: dict[str, Any]) -> str | None:
    try:
        inspect.signature(function).bind(**arguments)
    except TypeError as error:
        return str(error)
    return None


def serve(to_driver: int, stacks: int, others: Sequence[int]) -> None:
    """Load the user's code, reply with the schemas of the tools, then answer calls until the connection ends."""
    connection = socket.socket(fileno=to_driver)
    connection.setblocking(True)
    file = connection.makefile("rb", buffering=0)
    header = file.read(framing.LENGTH_BYTES)
    if len(header) < framing.LENGTH_BYTES:
        raise EOFError
    content = b""
    while len(content) < framing.length_of(header):
        content += file.read(framing.length_of(header) - len(content))
    settings = framing.unpack(content)
    sys.path[:] = settings["sys_path"]
    try:
        worker = Worker(settings, Marks(others[0]), stacks)
    except CallFailed as failure:
        connection.sendall(framing.pack({"failure": failure.fields}))
        return
    connection.sendall(framing.pack({"tools": worker.loaded.tools}))

    async def answer_calls() -> None:
        await worker.serve(*await asyncio.open_connection(sock=connection))

    asyncio.run(answer_calls())


if __name__ == "__main__":
    user_child.run(serve)

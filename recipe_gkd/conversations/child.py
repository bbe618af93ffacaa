"""Program of the process that runs environments. It is started by its path and imports nothing of the project.

Its connection leads to :class:`~recipe_gkd.conversations.process.EnvironmentProcess`. One event loop runs the calls of
all conversations of the process. Plain functions run in threads. A further file is shared with the driver: each of its
numbers is the key of the conversation whose code the event loop, or a thread, executes at the moment. If the process
ends, the driver reads there which conversation has ended it.
"""

from __future__ import annotations

import asyncio
import contextvars
import faulthandler
import importlib.util
import inspect
import json
import os
import socket
import sys
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

HEARTBEAT_S = 0.5


def load_file(path: str) -> ModuleType:
    """Import a file of the project by its path relative to this folder."""
    name = f"recipe_gkd_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


framing = load_file("framing.py")
marking = load_file("child_marks.py")
results = load_file("child_results.py")
user_child = load_file("../runtime/user_child.py")

CallFailed = results.CallFailed


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

    Attributes:
        n_failed: Number of calls of the last step that failed.
    """

    def __init__(self, functions: Mapping[str, Callable[..., Any]], worker: Worker) -> None:
        self._functions, self._worker, self.n_failed = functions, worker, 0

    async def reset(self, row: dict[str, Any]) -> None:
        """Keep the prompt of the row."""

    async def step(self, message: dict[str, Any], tool_calls: list[dict[str, Any]]) -> list[dict[str, Any]] | None:
        """Return the results of the calls. None without any."""
        self.n_failed = 0
        if not tool_calls:
            return None
        found = await asyncio.gather(*(self._call(call) for call in tool_calls))
        self.n_failed = sum(failed for _, failed in found)
        return [message for message, _ in found]

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
            result = await self._worker.call(call, is_async=_is_async(function))
            return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, default=str), False
        except CallFailed as failure:
            last_line = (failure.fields["trace"].splitlines() or [failure.fields["reason"]])[-1]
            reason = last_line if failure.fields["kind"] == "exception" else failure.fields["reason"]
        except Exception as error:  # noqa: BLE001 - a result may raise anything when it is read
            reason = f"its result cannot become text: {type(error).__name__}: {error}"
        return f"error: {name}: {reason}", True


class Worker:
    """Environments of the conversations of this process, and the calls of their methods."""

    def __init__(self, settings: dict[str, Any], marks: Any, stacks: int) -> None:
        self._settings, self._marks, self._stacks = settings, marks, stacks
        self._threads = ThreadPoolExecutor(marks.n_threads, "environment")
        self._free_threads, self._n_late = asyncio.Semaphore(marks.n_threads), 0
        self._environments: dict[int, Any] = {}
        self._calls: defaultdict[int, set[asyncio.Task[None]]] = defaultdict(set)
        self._late_closes: set[asyncio.Future[Any]] = set()
        self.loaded = self._load()

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Answer calls until the connection ends."""
        loop = asyncio.get_running_loop()
        loop.set_task_factory(lambda loop, coroutine, **options: asyncio.Task(
            marking.MarkedCoroutine(coroutine, self._marks), loop=loop, **options
        ))  # fmt: skip
        others = [
            loop.create_task(user_child.watch_loop(self._settings["timeout_s"], self._stacks)),
            loop.create_task(_send_heartbeats(writer)),
        ]
        try:
            while True:
                call = await framing.receive(reader)
                context = contextvars.copy_context()
                context.run(marking.CURRENT.set, call["key"])
                task = loop.create_task(self._answer(call, writer), context=context)
                self._calls[call["key"]].add(task)
                task.add_done_callback(self._calls[call["key"]].discard)
        finally:
            for other in others:
                other.cancel()

    async def _answer(self, call: dict[str, Any], writer: asyncio.StreamWriter) -> None:
        try:
            result = await self._run(call["method"], call["key"], call["arguments"])
            content = framing.pack({"id": call["id"], "result": result})
        except CallFailed as failure:
            content = framing.pack({"id": call["id"], "failure": failure.fields})
        except asyncio.CancelledError:
            closed = CallFailed("exception", "its conversation was closed")
            writer.write(framing.pack({"id": call["id"], "failure": closed.fields}))
            raise
        except Exception as error:  # noqa: BLE001 - a result of the user's code may raise anything when it is read
            invalid = CallFailed("result", "its result cannot be used", user_child.user_trace(error))
            content = framing.pack({"id": call["id"], "failure": invalid.fields})
        writer.write(content)

    async def _run(self, method: str, key: int, arguments: Sequence[Any]) -> Any:
        if method == "close":
            return await self._close(key)
        if method == "reset":
            self._environments[key] = await self.call(self.loaded.create, on_abandoned=self._close_late)
            return results.as_messages(await self._call_method(key, "reset", arguments), "reset")
        step = results.as_step(await self._call_method(key, "step", arguments))
        environment = self._environments[key]
        return step | {"tool_errors": environment.n_failed if isinstance(environment, ToolEnvironment) else 0}

    async def _close(self, key: int) -> None:
        """End the calls of a conversation, then its environment."""
        calls = self._calls.pop(key, set()) - {asyncio.current_task()}
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        await self._close_environment(self._environments.pop(key, None))

    async def _close_environment(self, environment: Any) -> None:
        close = getattr(environment, "close", None)
        if close is not None:
            await self.call(close, is_async=_is_async(close))

    def _close_late(self, created: Future[Any]) -> None:
        """Close an environment whose constructor has ended after its conversation."""
        if created.cancelled() or created.exception() is not None:
            return
        close = asyncio.gather(self._close_environment(created.result()), return_exceptions=True)
        self._late_closes.add(close)
        close.add_done_callback(self._late_closes.discard)

    async def _call_method(self, key: int, method: str, arguments: Sequence[Any]) -> Any:
        if key not in self._environments:
            raise CallFailed("exception", "it has no environment, because its reset failed")
        environment = self._environments[key]
        function = getattr(environment, method)
        if isinstance(environment, ToolEnvironment):  # each tool has its own deadline
            return await function(*arguments)
        return await self.call(partial(function, *arguments), is_async=_is_async(function))

    async def call(
        self,
        function: Callable[[], Any],
        *,
        is_async: bool = False,
        on_abandoned: Callable[[Future[Any]], None] | None = None,
    ) -> Any:
        """Return the result of a function of the user. A plain function runs in a thread.

        Args:
            on_abandoned: Function that is called when a thread has ended for whose result this call does not wait
                any more.

        Raises:
            CallFailed: It raised, or took longer than its deadline.
        """
        if is_async:
            return await self._within_deadline(function())
        await self._free_threads.acquire()  # the deadline begins when a thread is free
        loop, context = asyncio.get_running_loop(), contextvars.copy_context()
        deadline = loop.time() + self._settings["timeout_s"]
        running = self._threads.submit(context.run, self._marks.run_marked, function)
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(self._free_threads.release))
        try:
            return await self._within_deadline(asyncio.wrap_future(running))
        except (CallFailed, asyncio.CancelledError):  # a conversation that ends cancels its calls
            if not running.done():
                loop.call_at(deadline, self._count_if_late, running)
            if on_abandoned is not None:
                running.add_done_callback(
                    lambda done: loop.call_soon_threadsafe(on_abandoned, done, context=context)  # with its mark
                )
            raise

    def _count_if_late(self, running: Future[Any]) -> None:
        """Count a thread that still runs, and cannot be stopped. Write the stacks and exit if it is one of too many."""
        if running.done():
            return

        def end() -> None:
            self._n_late -= 1

        self._n_late += 1
        loop = asyncio.get_running_loop()
        running.add_done_callback(lambda _: loop.call_soon_threadsafe(end))
        if 2 * self._n_late > self._marks.n_threads:
            os.write(self._stacks, f"Timeout: {self._n_late} calls are late and still run\n".encode())
            faulthandler.dump_traceback(self._stacks)
            os._exit(1)

    async def _within_deadline(self, work: Awaitable[Any]) -> Any:
        timeout_s = self._settings["timeout_s"]
        try:
            async with asyncio.timeout(timeout_s) as deadline:
                return await work
        except BaseException as error:  # the user's code may raise anything
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise
            if isinstance(error, TimeoutError) and deadline.expired():
                trace = user_child.user_trace(error.__cause__ or error)
                raise CallFailed("timeout", f"it took longer than {timeout_s:g} s", trace) from error
            raise CallFailed("exception", "it raised", user_child.user_trace(error)) from error

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
            if (problem := _bind_problem(environment, settings["kwargs"])) is not None:
                raise CallFailed("0", f"rollout.environment_kwargs={settings['kwargs']} does not fit it: {problem}")
            if (setup := getattr(environment, "setup_process", None)) is not None:
                self._set_up(setup)
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

    def _set_up(self, setup: Callable[..., Any]) -> None:
        """Call the ``setup_process`` of an environment, which may set its ``tools``."""
        settings = self._settings
        try:
            user_child.call_within(settings["load_timeout_s"], self._stacks, partial(setup, **settings["kwargs"]))
        except BaseException as error:
            raise CallFailed("0", f"its setup_process raised:\n{user_child.user_trace(error)}") from error

    def _schema(self, tool: Any, number: int) -> dict[str, Any]:
        """Return the JSON schema of a tool, which may be a function."""
        if isinstance(tool, dict):
            return tool
        name = getattr(tool, "__name__", repr(tool))
        try:
            from transformers.utils import get_json_schema  # reads type hints and the docstring
        except ImportError as error:
            what = f"the schema of {name} cannot be read: {error}. Install transformers for {sys.executable}"
            raise CallFailed(str(number), what) from error
        try:
            return dict(get_json_schema(tool))
        except Exception as error:
            raise CallFailed(
                str(number),
                f"{name} has no schema that a chat template could describe: {type(error).__name__}: {error}. Give each "
                "parameter a type hint and a line under Args in the docstring",
            ) from error


async def _send_heartbeats(writer: asyncio.StreamWriter) -> None:
    """Show the driver that the event loop runs."""
    while True:
        writer.write(framing.pack({"id": marking.NO_KEY}))
        await asyncio.sleep(HEARTBEAT_S)


def _is_async(function: Callable[..., Any]) -> bool:
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


def _bind_problem(function: Callable[..., Any], arguments: dict[str, Any]) -> str | None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some functions that are written in C have no signature
        return None
    try:
        signature.bind(**arguments)
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
    if settings["sys_path"] is not None:  # another interpreter keeps its own packages
        sys.path[:] = settings["sys_path"]
    try:
        worker = Worker(settings, marking.Marks(others[0]), stacks)
    except CallFailed as failure:
        connection.sendall(framing.pack({"failure": failure.fields}))
        return
    connection.sendall(framing.pack({"tools": worker.loaded.tools}))

    async def answer_calls() -> None:
        await worker.serve(*await asyncio.open_connection(sock=connection))

    asyncio.run(answer_calls())


if __name__ == "__main__":
    user_child.run(serve)

"""Driver's side of a process that runs environments."""

from __future__ import annotations

import asyncio
import itertools
import mmap
import select
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from recipe_gkd.config.environments import EnvironmentSettings
from recipe_gkd.conversations import framing
from recipe_gkd.data.values import replace_surrogates
from recipe_gkd.runtime.threads import in_thread
from recipe_gkd.runtime.user_process import KILL_MARGIN_S, LOAD_TIMEOUT_S, ProcessEnd, UserProcess

MAX_THREADS = 64
"""Number of plain functions that run at the same time in a process."""
LIVENESS_INTERVAL_S = 0.5
_KEY_BYTES = 8


class CallError(Exception):
    """Call of an environment that failed, or returned something else than expected.

    Attributes:
        kind: ``"exception"``, ``"result"`` or ``"timeout"``.
        reason: Reason, as the predicate of a sentence.
        trace: Traceback, or stacks. Empty if there is none.
    """

    def __init__(self, kind: str, reason: str, trace: str = "") -> None:
        super().__init__(reason)
        self.kind, self.reason, self.trace = kind, reason, trace


class EnvironmentLost(Exception):
    """End of the process of an environment, whose state is lost.

    Attributes:
        end: Reason of the end.
        suspects: Keys of the conversations whose code was being executed.
    """

    def __init__(self, end: ProcessEnd, suspects: frozenset[int]) -> None:
        super().__init__(end.reason)
        self.end, self.suspects = end, suspects


class EnvironmentProcess:
    """A process that runs the environments of several conversations.

    Lifecycle::

        process = EnvironmentProcess(settings)   # starts, and imports the user's files in the background
        tools = process.wait_loaded()
        messages = await process.call("reset", key, row)      # concurrently, for different keys
        result = await process.call("step", key, message, tool_calls)
        await process.call("close", key)
        process.close()

    Attributes:
        n_open: Number of conversations that use the process.
        has_ended: True if the process has ended, or was ended at a deadline.
    """

    def __init__(self, settings: EnvironmentSettings) -> None:
        """Start the process."""
        self._settings, self.n_open, self.has_ended = settings, 0, False
        self._marks = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        self._marks.truncate(_KEY_BYTES * (1 + MAX_THREADS))
        self._map = mmap.mmap(self._marks.fileno(), 0)
        self._keys = memoryview(self._map).cast("q")
        for slot in range(len(self._keys)):
            self._keys[slot] = -1
        self._process = UserProcess(
            Path(__file__).with_name("child.py"), [self._marks.fileno()], python=settings.python
        )
        self._replies: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self._numbers = itertools.count()
        self._connection: asyncio.Future[asyncio.StreamWriter] | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._heard_at = 0.0
        self._ending: asyncio.Future[EnvironmentLost] | None = None
        values = {
            "environment": settings.environment,
            "kwargs": settings.kwargs,
            "tools": settings.tools,
            "timeout_s": settings.timeout_s,
            "load_timeout_s": LOAD_TIMEOUT_S,
            "sys_path": UserProcess.import_path() if settings.python is None else None,
        }
        with suppress(ConnectionError):  # If the process has died, wait_loaded reports the reason.
            self._process.socket.sendall(framing.pack(values))

    def wait_loaded(self) -> list[dict[str, Any]]:
        """Wait until the user's files are imported, and return the JSON schemas of the tools.

        Raises:
            ConfigError: A file cannot be used.
        """
        # An environment is imported, and then sets up the process.
        deadline = time.monotonic() + LOAD_TIMEOUT_S * max(2, len(self._settings.tools)) + KILL_MARGIN_S
        try:
            length = framing.length_of(self._read_exactly(framing.LENGTH_BYTES, deadline))
            reply = framing.unpack(self._read_exactly(length, deadline))
        except (EOFError, OSError) as error:
            end = self._process.end(LOAD_TIMEOUT_S, is_late=isinstance(error, TimeoutError))
            self.has_ended = True
            failure = {"kind": "0", "reason": "\n".join(filter(None, (f"its import {end.reason}", end.stack)))}
        else:
            if (failure := reply.get("failure")) is None:
                tools: list[dict[str, Any]] = reply["tools"]
                return tools
        raise self._settings.load_error(int(failure["kind"]), failure["reason"])

    def _read_exactly(self, n_bytes: int, deadline: float) -> bytes:
        content = b""
        while len(content) < n_bytes:
            left_s = deadline - time.monotonic()
            if not select.select([self._process.socket], [], [], max(0.0, min(LIVENESS_INTERVAL_S, left_s)))[0]:
                if self._process.is_dead():
                    raise EOFError
                if left_s <= 0:
                    raise TimeoutError
                continue
            if not (part := self._process.socket.recv(n_bytes - len(content))):
                raise EOFError
            content += part
        return content

    async def call(self, method: str, key: int, *arguments: object) -> Any:
        """Return the result of a method of a conversation's environment.

        Args:
            method: ``"reset"``, which creates the environment, ``"step"`` or ``"close"``.
            key: Key of the conversation.
            arguments: Arguments of the method.

        Raises:
            CallError: The user's code failed, or did not return in time.
            EnvironmentLost: The process has ended.
        """
        if self._ending is not None:
            raise await self.lost()
        writer = await self._connected()
        number = next(self._numbers)
        self._replies[number] = reply = asyncio.get_running_loop().create_future()
        try:
            writer.write(framing.pack({"id": number, "method": method, "key": key, "arguments": arguments}))
            message = await reply  # the process ends a call at its deadline, and `_watch` a silent process
        finally:
            self._replies.pop(number, None)
        if (failure := message.get("failure")) is not None:
            raise CallError(**failure)
        return replace_surrogates(message["result"])

    async def lost(self) -> EnvironmentLost:
        """Return the reason of the end of the process, when it has ended."""
        assert self._ending is not None
        return await asyncio.shield(self._ending)

    async def _connected(self) -> asyncio.StreamWriter:
        """Return the connection, which the first call opens in its event loop. Calls at the same time share it."""
        if self._connection is None:
            self._connection = asyncio.ensure_future(self._connect())
        return await asyncio.shield(self._connection)

    async def _connect(self) -> asyncio.StreamWriter:
        reader, writer = await asyncio.open_connection(sock=self._process.socket)
        self._heard_at = asyncio.get_running_loop().time()
        self._tasks = [asyncio.ensure_future(self._read(reader)), asyncio.ensure_future(self._watch())]
        return writer

    async def _read(self, reader: asyncio.StreamReader) -> None:
        """Pass replies to their calls until the process ends."""
        with suppress(EOFError, OSError):
            while True:
                message = await framing.receive(reader)
                self._heard_at = asyncio.get_running_loop().time()
                if (reply := self._replies.get(message["id"])) is not None and not reply.done():
                    reply.set_result(message)
        self._end(is_late=False)

    async def _watch(self) -> None:
        """End the process if it sends nothing for longer than a call may take."""
        loop, limit_s = asyncio.get_running_loop(), self._settings.timeout_s + KILL_MARGIN_S
        while (left_s := self._heard_at + limit_s - loop.time()) > 0:
            await asyncio.sleep(left_s)
        self._end(is_late=True)

    def _end(self, *, is_late: bool) -> None:
        """End the process and all its calls. Only the first call has an effect."""
        if self._ending is None:
            suspects = frozenset(key for key in self._keys.tolist() if key >= 0)  # before other code is executed
            self.has_ended = True
            self._ending = asyncio.ensure_future(self._finish(suspects, is_late=is_late))

    async def _finish(self, suspects: frozenset[int], *, is_late: bool) -> EnvironmentLost:
        end = await in_thread(lambda: self._process.end(self._settings.timeout_s, is_late=is_late))
        if self._connection is not None and self._connection.done():
            self._connection.result().transport.abort()
        lost = EnvironmentLost(end, suspects)
        for reply in self._replies.values():
            if not reply.done():
                reply.set_exception(lost)
        return lost

    def kill(self) -> None:
        """Kill the process and all processes that it has started."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and release its files. After :meth:`lost`, or when no call waits."""
        for task in self._tasks:
            if not (loop := task.get_loop()).is_closed():
                loop.call_soon_threadsafe(task.cancel)
        self._process.close()
        self._keys.release()
        self._map.close()
        self._marks.close()

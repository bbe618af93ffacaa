"""Processes that run the environments of a run's conversations."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from recipe_gkd.config.environments import EnvironmentSettings
from recipe_gkd.conversations.process import CallError, EnvironmentLost, EnvironmentProcess
from recipe_gkd.data.messages import Message
from recipe_gkd.data.tools import Tools
from recipe_gkd.runtime.threads import in_thread

log = logging.getLogger(__name__)


class EnvironmentPool:
    """Processes with environments. A process that has ended is started again.

    A context manager that ends the processes::

        with EnvironmentPool(settings, n_processes=2) as pool:
            session = await pool.open(key)
            messages = await session.reset(row)
            result = await session.step(message, tool_calls)
            session.close()

    Attributes:
        tools: JSON schemas of the tools that the chat template describes; empty for none.
        n_ended: Number of processes that have ended during calls.
    """

    def __init__(self, settings: EnvironmentSettings, n_processes: int) -> None:
        """Start the processes, and wait until they have imported the user's files.

        Raises:
            ConfigError: A file cannot be used.
        """
        self._settings, self.n_ended = settings, 0
        self._processes: list[EnvironmentProcess] = []
        self._restarts: dict[int, asyncio.Future[None]] = {}
        self.tools: Tools = []
        try:
            self._processes += [EnvironmentProcess(settings) for _ in range(n_processes)]
            for process in self._processes:
                self.tools = process.wait_loaded()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> EnvironmentPool:
        """Return the pool, whose processes have been started."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        self.close()

    async def open(self, key: int) -> EnvironmentSession:
        """Return a session on the process with the fewest conversations.

        Args:
            key: Number that no other open session has.

        Raises:
            ConfigError: A process has ended, and the files cannot be imported again.
        """
        number = min(range(len(self._processes)), key=lambda number: self._processes[number].n_open)
        if self._processes[number].has_ended:
            await self._restart(number)
        return EnvironmentSession(self._processes[number], key)

    async def _restart(self, number: int) -> None:
        """Replace a process that has ended. Callers at the same time wait for the same one."""
        if number not in self._restarts:
            self.n_ended += 1
            restart = asyncio.ensure_future(self._restarted(number))
            self._restarts[number] = restart
            restart.add_done_callback(lambda _: self._restarts.pop(number, None))
        await asyncio.shield(self._restarts[number])

    async def _restarted(self, number: int) -> None:
        await self._processes[number].lost()  # its calls have received the reason
        await in_thread(self._replace, number)

    def _replace(self, number: int) -> None:
        process = EnvironmentProcess(self._settings)
        try:
            process.wait_loaded()
        except BaseException:
            process.close()
            raise
        ended, self._processes[number] = self._processes[number], process
        ended.close()

    def close(self) -> None:
        """End the processes, even busy ones, and all processes that they have started."""
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.close()


class EnvironmentSession:
    """Environment of one conversation.

    All methods raise :class:`~recipe_gkd.conversations.process.CallError` if the user's code fails, and
    :class:`~recipe_gkd.conversations.process.EnvironmentLost` if the process has ended.

    Attributes:
        seconds: Time in the calls so far.
    """

    def __init__(self, process: EnvironmentProcess, key: int) -> None:
        self._process, self._key, self.seconds = process, key, 0.0
        process.n_open += 1
        self._is_closed = False

    async def reset(self, row: dict[str, Any]) -> list[Message] | None:
        """Create the environment, and return the messages of the prompt. None: the prompt of the row."""
        with self._measured():
            messages: list[Message] | None = await self._process.call("reset", self._key, row)
            return messages

    async def step(self, message: Message, tool_calls: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """Return the result of an assistant message; see :func:`recipe_gkd.conversations.child_results.as_step`.

        It has ``tool_errors`` too, the number of failed calls of ``rollout.tools``.
        """
        with self._measured():
            result: dict[str, Any] = await self._process.call("step", self._key, message, list(tool_calls))
            return result

    def close(self) -> None:
        """Release the environment, without waiting for it."""
        if self._is_closed:
            return
        self._is_closed = True
        self._process.n_open -= 1
        if not self._process.has_ended:
            ended = asyncio.ensure_future(self._process.call("close", self._key))
            ended.add_done_callback(_ignore)

    @contextmanager
    def _measured(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            yield
        finally:
            self.seconds += loop.time() - began


def _ignore(ended: asyncio.Future[Any]) -> None:
    """Log the error of a ``close``, which changes nothing any more."""
    with contextlib.suppress(asyncio.CancelledError, EnvironmentLost):
        if isinstance(error := ended.exception(), CallError):
            log.debug("close of an environment: %s", error.reason)

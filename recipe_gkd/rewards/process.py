"""Driver's side of a process that calls the reward functions."""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from recipe_gkd.config.reward_functions import RewardFunction, reserved_names, reward_functions
from recipe_gkd.config.schema import RewardFunctionConfig
from recipe_gkd.data.samples import Reward
from recipe_gkd.errors import ConfigError, RewardError
from recipe_gkd.rewards.items import RewardItem, TruthUse
from recipe_gkd.runtime.user_process import KILL_MARGIN_S, LOAD_TIMEOUT_S, ProcessEnd, UserProcess
from teacher.common.display_text import excerpt

LIVENESS_INTERVAL_S = 0.5
"""Interval of checks that the process is alive. A fork of a dead process keeps the connection open."""
SHOWN_CHARS = 300
"""Length of a prompt or a response in an error."""


class RewardProcess:
    """A process that calls the reward functions.

    Only one thread may call a process at a time. :meth:`kill` is the exception.

    Lifecycle::

        process = RewardProcess(config)  # starts, and imports the user's files in the background
        process.wait_loaded()
        results = process.score(items)
        process.close()

    Args:
        config: Functions, and the deadline of a call.

    Attributes:
        is_async: True if a function is ``async def``. Available after :meth:`wait_loaded`.
        truth_use: Use of the ground truth by the functions. Available after :meth:`wait_loaded`.
        has_ended: True if the process died in :meth:`score`, or was ended at a deadline.
    """

    is_async: bool
    truth_use: TruthUse

    def __init__(self, config: RewardFunctionConfig) -> None:
        self._config, self._functions = config, reward_functions(config)
        self._stops_at_failure = config.on_failure in (None, "fail")
        self.has_ended = False
        self._process = UserProcess(Path(__file__).with_name("child.py"))
        to_process = self._process.socket
        to_process.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(config.timeout_s) + 1, 0))
        self._connection = Connection(to_process.detach())
        settings = {
            "functions": [
                {
                    "label": function.label,
                    "path": str(file_of(function)),
                    "name": function.name,
                    "weight": function.weight,
                    "kwargs": dict(function.kwargs),
                }
                for function in self._functions
            ],
            "reserved": reserved_names(config),
            "max_concurrency": config.max_concurrency,
            "stops_at_failure": self._stops_at_failure,
            "timeout_s": config.timeout_s,
            "load_timeout_s": LOAD_TIMEOUT_S,
            "sys_path": UserProcess.import_path(),
        }
        with suppress(ConnectionError):  # If the process has died, wait_loaded reports the reason.
            self._connection.send(settings)

    def wait_loaded(self) -> None:
        """Wait until the user's files are imported.

        Raises:
            ConfigError: A file cannot be imported, or has no such function, or its parameters are not accepted.
        """
        try:
            loaded = self._receive(LOAD_TIMEOUT_S * len(self._functions))
        except (EOFError, OSError) as error:
            ended = self._end(LOAD_TIMEOUT_S, error)
            loaded = "\n".join(filter(None, (f"its import {ended.reason}", ended.stack))), 0
        if isinstance(loaded, dict):
            self.is_async, self.truth_use = loaded["n_blocking"] < len(self._functions), loaded["truth_use"]
            self._n_blocking = int(loaded["n_blocking"])
            return
        reason, number = loaded
        function = self._functions[number]
        expected = f"Expected a Python file that defines {_signature(function)}; correct it or {function.name_key}"
        what = f"{function.path_key}={file_of(function)}: {reason}"
        raise ConfigError(what, details=(expected,), keys=(function.path_key, function.name_key))

    def score(self, items: Sequence[RewardItem]) -> list[Reward | RewardError | None]:
        """Return the results of ``items``, in order.

        Returns:
            The reward of each item. With ``on_failure=skip`` or ``value``: an error that names an item without one, and
            None for items that were not scored because the process has ended. If functions are asynchronous, such an
            end has no error unless there is one item, because any of the calls in flight may have caused it.

        Raises:
            RewardError: With ``on_failure=fail``, an item got no reward. The process may have ended.
        """
        found: dict[int, Reward | RewardError] = {}
        timeout_s = self._config.timeout_s * len(self._functions)  # each has its own deadline in the process
        if self.is_async:  # the blocking calls of all items in flight may precede the first reply
            timeout_s += self._config.timeout_s * self._n_blocking * (self._config.max_concurrency - 1)
        try:
            self._connection.send([(item.arguments, item.n_turns) for item in items])
            while len(found) < len(items):
                index, score, *other = self._receive(timeout_s)
                if isinstance(score, dict):  # the fields of a failure
                    function = self._functions[score["number"]].description
                    failure = _error(items[index], score["reason"], score["trace"], function=function)
                    failure.kind = score["kind"]
                    if self._stops_at_failure:
                        raise failure
                    found[index] = failure
                else:
                    found[index] = Reward(score, *other)
        except (EOFError, OSError) as error:
            self.has_ended = True
            ended = self._end(self._config.timeout_s, error)
            first_missing = next(index for index in range(len(items)) if index not in found)
            names = " or ".join(function.description for function in self._functions)
            failure = _error(items[first_missing], f"it {ended.reason}", ended.stack, function=names)
            failure.kind, failure.exit_status = ended.kind, ended.exit_status
            if self._stops_at_failure:
                raise failure from None
            if len(items) == 1 or not self.is_async:
                found[first_missing] = failure
        return [found.get(index) for index in range(len(items))]

    def kill(self) -> None:
        """Kill the process and all processes that it has started. Safe in any thread."""
        self._process.kill()

    def close(self) -> None:
        """Kill the process and release its files. No thread may be in :meth:`score`."""
        self._process.close()
        self._connection.close()

    def _receive(self, timeout_s: float) -> Any:
        """Return the next reply; see :func:`recipe_gkd.rewards.child.serve`.

        Raises:
            TimeoutError: There is no reply :data:`KILL_MARGIN_S` after the deadline.
            EOFError, OSError: The process has ended or closed the connection.
        """
        deadline = time.monotonic() + timeout_s + KILL_MARGIN_S
        while not self._connection.poll(max(0.0, min(LIVENESS_INTERVAL_S, deadline - time.monotonic()))):
            if self._process.is_dead() and not self._connection.poll(0):
                raise EOFError
            if time.monotonic() >= deadline:
                raise TimeoutError
        return self._connection.recv()

    def _end(self, timeout_s: float, error: Exception) -> ProcessEnd:
        """End a process that does not answer, and return the reason.

        Args:
            timeout_s: Deadline that applied.
            error: Exception of the connection.
        """
        is_late = isinstance(error, TimeoutError | BlockingIOError)  # BlockingIOError: it does not read its items
        return self._process.end(timeout_s, is_late=is_late)


def _error(item: RewardItem, reason: str, trace: str, *, function: str) -> RewardError:
    shown = ("prompt", item.prompt), ("response", item.response), ("ground truth", item.ground_truth)
    return RewardError(
        f"the reward function {function} gave no reward to sample {item.uid} ({item.where}): {reason}",
        details=(*([trace] if trace else []), *(f"{name}: {_shorten(value)}" for name, value in shown)),
        uid=item.uid,
        function=function,
    )


def _signature(function: RewardFunction) -> str:
    return f"{function.name}(prompt, response, ground_truth, extra) -> float, or with verl's parameters"


def file_of(function: RewardFunction) -> Path:
    """Return the absolute path of the function's file.

    Raises:
        ConfigError: There is no such file.
    """
    path = Path(function.path).absolute()
    if not path.is_file():
        raise ConfigError(
            f"{function.path_key}={function.path}: {path} is no file; expected a Python file that defines "
            f"{_signature(function)}",
            keys=(function.path_key,),
        )
    return path


def _shorten(value: object) -> str:
    return excerpt(repr(value), SHOWN_CHARS)

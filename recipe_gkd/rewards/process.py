"""One process that calls the reward function, from the side of those who have it called.

Not a process of multiprocessing: that would import the command's module again, torch and Ray with it, and the deadline
of a pool is one for a whole chunk.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path

from recipe_gkd.config.schema import RewardFunctionConfig
from recipe_gkd.errors import ConfigError, RewardError
from recipe_gkd.rewards.items import RewardItem

LOAD_TIMEOUT_S = 300.0
"""For the import of the user's file, which may bring a model of its own."""
MARGIN_S = 2.0
"""The process ends itself at a deadline, and tells where it was; this much later it is killed."""
END_TIMEOUT_S = 10.0
"""A killed process is gone in milliseconds."""
LOOK_S = 0.5
"""While an answer is waited for, how often to look if the process lives: a fork of it keeps the connection open."""
DYING_S = 1.0
"""A process that dies closes its connection a moment before it is dead."""
SHOWN = 300
"""Characters of a prompt or an answer in an error."""
STACK_LINES = 20
OUR_THREAD = re.compile(r"^Thread .*\n  File .* in end_with_driver\n(?:  File .*\n)*\n?", re.MULTILINE)
"""The part of the stacks that is not the function's."""


class RewardProcess:
    """Starts at once and imports meanwhile: :meth:`wait_loaded` waits. One caller at a time, but for :meth:`kill`."""

    def __init__(self, config: RewardFunctionConfig, path: Path) -> None:
        self._config, self._path = config, path
        self._stacks = tempfile.TemporaryFile()  # noqa: SIM115 - closed by close()
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", int(config.timeout_s) + 1, 0))
            self._connection = Connection(ours.detach())
            stderr = os.dup(2)
            try:
                descriptors = theirs.fileno(), self._stacks.fileno(), stderr
                self._process = subprocess.Popen(
                    # -u: it is killed in the end, and what it printed shall not be lost
                    [sys.executable, "-P", "-u", str(Path(__file__).with_name("child.py")), *map(str, descriptors)],
                    stdin=subprocess.DEVNULL,
                    stderr=self._stacks,  # until it has started
                    pass_fds=descriptors,
                    start_new_session=True,  # Ctrl-C is the driver's; and what the function starts ends with it
                )
            finally:
                os.close(stderr)
        settings = {
            "path": str(path),
            "name": config.name,
            "timeout_s": config.timeout_s,
            "load_timeout_s": LOAD_TIMEOUT_S,
            "sys_path": [entry or os.getcwd() for entry in sys.path],
        }
        with suppress(ConnectionError):  # it died at once: wait_loaded tells how
            self._connection.send(settings)

    def wait_loaded(self) -> None:
        """Raises :class:`ConfigError` if the file cannot be imported, or has no such function."""
        try:
            wrong = self._answer(LOAD_TIMEOUT_S)
        except (EOFError, OSError) as error:
            wrong = f"its import {self._end(LOAD_TIMEOUT_S, error)}"
        if wrong is not None:
            raise ConfigError(
                f"custom_reward_function.path={self._path}: {wrong}\nExpected a Python file that defines "
                f"{self._config.name}(prompt, answer, ground_truth, extra) -> float, or with verl's parameters; "
                "correct it, or custom_reward_function.name"
            )

    def score(self, items: Sequence[RewardItem]) -> list[float]:
        """Raises :class:`RewardError` for the first item that gets no reward; the process may be gone then."""
        rewards: list[float] = []
        try:
            self._connection.send([item.arguments for item in items])
            for item in items:
                reward = self._answer(self._config.timeout_s)
                if not isinstance(reward, float):
                    raise self._error(item, str(reward))
                rewards.append(reward)
        except (EOFError, OSError) as error:
            wrong = f"it {self._end(self._config.timeout_s, error)}"
            raise self._error(items[len(rewards)], wrong) from None
        return rewards

    def kill(self) -> None:
        """Whatever it does, and what it started; from any thread."""
        if self._process.returncode is None:  # not reaped: its number is still its own
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def close(self) -> None:
        """Only when nobody calls :meth:`score` any more."""
        self.kill()
        self._process.wait(END_TIMEOUT_S)
        self._connection.close()
        self._stacks.close()

    def _answer(self, timeout_s: float) -> float | str | None:
        """Raises TimeoutError if there is none in time; EOFError, or another OSError, if there will be none."""
        deadline = time.monotonic() + timeout_s + MARGIN_S
        while not self._connection.poll(max(0.0, min(LOOK_S, deadline - time.monotonic()))):
            if self._is_dead() and not self._connection.poll(0):
                raise EOFError
            if time.monotonic() >= deadline:
                raise TimeoutError
        response: float | str | None = self._connection.recv()
        return response

    def _is_dead(self) -> bool:
        """Without reaping it: until then its number, which is that of its group, is its own."""
        if self._process.returncode is not None:
            return True
        try:
            return os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
        except ChildProcessError:  # reaped by someone else
            return True

    def _end(self, timeout_s: float, error: Exception) -> str:
        """End what is left of a process that does not answer; say what became of it. ``error``: what told so."""
        is_late = isinstance(error, TimeoutError | BlockingIOError)  # no answer, or its arguments are not taken
        deadline = time.monotonic() + DYING_S
        while not (is_late or self._is_dead()) and time.monotonic() < deadline:
            time.sleep(0.01)  # there is no call that waits with a deadline and does not reap
        died = self._is_dead()
        self.kill()
        status = self._process.wait(END_TIMEOUT_S)
        text = os.pread(self._stacks.fileno(), 1 << 16, 0).decode(errors="replace")
        lines = OUR_THREAD.sub("", text).splitlines()
        stack = "".join(f"\n{line}" for line in lines[:STACK_LINES])
        if stack.startswith("\nTimeout") or (is_late and not died):
            return f"took longer than {timeout_s:g} s and was ended{stack and ', here:'}{stack}"
        if not died:
            return "closed the connection to the driver, and was ended"
        if status == -signal.SIGKILL:
            return "was killed (SIGKILL): the kernel's log tells if it wanted memory"
        how = f"exit status {status}" if status >= 0 else signal.Signals(-status).name
        return f"ended its process ({how}){stack}"

    def _error(self, item: RewardItem, wrong: str) -> RewardError:
        return RewardError(
            f"the reward function {self._config.name} of {self._path} gave no reward to sample {item.uid} "
            f"({item.where}): {wrong}\n"
            f"prompt: {cut(item.prompt)}\nanswer: {cut(item.response)}\nground truth: {cut(item.ground_truth)}"
        )


def cut(value: object) -> str:
    """Its beginning and its end."""
    text = repr(value)
    return text if len(text) <= SHOWN else f"{text[: SHOWN // 2]} ... {text[-SHOWN // 2 :]}"

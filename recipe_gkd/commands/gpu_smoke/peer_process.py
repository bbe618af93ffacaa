"""A second process of a check, which runs a function and exchanges messages with the check."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import torch

from recipe_gkd.commands.gpu_smoke.outcome import CheckFailed

_JOIN_TIMEOUT_S = 10.0


class Peer:
    """The check's end of the connection.

    Args:
        timeout_s: Deadline of each message.
    """

    def __init__(self, connection: Connection, timeout_s: float) -> None:
        self._connection, self._timeout_s = connection, timeout_s

    def send(self, message: object) -> None:
        """Send a message."""
        self._connection.send(message)

    def receive(self) -> Any:
        """Return the next message.

        Raises:
            CheckFailed: The process ended, or sent nothing in time.
        """
        try:
            if self._connection.poll(self._timeout_s):
                return self._connection.recv()
        except EOFError:
            raise CheckFailed("the second process of the check ended with an error; see the log") from None
        raise CheckFailed(f"the second process of the check sent nothing within {self._timeout_s:g} s; see the log")


@contextmanager
def running_peer(main: Callable[..., None], *arguments: object, timeout_s: float) -> Iterator[Peer]:
    """Run ``main(connection, *arguments)`` in a spawned process, and kill it at the end.

    Args:
        main: Function of a module.
        *arguments: Its further arguments.
        timeout_s: Deadline of each message.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    # A daemon must not have children, such as the ranks of an engine. They end with the check: see `isolation`.
    process = context.Process(target=main, args=(theirs, *arguments))
    process.start()
    theirs.close()
    try:
        yield Peer(ours, timeout_s)
        process.join(_JOIN_TIMEOUT_S)
    finally:
        process.kill()
        process.join()


def select_device(device_type: str, index: int) -> torch.device:
    """Return a device, and make a GPU the default one of this process."""
    if device_type == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)

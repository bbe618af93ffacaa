"""The process that calls the reward function; started by its path, so that nothing of the project is imported here.

Its arguments are two descriptors: a connection to :class:`~recipe_gkd.rewards.process.RewardProcess`, and a file for
stacks, which faulthandler writes when a deadline passes or the process crashes.
"""

from __future__ import annotations

import faulthandler
import importlib.machinery
import importlib.util
import math
import numbers
import os
import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any


def main(connection: Connection, stacks: int) -> None:
    """First the function, answered by None or by what is wrong with it; then any number of lists of its arguments.

    To each item, in order, the answer is its reward, or a text that says why there is none: the rest of that list is
    then dropped.
    """
    settings = connection.recv()
    sys.path[:] = settings["sys_path"]
    function = within(settings["load_timeout_s"], stacks, load, settings["path"], settings["name"])
    if isinstance(function, str):
        connection.send(function)
        return
    connection.send(None)
    while True:
        for arguments in connection.recv():
            result = within(settings["timeout_s"], stacks, call, function, arguments)
            connection.send(result)
            if isinstance(result, str):
                break


def within(timeout_s: float, stacks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Its result; after the deadline, the end of this process, even if code that is no Python has hung itself up."""
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=stacks)
    try:
        return function(*arguments)
    finally:
        faulthandler.cancel_dump_traceback_later()


def load(path: str, name: str) -> Callable[..., Any] | str:
    module_name = "custom_reward_function"
    try:
        loader = importlib.machinery.SourceFileLoader(module_name, path)
        spec = importlib.util.spec_from_loader(module_name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        sys.path.insert(0, str(Path(path).parent))  # for what lies beside it, as if it were run
        loader.exec_module(module)
    except BaseException as error:  # noqa: BLE001 - a file of the user's may raise anything, and sys.exit
        return f"it cannot be imported:\n{trace(error)}"
    function = getattr(module, name, None)
    if callable(function):
        return function
    others = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    there = f"it defines: {', '.join(others) or 'nothing that can be called'}"
    if not hasattr(module, name):
        return f"it has no {name}; {there}"
    return f"its {name} is {function!r:.100}, which cannot be called; {there}"


def call(function: Callable[..., Any], arguments: tuple[Any, ...]) -> float | str:
    try:
        reward = function(*arguments)
    except BaseException as error:  # noqa: BLE001 - a function of the user's may raise anything, and sys.exit
        return f"it raised\n{trace(error)}"
    if not isinstance(reward, numbers.Real) or not math.isfinite(reward):
        return f"it returned {reward!r:.200} ({type(reward).__name__}), expected a finite number"
    return float(reward)


def trace(error: BaseException) -> str:
    """The user's own frames: those after this file's and the importer's, if there are any."""
    frames = traceback.TracebackException.from_exception(error)
    ours = (__file__, "<frozen importlib")
    while frames.stack and frames.stack[0].filename.startswith(ours):
        del frames.stack[0]
    return "".join(frames.format()).rstrip()


if __name__ == "__main__":
    to_driver, stacks_file = map(int, sys.argv[1:])
    for descriptor in (to_driver, stacks_file):  # processes that the function starts shall not hold them
        os.set_inheritable(descriptor, False)
    faulthandler.enable(file=stacks_file)
    with suppress(EOFError, ConnectionError):  # the driver is gone
        main(Connection(to_driver), stacks_file)

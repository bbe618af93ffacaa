"""The process that calls the reward function; started by its path, so that nothing of the project is imported here.

Its arguments are three descriptors: a connection to :class:`~recipe_gkd.rewards.process.RewardProcess`; a file for
stacks, which faulthandler writes when a deadline passes or the process crashes; and the driver's stderr. Its own stderr
is that file at first, so that the driver can tell why an interpreter does not even start.
"""

from __future__ import annotations

import faulthandler
import importlib.machinery
import importlib.util
import inspect
import math
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import Any

LONGEST_TRACE = 4000
"""Characters; the text of an error may have any number of them."""


def beside(file_name: str) -> ModuleType:
    """Import a file of this folder by its path."""
    spec = importlib.util.spec_from_file_location(
        f"recipe_gkd_{Path(file_name).stem}", Path(__file__).with_name(file_name)
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


binding = beside("binding.py")


def main(connection: Connection, stacks: int) -> None:
    """Load the function, then score lists of items until the connection ends.

    The first message names the function; the reply is None, or the reason why it is refused. Each later message is a
    list of items, dicts of the arguments of ``values_of``. Each item, in order, gets its reward as reply, or the reason
    why there is none; the rest of that list is then dropped.
    """
    settings = connection.recv()
    sys.path[:] = settings["sys_path"]
    function = within(settings["load_timeout_s"], stacks, load, settings["path"], settings["name"])
    bound = function if isinstance(function, str) else binding.bind(function, settings["name"])
    if isinstance(bound, str):
        connection.send(bound)
        return
    connection.send(None)
    while True:
        for item in connection.recv():
            values = binding.values_of(**item)
            arguments = {name: values[value] for name, value in bound.items()}
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
        if inspect.iscoroutinefunction(function):
            return f"its {name} is async; make it an ordinary function"
        return function
    others = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    there = f"it defines: {', '.join(others) or 'nothing that can be called'}"
    if not hasattr(module, name):
        return f"it has no {name}; {there}"
    return f"its {name} is {function!r:.100}, which cannot be called; {there}"


def call(function: Callable[..., Any], arguments: dict[str, Any]) -> float | str:
    try:
        reward = function(**arguments)
        number = as_number(binding.number_of(reward))
        if math.isfinite(number):
            return number
        return (
            f"it returned {reward!r:.200} ({type(reward).__name__}), expected a finite number, or a dict with one as "
            "'score'"
        )
    except BaseException as error:  # noqa: BLE001 - the user's function, or what it returned, may raise anything
        return f"it raised\n{trace(error)}"


def as_number(reward: Any) -> float:
    """What ``float`` makes of it, as of a bool, a Decimal, or an array without dimensions; nan if it is no number."""
    if isinstance(reward, str | bytes | bytearray):
        return math.nan
    try:
        return float(reward)
    except (TypeError, ValueError):
        return math.nan


def trace(error: BaseException) -> str:
    """The user's own frames: those after this file's and the importer's, if there are any; long ones are cut."""
    frames = traceback.TracebackException.from_exception(error)
    ours = (__file__, "<frozen importlib")
    while frames.stack and frames.stack[0].filename.startswith(ours):
        del frames.stack[0]
    text = "".join(frames.format()).rstrip()
    half = LONGEST_TRACE // 2
    return text if len(text) <= LONGEST_TRACE else f"{text[:half]}\n... cut ...\n{text[-half:]}"


def restore_stderr(stderr: int, stacks: int) -> None:
    """Pass on what the interpreter wrote as it started, and leave the file to stacks."""
    early = os.pread(stacks, 1 << 16, 0)
    os.ftruncate(stacks, 0)
    os.lseek(stacks, 0, os.SEEK_SET)
    os.dup2(stderr, 2)
    os.close(stderr)
    with suppress(OSError):  # nobody may be reading
        os.write(2, early)


def end_with_driver(connection: int) -> None:
    """Wait until the driver has closed its end, which it does last, or is gone: then nobody else ends this group."""
    hangup = select.poll()
    hangup.register(connection, 0)
    hangup.poll()
    end_group()


def end_group() -> None:
    """This process, the leader of its group, and what the function started."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    to_driver, stack_dump_file, drivers_stderr = map(int, sys.argv[1:])
    restore_stderr(drivers_stderr, stack_dump_file)
    for descriptor in (to_driver, stack_dump_file):  # processes that the function starts shall not hold them
        os.set_inheritable(descriptor, False)
    faulthandler.enable(file=stack_dump_file)
    threading.Thread(target=end_with_driver, args=(to_driver,), daemon=True).start()
    try:
        main(Connection(to_driver), stack_dump_file)
    except (EOFError, ConnectionError):  # the driver is gone
        end_group()

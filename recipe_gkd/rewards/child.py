"""Program of the process that calls the reward function. It is started by its path and imports nothing of the project.

The arguments are three file descriptors: a connection to :class:`~recipe_gkd.rewards.process.RewardProcess`; a file in
which faulthandler writes stacks when a deadline passes or the process crashes; and the driver's stderr. At first the
process's own stderr is the stacks file, so that the driver can report why an interpreter did not start.
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

MAX_TRACE_CHARS = 4000


def load_sibling(file_name: str) -> ModuleType:
    """Import a file of this folder by its path."""
    spec = importlib.util.spec_from_file_location(
        f"recipe_gkd_{Path(file_name).stem}", Path(__file__).with_name(file_name)
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


binding = load_sibling("binding.py")


def serve(connection: Connection, stacks: int) -> None:
    """Load the function, then score lists of items until the connection ends.

    The first message contains the settings. Its reply is None, or the reason why the function is rejected. Each later
    message is a list of items, dicts of the arguments of ``values_of``. The reply to each item, in order, is its
    reward, or the reason why there is none. After such a reason the rest of the list is dropped.
    """
    settings = connection.recv()
    sys.path[:] = settings["sys_path"]
    function = call_within(settings["load_timeout_s"], stacks, load, settings["path"], settings["name"])
    bound = function if isinstance(function, str) else binding.bind(function, settings["name"], settings["kwargs"])
    if isinstance(bound, str):
        connection.send(bound)
        return
    connection.send(None)
    while True:
        for item in connection.recv():
            values = binding.values_of(**item)
            arguments = settings["kwargs"] | {name: values[value] for name, value in bound.items()}
            result = call_within(settings["timeout_s"], stacks, score, function, arguments)
            connection.send(result)
            if isinstance(result, str):
                break


def call_within(timeout_s: float, stacks: int, function: Callable[..., Any], *arguments: Any) -> Any:
    """Return ``function(*arguments)``. At the deadline, write the stacks and exit, even if C code holds the GIL."""
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=stacks)
    try:
        return function(*arguments)
    finally:
        faulthandler.cancel_dump_traceback_later()


def load(path: str, name: str) -> Callable[..., Any] | str:
    """Return the function ``name`` of the file ``path``, or the reason why it cannot be used."""
    module_name = "custom_reward_function"
    try:
        loader = importlib.machinery.SourceFileLoader(module_name, path)
        spec = importlib.util.spec_from_loader(module_name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        # Installed modules with common names, such as utils, must not hide those beside the user's file. The driver has
        # the same rule in runtime/user_code.py. This process calls only the user's code, so the folder stays the first.
        sys.path.insert(0, str(Path(path).parent))
        loader.exec_module(module)
    except BaseException as error:  # noqa: BLE001 - a user's file may raise anything, including SystemExit
        return f"it cannot be imported:\n{user_trace(error)}"
    function = getattr(module, name, None)
    if callable(function):
        if inspect.iscoroutinefunction(function):
            return f"its {name} is async; make it an ordinary function"
        return function
    others = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    defined = f"it defines: {', '.join(others) or 'no function'}"
    if not hasattr(module, name):
        return f"it has no {name}; {defined}"
    return f"its {name} is {function!r:.100}, which cannot be called; {defined}"


def score(function: Callable[..., Any], arguments: dict[str, Any]) -> float | str:
    """Return the reward, or the reason why there is none."""
    try:
        reward = function(**arguments)
        number = to_float(binding.score_of(reward))
        if math.isfinite(number):
            return number
        return (
            f"it returned {reward!r:.200} ({type(reward).__name__}), expected a finite number, or a dict with one as "
            "'score'"
        )
    except BaseException as error:  # noqa: BLE001 - the user's function, or its result, may raise anything
        return f"it raised\n{user_trace(error)}"


def to_float(reward: Any) -> float:
    """Return ``float(reward)``, or nan for text and for values that are no number."""
    if isinstance(reward, str | bytes | bytearray):
        return math.nan
    try:
        return float(reward)
    except (TypeError, ValueError):
        return math.nan


def user_trace(error: BaseException) -> str:
    """Return the traceback without the leading frames of this file and of the importer. Shorten a long one."""
    frames = traceback.TracebackException.from_exception(error)
    internal_files = (__file__, "<frozen importlib")
    while frames.stack and frames.stack[0].filename.startswith(internal_files):
        del frames.stack[0]
    text = "".join(frames.format()).rstrip()
    half = MAX_TRACE_CHARS // 2
    return text if len(text) <= MAX_TRACE_CHARS else f"{text[:half]}\n... cut ...\n{text[-half:]}"


def restore_stderr(stderr: int, stacks: int) -> None:
    """Forward the output of the interpreter's start to the driver's stderr, and empty the stacks file."""
    startup_output = os.pread(stacks, 1 << 16, 0)
    os.ftruncate(stacks, 0)
    os.lseek(stacks, 0, os.SEEK_SET)
    os.dup2(stderr, 2)
    os.close(stderr)
    with suppress(OSError):  # The driver's stderr may have no reader.
        os.write(2, startup_output)


def end_with_driver(connection: int) -> None:
    """Wait until the driver has closed its end or has died, then kill this process group.

    After a kill of the driver no other process would end this group.
    """
    hangup = select.poll()
    hangup.register(connection, 0)
    hangup.poll()
    kill_group()


def kill_group() -> None:
    """Kill this process, which leads its group, and all processes that the function has started."""
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    to_driver, stacks_file, driver_stderr = map(int, sys.argv[1:])
    restore_stderr(driver_stderr, stacks_file)
    for descriptor in (to_driver, stacks_file):  # Processes that the function starts must not inherit them.
        os.set_inheritable(descriptor, False)
    faulthandler.enable(file=stacks_file)
    threading.Thread(target=end_with_driver, args=(to_driver,), daemon=True).start()
    try:
        serve(Connection(to_driver), stacks_file)
    except (EOFError, ConnectionError):  # The driver has died.
        kill_group()

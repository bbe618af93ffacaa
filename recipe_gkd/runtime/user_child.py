"""Functions of a process that runs a user's code, which :mod:`recipe_gkd.runtime.user_process` starts.

This file imports only the standard library, because such a process loads it by its path and imports nothing else of the
project. The first three arguments of a process are file descriptors: a socket to the driver; a file in which
faulthandler writes stacks when a deadline passes or the process crashes; and the driver's stderr. At first the stderr
of the process is the stacks file, so that the driver can report why an interpreter did not start.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib.machinery
import importlib.util
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, TypeVarTuple

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_TRACE_CHARS = 4000
WATCH_INTERVAL_S = 0.2
"""Interval in which a running event loop moves the deadline of a blocked one."""
BLOCKED_MARGIN_S = 1.0
"""Time after the deadline of a call at which a blocked event loop is ended."""


def run(serve: Callable[[int, int, Sequence[int]], None]) -> None:
    """Run the program of a process: ``serve`` gets the descriptors of the socket, of the stacks file, and further ones.

    The process group ends when ``serve`` finds the socket closed, or when the driver has died.
    """
    to_driver, stacks_file, driver_stderr, *others = map(int, sys.argv[1:])
    restore_stderr(driver_stderr, stacks_file)
    for descriptor in (to_driver, stacks_file, *others):  # Processes that the user's code starts must not inherit them.
        os.set_inheritable(descriptor, False)
    faulthandler.enable(file=stacks_file)
    threading.Thread(target=end_with_driver, args=(to_driver,), daemon=True).start()
    try:
        serve(to_driver, stacks_file, others)
    except (EOFError, ConnectionError):  # The driver has died.
        kill_group()


async def watch_loop(timeout_s: float, stacks: int) -> None:
    """Write the stacks and exit if the event loop is blocked for longer than ``timeout_s``."""
    while True:
        faulthandler.dump_traceback_later(timeout_s + BLOCKED_MARGIN_S, exit=True, file=stacks)
        await asyncio.sleep(WATCH_INTERVAL_S)


def call_within(timeout_s: float, stacks: int, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Return ``function(*arguments)``. At the deadline, write the stacks and exit, even if C code holds the GIL."""
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=stacks)
    try:
        return function(*arguments)
    finally:
        faulthandler.cancel_dump_traceback_later()


def load(path: str, name: str, module_name: str) -> Callable[..., Any] | str:
    """Return the function ``name`` of the file ``path``, or the reason why it cannot be used."""
    try:
        loader = importlib.machinery.SourceFileLoader(module_name, path)
        spec = importlib.util.spec_from_loader(module_name, loader)
        assert spec is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[module_name] = module
        # Installed modules with common names, such as utils, must not hide those beside the user's file. The driver has
        # the same rule in user_code.py. This process calls only the user's code, so the folder stays the first.
        sys.path.insert(0, str(Path(path).parent))
        loader.exec_module(module)
    except BaseException as error:  # noqa: BLE001 - a user's file may raise anything, including SystemExit
        return f"it cannot be imported:\n{user_trace(error)}"
    function = getattr(module, name, None)
    if callable(function):
        return function
    others = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    defined = f"it defines: {', '.join(others) or 'no function'}"
    if not hasattr(module, name):
        return f"it has no {name}; {defined}"
    return f"its {name} is {function!r:.100}, which cannot be called; {defined}"


def user_trace(error: BaseException) -> str:
    """Return the traceback without the leading frames of the project and of the importer. Shorten a long one."""
    frames = traceback.TracebackException.from_exception(error)
    internal_files = (str(Path(__file__).parent), str(Path(sys.argv[0]).absolute().parent), "<frozen importlib")
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

"""Program of the process that calls the reward functions. It is started by its path and imports nothing of the project.

The arguments are three file descriptors: a connection to :class:`~recipe_gkd.rewards.process.RewardProcess`; a file in
which faulthandler writes stacks when a deadline passes or the process crashes; and the driver's stderr. At first the
process's own stderr is the stacks file, so that the driver can report why an interpreter did not start.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib.machinery
import importlib.util
import inspect
import os
import select
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

if TYPE_CHECKING:
    from recipe_gkd.rewards.results import Result

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

MAX_TRACE_CHARS = 4000
WATCH_INTERVAL_S = 0.2
"""Interval in which a running event loop moves the deadline of a blocked one."""
BLOCKED_MARGIN_S = 1.0
"""Time after the deadline of a call at which a blocked event loop is ended."""


def load_sibling(file_name: str) -> ModuleType:
    """Import a file of this folder by its path."""
    name = f"recipe_gkd_{Path(file_name).stem}"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(file_name))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


binding = load_sibling("binding.py")
results = load_sibling("results.py")


@dataclass
class Function:
    """A loaded reward function.

    Attributes:
        number: Index of the function in the configuration.
        call: The function.
        bound: Parameter name -> name of the value that it receives.
        settings: Its label, weight and kwargs.
        reserved: Names that no number in its result may have.
        is_async: True if calls must be awaited.
    """

    number: int
    call: Callable[..., Any]
    bound: dict[str, str]
    settings: dict[str, Any]
    reserved: Collection[str]
    is_async: bool

    def arguments(self, values: dict[str, Any]) -> dict[str, Any]:
        """Return the keyword arguments of a call."""
        return self.settings["kwargs"] | {name: values[value] for name, value in self.bound.items()}


@dataclass
class RewardFailure:
    """A call without a result.

    Attributes:
        kind: ``"exception"``, ``"result"`` or ``"timeout"``.
        reason: Reason, as the predicate of a sentence.
        number: Index of the function.
        trace: Traceback. Empty if there is none.
    """

    kind: str
    reason: str
    number: int
    trace: str = ""


def serve(connection: Connection, stacks: int) -> None:
    """Load the functions, then score lists of items until the connection ends.

    The first message contains the settings. Its reply is a dict with properties of the functions, or the reason why one
    is rejected and its index. Each later message is a list of items, dicts of the arguments of ``values_of``. The reply
    to an item is its index in the list, its score and other numbers; or its index, a dict of the fields of
    :class:`Failure`, and None. After a failure the rest of the list is dropped if the settings have
    ``stops_at_failure``. With ``async def`` functions the
    replies are in the order of completion, otherwise in the order of the items.
    """
    settings = connection.recv()
    sys.path[:] = settings["sys_path"]
    functions = []
    for number, one in enumerate(settings["functions"]):
        loaded = load_function(number, one, settings, stacks)
        if isinstance(loaded, str):
            connection.send((loaded, number))
            return
        functions.append(loaded)
    is_async = any(function.is_async for function in functions)
    truth_use = "optional" if any("ground_truth" in function.bound.values() for function in functions) else "unused"
    if any(binding.requires(function.call, "ground_truth") for function in functions):
        truth_use = "required"
    connection.send({"is_async": is_async, "truth_use": truth_use})
    if is_async:
        with asyncio.Runner() as runner:  # one loop for all calls, so that the user's file can keep a client open
            while True:
                runner.run(score_concurrently(connection, functions, connection.recv(), settings, stacks))
    while True:
        for index, item in enumerate(connection.recv()):
            values = binding.values_of(**item)
            found = [
                call_within(settings["timeout_s"], stacks, score, function, function.arguments(values))
                for function in functions
            ]
            if not send_result(connection, index, functions, found) and settings["stops_at_failure"]:
                break


async def score_concurrently(
    connection: Connection,
    functions: Sequence[Function],
    items: Sequence[dict[str, Any]],
    settings: dict[str, Any],
    stacks: int,
) -> None:
    """Score a list of items, ``max_concurrency`` at a time."""
    slots = asyncio.Semaphore(settings["max_concurrency"])

    async def score_item(index: int, item: dict[str, Any]) -> tuple[int, list[Any]]:
        async with slots:
            values = binding.values_of(**item)
            calls = (score_async(one, one.arguments(values), settings["timeout_s"]) for one in functions)
            return index, await asyncio.gather(*calls)

    scoring = [asyncio.ensure_future(score_item(index, item)) for index, item in enumerate(items)]
    n_blocking = sum(not function.is_async for function in functions)  # called one after the other in the loop
    watch = asyncio.ensure_future(watch_loop(settings["timeout_s"] * max(1, n_blocking), stacks))
    try:
        for task in asyncio.as_completed(scoring):
            index, found = await task
            if not send_result(connection, index, functions, found) and settings["stops_at_failure"]:
                break
    finally:
        for started in (watch, *scoring):
            started.cancel()
        await asyncio.gather(watch, *scoring, return_exceptions=True)
        faulthandler.cancel_dump_traceback_later()


async def watch_loop(timeout_s: float, stacks: int) -> None:
    """Write the stacks and exit if the event loop is blocked for longer than ``timeout_s``."""
    while True:
        faulthandler.dump_traceback_later(timeout_s + BLOCKED_MARGIN_S, exit=True, file=stacks)
        await asyncio.sleep(WATCH_INTERVAL_S)


def send_result(connection: Connection, index: int, functions: Sequence[Function], found: Sequence[Any]) -> bool:
    """Send the result of an item, and return True, or the first failure, and return False."""
    failure = next((one for one in found if isinstance(one, RewardFailure)), None)
    if failure is not None:
        connection.send((index, vars(failure), None))
        return False
    labels, weights = ([function.settings[name] for function in functions] for name in ("label", "weight"))
    scored = found[0] if labels == [""] else results.weighted_sum(found, labels, weights)
    connection.send((index, *scored))
    return True


def call_within(timeout_s: float, stacks: int, function: Callable[[*Ts], T], *arguments: *Ts) -> T:
    """Return ``function(*arguments)``. At the deadline, write the stacks and exit, even if C code holds the GIL."""
    faulthandler.dump_traceback_later(timeout_s, exit=True, file=stacks)
    try:
        return function(*arguments)
    finally:
        faulthandler.cancel_dump_traceback_later()


def load_function(number: int, one: dict[str, Any], settings: dict[str, Any], stacks: int) -> Function | str:
    """Return a function of the settings, or the reason why it is rejected."""
    module_name = f"custom_reward_function_{number}" if number else "custom_reward_function"
    call = call_within(settings["load_timeout_s"], stacks, load, one["path"], one["name"], module_name)
    if isinstance(call, str):
        return call
    bound = binding.bind(call, one["name"], one["kwargs"])
    if isinstance(bound, binding.Refusal):
        return str(bound.reason)
    # An object may have an asynchronous __call__.
    is_async = any(map(inspect.iscoroutinefunction, (call, getattr(call, "__call__", None))))  # noqa: B004
    return Function(number, call, bound, one, settings["reserved"], is_async)


def load(path: str, name: str, module_name: str) -> Callable[..., Any] | str:
    """Return the function ``name`` of the file ``path``, or the reason why it cannot be used."""
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
        return function
    others = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
    defined = f"it defines: {', '.join(others) or 'no function'}"
    if not hasattr(module, name):
        return f"it has no {name}; {defined}"
    return f"its {name} is {function!r:.100}, which cannot be called; {defined}"


def score(function: Function, arguments: dict[str, Any]) -> Result | RewardFailure:
    """Return the result of a call, or a failure."""
    try:
        return parsed(function, function.call(**arguments))
    except BaseException as error:  # noqa: BLE001 - the user's function, or its result, may raise anything
        return RewardFailure("exception", "it raised", function.number, user_trace(error))


async def score_async(function: Function, arguments: dict[str, Any], timeout_s: float) -> Result | RewardFailure:
    """Return the result of a call, which is awaited if the function is asynchronous, or a failure."""
    if not function.is_async:
        return score(function, arguments)
    try:
        async with asyncio.timeout(timeout_s) as deadline:
            return parsed(function, await function.call(**arguments))
    except BaseException as error:  # as in score()
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        if isinstance(error, TimeoutError) and deadline.expired():
            trace = user_trace(error.__cause__ or error)
            return RewardFailure("timeout", f"it took longer than {timeout_s:g} s, here:", function.number, trace)
        return RewardFailure("exception", "it raised", function.number, user_trace(error))


def parsed(function: Function, returned: object) -> Result | RewardFailure:
    """Return the score and the numbers of a returned value, or a failure."""
    result = results.parse_result(returned, function.reserved)
    return RewardFailure("result", result.reason, function.number) if isinstance(result, results.Rejection) else result


def user_trace(error: BaseException) -> str:
    """Return the traceback without the leading frames of this folder and of the importer. Shorten a long one."""
    frames = traceback.TracebackException.from_exception(error)
    internal_files = (str(Path(__file__).parent), "<frozen importlib")
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

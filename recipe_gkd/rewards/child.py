"""Program of the process that calls the reward functions. It is started by its path and imports nothing of the project.

Its connection leads to :class:`~recipe_gkd.rewards.process.RewardProcess`.
"""

from __future__ import annotations

import asyncio
import faulthandler
import importlib.util
import inspect
import sys
from collections.abc import AsyncIterator, Callable, Collection, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from recipe_gkd.rewards.results import Result


def load_file(path: str) -> ModuleType:
    """Import a file of the project by its path relative to this folder."""
    name = f"recipe_gkd_{Path(path).stem}"
    spec = importlib.util.spec_from_file_location(name, Path(__file__).parent / path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


binding = load_file("binding.py")
results = load_file("results.py")
user_child = load_file("../runtime/user_child.py")


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
    is rejected and its index. Each later message is a list of items: pairs of a dict of the arguments of ``values_of``
    and the number of turns. The reply to an item is its index in the list and the fields of its ``Result``; or its
    index and a dict of the fields of :class:`RewardFailure`. After a failure the rest of the list is dropped if the
    settings have ``stops_at_failure``. With ``async def`` functions the replies are in the order of completion,
    otherwise in the order of the items.
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
    n_blocking = sum(not function.is_async for function in functions)
    truth_use = "optional" if any("ground_truth" in function.bound.values() for function in functions) else "unused"
    if any(binding.requires(function.call, "ground_truth") for function in functions):
        truth_use = "required"
    connection.send({"n_blocking": n_blocking, "truth_use": truth_use})
    if n_blocking < len(functions):
        with asyncio.Runner() as runner:  # one loop for all calls, so that the user's file can keep a client open
            while True:
                runner.run(score_concurrently(connection, functions, connection.recv(), settings, stacks))
    while True:
        for index, (item, n_turns) in enumerate(connection.recv()):
            values = binding.values_of(**item)
            found = [
                user_child.call_within(settings["timeout_s"], stacks, score, one, one.arguments(values), n_turns)
                for one in functions
            ]
            if not send_result(connection, index, functions, found) and settings["stops_at_failure"]:
                break


async def score_concurrently(
    connection: Connection,
    functions: Sequence[Function],
    items: Sequence[tuple[dict[str, Any], int]],
    settings: dict[str, Any],
    stacks: int,
) -> None:
    """Score a list of items, ``max_concurrency`` at a time. Functions that are not asynchronous block the loop."""
    slots, blocking, deadlines = asyncio.Semaphore(settings["max_concurrency"]), asyncio.Lock(), Deadlines()

    async def call(one: Function, arguments: dict[str, Any], n_turns: int) -> Result | RewardFailure:
        if one.is_async:
            return await score_async(one, arguments, n_turns, settings["timeout_s"], deadlines)
        async with blocking:
            with deadlines.paused():
                result = score(one, arguments, n_turns)
            await asyncio.sleep(0)  # before the next one, the loop serves the watch and the calls that have ended
        return result

    async def score_item(index: int, item: dict[str, Any], n_turns: int) -> tuple[int, list[Any]]:
        async with slots:
            values = binding.values_of(**item)
            return index, await asyncio.gather(*(call(one, one.arguments(values), n_turns) for one in functions))

    scoring = [asyncio.ensure_future(score_item(index, *item)) for index, item in enumerate(items)]
    watch = asyncio.ensure_future(user_child.watch_loop(settings["timeout_s"], stacks))
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


def send_result(connection: Connection, index: int, functions: Sequence[Function], found: Sequence[Any]) -> bool:
    """Send the result of an item, and return True, or the first failure, and return False."""
    failure = next((one for one in found if isinstance(one, RewardFailure)), None)
    if failure is not None:
        connection.send((index, vars(failure)))
        return False
    labels, weights = ([function.settings[name] for function in functions] for name in ("label", "weight"))
    scored = found[0] if labels == [""] else results.weighted_sum(found, labels, weights)
    connection.send((index, *scored))
    return True


def load_function(number: int, one: dict[str, Any], settings: dict[str, Any], stacks: int) -> Function | str:
    """Return a function of the settings, or the reason why it is rejected."""
    module_name = f"custom_reward_function_{number}" if number else "custom_reward_function"
    call = user_child.call_within(
        settings["load_timeout_s"], stacks, user_child.load, one["path"], one["name"], module_name
    )
    if isinstance(call, str):
        return call
    bound = binding.bind(call, one["name"], one["kwargs"])
    if isinstance(bound, binding.Refusal):
        return str(bound.reason)
    # An object may have an asynchronous __call__.
    is_async = any(map(inspect.iscoroutinefunction, (call, getattr(call, "__call__", None))))  # noqa: B004
    return Function(number, call, bound, one, settings["reserved"], is_async)


def score(function: Function, arguments: dict[str, Any], n_turns: int) -> Result | RewardFailure:
    """Return the result of a call, or a failure."""
    try:
        return parsed(function, function.call(**arguments), n_turns)
    except BaseException as error:  # noqa: BLE001 - the user's function, or its result, may raise anything
        return RewardFailure("exception", "it raised", function.number, user_child.user_trace(error))


class Deadlines:
    """Deadlines of the asynchronous calls in flight. They do not include the time of calls that block the loop."""

    def __init__(self) -> None:
        self._open: set[asyncio.Timeout] = set()

    @asynccontextmanager
    async def within(self, timeout_s: float) -> AsyncIterator[asyncio.Timeout]:
        """Cancel the body after ``timeout_s``, like ``asyncio.timeout``."""
        async with asyncio.timeout(timeout_s) as deadline:
            self._open.add(deadline)
            try:
                yield deadline
            finally:
                self._open.discard(deadline)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Add the duration of the body to all deadlines."""
        clock = asyncio.get_running_loop().time
        started = clock()
        yield
        for deadline in self._open:
            when = deadline.when()
            if when is not None and not deadline.expired():
                deadline.reschedule(when + clock() - started)


async def score_async(
    function: Function, arguments: dict[str, Any], n_turns: int, timeout_s: float, deadlines: Deadlines
) -> Result | RewardFailure:
    """Return the result of a call of an asynchronous function, or a failure."""
    try:
        async with deadlines.within(timeout_s) as deadline:
            return parsed(function, await function.call(**arguments), n_turns)
    except BaseException as error:  # as in score()
        task = asyncio.current_task()
        if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
            raise
        if isinstance(error, TimeoutError) and deadline.expired():
            trace = user_child.user_trace(error.__cause__ or error)
            return RewardFailure("timeout", f"it took longer than {timeout_s:g} s, here:", function.number, trace)
        return RewardFailure("exception", "it raised", function.number, user_child.user_trace(error))


def parsed(function: Function, returned: object, n_turns: int) -> Result | RewardFailure:
    """Return the score and the numbers of a returned value, or a failure."""
    result = results.parse_result(returned, function.reserved, n_turns)
    return RewardFailure("result", result.reason, function.number) if isinstance(result, results.Rejection) else result


if __name__ == "__main__":
    user_child.run(lambda to_driver, stacks, _: serve(Connection(to_driver), stacks))

"""Calls of the user's reward functions, distributed over their processes."""

from __future__ import annotations

import asyncio
import logging
import math
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue

from recipe_gkd.config.reward_functions import reward_functions, reward_name
from recipe_gkd.config.schema import RewardFunctionConfig
from recipe_gkd.data.samples import Reward
from recipe_gkd.errors import ConfigError, RewardError
from recipe_gkd.rewards.items import RewardItem
from recipe_gkd.rewards.process import RewardProcess, file_of
from recipe_gkd.runtime.run_log import FILE_ONLY
from recipe_gkd.runtime.wait_log import waiting

log = logging.getLogger(__name__)

Outcome = Reward | RewardError
MAX_CHUNK_ITEMS = 16
"""Maximum number of items in a message to a process. Larger messages would not be faster."""
MIN_CHUNKS_PER_PROCESS = 4
"""Minimum number of messages per process if there are enough items, because calls may take very different times."""


class RewardScorer:
    """The functions of ``custom_reward_function``, loaded in ``num_workers`` processes.

    A context manager that ends the processes::

        with RewardScorer(config) as scorer:
            results = await scorer.score(items)

    With ``on_failure=skip`` or ``value``, a process that has ended is started again.

    Args:
        config: Configuration with at least one function. An ``on_failure`` of None is ``fail``.

    Raises:
        ConfigError: A function cannot be loaded.

    Attributes:
        name: Name of the reward, as in the metric ``val/<data_source>/<name>``.
        truth_use: Use of the ground truth by the functions.
        failures: Number of calls that have failed, with ``on_failure=skip`` or ``value``.
    """

    def __init__(self, config: RewardFunctionConfig) -> None:
        self._config, self.name, self.failures = config, reward_name(config), 0
        for function in reward_functions(config):
            file_of(function)
        self._processes: list[RewardProcess] = []
        self._free: SimpleQueue[int] = SimpleQueue()  # indices of the processes that score nothing
        self._lock, self._is_closed = threading.Lock(), False
        self._threads = ThreadPoolExecutor(config.num_workers, "reward")
        try:
            for _ in range(config.num_workers):
                self._processes.append(RewardProcess(config))
            for number, process in enumerate(self._processes):
                process.wait_loaded()
                self._free.put(number)
            self.truth_use = self._processes[0].truth_use
            self._is_async = self._processes[0].is_async
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RewardScorer:
        """Return the scorer, whose processes have been started."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the processes."""
        self.close()

    async def score(self, items: Sequence[RewardItem]) -> list[Reward | None]:
        """Return the result of each item, in order.

        Returns:
            The reward of each item. None for an item on which the function failed, with ``on_failure=skip``.

        Raises:
            RewardError: The function failed on an item with ``on_failure=fail``, or more often than ``max_failures``.
                The error has the uid of the sample.
        """
        n_processes = len(self._processes)
        size = max(1, min(MAX_CHUNK_ITEMS, len(items) // (n_processes * MIN_CHUNKS_PER_PROCESS)))
        if self._is_async:  # a process starts the next call when one has ended, so it gets its share at once
            size = math.ceil(len(items) / n_processes) or 1
        starts = deque(range(0, len(items), size))
        results: dict[int, list[Outcome]] = {}

        def score_chunks() -> None:
            """Score chunks on one free process until none is left. There are as many threads as processes."""
            number = self._free.get_nowait()
            try:
                with suppress(IndexError):  # No chunk is left.
                    while True:
                        start = starts.popleft()
                        results[start] = self._score_chunk(number, items[start : start + size])
            finally:
                self._free.put(number)

        run = asyncio.get_running_loop().run_in_executor
        try:
            with waiting("rewards", None, partial(_missing, len(items), results), "results"):
                await asyncio.gather(*(run(self._threads, score_chunks) for _ in range(min(n_processes, len(starts)))))
        finally:
            starts.clear()  # After a failure or a cancellation, the other threads start no further chunk.
        return [self._reward_of(outcome) for start in sorted(results) for outcome in results[start]]

    def _score_chunk(self, number: int, items: Sequence[RewardItem]) -> list[Outcome]:
        """Return the outcomes of items from one process. If it ends, another one scores the rest.

        If functions are asynchronous, any of the calls in flight may have ended the process. The rest is halved until
        the item is found, so that each end repeats few of the other calls.
        """
        outcomes: dict[int, Outcome] = {}
        groups = [list(range(len(items)))]
        while groups:
            group = groups.pop()
            if self._processes[number].has_ended:
                try:
                    self._restart(number)
                except (ConfigError, OSError) as error:
                    failure = RewardError(
                        "the process of the reward function could not be started again", details=(str(error),)
                    )
                    failure.__cause__ = error
                    return [outcomes.get(index, failure) for index in range(len(items))]
            found = self._processes[number].score([items[index] for index in group])
            outcomes |= {index: one for index, one in zip(group, found, strict=True) if one is not None}
            missing = [index for index in group if index not in outcomes]
            middle = (len(missing) + 1) // 2 if self._is_async else len(missing)
            groups += [half for half in (missing[middle:], missing[:middle]) if half]
        return [outcomes[index] for index in range(len(items))]

    def _restart(self, number: int) -> None:
        """Replace a process that has ended, and wait until it has loaded the functions."""
        with self._lock:  # close() must find the new process
            if self._is_closed:
                raise ConfigError("the run ends")
            self._processes[number].close()
            self._processes[number] = process = RewardProcess(self._config)
        try:
            process.wait_loaded()
        except ConfigError:
            process.has_ended = True
            raise

    def _reward_of(self, outcome: Outcome) -> Reward | None:
        """Return the reward of an outcome, and count a failure."""
        if isinstance(outcome, Reward):
            return outcome
        self.failures += 1
        limit = self._config.max_failures
        if limit is not None and self.failures > limit:
            end = (
                f"the run ends because {self.failures} calls of the reward function have failed, more than "
                f"custom_reward_function.max_failures={limit}; correct the function, or raise the limit"
            )
            raise outcome.replaced(details=(*outcome.details, end), failures=self.failures)
        fails_first = self.failures == 1
        log.warning(
            "%s\ncustom_reward_function.on_failure=%s: the run continues%s", outcome, self._config.on_failure,
            "; further failures are in run.log and in the metric reward/failures" if fails_first else "",
            extra={} if fails_first else FILE_ONLY,
        )  # fmt: skip
        return Reward(self._config.failure_value) if self._config.on_failure == "value" else None

    def close(self) -> None:
        """End the processes, even busy ones, and all processes that they have started."""
        with self._lock:
            self._is_closed = True
            for process in self._processes:
                process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()


def _missing(n_items: int, results: Mapping[int, Sequence[Outcome]]) -> dict[str, int]:
    n_scored = sum(map(len, list(results.values())))  # a copy, because threads add results
    return {"custom_reward_function": n_items - n_scored}

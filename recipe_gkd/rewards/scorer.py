"""Calls of the user's reward functions, distributed over their processes."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Any

from recipe_gkd.config.reward_functions import reward_functions, reward_name
from recipe_gkd.config.schema import RewardFunctionConfig
from recipe_gkd.data.samples import Reward
from recipe_gkd.rewards.items import RewardItem
from recipe_gkd.rewards.process import RewardProcess, file_of
from recipe_gkd.runtime.wait_log import waiting

MAX_CHUNK_ITEMS = 16
"""Maximum number of items in a message to a process. Larger messages would not be faster."""
MIN_CHUNKS_PER_PROCESS = 4
"""Minimum number of messages per process if there are enough items, because calls may take very different times."""


class RewardScorer:
    """The functions of ``custom_reward_function``, loaded in ``num_workers`` processes.

    A context manager that ends the processes::

        with RewardScorer(config) as scorer:
            results = await scorer.score(items)

    Args:
        config: Configuration with at least one function.

    Raises:
        ConfigError: A function cannot be loaded.

    Attributes:
        name: Name of the reward, as in the metric ``val/<data_source>/<name>``.
        truth_use: Use of the ground truth by the functions.
    """

    def __init__(self, config: RewardFunctionConfig) -> None:
        self.name = reward_name(config)
        for function in reward_functions(config):
            file_of(function)
        self._processes: list[RewardProcess] = []
        self._free: SimpleQueue[RewardProcess] = SimpleQueue()
        self._threads = ThreadPoolExecutor(config.num_workers, "reward")
        try:
            for _ in range(config.num_workers):
                self._processes.append(RewardProcess(config))
            for process in self._processes:
                process.wait_loaded()
                self._free.put(process)
            self.truth_use = self._processes[0].truth_use
            self._is_async = self._processes[0].is_async
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RewardScorer:
        """Return the scorer, whose processes have been started."""
        return self

    def __exit__(self, *_: Any) -> None:
        """End the processes."""
        self.close()

    async def score(self, items: Sequence[RewardItem]) -> list[Reward]:
        """Return the result of each item, in order.

        Raises:
            RewardError: The function failed on an item. The message names the sample.
        """
        n_processes = len(self._processes)
        size = max(1, min(MAX_CHUNK_ITEMS, len(items) // (n_processes * MIN_CHUNKS_PER_PROCESS)))
        if self._is_async:  # a process starts the next call when one has ended, so it gets its share at once
            size = math.ceil(len(items) / n_processes) or 1
        starts = deque(range(0, len(items), size))
        results: dict[int, list[Reward]] = {}

        def score_chunks() -> None:
            """Score chunks on one free process until none is left. There are as many threads as processes."""
            process = self._free.get_nowait()
            try:
                with suppress(IndexError):  # No chunk is left.
                    while True:
                        start = starts.popleft()
                        results[start] = process.score(items[start : start + size])
            finally:
                self._free.put(process)

        run = asyncio.get_running_loop().run_in_executor
        try:
            with waiting("rewards", None, partial(_missing, len(items), results), "results"):
                await asyncio.gather(*(run(self._threads, score_chunks) for _ in range(min(n_processes, len(starts)))))
        finally:
            starts.clear()  # After a failure or a cancellation, the other threads start no further chunk.
        return [result for start in sorted(results) for result in results[start]]

    def close(self) -> None:
        """End the processes, even busy ones, and all processes that they have started."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()


def _missing(n_items: int, results: Mapping[int, Sequence[Reward]]) -> dict[str, int]:
    n_scored = sum(map(len, list(results.values())))  # a copy, because threads add results
    return {"custom_reward_function": n_items - n_scored}

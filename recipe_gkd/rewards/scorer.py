"""Calls of the user's reward function, distributed over its processes."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from recipe_gkd.config.schema import RewardFunctionConfig
from recipe_gkd.errors import ConfigError
from recipe_gkd.rewards.items import RewardItem
from recipe_gkd.rewards.process import RewardProcess

MAX_CHUNK_ITEMS = 16
"""Maximum number of items in a message to a process. Larger messages would not be faster."""
MIN_CHUNKS_PER_PROCESS = 4
"""Minimum number of messages per process if there are enough items, because calls may take very different times."""


class RewardScorer:
    """The function of ``custom_reward_function``, loaded in ``num_workers`` processes.

    A context manager that ends the processes::

        with RewardScorer(config) as scorer:
            rewards = await scorer.score(items)

    Args:
        config: Configuration of the function. ``path`` must be set.

    Raises:
        ConfigError: The function cannot be loaded.

    Attributes:
        name: Name of the function, as in the metric ``val/<data_source>/<name>``.
    """

    def __init__(self, config: RewardFunctionConfig) -> None:
        self.name = config.name
        path = Path(config.path or "").expanduser().absolute()
        if not path.is_file():
            raise ConfigError(
                f"custom_reward_function.path={config.path}: {path} is no file; expected a Python file that defines "
                f"{config.name}(prompt, response, ground_truth, extra) -> float, or with verl's parameters"
            )
        self._processes: list[RewardProcess] = []
        self._free: SimpleQueue[RewardProcess] = SimpleQueue()
        self._threads = ThreadPoolExecutor(config.num_workers, "reward")
        try:
            for _ in range(config.num_workers):
                self._processes.append(RewardProcess(config, path))
            for process in self._processes:
                process.wait_loaded()
                self._free.put(process)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> RewardScorer:
        """Return the scorer, whose processes have been started."""
        return self

    def __exit__(self, *_: Any) -> None:
        """End the processes."""
        self.close()

    async def score(self, items: Sequence[RewardItem]) -> list[float]:
        """Return the reward of each item, in order.

        Raises:
            RewardError: The function failed on an item. The message names the sample.
        """
        n_processes = len(self._processes)
        size = max(1, min(MAX_CHUNK_ITEMS, len(items) // (n_processes * MIN_CHUNKS_PER_PROCESS)))
        starts = deque(range(0, len(items), size))
        rewards: list[float] = [0.0] * len(items)

        def score_chunks() -> None:
            """Score chunks on one free process until none is left. There are as many threads as processes."""
            process = self._free.get_nowait()
            try:
                with suppress(IndexError):  # No chunk is left.
                    while True:
                        start = starts.popleft()
                        rewards[start : start + size] = process.score(items[start : start + size])
            finally:
                self._free.put(process)

        run = asyncio.get_running_loop().run_in_executor
        try:
            await asyncio.gather(*(run(self._threads, score_chunks) for _ in range(min(n_processes, len(starts)))))
        finally:
            starts.clear()  # After a failure or a cancellation, the other threads start no further chunk.
        return rewards

    def close(self) -> None:
        """End the processes, even busy ones, and all processes that they have started."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()

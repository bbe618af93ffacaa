"""The user's reward function, called in processes of its own."""

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

LARGEST_CHUNK = 16
"""Items that a process is given at a time: enough that giving them costs nothing."""
CHUNKS_PER_PROCESS = 4
"""At least, if there are enough items: calls may take very different times."""


class RewardScorer:
    """``custom_reward_function``, loaded in ``num_workers`` processes; a context manager that ends them.

    Raises :class:`ConfigError` if the function cannot be loaded. Only for a ``path`` that is set.
    """

    def __init__(self, config: RewardFunctionConfig) -> None:
        self.name = config.name
        """Of the function: ``val/<data_source>/<name>``."""
        path = Path(config.path or "").expanduser().absolute()
        if not path.is_file():
            raise ConfigError(
                f"custom_reward_function.path={config.path}: {path} is no file; expected a Python file that defines "
                f"{config.name}(prompt, answer, ground_truth, extra) -> float, or with verl's parameters"
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
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    async def score(self, items: Sequence[RewardItem]) -> list[float]:
        """The reward of each; :class:`RewardError` names one on which the function failed."""
        n_processes = len(self._processes)
        size = max(1, min(LARGEST_CHUNK, len(items) // (n_processes * CHUNKS_PER_PROCESS)))
        chunks = deque(range(0, len(items), size))
        rewards: list[float] = [0.0] * len(items)

        def work() -> None:
            """In a thread, which waits for a process; there are as many of both."""
            process = self._free.get_nowait()
            try:
                with suppress(IndexError):  # no chunk is left
                    while True:
                        start = chunks.popleft()
                        rewards[start : start + size] = process.score(items[start : start + size])
            finally:
                self._free.put(process)

        run = asyncio.get_running_loop().run_in_executor
        try:
            await asyncio.gather(*(run(self._threads, work) for _ in range(min(n_processes, len(chunks)))))
        finally:
            chunks.clear()  # after a failure or when cancelled, the others stop where they are
        return rewards

    def close(self) -> None:
        """End the processes, whatever they do, and what they started."""
        for process in self._processes:
            process.kill()
        self._threads.shutdown(cancel_futures=True)
        for process in self._processes:
            process.close()

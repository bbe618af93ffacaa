"""A pool of processes that stay alive between tests, because the import of Megatron takes longer than a test."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

from tests._support.ports import free_port
from tests._support.waiting import PATIENCE_S

Job = Callable[..., Any]

MAX_THREADS = 600
"""Threads of a process at which the pool is restarted. Gloo leaves a polling thread for each group of a job."""


class WorkerPool:
    """Processes that run ``job(rank, world_size, port, *args)``, one rank each. They start at the first job.

    Lifecycle::

        pool = WorkerPool()
        results = pool.run(2, job, *args)  # by rank
        pool.close()
    """

    def __init__(self) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def run(self, world_size: int, job: Job, *args: Any) -> list[Any]:
        """Run a job on ``world_size`` ranks and return the results by rank.

        A failure or a timeout kills all processes of the pool, because other ranks may wait for the failed one.

        Args:
            world_size: Number of ranks.
            job: Function of a module. ``port`` is a free port for its rendezvous.
            args: Further arguments of the job. They and the result are pickled.

        Raises:
            AssertionError: The job raised an exception, or a process died. The message contains the traceback.
            TimeoutError: A rank did not respond within PATIENCE_S.
        """
        if any(len(os.listdir(f"/proc/{process.pid}/task")) > MAX_THREADS for process, _ in self._workers):
            self.close()
        self._start(world_size)
        port = free_port()
        for rank, (_, pipe) in enumerate(self._workers[:world_size]):
            pipe.send((job, rank, world_size, port, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + PATIENCE_S
        while missing := [rank for rank in range(world_size) if rank not in results]:
            ready = wait([self._workers[rank][1] for rank in missing], timeout=max(0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise TimeoutError(f"{job.__name__}: ranks {missing} did not respond within {PATIENCE_S:g} s")
            for rank in missing:
                if self._workers and self._workers[rank][1] in ready:
                    results[rank] = self._receive(job, rank)
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        """Kill all processes. A later `run` starts new ones."""
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()

    def _start(self, world_size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["tests._support.preload"])
        while len(self._workers) < world_size:
            parent_end, child_end = context.Pipe()
            process = context.Process(target=_serve, args=(child_end,))
            process.start()
            child_end.close()
            self._workers.append((process, parent_end))

    def _receive(self, job: Job, rank: int) -> Any:
        try:
            succeeded, result = self._workers[rank][1].recv()
        except EOFError:
            succeeded, result = False, "the process died"
        if not succeeded:
            self.close()
            raise AssertionError(f"{job.__name__}, rank {rank}:\n{result}")
        return result


def _serve(pipe: Connection) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    while True:
        try:
            job, rank, world_size, port, args = pipe.recv()
        except EOFError:
            return
        try:
            pipe.send((True, job(rank, world_size, port, *args)))
        except Exception:  # noqa: BLE001  # The caller raises it in the test.
            pipe.send((False, traceback.format_exc()))

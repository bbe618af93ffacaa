"""Processes that stay alive between tests: importing Megatron takes longer than any single check."""

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

Job = Callable[..., Any]

MOST_THREADS = 600
"""Gloo leaves a polling thread for each group that a job made; thousands of them slow the whole machine down."""


class WorkerPool:
    """Runs ``job(rank, world_size, port, *args)`` on the first ``world_size`` processes, started when needed."""

    def __init__(self) -> None:
        self._workers: list[tuple[BaseProcess, Connection]] = []

    def run(self, world_size: int, job: Job, *args: Any, timeout_s: float = 90) -> list[Any]:
        """Results by rank. A failure or a missed deadline ends all processes: others may be waiting for that one."""
        if any(len(os.listdir(f"/proc/{process.pid}/task")) > MOST_THREADS for process, _ in self._workers):
            self.close()
        self._start(world_size)
        port = free_port()
        for rank, (_, pipe) in enumerate(self._workers[:world_size]):
            pipe.send((job, rank, world_size, port, args))
        results: dict[int, Any] = {}
        deadline = time.monotonic() + timeout_s
        while missing := [rank for rank in range(world_size) if rank not in results]:
            ready = wait([self._workers[rank][1] for rank in missing], timeout=max(0, deadline - time.monotonic()))
            if not ready:
                self.close()
                raise TimeoutError(f"{job.__name__}: ranks {missing} did not answer within {timeout_s} s")
            for rank in missing:
                if self._workers and self._workers[rank][1] in ready:
                    results[rank] = self._receive(job, rank)
        return [results[rank] for rank in range(world_size)]

    def close(self) -> None:
        for process, pipe in self._workers:
            pipe.close()
            process.kill()
        for process, _ in self._workers:
            process.join()
        self._workers.clear()

    def _start(self, world_size: int) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["recipe_gkd.actor.megatron_actor"])
        while len(self._workers) < world_size:
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there,))
            process.start()
            there.close()
            self._workers.append((process, here))

    def _receive(self, job: Job, rank: int) -> Any:
        try:
            ok, response = self._workers[rank][1].recv()
        except EOFError:
            ok, response = False, "the process died"
        if not ok:
            self.close()
            raise AssertionError(f"{job.__name__}, rank {rank}:\n{response}")
        return response


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
        except Exception:  # noqa: BLE001  # whatever a job raises is the test's to see
            pipe.send((False, traceback.format_exc()))

"""Processes with Triton's interpreter, which runs GPU kernels on a CPU.

Triton enables the interpreter when it is imported. The process of pytest compiles kernels and must not enable it.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest

from tests._support.ports import free_port
from tests._support.waiting import PATIENCE_S

Run = Callable[..., Any]


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    """Function that runs ``job(*args)`` in a process with the interpreter, the same for all tests of a module."""
    with _process() as pool:
        yield lambda job, *args: pool.submit(job, *args).result(timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def interpreted_ranks() -> Iterator[Run]:
    """Function that runs ``job(rank, 2, port, *args)`` in two processes with the interpreter, and returns a list."""
    with ExitStack() as stack:
        pools = [stack.enter_context(_process()) for _ in range(2)]

        def run(job: Callable[..., Any], *args: Any) -> list[Any]:
            port = free_port()
            futures = [pool.submit(job, rank, len(pools), port, *args) for rank, pool in enumerate(pools)]
            return [future.result(timeout=PATIENCE_S) for future in futures]

        yield run


@contextmanager
def _process() -> Iterator[ProcessPoolExecutor]:
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(1, mp_context=context, initializer=_enable_interpreter)
    try:
        yield pool
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown()


def _enable_interpreter() -> None:
    assert "triton" not in sys.modules, "Triton was imported before its interpreter was enabled"
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)

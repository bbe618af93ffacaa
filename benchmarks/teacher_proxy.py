"""Benchmark of the proxy: bytes per second of results, with and without encryption, over the number of I/O threads.

    python benchmarks/teacher_proxy.py [--json FILE] [--megabytes 512] [-k 256]

A proxy, two workers whose engine returns prepared arrays at once, and one client with as many connections as a training
would open (``n_connections``) run as separate processes. On a machine with few cores these processes compete, so the
duration alone does not show how the proxy scales. The table therefore also shows what limits the proxy itself: the CPU
time of its busiest thread, as an upper bound of its throughput with enough cores.

    MB/s          measured, over the duration of all requests
    bound MB/s    bytes over the CPU time of the proxy's busiest thread
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import queue
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Event
from pathlib import Path

import numpy as np
from teacher_processes import TIMEOUT_S, free_port

from teacher import ScoredSequence, TeacherClient, TeacherRequestError, TeacherSequence
from teacher.proxy import Proxy
from teacher.proxy.proxy_sockets import SocketSettings
from teacher.records import LogitSettings, ModelInfo
from teacher.stop_signal import StopSignal
from teacher.wire.auth import server_keys
from teacher.wire.make_keys import make_keys
from teacher.worker import Worker

POSITIONS = 1024
N_WORKERS = 2
N_ROUNDS = 3


@dataclass(frozen=True, kw_only=True)
class Case:
    """One measured configuration.

    Attributes:
        io_threads: I/O threads of the proxy.
        n_connections: Connections of the client.
        encrypted: True for CURVE.
    """

    io_threads: int
    n_connections: int
    encrypted: bool

    @property
    def name(self) -> str:
        """Name in the table and in the JSON file."""
        return f"{'curve' if self.encrypted else 'plain'}_{self.io_threads}_threads"


CASES = [
    Case(io_threads=1, n_connections=1, encrypted=False),
    Case(io_threads=4, n_connections=1, encrypted=False),
    Case(io_threads=1, n_connections=1, encrypted=True),
    Case(io_threads=4, n_connections=4, encrypted=True),
]


class PreparedEngine:
    """Engine that returns the same arrays for every sequence."""

    logits = LogitSettings()
    capacity_tokens = 1 << 16

    def __init__(self, k: int) -> None:
        self.info = ModelInfo("prepared", 1000, 1000, "none", POSITIONS + 1, k, "prepared", (1,))
        logps_TK = np.full((POSITIONS, k), -7.0, dtype=np.float32)
        self._scored = ScoredSequence(logps_TK, np.zeros((POSITIONS, k), np.int32), logps_TK[:, 0].copy())
        self._waiting: list[int] = []

    def set_logits(self, settings: LogitSettings) -> None:
        pass

    def check(self, sequence: TeacherSequence, settings: LogitSettings) -> None:
        pass

    def add(self, key: int, sequence: TeacherSequence) -> None:
        self._waiting.append(key)

    def discard(self, keys: list[int]) -> None:
        self._waiting = [key for key in self._waiting if key not in keys]

    def has_work(self) -> bool:
        return bool(self._waiting)

    def step(self) -> list[tuple[int, ScoredSequence | TeacherRequestError]]:
        return [(self._waiting.pop(0), self._scored)]

    def close(self) -> None:
        pass


def run_proxy(ports: tuple[int, int], case: Case, auth_dir: str, ready: Event) -> None:
    """Serve until SIGTERM."""
    stop = StopSignal()
    settings = SocketSettings(keys=server_keys(auth_dir), io_threads=case.io_threads)
    proxy = Proxy("127.0.0.1", *ports, sockets=settings)
    ready.set()
    proxy.run(stop)


def run_worker(port: int, k: int, auth_dir: str, ready: Event) -> None:
    """Serve until SIGTERM."""
    stop = StopSignal()
    Worker(PreparedEngine(k), backend_port=port, auth_dir=auth_dir or None).run(stop, on_registered=ready.set)


def thread_cpu_s(pid: int) -> dict[str, float]:
    """Return the CPU time of each thread of a process, in seconds by thread id."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {task.name: int((task / "schedstat").read_text().split()[0]) / 1e9 for task in tasks}


@contextmanager
def running(case: Case, k: int, auth_dir: str) -> Iterator[tuple[int, int]]:
    """Start the proxy and the workers, yield the client port and the proxy's pid, and end them."""
    context = multiprocessing.get_context("spawn")
    ports = (free_port(), free_port())
    processes: list[BaseProcess] = []
    try:
        targets = [(run_proxy, (ports, case, auth_dir))]
        targets += [(run_worker, (ports[1], k, auth_dir and f"{auth_dir}/clients/default"))] * N_WORKERS
        for target, arguments in targets:
            ready = context.Event()
            processes.append(context.Process(target=target, args=(*arguments, ready), daemon=True))
            processes[-1].start()
            if not ready.wait(TIMEOUT_S):
                raise RuntimeError(f"{target.__name__} did not start within {TIMEOUT_S:g} s")
        yield ports[0], processes[0].pid or 0
    finally:
        for process in reversed(processes):
            process.terminate()
        for process in processes:
            process.join(10)
            process.kill()


def score_all(client: TeacherClient, sequence: TeacherSequence, n_calls: int) -> None:
    """Send requests of one sequence, and wait for all results. Results are not kept.

    Raises:
        TeacherError: A request failed.
        RuntimeError: A result did not arrive within ``TIMEOUT_S``.
    """
    errors = queue.SimpleQueue[BaseException | None]()
    for _ in range(n_calls):
        client.submit([sequence]).add_done_callback(lambda future: errors.put(future.exception()))
    for _ in range(n_calls):
        try:
            error = errors.get(timeout=TIMEOUT_S)
        except queue.Empty:
            raise RuntimeError(f"a request was not answered within {TIMEOUT_S:g} s") from None
        if error is not None:
            raise error


def measure(case: Case, k: int, n_bytes: int, auth_dir: str) -> dict[str, float]:
    """Return the throughput of one case and its bound, in MB/s: the medians of the rounds."""
    bytes_per_sequence = POSITIONS * (8 * k + 4)
    n_calls = max(case.n_connections, n_bytes // bytes_per_sequence)
    sequence = TeacherSequence(np.zeros(POSITIONS + 1, np.int32), 1)
    client_keys = f"{auth_dir}/clients/default" if auth_dir else None
    measured, bounds = [], []
    with (
        running(case, k, auth_dir) as (port, pid),
        TeacherClient(
            server_port=port, timeout_s=TIMEOUT_S, auth_dir=client_keys, n_connections=case.n_connections
        ) as client,
    ):
        client.hello()
        for _ in range(N_ROUNDS):
            before, began = thread_cpu_s(pid), time.perf_counter()
            score_all(client, sequence, n_calls)
            megabytes = n_calls * bytes_per_sequence / 1e6
            measured.append(megabytes / (time.perf_counter() - began))
            busiest_s = max(now - before.get(thread, 0.0) for thread, now in thread_cpu_s(pid).items())
            bounds.append(megabytes / busiest_s)
    return {"mb_per_s": float(np.median(measured)), "bound_mb_per_s": float(np.median(bounds))}


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=512, help="bytes of the results of one round")
    parser.add_argument("-k", type=int, default=256, help="log-probabilities per position")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args()
    figures: dict[str, float] = {}
    print(f"{'':20}{'MB/s':>8}{'bound MB/s':>12}")
    with tempfile.TemporaryDirectory(prefix="teacher-proxy-") as folder:
        keys = Path(folder) / "keys"
        make_keys(keys)
        for case in CASES:
            found = measure(case, given.k, given.megabytes * 10**6, str(keys) if case.encrypted else "")
            print(f"{case.name:20}{found['mb_per_s']:>8.0f}{found['bound_mb_per_s']:>12.0f}", flush=True)
            figures |= {f"{case.name}_{name}": value for name, value in found.items()}
    for kind in ("plain", "curve"):
        ratio = figures[f"{kind}_4_threads_bound_mb_per_s"] / figures[f"{kind}_1_threads_bound_mb_per_s"]
        figures[f"{kind}_bound_4_over_1_threads"] = ratio
        print(f"{kind}: the bound with 4 threads is {ratio:.1f} times that with 1")
    if given.json:
        given.json.write_text(json.dumps(figures | {"k": given.k, "megabytes": given.megabytes}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""A real service under load whose processes are killed, stopped and restarted.

In each test every result arrives exactly once, and equals the result of the undisturbed service.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from pathlib import Path

import numpy as np
import pytest

from teacher import ScoredSequence, TeacherClient, TeacherSequence
from tests._support.ports import free_port
from tests._support.teacher_service import MAX_MODEL_LEN, VOCAB_SIZE, processes_of, run_script
from tests._support.waiting import PATIENCE_S, wait_until

pytestmark = pytest.mark.slow  # tests/fuzz and scoring/test_pool.py have faults of proxies and workers

N_REQUESTS = 200


class Chaos:
    """A service of two workers, and its results before any disturbance."""

    def __init__(self, ckpt_path: Path, run_dir: Path) -> None:
        self.run_dir, self.port, self.backend_port = run_dir, free_port(), free_port()
        self.model_flags = ("--ckpt-path", str(ckpt_path), "--dtype", "float32", "--n-logprobs", str(VOCAB_SIZE))
        self.model_flags += (
            "--logits-mib",
            "1",
            "--kv-cache-mib",
            "16",
            "--proxy-backend-port",
            str(self.backend_port),
        )
        self.proxy: subprocess.Popen[bytes] | None = None
        self.sequences = random_sequences()
        self.undisturbed: list[np.ndarray] = []

    def start(self) -> None:
        flags = ("--proxy-frontend-port", str(self.port), "--n-workers", "2", "--http-port", "-1")
        started = run_script("start_server.sh", *self.model_flags, *flags, "--run-dir", str(self.run_dir))
        assert started.returncode == 0, started.stdout + started.stderr
        with self.client() as client:
            self.undisturbed = [dense(future.result()[0]) for future in self.submit_all(client)]

    def join(self) -> subprocess.CompletedProcess[str]:
        return run_script("join_server.sh", *self.model_flags, "--run-dir", str(self.run_dir / "joined"))

    def stop(self) -> None:
        if self.proxy is not None:
            self.proxy.kill()
            self.proxy.wait(timeout=PATIENCE_S)
        for run_dir in (self.run_dir / "joined", self.run_dir):
            run_script("stop_server.sh", "--run-dir", str(run_dir))
        assert processes_of(self.run_dir) == []

    def signal(self, name: str, number: int) -> None:
        os.kill(int((self.run_dir / f"{name}.pid").read_text().split()[0]), number)

    def restart_proxy(self) -> None:
        """Kill the proxy and start another on the same ports."""
        self.signal("proxy", signal.SIGKILL)
        flags = ("--frontend-port", str(self.port), "--backend-port", str(self.backend_port), "--http-port", "-1")
        self.proxy = subprocess.Popen([sys.executable, "-m", "teacher", "proxy", *flags])

    def client(self) -> TeacherClient:
        return TeacherClient(server_port=self.port, timeout_s=PATIENCE_S)

    def submit_all(self, client: TeacherClient) -> list[Future[list[ScoredSequence]]]:
        return [client.submit([sequence]) for sequence in self.sequences]

    def check(self, futures: Sequence[Future[list[ScoredSequence]]]) -> None:
        """Check that all futures are done with the undisturbed results."""
        _, late = wait(futures, PATIENCE_S)
        assert not late
        for future, want_TV in zip(futures, self.undisturbed, strict=True):
            (scored,) = future.result()
            np.testing.assert_allclose(dense(scored), want_TV, atol=1e-5)

    def n_workers(self, client: TeacherClient) -> int:
        return len(client.status().workers)


def random_sequences() -> list[TeacherSequence]:
    rng = np.random.default_rng(0)
    lengths = rng.integers(2, MAX_MODEL_LEN + 1, N_REQUESTS)
    return [TeacherSequence(rng.integers(0, VOCAB_SIZE, n, np.int32), int(rng.integers(1, n))) for n in lengths]


def dense(scored: ScoredSequence) -> np.ndarray:
    """Return log-probabilities by token id, and those of the sampled tokens in the last column, [T, V + 1]."""
    logps_TV = np.full((len(scored.topk_ids_TK), VOCAB_SIZE), np.nan)
    np.put_along_axis(logps_TV, scored.topk_ids_TK.astype(np.int64), scored.topk_logps_TK, axis=1)
    return np.column_stack([logps_TV, scored.sampled_logps_T])


def when_done(futures: Sequence[Future[list[ScoredSequence]]], n: int, counted: Counter[int]) -> threading.Event:
    """Return an event that is set once `n` futures are done. `counted` counts the callbacks of each future."""
    reached = threading.Event()

    def note(i: int) -> Callable[[Future[list[ScoredSequence]]], None]:
        def noted(_: Future[list[ScoredSequence]]) -> None:
            counted[i] += 1
            if len(counted) >= n:
                reached.set()

        return noted

    for i, future in enumerate(futures):
        future.add_done_callback(note(i))
    return reached


@pytest.fixture(scope="module")
def chaos(tiny_qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chaos]:
    running = Chaos(tiny_qwen2, tmp_path_factory.mktemp("chaos"))
    try:
        running.start()
        yield running
    finally:
        running.stop()


def test_restarted_proxy_loses_no_request(chaos: Chaos) -> None:
    with chaos.client() as client:
        futures, counted = chaos.submit_all(client), Counter[int]()
        assert when_done(futures, 20, counted).wait(PATIENCE_S)
        chaos.restart_proxy()
        chaos.check(futures)
        wait_until(lambda: chaos.n_workers(client) == 2)
        assert set(counted.values()) == {1} and len(counted) == N_REQUESTS


def test_stopped_worker_loses_no_request_and_returns(chaos: Chaos) -> None:
    with chaos.client() as client:
        futures, counted = chaos.submit_all(client), Counter[int]()
        assert when_done(futures, 20, counted).wait(PATIENCE_S)
        chaos.signal("worker-0", signal.SIGSTOP)
        try:
            chaos.check(futures)
            wait_until(lambda: chaos.n_workers(client) == 1)
        finally:
            chaos.signal("worker-0", signal.SIGCONT)
        wait_until(lambda: chaos.n_workers(client) == 2)
        assert set(counted.values()) == {1}
        chaos.check(chaos.submit_all(client))


def test_killed_client_does_not_affect_others(chaos: Chaos) -> None:
    with chaos.client() as one, chaos.client() as other:
        command = [sys.executable, "-c", VANISHING, str(chaos.port)]
        vanishing = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert vanishing.stdout is not None and vanishing.stdout.readline() == "submitted\n"
            futures = [chaos.submit_all(client) for client in (one, other)]
        finally:
            vanishing.kill()
            vanishing.wait(timeout=PATIENCE_S)
            vanishing.stdout.close()
        for own in futures:
            chaos.check(own)
        wait_until(
            lambda: not one.status().queue_requests and not any(worker.requests for worker in one.status().workers)
        )


VANISHING = """
import sys, time
import numpy as np
from teacher import TeacherClient, TeacherSequence
client = TeacherClient(server_port=int(sys.argv[1]))
client.hello()
for _ in range(2000):
    client.submit([TeacherSequence(np.arange(60, dtype=np.int32), 1)])
time.sleep(0.1)
print("submitted", flush=True)
time.sleep(3600)
"""


def test_killed_workers_lose_no_request_and_requests_wait_for_next_worker(chaos: Chaos) -> None:
    """Kill one worker under load, then the other, then start a new one."""
    with chaos.client() as client:
        lost_before = client.status().totals.workers_lost
        futures, counted = chaos.submit_all(client), Counter[int]()
        assert when_done(futures, 20, counted).wait(PATIENCE_S)
        chaos.signal("worker-0", signal.SIGKILL)
        chaos.check(futures)
        assert set(counted.values()) == {1}

        futures = chaos.submit_all(client)
        assert when_done(futures, 20, Counter()).wait(PATIENCE_S)
        chaos.signal("worker-1", signal.SIGKILL)
        wait_until(lambda: chaos.n_workers(client) == 0)
        assert not all(future.done() for future in futures)
        joined = chaos.join()
        assert joined.returncode == 0, joined.stderr
        chaos.check(futures)
        status = client.status()
        assert status.totals.rejected_after_losses == 0 and len(status.workers) == 1
        assert status.totals.workers_lost == lost_before + 2

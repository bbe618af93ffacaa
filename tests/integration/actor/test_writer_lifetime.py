"""Lifetime of a writer process that a Ray actor has started."""

from __future__ import annotations

import os
import signal
import threading
import time
from typing import Any

import psutil
import pytest
import ray

from recipe_gkd.actor.checkpoint.writer_process import WriterProcess
from tests._support.waiting import PATIENCE_S


def _actor_class() -> Any:
    """Return a class that Ray serializes by value: its workers cannot import this module."""

    class Actor:
        def start(self) -> tuple[int, int]:
            """Fork a writer from a thread that ends, as Ray's threads may."""
            pids: list[int] = []
            thread = threading.Thread(target=lambda: pids.append(WriterProcess(lambda: time.sleep(3600)).pid))
            thread.start()
            thread.join()
            return os.getpid(), pids[0]

        def train(self) -> None:
            time.sleep(3600)

    return ray.remote(Actor)


@pytest.mark.slow
def test_writer_outlives_forking_thread_but_not_actor(ray_session: Any) -> None:
    actor = _actor_class().options(num_cpus=0).remote()
    actor_pid, writer_pid = ray.get(actor.start.remote(), timeout=PATIENCE_S)
    training = actor.train.remote()
    writer = psutil.Process(writer_pid)
    with pytest.raises(psutil.TimeoutExpired):
        writer.wait(timeout=2)
    os.kill(actor_pid, signal.SIGKILL)
    with pytest.raises(ray.exceptions.RayActorError):
        ray.get(training, timeout=PATIENCE_S)
    writer.wait(timeout=PATIENCE_S)

"""Proxies in threads of the test process, teacher services started by their scripts, and a tiny model."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from teacher.proxy import Proxy
from tests._support.qwen2 import random_qwen2, save_word_tokenizer
from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S

VOCAB_SIZE = 96
MAX_MODEL_LEN = 64


class StopFlag:
    """Stop signal of a proxy: a file descriptor that becomes readable on `set`."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()

    def set(self) -> None:
        self._sender.send(b"\0")

    def fileno(self) -> int:
        return self._receiver.fileno()

    def close(self) -> None:
        self._receiver.close()
        self._sender.close()


@contextmanager
def running_proxy(frontend_port: int = 0, backend_port: int = 0, **settings: Any) -> Iterator[Proxy]:
    """Yield a proxy that runs in a thread, and stop it on exit. Port 0 selects a free port."""
    proxy, stop = Proxy(frontend_port=frontend_port, backend_port=backend_port, **settings), StopFlag()
    thread = threading.Thread(target=proxy.run, args=(stop,), daemon=True)
    thread.start()
    try:
        yield proxy
    finally:
        stop.set()
        thread.join(timeout=PATIENCE_S)
        assert not thread.is_alive()
        stop.close()


def run_script(name: str, *flags: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a script of the teacher service and return its exit status and output.

    Args:
        name: File name in ``teacher/``.
        flags: Command-line arguments.
        variables: Additional environment variables. ``PYTHON`` is the interpreter of the tests.
    """
    # Modules of the rollout set variables of vLLM in the test process. The service must choose its own.
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment = inherited | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"} | variables
    command = [str(REPO / "teacher" / name), *flags]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)


def processes_of(run_dir: Path) -> list[int]:
    """Return the pids of live processes whose command line contains the run folder."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if str(run_dir).encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue  # The process has ended.
    return found


@dataclass(frozen=True)
class Service:
    """A running teacher service with one real worker.

    Attributes:
        port: Port for clients.
        openai_port: Port of its gateway.
        ckpt_path: Folder of the model.
    """

    port: int
    backend_port: int
    openai_port: int
    run_dir: Path
    ckpt_path: Path


def make_tiny_qwen2(folder: Path) -> Path:
    """Save a random Qwen2 with two layers, 96 tokens and a character tokenizer, in float32; return ``folder``."""
    random_qwen2(
        seed=0, vocab_size=VOCAB_SIZE, max_position_embeddings=MAX_MODEL_LEN, num_key_value_heads=1
    ).save_pretrained(folder)
    save_word_tokenizer(folder, [chr(32 + i) for i in range(VOCAB_SIZE - 3)], characters=True)
    return folder

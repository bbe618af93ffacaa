"""Training runs started by their command line, teacher services, tiny models, and a list of a run's processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests._support.ports import free_port
from tests._support.qwen2 import random_qwen2
from tests._support.teacher_service import run_script
from tests._support.waiting import PATIENCE_S

RUN_ID_VARIABLE = "RECIPE_GKD_TEST_RUN"
"""Environment variable of all processes of a run. Its value identifies the run."""

FULL_OBJECTIVE = (
    "gkd.use_rl_loss=true",
    "gkd.sft_share=0.25",
    "data.response_key=answer",
    "actor_rollout_ref.rollout.n=2",
)
"""Overrides for all loss terms: distillation, a policy loss on rewards, and cross-entropy on reference responses."""


def processes_of_run(run_id: str) -> list[str]:
    """Return ``pid command`` of each live process of a run. Zombies are excluded: their environment is empty."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{RUN_ID_VARIABLE}={run_id}".encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{folder.name} {command[:100]}")
    return found


@dataclass
class Run:
    """A training run in a separate process.

    Attributes:
        process: Process of the driver.
        run_id: Value of `RUN_ID_VARIABLE`.
        temporary: Folder for temporary files. Ray has another one, which keeps the logs of a session.
        output: Text that the driver printed, after `finish`.
        status: Exit status, after `finish`.
        started: Start time, of the monotonic clock.
    """

    process: subprocess.Popen[str]
    folder: Path
    run_id: str
    temporary: Path
    output: str = ""
    status: int | None = None
    started: float = field(default_factory=time.monotonic)

    def finish(self, timeout_s: float = PATIENCE_S) -> Run:
        """Wait for the end of the run, and return this object. After ``timeout_s`` kill all processes of the run."""
        try:
            self.output, _ = self.process.communicate(timeout=timeout_s)
            self.status = self.process.returncode
        finally:
            if self.status is None:
                for line in processes_of_run(self.run_id):
                    with suppress(ProcessLookupError):
                        os.kill(int(line.split()[0]), signal.SIGKILL)
                self.output, _ = self.process.communicate()
        return self

    @property
    def seconds(self) -> float:
        """Time since the start."""
        return time.monotonic() - self.started

    @property
    def metrics(self) -> list[dict[str, Any]]:
        """Lines of ``metrics.jsonl``. Empty before the first step."""
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def await_step(self, step: int) -> None:
        """Wait until ``step`` lines of metrics exist. Fail the test if the run ends before or takes too long."""
        deadline = time.monotonic() + PATIENCE_S
        while len(self.metrics) < step:
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the run did not reach step {step}:\n{self.finish(1).output}")
            time.sleep(0.2)

    def leftovers(self) -> list[str]:
        """Return processes and temporary files of the run that still exist after at most a minute."""
        deadline = time.monotonic() + 60
        while (remaining := self._remaining()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return remaining

    def _remaining(self) -> list[str]:
        return processes_of_run(self.run_id) + [str(path) for path in self.temporary.rglob("*")]


StartRun = Callable[..., Run]
"""Signature of the fixture ``start_run``: ``start_run(*overrides, folder=...)``."""


@dataclass(frozen=True)
class Teacher:
    """A running teacher service.

    Attributes:
        port: Port for clients.
        settings: Environment variables of its workers.
    """

    port: int
    run_dir: Path
    settings: dict[str, str]


def make_model(folder: Path, *, seed: int) -> Path:
    """Save a random Qwen2 with two layers and the quickstart's tokenizer of 32 characters; return ``folder``."""
    from recipe_gkd.addition.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    random_qwen2(
        seed,
        vocab_size=len(tokenizer),
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.15,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    ).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def running_teacher(model: Path, run_dir: Path, n_workers: int = 1, **more: object) -> Iterator[Teacher]:
    """Start a teacher service, yield it, and stop it.

    Args:
        model: Folder of the model.
        **more: Further environment variables of the start script.
    """
    port = free_port()
    settings = {
        "CKPT_PATH": str(model),
        "N_LOGPROBS": "8",
        "DTYPE": "float32",
        "MAX_MODEL_LEN": "64",
        "PROXY_BACKEND_PORT": str(free_port()),
        **{name: str(value) for name, value in more.items()},
    }
    service = {
        "RUN_DIR": str(run_dir),
        "N_WORKERS": str(n_workers),
        "PROXY_FRONTEND_PORT": str(port),
        "HTTP_PORT": "-1",
    }
    started = run_script("start_server.sh", **service, **settings)
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield Teacher(port, run_dir, settings)
    finally:
        stop_service(run_dir)


def stop_service(run_dir: Path) -> None:
    """Stop the teacher processes of a run folder."""
    run_script("stop_server.sh", RUN_DIR=str(run_dir))

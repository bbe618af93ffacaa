"""The command as a user gives it, a real teacher service, tiny models, and a census of processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests._support.ports import free_port
from tests._support.repository import REPO

MARK = "RECIPE_GKD_TEST_RUN"
OBJECTIVE = (
    "gkd.use_rl_loss=true",
    "gkd.sft_share=0.25",
    "data.response_key=answer",
    "actor_rollout_ref.rollout.n=2",
)
"""All parts of the objective: distillation, a policy loss on a reward, and cross-entropy with given answers."""


def processes_marked(mark: str) -> list[str]:
    """`pid command` of every live process whose environment carries the mark of one run."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
                found.append(f"{folder.name} {command[:100]}")
    return found


@dataclass
class Run:
    """One start of the command."""

    process: subprocess.Popen[str]
    folder: Path
    mark: str
    temporary: Path
    """Its temporary folder, but for Ray's own, which keeps the logs of a session."""
    output: str = ""
    status: int | None = None
    started: float = field(default_factory=time.monotonic)

    def finish(self, timeout_s: float = 240) -> Run:
        """Wait for the end; the status and all it printed are kept. On a deadline everything of the run is killed."""
        try:
            self.output, _ = self.process.communicate(timeout=timeout_s)
            self.status = self.process.returncode
        finally:
            if self.status is None:
                for line in processes_marked(self.mark):
                    with suppress(ProcessLookupError):
                        os.kill(int(line.split()[0]), signal.SIGKILL)
                self.output, _ = self.process.communicate()
        return self

    @property
    def seconds(self) -> float:
        return time.monotonic() - self.started

    @property
    def metrics(self) -> list[dict[str, Any]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def await_step(self, step: int, timeout_s: float = 200) -> None:
        deadline = time.monotonic() + timeout_s
        while len(self.metrics) < step:
            if self.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"the run did not reach step {step}:\n{self.finish(1).output}")
            time.sleep(0.2)

    def leftovers(self, patience_s: float = 10) -> list[str]:
        """Return what is left of the run after a moment: processes, and files in its temporary folder."""
        deadline = time.monotonic() + patience_s
        while (left := self._left()) and time.monotonic() < deadline:
            time.sleep(0.2)
        return left

    def _left(self) -> list[str]:
        return processes_marked(self.mark) + [str(path) for path in self.temporary.rglob("*")]


Start = Callable[..., Run]
"""``start(*overrides, folder=...)`` of conftest.py."""


@dataclass(frozen=True)
class Teacher:
    port: int
    run_dir: Path
    settings: dict[str, object]
    """Of its workers, as environment variables."""


def script(name: str, **settings: object) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable} | {key: str(value) for key, value in settings.items()}
    return subprocess.run(
        ["bash", str(REPO / "teacher" / name)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )


def make_model(folder: Path, *, seed: int) -> Path:
    """A random model of the quickstart's kind: two layers, 32 characters."""
    import torch
    import transformers

    from recipe_gkd.quickstart.tokenizer import build_tokenizer

    tokenizer = build_tokenizer()
    torch.manual_seed(seed)
    config = transformers.Qwen2Config(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
        initializer_range=0.15,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    transformers.Qwen2ForCausalLM(config).float().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def running_teacher(model: Path, run_dir: Path, n_workers: int = 1, **more: object) -> Iterator[Teacher]:
    port = free_port()
    settings = {
        "CKPT_PATH": model,
        "N_LOGPROBS": 8,
        "DTYPE": "float32",
        "MAX_MODEL_LEN": 64,
        "PROXY_BACKEND_PORT": free_port(),
        **more,
    }
    started = script(
        "start_server.sh", RUN_DIR=run_dir, N_WORKERS=n_workers, PROXY_FRONTEND_PORT=port, HTTP_PORT=-1, **settings
    )
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        yield Teacher(port, run_dir, settings)
    finally:
        script("stop_server.sh", RUN_DIR=run_dir)

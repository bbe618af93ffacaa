"""Metrics on the console: one line per step, and a progress bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any, TextIO

from tqdm import tqdm


class ConsoleLogger:
    """Printer of one line per step and one line per validation."""

    FIELDS = (
        ("kl", "actor/kl_loss", "{:.4f}"),
        ("reward", "reward/mean", "{:.3f}"),
        ("grad", "actor/grad_norm", "{:.2f}"),
        ("len", "response_seq_len/average", "{:.1f}"),
        ("tok/s", "perf/tokens_per_second", "{:.0f}"),
        ("stale", "training/staleness_mean", "{:.1f}"),
        ("step", "timing/step", "{:.2f}s"),
        ("gen", "timing/generate_sequences", "{:.2f}s"),
        ("teach", "timing/get_teacher_knowledge", "{:.2f}s"),
        ("update", "timing/update_actor", "{:.2f}s"),
        ("sync", "timing/sync_rollout_weights", "{:.3f}s"),
    )

    def __init__(self, completed_steps: int, last_step: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._last_step = last_step
        self._bar: Any = None
        if self._stream.isatty():
            self._bar = tqdm(total=last_step, initial=completed_steps, file=self._stream, unit="step", leave=False)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the fields that ``metrics`` contains, and validation metrics in a line of their own."""
        done = f"{step:>{len(str(self._last_step))}}/{self._last_step}"
        parts = [f"{label} {form.format(metrics[name])}" for label, name, form in self.FIELDS if name in metrics]
        if parts:
            self._print(f"step {done}  " + "  ".join(parts))
        if results := [f"{name[4:]} {value:.4f}" for name, value in metrics.items() if name.startswith("val/")]:
            self._print(f"val  {done}  " + "  ".join([*results, f"time {metrics['timing/validate']:.2f}s"]))
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def _print(self, line: str) -> None:
        if self._bar is None:
            print(line, file=self._stream, flush=True)
        else:
            self._bar.write(line, file=self._stream)

    def close(self) -> None:
        """Remove the progress bar."""
        if self._bar is not None:
            self._bar.close()

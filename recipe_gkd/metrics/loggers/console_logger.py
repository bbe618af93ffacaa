"""Metrics on the console: one line per step, and a progress bar with the remaining time on a terminal."""

from __future__ import annotations

import errno
import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

log = logging.getLogger(__name__)

GONE = {errno.EPIPE, errno.EIO, errno.EBADF}
"""Errors of a stream whose reader or terminal does not exist any more."""
SPEED_WINDOW_S = 3600.0
"""Time over which the progress bar averages the speed. Steps of large models take minutes."""


class ConsoleLogger:
    """Printer of one line per step and one line per validation.

    If the terminal or the reader of a pipe is gone, nothing is printed any more. Lines that cannot be written for
    another reason, such as a full disk, are left out. Both are logged once.
    """

    FIELDS = (
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

    def __init__(
        self, completed_steps: int, last_step: int, stream: TextIO | None = None, *, loss_name: str = "loss"
    ) -> None:
        """Show the progress bar, if the stream is a terminal.

        Args:
            completed_steps: Number of steps that are completed at the start.
            stream: Output, ``sys.stdout`` by default.
            loss_name: Name of the distillation loss, which stands before its values.
        """
        self._fields = ((loss_name, "actor/kl_loss", "{:.4f}"), *self.FIELDS)
        self._stream = stream or sys.stdout
        self._last_step = last_step
        self._bar: Progress | None = None
        self._is_gone = self._has_warned = False
        with self._tolerated():
            self._show_bar(completed_steps, last_step)

    def _show_bar(self, completed_steps: int, last_step: int) -> None:
        """Show the progress bar if the stream is a terminal."""
        if self._stream.isatty():
            # The bar redirects both streams while it is shown, so that log lines are printed above it.
            self._bar = Progress(
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(),
                TimeElapsedColumn(),
                TextColumn("remaining"),
                TimeRemainingColumn(),
                console=Console(file=self._stream, force_terminal=True, highlight=False),
                transient=True,
                redirect_stderr=sys.stderr.isatty(),
                speed_estimate_period=SPEED_WINDOW_S,
            )
            self._task = self._bar.add_task("", total=last_step, completed=completed_steps)
            self._bar.start()

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Print the fields that ``metrics`` contains, and validation metrics in a separate line."""
        for line in self._lines(step, metrics):
            self._print(line)
        if self._bar is not None and not self._is_gone:
            with self._tolerated():
                self._bar.update(self._task, completed=step)

    @contextmanager
    def _tolerated(self) -> Iterator[None]:
        """Run the body, which writes to the stream, and log its first failure."""
        try:
            yield
        except (OSError, ValueError) as error:
            if self._is_gone:
                return
            self._is_gone = self._stream.closed or getattr(error, "errno", None) in GONE
            if self._is_gone:
                log.warning("the console cannot be written any more: %s", error)
            elif not self._has_warned:
                log.warning("the console cannot be written, and lines are left out: %s", error)
            self._has_warned = True

    def _lines(self, step: int, metrics: Mapping[str, float]) -> Iterator[str]:
        """Yield the line of a step and the line of its validation."""
        done = f"{step:>{len(str(self._last_step))}}/{self._last_step}"
        parts = [f"{label} {form.format(metrics[name])}" for label, name, form in self._fields if name in metrics]
        if parts:
            yield f"step {done}  " + "  ".join(parts)
        if results := [f"{name[4:]} {value:.4f}" for name, value in metrics.items() if name.startswith("val/")]:
            yield f"val  {done}  " + "  ".join([*results, f"time {metrics['timing/validate']:.2f}s"])

    def _print(self, line: str) -> None:
        if self._is_gone:
            return
        with self._tolerated():
            if self._bar is None:
                print(line, file=self._stream, flush=True)
            else:
                self._bar.console.print(line, markup=False, soft_wrap=True)

    def close(self) -> None:
        """Remove the progress bar."""
        with self._tolerated():
            if self._bar is not None:
                self._bar.stop()

"""Where metrics go: a line and a progress bar on the console, a JSON object a line, TensorBoard."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol, TextIO

from tqdm import tqdm

from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.config.schema import TrainerConfig


class Logger(Protocol):
    """One destination. ``log`` gets the complete metrics of one step, or a validation's before the first one."""

    def log(self, metrics: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


class Loggers:
    """All destinations that ``trainer.logger`` names; a context manager that closes them."""

    def __init__(self, config: TrainerConfig, *, first_step: int, last_step: int) -> None:
        folder = folder_of(config)
        folder.mkdir(parents=True, exist_ok=True)
        make: dict[str, Callable[[], Logger]] = {
            "console": lambda: Console(first_step, last_step),
            "jsonl": lambda: Jsonl(folder / "metrics.jsonl", first_step),
            "tensorboard": lambda: TensorBoard(
                folder / "tensorboard", f"{config.project_name}/{config.experiment_name}", first_step
            ),
        }
        self._loggers: list[Logger] = [make[name]() for name in config.logger]

    def __enter__(self) -> Loggers:
        return self

    def __exit__(self, *_: object) -> None:
        for logger in self._loggers:
            logger.close()

    def log(self, metrics: dict[str, float], step: int) -> None:
        for logger in self._loggers:
            logger.log(metrics, step)


class Console:
    """One line a step, and one a validation; on a terminal also a progress bar."""

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

    def __init__(self, first_step: int, last_step: int, stream: TextIO | None = None) -> None:
        self._stream = stream or sys.stdout
        self._last = last_step
        self._bar: Any = None
        if self._stream.isatty():
            self._bar = tqdm(total=last_step, initial=first_step, file=self._stream, unit="step", leave=False)

    def log(self, metrics: dict[str, float], step: int) -> None:
        done = f"{step:>{len(str(self._last))}}/{self._last}"
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
        if self._bar is not None:
            self._bar.close()


class Jsonl:
    """One JSON object a step; what is validated before the first step has the number 0.

    A resumed run drops the lines of steps that it will do again. If it validates before its first step, the results go
    into the line of the step that it resumes from.
    """

    def __init__(self, path: Path, first_step: int) -> None:
        self._last, self._last_at = b"", 0  # of the lines that were there already, and where it begins
        draft = path.with_suffix(".writing")
        with draft.open("wb") as kept:
            for line in _lines_until(path, first_step) if first_step else ():
                self._last, self._last_at = line, kept.tell()
                kept.write(line + b"\n")
        draft.replace(path)
        self._file = path.open("a", encoding="utf-8", buffering=1)

    def log(self, metrics: dict[str, float], step: int) -> None:
        line: dict[str, Any] = {"training/global_step": step}
        last, self._last = self._last, b""
        if last and _step_of(last) == step:  # nothing comes after it yet
            self._file.truncate(self._last_at)
            line = json.loads(last)
            metrics = {name: metrics[name] for name in metrics if not name.startswith("timing/")}  # not of that step
        self._file.write(json.dumps(line | metrics) + "\n")

    def close(self) -> None:
        self._file.close()


class TensorBoard:
    """Scalars under the names that the metrics have."""

    def __init__(self, folder: Path, run: str, first_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder / run), purge_step=first_step + 1)  # a resumed run does these again

    def log(self, metrics: dict[str, float], step: int) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


def _lines_until(path: Path, step: int) -> Iterator[bytes]:
    if path.is_file():
        with path.open("rb") as lines:
            yield from (line.rstrip(b"\n") for line in lines if _step_of(line) <= step)


def _step_of(line: bytes) -> float:
    try:
        return float(json.loads(line)["training/global_step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # a line cut short by a crash

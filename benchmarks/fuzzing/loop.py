"""The fuzzing loop: mutate, run, keep the inputs that reach new arcs, and record findings."""

from __future__ import annotations

import base64
import json
import random
import re
import signal
import time
import traceback
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from fuzzing.memory import PeakMemory
from fuzzing.mutations import Mutator
from fuzzing.targets import (
    BYTES_PER_HANG_S,
    HANG_S,
    MAX_INPUT_GROWTH_BYTES,
    MAX_TOTAL_GROWTH_BYTES,
    Defect,
    Frames,
    Hang,
    Target,
)

_HISTORY = 64
"""Inputs before a finding that are saved with it, for a target with state."""
_FAVORED_SHARE = 0.5
_MEMORY_CHECK_INPUTS = 1000


@dataclass(frozen=True)
class Finding:
    """An input that violates the rules of its target.

    Attributes:
        target: Name of the target.
        key: Error type and place, the same for all inputs with the same cause.
        error: Error message.
        trace: Traceback.
        frames: Input.
        history: Inputs before it.
    """

    target: str
    key: str
    error: str
    trace: str
    frames: Frames
    history: list[Frames]

    def save(self, path: Path) -> None:
        """Write the finding as JSON."""
        content = {
            "target": self.target,
            "key": self.key,
            "error": self.error,
            "trace": self.trace.splitlines(),
            "frames": _encode(self.frames),
            "history": [_encode(frames) for frames in self.history],
        }
        path.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def load_finding(path: Path) -> Finding:
    """Read a saved finding."""
    content = json.loads(path.read_text(encoding="utf-8"))
    history = [_decode(frames) for frames in content["history"]]
    trace = "\n".join(content["trace"])
    return Finding(content["target"], content["key"], content["error"], trace, _decode(content["frames"]), history)


def _encode(frames: Frames) -> list[str]:
    return [base64.b64encode(frame).decode() for frame in frames]


def _decode(frames: list[str]) -> Frames:
    return [base64.b64decode(frame) for frame in frames]


@dataclass
class Report:
    """Figures of one target.

    Attributes:
        target: Name of the target.
        inputs: Inputs that were run.
        accepted: Inputs without an error.
        rejected: Inputs with the documented error.
        arcs: Arcs that were reached.
        corpus: Inputs that reached new arcs, seeds included.
        seconds: Duration.
        growth_bytes: Growth of the tested process over the run, None for a target without state.
        findings: Findings by key, with the number of inputs.
        files: Files of the findings.
        stopped_early: True if the time limit ended the run.
    """

    target: str
    inputs: int = 0
    accepted: int = 0
    rejected: int = 0
    arcs: int = 0
    corpus: int = 0
    seconds: float = 0.0
    growth_bytes: int | None = None
    findings: dict[str, int] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    stopped_early: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return the figures as JSON values."""
        return vars(self) | {"inputs_per_second": round(self.inputs / max(self.seconds, 1e-9), 1)}


class Fuzzer:
    """Run of one target.

    Args:
        target: Target. The caller closes it.
        seed: Seed of the random numbers. Targets in this process are repeated exactly; the order of events in sockets
            is not.
        folder: Folder for the findings.
        words: Further byte strings of the mutations.
        hang_s: Time limit of a small input, in seconds. Targets with state have limits of their own.
    """

    def __init__(
        self, target: Target, *, seed: int, folder: Path, words: tuple[bytes, ...] = (), hang_s: float = HANG_S
    ) -> None:
        self._target, self._folder = target, folder
        self._hang_s = 0.0 if target.is_stateful else hang_s
        self._rng = random.Random(f"{seed} {target.name}")
        self._mutator = Mutator(self._rng, is_message=target.is_message, words=words)
        self._corpus: list[Frames] = []
        self._history: deque[Frames] = deque(maxlen=_HISTORY)
        self._first_resident_bytes: int | None = None
        self._peak = PeakMemory()
        self.report = Report(target.name)

    def run(self, n_inputs: int, max_seconds: float = float("inf")) -> Report:
        """Run the seeds, then mutated inputs, and return the figures."""
        began = time.monotonic()
        with _alarm():
            for frames in self._inputs(n_inputs):
                self._run_one(frames)
                self.report.seconds = time.monotonic() - began
                if self.report.seconds > max_seconds:
                    self.report.stopped_early = True
                    break
                if self.report.inputs % _MEMORY_CHECK_INPUTS == 0:
                    self._check_memory()
            self._check_memory()
        self._peak.close()
        self.report.arcs, self.report.corpus = self._target.n_arcs(), len(self._corpus)
        return self.report

    def _inputs(self, n_inputs: int) -> Iterator[Frames]:
        seeds = self._target.seeds
        for frames in seeds[:n_inputs]:
            yield list(frames)
        for _ in range(n_inputs - len(seeds)):
            pool = seeds if self._rng.random() > _FAVORED_SHARE or not self._corpus else self._corpus
            yield self._mutator.mutate(self._rng.choice(pool), self._rng.choice(seeds))

    def _run_one(self, frames: Frames) -> None:
        report, n_before = self.report, self._target.n_arcs()
        report.inputs += 1
        error = self._try(frames)
        if error is None:
            if self._target.n_arcs() > n_before:
                self._corpus.append(frames)
        elif not isinstance(error, Hang) or self._hangs_again(frames):
            self._record(frames, error)
        self._history.append(frames)

    def _try(self, frames: Frames) -> BaseException | None:
        """Run an input. Return its error if it is a finding."""
        self._peak.reset()
        try:
            with _time_limit(_limit_s(self._hang_s, frames)):
                accepted = self._target.run(frames)
        except (Exception, Hang) as error:  # noqa: BLE001 - every unexpected error is a finding
            return error
        self.report.accepted += accepted
        self.report.rejected += not accepted
        if (grown := self._peak.grown_bytes()) > MAX_INPUT_GROWTH_BYTES:
            return Defect(f"an input of {sum(map(len, frames))} bytes allocated {grown >> 20} MiB")
        return None

    def _hangs_again(self, frames: Frames) -> bool:
        """Return True if the input takes too long once more, so that the load of the machine is not the cause."""
        self._target.reset()
        return isinstance(self._try(frames), Hang)

    def _check_memory(self) -> None:
        resident_bytes = self._target.resident_bytes()
        if resident_bytes is None:
            return
        if self._first_resident_bytes is None or resident_bytes < self._first_resident_bytes:
            self._first_resident_bytes = resident_bytes
        grown = self.report.growth_bytes = resident_bytes - self._first_resident_bytes
        if grown > MAX_TOTAL_GROWTH_BYTES:
            self._record([], Defect(f"the process grew by {grown >> 20} MiB in {self.report.inputs} inputs"))
            self._first_resident_bytes = None

    def _record(self, frames: Frames, error: BaseException) -> None:
        """Count a finding, and save the first one of its cause."""
        key = finding_key(error)
        is_new = key not in self.report.findings
        self.report.findings[key] = self.report.findings.get(key, 0) + 1
        if is_new:
            trace = "".join(traceback.format_exception(error))
            history = list(self._history) if self._target.is_stateful else []
            self._folder.mkdir(parents=True, exist_ok=True)
            path = self._folder / f"{self._target.name}-{len(self.report.findings)}.json"
            Finding(self._target.name, key, str(error)[:2000], trace, frames, history).save(path)
            self.report.files.append(str(path))
        self._target.reset()


def finding_key(error: BaseException) -> str:
    """Return the type of an error with the innermost line of ``teacher``, or a defect's message without its numbers."""
    if isinstance(error, Defect):
        return f"Defect: {re.sub(r'[0-9]+', 'N', str(error).partition(chr(10))[0])[:160]}"
    places = [frame for frame in traceback.extract_tb(error.__traceback__) if "/teacher/" in frame.filename]
    if not places:
        places = list(traceback.extract_tb(error.__traceback__))[-1:]
    place = f"{Path(places[-1].filename).name}:{places[-1].name}" if places else "?"
    return f"{type(error).__name__} in {place}"


def replay(target: Target, finding: Finding, hang_s: float = HANG_S) -> BaseException | None:
    """Run the input of a finding, and if it passes, the inputs before it and then the input again.

    Returns:
        The error, None if there is none.
    """
    for inputs in ([finding.frames], [*finding.history, finding.frames]):
        with _alarm():
            for frames in inputs:
                try:
                    with _time_limit(0.0 if target.is_stateful else _limit_s(hang_s, frames)):
                        target.run(frames)
                except (Exception, Hang) as error:  # noqa: BLE001 - every unexpected error is a finding
                    return error
    return None


@contextmanager
def _alarm() -> Iterator[None]:
    """Install the handler of ``_time_limit``, and restore the former handler and timer."""

    def on_alarm(number: int, frame: FrameType | None) -> None:
        raise Hang("no result before the time limit")

    handler, (left_s, interval_s) = signal.signal(signal.SIGALRM, on_alarm), signal.setitimer(signal.ITIMER_REAL, 0.0)
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, left_s, interval_s)


def _limit_s(hang_s: float, frames: Frames) -> float:
    return hang_s * (1 + sum(map(len, frames)) / BYTES_PER_HANG_S)


@contextmanager
def _time_limit(limit_s: float) -> Iterator[None]:
    """Raise ``Hang`` after a time. 0 for a target with its own deadlines."""
    signal.setitimer(signal.ITIMER_REAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)

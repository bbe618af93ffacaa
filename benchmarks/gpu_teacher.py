"""Section ``teacher``: tokens scored per second and GPU, by the engine alone and through the service."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from gpu_models import SHAPES, write_model
from teacher_processes import TIMEOUT_S, Service
from teacher_service import Case, EngineAlone, service_seconds

from teacher import TeacherClient

_SHAPES = {"cpu": ("tiny",), "cuda": ("1.5B", "8B")}
_K = {"cpu": (16,), "cuda": (1, 16, 64, 256)}
_LOAD = {"cpu": (8, 63), "cuda": (256, 1023)}
"""Sequences, and scored positions of each."""
_ROUNDS = {"cpu": 1, "cuda": 5}


def measure(device: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each shape and k. Engine and service run one after the other: each takes the whole GPU."""
    for shape in _SHAPES[device]:
        model = write_model(folder / shape, shape, device)
        for k in _K[device]:
            sequences, positions = _LOAD[device]
            case = Case(
                sequences=sequences, positions=positions, k=k, vocabulary=SHAPES[shape]["vocab_size"], threads=1,
                dtype="bfloat16",
            )  # fmt: skip
            engine_s = _engine_seconds(model, case, _ROUNDS[device])
            service_s = _service_seconds(model, case, folder / f"{shape}-{k}", _ROUNDS[device])
            yield {
                "shape": shape,
                "k": k,
                "engine_tokens_per_s": case.tokens / engine_s,
                "service_tokens_per_s": case.tokens / service_s,
                "service_over_engine": service_s / engine_s,
            }


def _engine_seconds(model: Path, case: Case, rounds: int) -> float:
    engine = EngineAlone(model, case)
    try:
        seconds = [engine.seconds(number) for number in range(rounds + 1)]
    finally:
        engine.close()
    return statistics.median(seconds[1:])


def _service_seconds(model: Path, case: Case, run_dir: Path, rounds: int) -> float:
    service = Service(run_dir, model, case.k, case.dtype)
    try:
        service.start()
        with TeacherClient(server_port=service.port, timeout_s=TIMEOUT_S) as client:
            seconds = [service_seconds(client, case.make(number))[0] for number in range(rounds + 1)]
    finally:
        service.stop()
    return statistics.median(seconds[1:])

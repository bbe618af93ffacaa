"""Process of one section of ``benchmarks/gpu.py``: it appends a line of JSON for each row to a file."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

from recipe_gkd.actor.megatron.transformer_impl import resolve_transformer_impl

Rows = Iterator[dict[str, Any]]
# Section -> module and function. A section is imported in its own process only.
SECTIONS = {
    "losses": ("gpu_losses", "measure"),
    "transports": ("gpu_sections", "measure_transports"),
    "actor": ("gpu_actor", "measure_megatron"),
    "actor_fsdp": ("gpu_actor", "measure_fsdp"),
    "mismatch": ("gpu_actor", "measure_mismatch"),
    "teacher": ("gpu_teacher", "measure"),
}
_TRANSPORT_MODELS = {"cpu": ("0.5M",), "cuda": ("1B",)}
_BUCKETS_MB = {"cpu": (1.0,), "cuda": (64.0, 512.0)}


def measure_transports(device: str, folder: Path) -> Rows:
    """Yield a row for each transport that the machine allows and each bucket size."""
    import torch
    from weight_sync import Case, measure, models

    # NCCL needs a GPU for each rank. Shared memory is CUDA IPC on one GPU.
    transports = ["ipc"] if device == "cuda" and torch.cuda.device_count() < 2 else ["collective", "ipc"]
    chosen = [model for model in models() if model.name in _TRANSPORT_MODELS[device]]
    for transport in transports:
        todo = [Case(model=model, bucket_mb=mb, repeats=5) for model in chosen for mb in _BUCKETS_MB[device]]
        for row in measure(todo, 1, transport, device):
            names = ("transport", "model", "bucket_mb", "sync_over_raw")
            yield {name: row[name] for name in names} | {"gb_per_s": row["mb_per_s"] / 1e3}


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("section", choices=SECTIONS)
    parser.add_argument("--device", required=True)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--rows", type=Path, required=True)
    given = parser.parse_args()
    if given.section in ("actor", "actor_fsdp", "mismatch"):
        resolve_transformer_impl("auto", given.device)  # before Megatron is imported
    module, name = SECTIONS[given.section]
    measure: Callable[[str, Path], Rows] = getattr(import_module(module), name)
    with given.rows.open("a") as file:
        for row in measure(given.device, given.folder):
            file.write(json.dumps(row, default=float) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main())

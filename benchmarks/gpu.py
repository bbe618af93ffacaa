"""Measure the parts of this project on the GPUs of this machine, with random weights.

    python benchmarks/gpu.py [--only SECTION ...] [--json FILE] [--device cuda|cpu]

Sections:

    losses      forward and backward of the loss, from logits and from hidden states: ours, plain PyTorch,
                torch.compile, and Liger's cross-entropy if it is installed
    transports  GB/s of a weight sync over each transport that the machine allows (NCCL needs two GPUs)
    actor       tokens/s, MFU and memory of updates of a 1.5B student on one GPU with Megatron, without and with the
                fused output layer
    actor_fsdp  the same with FSDP
    mismatch    log-probabilities of the rollout engine against the actor's in bfloat16, by dtype of the output layers
    teacher     tokens scored per second by one engine on one GPU, alone and through the service, for 1.5B and 8B shapes
                and k = 1, 16, 64, 256

Each section runs in a separate process with a deadline, and the rows that it has measured are reported even if it
fails. ``--device cpu`` runs the same code on miniature shapes in about a minute. Its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gpu_sections import SECTIONS

from recipe_gkd.actor.environment import worker_environment as actor_environment
from recipe_gkd.commands.gpu_smoke.isolation import last_lines, run_with_deadline
from recipe_gkd.commands.gpu_smoke.machine import versions
from recipe_gkd.rollout.environment import worker_environment as rollout_environment

DEADLINE_S = {"cpu": 180.0, "cuda": 3600.0}
PROGRAM = Path(__file__).with_name("gpu_sections.py")


def run_section(section: str, device: str, folder: Path, deadline_s: float) -> dict[str, Any]:
    """Run a section in its process.

    Returns:
        ``rows``, ``seconds``, and ``error``: None, or why the section ended before its last row.
    """
    files, rows, log = folder / section, folder / f"{section}.jsonl", folder / f"{section}.log"
    files.mkdir()
    command = [sys.executable, str(PROGRAM), section, "--device", device]
    variables = {"HF_HUB_OFFLINE": "1"}
    if section in ("actor", "actor_fsdp", "mismatch"):
        variables |= actor_environment(device, "fsdp" if section == "actor_fsdp" else "megatron")
    if section == "mismatch":
        variables |= rollout_environment(device)
    if device == "cpu":
        variables |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    started = time.monotonic()
    status = run_with_deadline(
        [*command, "--folder", str(files), "--rows", str(rows)], variables=variables, log=log, deadline_s=deadline_s
    )
    error = None
    if status != 0:
        reason = f"no end within {deadline_s:g} s" if status is None else f"exit status {status}"
        error = "\n".join([reason, *last_lines(log)])
    lines = rows.read_text().splitlines() if rows.exists() else []
    return {"rows": [json.loads(line) for line in lines], "seconds": time.monotonic() - started, "error": error}


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as a table with all their keys."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([_cell(row.get(name)) for name in names] for row in rows)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(names))]
    return "\n".join("  ".join(f"{cell:>{width}}" for cell, width in zip(line, widths, strict=True)) for line in cells)


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "-" if value is None else str(value)


def gpu_names(device: str) -> list[str]:
    if device == "cpu":
        return []
    import torch

    return [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--only", nargs="+", choices=SECTIONS, metavar="SECTION", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--json", type=Path, help="write versions and rows to this file")
    parser.add_argument("--deadline-s", type=float, help="deadline of each section (default: 3600, on a CPU 180)")
    given = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # a killed benchmark must end the processes of a section
    names = gpu_names(given.device)
    if given.device == "cuda" and not names:
        parser.error("torch finds no GPU; check `nvidia-smi`, or use --device cpu for a trial run")
    found: dict[str, Any] = {"device": given.device, "gpus": names, "versions": versions(), "sections": {}}
    print(f"{len(names)} GPUs: {', '.join(names)}\n{json.dumps(found['versions'])}", flush=True)
    with tempfile.TemporaryDirectory(prefix="gkd_bench_", ignore_cleanup_errors=True) as folder:
        for section in given.only or SECTIONS:
            deadline_s = given.deadline_s or DEADLINE_S[given.device]
            result = run_section(section, given.device, Path(folder), deadline_s)
            found["sections"][section] = result
            print(f"\n{section} ({result['seconds']:.0f} s)\n{table(result['rows'])}", flush=True)
            if result["error"]:
                print(f"FAILED: {result['error']}", flush=True)
            if given.json:  # after each section, so that an interruption loses one
                given.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if any(result["error"] for result in found["sections"].values()) else 0


if __name__ == "__main__":
    sys.exit(main())

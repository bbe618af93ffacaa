"""Arguments and output of the command."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from recipe_gkd.commands.arguments import command_parser
from recipe_gkd.commands.plan.changes import Change, smallest_change
from recipe_gkd.commands.plan.estimate import PoolMemory, RunEstimate, estimate_run
from recipe_gkd.commands.plan.timing import TimingEstimate, estimate_timing, read_teacher
from recipe_gkd.commands.plan.timing_text import timing_text
from recipe_gkd.config import Config
from recipe_gkd.config.keys import TRAIN_FILES
from recipe_gkd.config.load import read_config
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.memory_budget.slots import slot_memory
from recipe_gkd.model_files import find_model
from recipe_gkd.preflight import with_model_path
from teacher.common.sizes import GIB, size_text

_KEYS_WITHOUT_EFFECT = (TRAIN_FILES,)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0 if everything fits or the memory is unknown, 1 if not or after an error.
    """
    arguments = _parse(argv)
    try:
        config = _read(arguments)
        device = _device(config)
        memory = _device_memory(arguments, config, device)
        estimate = estimate_run(config, device, memory)
        change = smallest_change(config, device, memory) if estimate.problems and memory is not None else None
        timing = _timing(arguments, config, estimate) if arguments.timing else None
    except Exception as error:  # noqa: BLE001 - the command prints one error instead of a traceback
        print(f"error: {as_known_error(error, 'plan')}", file=sys.stderr)
        return 1
    if arguments.json:
        predicted = {} if timing is None else {"timing": asdict(timing)}
        print(json.dumps(_as_json(device, estimate, change) | predicted, indent=1))
    else:
        predicted_text = [] if timing is None else ["", timing_text(timing)]
        print("\n".join([plan_text(device, estimate, change), *predicted_text]))
    return int(bool(estimate.problems))


def plan_text(device: str, estimate: RunEstimate, change: Change | None) -> str:
    """Return the figures of a run as text.

    Args:
        device: ``"cuda"`` or ``"cpu"``.
        estimate: Figures of the run.
        change: Smallest change with which everything fits; None if there is none, or if everything fits.
    """
    kind = "GPU" if device == "cuda" else "CPU slot"
    memory = "unknown" if estimate.device_memory is None else f"{estimate.device_memory / GIB:.2f} GiB"
    lines = [
        f"student: {_count(estimate.n_parameters)} parameters, {_count(estimate.n_rank_parameters)} on an actor rank",
        f"step: {estimate.tokens} tokens at most, {estimate.micro_batches} micro-batches of up to "
        f"{estimate.micro_batch_tokens} tokens per data-parallel rank",
        f"weight sync: {size_text(estimate.sync_bytes)} to each rollout worker",
        f"teacher: {size_text(estimate.teacher_bytes)} per step at most, {estimate.n_ids} ids per position",
        f"KV cache: {_cache_text(estimate)}",
        f"memory of a {kind}: {memory}",
        *(line for pool in estimate.pools for line in _pool_lines(pool)),
    ]
    if estimate.device_memory is None:
        found = "this machine has no GPU whose memory can be read" if device == "cuda" else "the memory is unknown"
        return "\n".join([*lines, "", f"nothing was compared: {found}; give it in GiB, such as --device-memory-gb 80"])
    if not estimate.problems:
        return "\n".join([*lines, "", "everything fits"])
    lines += ["", *(f"does not fit: {text}" for text in estimate.problems)]
    if change is None:
        return "\n".join([*lines, "no single key makes it fit; use more or larger devices, or a smaller student"])
    lines += [f"smallest change that makes it fit: {' '.join(change.overrides)}"]
    lines += [f"  {pool.name} then needs {pool.total / GIB:.2f} GiB" for pool in change.estimate.pools]
    return "\n".join(lines)


def _cache_text(estimate: RunEstimate) -> str:
    if not estimate.cached_tokens and estimate.device_memory is None:
        return "unknown, it is a part of the GPU's memory"
    return f"{estimate.cached_tokens} tokens per engine"


def _read(arguments: argparse.Namespace) -> Config:
    """Return the configuration with the folder of the model. Keys that the command does not use may be missing."""
    given = {override.lstrip("+").partition("=")[0] for override in arguments.overrides}
    defaults = [f"{key}=none" for key in _KEYS_WITHOUT_EFFECT if key not in given]
    config = read_config(arguments.config_name, [*defaults, *arguments.overrides], arguments.config_dir).config
    return with_model_path(config, find_model(config.actor_rollout_ref.model.path))


def _timing(arguments: argparse.Namespace, config: Config, estimate: RunEstimate) -> TimingEstimate:
    teacher = read_teacher(config, arguments.teacher_model, arguments.teacher_gpus)
    return estimate_timing(config, estimate, teacher, arguments.device_name)


def _device(config: Config) -> str:
    """Return the device kind of the run. With ``trainer.device=auto`` this machine need not be the one of the run."""
    return "cpu" if config.trainer.device == "cpu" else "cuda"


def _device_memory(arguments: argparse.Namespace, config: Config, device: str) -> int | None:
    """Return the memory of a device in bytes; None if it is unknown, for example of a GPU on a machine without one."""
    if arguments.device_memory_gb is not None:
        return int(arguments.device_memory_gb * GIB)
    each = config.trainer.n_gpus_per_node
    if device == "cpu":
        n_slots = each if config.actor_rollout_ref.hybrid_engine else each + config.rollout.n_gpus_per_node
        return slot_memory("cpu", n_slots)
    return slot_memory("cuda", 1)


def _pool_lines(pool: PoolMemory) -> list[str]:
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in pool.parts.items() if size)
    return [f"  {pool.name}: {pool.total / GIB:.2f} GiB ({parts})"]


def _as_json(device: str, estimate: RunEstimate, change: Change | None) -> dict[str, Any]:
    def of(figures: RunEstimate) -> dict[str, Any]:
        return asdict(figures) | {"pools": [asdict(pool) | {"total": pool.total} for pool in figures.pools]}

    changed = None if change is None else {"overrides": change.overrides, "estimate": of(change.estimate)}
    return {"device": device, "fits": not estimate.problems, "estimate": of(estimate), "smallest_change": changed}


def _count(number: float) -> str:
    return f"{number / 1e9:.2f} B" if number >= 1e9 else f"{number / 1e6:.2f} M"


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    from recipe_gkd.commands import plan

    parser = command_parser("plan", plan.__doc__)
    parser.add_argument(
        "--device-memory-gb",
        type=_positive,
        help="memory of one GPU or CPU slot in GiB (default: this machine's)",
    )
    parser.add_argument("--timing", action="store_true", help="also predict the time of each stage of a step")
    parser.add_argument("--device-name", help="with --timing: name of the GPU (default: this machine's)")
    parser.add_argument("--teacher-model", metavar="DIR", help="with --timing: folder with the teacher's config.json")
    parser.add_argument(
        "--teacher-gpus", type=_count_of_gpus, metavar="N", help="with --timing: GPUs of all teacher workers together"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    arguments = parser.parse_intermixed_args(argv)
    for option in ("device_name", "teacher_model", "teacher_gpus"):
        if getattr(arguments, option) is not None and not arguments.timing:
            parser.error(f"--{option.replace('_', '-')} has an effect with --timing only; add --timing")
    return arguments


def _count_of_gpus(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, expected a number of GPUs of at least 1")
    return value


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, expected a number of GiB above 0, such as 80")
    return value

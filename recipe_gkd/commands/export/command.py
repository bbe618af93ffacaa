"""The command ``export``."""

from __future__ import annotations

import argparse
import math
import os
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path

import recipe_gkd.commands.export as package
from recipe_gkd.actor.environment import worker_environment
from recipe_gkd.commands.export.source import find_source
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import CheckpointError
from teacher.common.sizes import GIB

DTYPES = ("float32", "bfloat16", "float16")
DEFAULT_SHARD_GB = 4.0


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0 if the folder was written, 1 after an error, 130 after Ctrl-C.
    """
    args = _parser().parse_args(argv)
    os.environ.update(worker_environment("cpu"))  # before torch looks for a GPU
    os.environ["OMP_NUM_THREADS"] = str(len(os.sched_getaffinity(0)))  # one process has all cores
    warnings.simplefilter("ignore")  # Megatron warns about each optional package that is not installed
    try:
        source = find_source(args.checkpoint, args.model, args.config)
        check_out(args.out)
        from recipe_gkd.commands.export.write import write_adapter, write_model

        if args.adapter:
            write_adapter(source, args.out)
        else:
            write_model(source, args.out, dtype=args.dtype, max_shard_bytes=int(args.max_shard_gb * GIB))
    except Exception as error:  # noqa: BLE001 - the command prints one error instead of a traceback
        print(f"error: {as_known_error(error, 'export')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    files = [path for path in args.out.rglob("*") if path.is_file()]
    n_weights = sum(path.suffix == ".safetensors" for path in files)
    megabytes = sum(path.stat().st_size for path in files) / 1e6
    print(f"exported {source.checkpoint} to {args.out}: {n_weights} weight file(s), {megabytes:,.1f} MB in all")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipe_gkd export",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("checkpoint", type=Path, metavar="CHECKPOINT", help="folder global_step_N, or folder of a run")
    parser.add_argument("out", type=lambda text: Path(text).expanduser(), metavar="OUT", help="folder to create")
    parser.add_argument("--adapter", action="store_true", help="write the LoRA adapters, not merged, for peft")
    parser.add_argument("--dtype", choices=DTYPES, help="data type of the parameters (default: the run's)")
    parser.add_argument(
        "--max-shard-gb",
        type=_positive,
        default=DEFAULT_SHARD_GB,
        metavar="GIB",
        help="maximum size of a weight file in GiB (default: 4)",
    )
    parser.add_argument(
        "--model", type=Path, metavar="FOLDER", help="model folder of the run, if it was moved since the run"
    )
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help="config.yaml of the run (default: beside the checkpoint)"
    )
    return parser


def check_out(out: Path) -> None:
    """Check that the output folder does not exist or is empty.

    Raises:
        CheckpointError: It has files, or is a file.
    """
    if out.is_dir() and any(out.iterdir()):
        remedy = "choose a new folder, or remove its files first"
        raise CheckpointError(f"OUT: {out} is not empty", remedy=remedy, path=out)
    if out.exists() and not out.is_dir():
        what = f"OUT: {out} is a file, expected a folder that does not exist yet, or is empty"
        raise CheckpointError(what, path=out)


def _positive(value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < 1e6:
        raise argparse.ArgumentTypeError(f"got {value}, expected a number above 0")
    return number

"""Inputs of the quickstart: problems, teacher and student.

Usage::

    python -m recipe_gkd.quickstart.prepare --out outputs/quickstart [--seed 0] [--fresh] [--timeout-s 1800]
        [--self | --family qwen3_moe]

The output is ``data/{train,held_out,dev}.parquet``, ``teacher/`` and ``student/``. With ``--self`` it is the data and
``self_student/``; with ``--family NAME`` a folder ``NAME/`` takes the place of ``student/``. Each folder is written
under another name and renamed when it is complete. Its ``made.json`` records the settings. A later call creates only
the folders that are missing or have other settings.

The weights of seed 0 are part of the package (``weights/``), so that all machines distill the same models.
``--fresh``, another seed or another recipe trains the models.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import multiprocessing
import shutil
import sys
import time
from collections.abc import Mapping
from importlib.resources import files
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
import transformers

from recipe_gkd.addition.task import Problem, Splits, make_splits, write_parquet
from recipe_gkd.addition.tokenizer import CHAT_TEMPLATE, build_tokenizer
from recipe_gkd.errors import DeadlineError, GkdError, ModelError
from recipe_gkd.quickstart.models import (
    FAMILY_RECIPES,
    RECIPES,
    Recipe,
    Role,
    build_model,
    make_model,
    save_model,
    select_recipes,
)
from recipe_gkd.runtime.closed_output import run_until_closed

SIZES = {"n_train": 16384, "n_held_out": 512, "n_dev": 384}
_DATA_FORMAT = 2
"""Raised when the columns of the data files change, so that older files are made again."""
RECORD = "made.json"
TIMEOUT_S = 1800.0
"""Deadline of the training of the models, in seconds. Teacher and student take 1 to 3 minutes on two idle cores, the
model of a self-distillation takes about 20 minutes."""
WEIGHTS = "weights"
"""Folder of this package with the weights of seed 0, ``ROLE.safetensors``, and their records, ``ROLE.json``."""


class ModelJob(NamedTuple):
    """Training of one model in a separate process.

    Attributes:
        role: Name of the model.
        recipe: Shape and training of the model.
        seed: Seed of the quickstart.
        folder: Output folder.
        key: Digest of all settings.
    """

    role: Role
    recipe: Recipe
    seed: int
    folder: Path
    key: str


def prepare(
    out: Path,
    *,
    seed: int = 0,
    fresh: bool = False,
    recipes: Mapping[Role, Recipe] = RECIPES,
    timeout_s: float = TIMEOUT_S,
) -> dict[str, dict[str, Any]]:
    """Create the missing folders.

    Args:
        out: Parent of the folders.
        seed: Seed of the problems, the initial weights and the training.
        fresh: True to create all folders again, and to train the models instead of using the packaged weights.
        recipes: Shape and training of each model.

    Returns:
        The records of ``data`` and of each model.

    Raises:
        ModelError: A model did not reach its accuracy within its steps.
        DeadlineError: The training did not end within ``timeout_s``.
    """
    out.mkdir(parents=True, exist_ok=True)
    data_key = _key(seed, SIZES | {"format": _DATA_FORMAT})
    if fresh or not _is_made(out / "data", data_key):
        _make_data(out / "data", make_splits(seed, **SIZES), data_key)
    else:
        print("data: done before", flush=True)
    jobs = []
    for role, recipe in recipes.items():
        job = ModelJob(role, recipe, seed, out / role, _key(seed, dataclasses.asdict(recipe) | SIZES))
        if not fresh and _is_made(job.folder, job.key):
            print(f"{role}: done before", flush=True)
        elif not fresh and (record := _packaged_record(job)) is not None:
            _unpack_model(job, record)
        else:
            jobs.append(job)
    if jobs:
        names = " and ".join(job.role for job in jobs)
        print(f"{names}: trained from random weights, for at most {timeout_s:.0f} s (--timeout-s)", flush=True)
        _make_models(jobs, timeout_s)
    return {name: json.loads((out / name / RECORD).read_text()) for name in ("data", *recipes)}


def _key(seed: int, settings: Mapping[str, Any]) -> str:
    """Return a digest of the settings. The limit on the steps is left out, as it does not change a finished model."""
    parts = [seed, {k: v for k, v in settings.items() if k != "max_steps"}, Problem(123, 456).answer, CHAT_TEMPLATE]
    text = json.dumps(parts, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _is_made(folder: Path, key: str) -> bool:
    try:
        return bool(json.loads((folder / RECORD).read_text())["key"] == key)
    except (FileNotFoundError, NotADirectoryError, ValueError, KeyError, TypeError):
        return False


def _empty_draft(folder: Path) -> Path:
    draft = folder.with_name(folder.name + ".partial")
    if draft.exists():
        shutil.rmtree(draft)
    draft.mkdir()
    return draft


def _finish(draft: Path, folder: Path, record: Mapping[str, Any]) -> None:
    (draft / RECORD).write_text(json.dumps(record, indent=1))
    if folder.exists():
        shutil.rmtree(folder)
    draft.rename(folder)


def _make_data(folder: Path, splits: Splits, key: str) -> None:
    draft = _empty_draft(folder)
    for name in ("train", "held_out", "dev"):
        write_parquet(getattr(splits, name), draft / f"{name}.parquet")
    _finish(draft, folder, {"key": key} | SIZES)
    print(
        f"data: {len(splits.train)} training and {len(splits.held_out)} held-out problems, such as "
        f"{splits.train[0].question}{splits.train[0].answer}",
        flush=True,
    )


def _packaged_record(job: ModelJob) -> dict[str, Any] | None:
    """Return the record of the packaged weights, None if there are none of these settings."""
    try:
        record = json.loads(files("recipe_gkd.quickstart").joinpath(WEIGHTS, f"{job.role}.json").read_text())
    except FileNotFoundError:
        return None
    return cast("dict[str, Any]", record) if record["key"] == job.key else None


def _unpack_model(job: ModelJob, record: Mapping[str, Any]) -> None:
    """Write the Hugging Face folder of the packaged weights."""
    transformers.utils.logging.disable_progress_bar()
    draft = _empty_draft(job.folder)
    save_model(build_model(job.recipe, build_tokenizer(), job.seed), build_tokenizer(), draft)
    weights = files("recipe_gkd.quickstart").joinpath(WEIGHTS, f"{job.role}.safetensors").read_bytes()
    (draft / "model.safetensors").write_bytes(weights)
    _finish(draft, job.folder, record)
    print(
        f"{job.role}: packaged weights, {record['parameters']} parameters, {record['accuracy']:.1%} exact answers",
        flush=True,
    )


def _make_model(job: ModelJob, result: Connection) -> None:
    """Train one model in a child process. Send None when its folder is complete, or the error."""
    torch.set_num_threads(1)
    transformers.utils.logging.disable_progress_bar()
    started = time.monotonic()

    def report(line: str) -> None:
        print(f"{job.role} {time.monotonic() - started:5.0f} s  {line}", flush=True)

    try:
        splits = make_splits(job.seed, **SIZES)
        draft = _empty_draft(job.folder)
        made = make_model(
            job.role,
            job.recipe,
            seed=job.seed,
            dev=splits.dev,
            excluded=splits.dev + splits.held_out,
            folder=draft,
            report=report,
        )
        seconds = round(time.monotonic() - started, 1)
        _finish(draft, job.folder, {"key": job.key, "seed": job.seed, "seconds": seconds} | dataclasses.asdict(made))
        report(f"done: {made.parameters} parameters, {made.accuracy:.1%} exact answers after {made.steps} steps")
    except (GkdError, OSError) as error:
        result.send(error)
    else:
        result.send(None)


def _make_models(jobs: list[ModelJob], timeout_s: float) -> None:
    """Run all jobs at the same time, each in a process with one thread. The first failure ends the others."""
    context = multiprocessing.get_context("spawn")
    running: dict[Connection, tuple[ModelJob, SpawnProcess]] = {}
    deadline = time.monotonic() + timeout_s
    try:
        for job in jobs:
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=_make_model, args=(job, sender), name=job.role, daemon=True)
            process.start()
            sender.close()  # Only the child holds it now, so the death of the child ends the stream.
            running[receiver] = job, process
        while running:
            ready = wait(list(running), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                roles = tuple(job.role for job, _ in running.values())
                raise DeadlineError(
                    f"the training of the {' and '.join(roles)} did not end within {timeout_s:.0f} s; each needs one "
                    "idle core",
                    remedy="stop other programs, or raise the limit with --timeout-s of python -m "
                    "recipe_gkd.quickstart.prepare",
                    phase="quickstart",
                    silent=roles,
                    waited_s=timeout_s,
                )
            for receiver in cast("list[Connection]", ready):
                job, process = running[receiver]
                try:
                    failure = receiver.recv()
                except EOFError:
                    process.join(timeout=10)
                    failure = ModelError(f"its process ended with exit code {process.exitcode}")
                if failure is not None:
                    what, details = f"the {job.role} was not made", (f"{type(failure).__name__}: {failure}",)
                    raise ModelError(what, phase="quickstart", details=details, path=job.folder) from failure
                process.join(timeout=30)
                del running[receiver]
    finally:
        for _, process in running.values():
            process.kill()
            process.join(timeout=10)


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe_gkd.quickstart.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=Path("outputs/quickstart"), help="output folder")
    parser.add_argument("--seed", type=int, default=0, help="seed of the problems and of the training")
    parser.add_argument("--fresh", action="store_true", help="create everything again, and train the models")
    parser.add_argument(
        "--timeout-s",
        type=float,
        default=TIMEOUT_S,
        help="deadline of the training of the models (default: %(default).0f)",
    )
    kinds = parser.add_mutually_exclusive_group()
    kinds.add_argument("--self", action="store_true", dest="for_self", help="only the model of a self-distillation")
    kinds.add_argument("--family", choices=FAMILY_RECIPES, help="a student of this family instead of the dense one")
    args = parser.parse_args(argv)
    started = time.monotonic()
    try:
        recipes = select_recipes(for_self=args.for_self, family=args.family)
        records = prepare(args.out, seed=args.seed, fresh=args.fresh, recipes=recipes, timeout_s=args.timeout_s)
    except GkdError as error:
        print(error, file=sys.stderr)
        return 1
    made = " and ".join(f"a {role} with {records[role]['accuracy']:.1%}" for role in recipes)
    print(f"ready in {time.monotonic() - started:.0f} s: {args.out} has data, {made} exact answers")
    return 0


if __name__ == "__main__":
    sys.exit(run_until_closed(main))

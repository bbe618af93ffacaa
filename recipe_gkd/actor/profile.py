"""Traces of the actor's updates by torch's profiler, for chosen steps and ranks (``trainer.profile``)."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from recipe_gkd.config.schema import ProfileConfig

log = logging.getLogger(__name__)

FOLDER = "profile"


@contextmanager
def profiled(config: ProfileConfig, run_folder: Path, *, step: int, rank: int) -> Iterator[None]:
    """Record the body if its step and rank are chosen. A trace that cannot be written is a warning.

    Args:
        config: Steps and ranks to record.
        run_folder: Run folder, which all actor ranks share. The trace is ``profile/step_N_rank_R.json.gz``.
        step: Number of the step, starting at 1.
        rank: Global rank of the actor.
    """
    if step not in config.steps or rank not in config.ranks:
        yield
        return
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
    with profile(activities=activities, record_shapes=True, profile_memory=True) as recorded:
        yield
    path = run_folder / FOLDER / f"step_{step}_rank_{rank}.json.gz"
    draft = path.with_name(f".{path.name}")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        recorded.export_chrome_trace(str(draft))
        draft.replace(path)
    except (OSError, RuntimeError) as error:  # Kineto reports an unwritable file as RuntimeError
        log.warning("the profile %s could not be written: %s", path, error)
        with suppress(OSError):
            draft.unlink()

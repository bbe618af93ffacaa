"""Loading of a checkpoint in this process, and writing of its weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from recipe_gkd.actor.backend import Backend
from recipe_gkd.actor.checkpoint.files import read_description
from recipe_gkd.actor.checkpoint.hf_save import write_hf_folder
from recipe_gkd.actor.checkpoint.stop_ids import generation_config
from recipe_gkd.actor.ranks import RankSpec
from recipe_gkd.actor.strategy import build_backend
from recipe_gkd.commands.export.source import Source, with_float32
from recipe_gkd.errors import CheckpointError
from recipe_gkd.runtime.durable_files import sync_tree

ADAPTER = "adapter/"
"""Folder of the adapters in a saved Hugging Face folder."""


def write_model(source: Source, out: Path, *, dtype: str | None, max_shard_bytes: int) -> None:
    """Write a Hugging Face folder with complete, merged weights.

    Args:
        source: Checkpoint.
        out: Folder to create. An empty folder is replaced.
        dtype: Data type of the parameters; corrections of routers stay float32. None: the run's.
        max_shard_bytes: Maximum size of a weight file. A larger weight gets its own file.

    Raises:
        CheckpointError: The checkpoint is damaged, is of another model, or has no weights; or ``out`` cannot be
            written.
    """
    if dtype == source.dtype:
        dtype = None
    with loaded(source if dtype is None else with_float32(source)) as backend:
        weights = backend.weights_meta(None if dtype is None else getattr(torch, dtype))
        dtypes = {name: getattr(torch, of_tensor) for tensors in weights for name, _, of_tensor in tensors}

        def export(first: int, end: int) -> Iterator[tuple[str, Tensor]]:
            return ((name, tensor.to(dtypes[name])) for name, tensor in backend.export_weights(first, end))

        out.parent.mkdir(parents=True, exist_ok=True)
        files = generation_config(source.model, source.stop_token_ids)
        write_hf_folder(
            out, source.model, weights, export, _run_at(out), max_file_bytes=max_shard_bytes, extra_files=files
        )


def write_adapter(source: Source, out: Path) -> None:
    """Write the adapters as a folder for peft, in float32.

    Args:
        source: Checkpoint of a run with LoRA.
        out: Folder to create, or an empty one.

    Raises:
        CheckpointError: The checkpoint has no adapters, peft cannot load them, or see :func:`write_model`.
    """
    if not source.config.actor_rollout_ref.actor.lora.rank:
        raise CheckpointError(
            f"--adapter: {source.checkpoint} was trained without LoRA (actor_rollout_ref.actor.lora.rank)",
            remedy="export the complete weights without --adapter",
            path=source.checkpoint,
        )
    with loaded(source) as backend:
        files = {name.removeprefix(ADAPTER): content for name, content in backend.extra_files().items()}
    if not files:
        raise CheckpointError(
            f"--adapter: peft would load the adapters of {source.checkpoint} onto other layers, because it takes names "
            "of dense layers of this mixture of experts for names of experts",
            remedy="export the complete weights without --adapter",
            path=source.checkpoint,
        )
    partial = out.with_name(out.name + ".partial")
    _run_at(out)(lambda: _write_files(partial, out, files), None)


@contextmanager
def loaded(source: Source) -> Iterator[Backend]:
    """Build the model of a checkpoint in this process, and load the checkpoint into it.

    Raises:
        CheckpointError: The checkpoint is damaged, is of another model, or has no weights.
        ModelError: The model folder is not supported, or cannot be read.
    """
    path = source.checkpoint / "actor"
    description = read_description(path)
    if "model" not in description.get("contents", ["model"]):
        raise CheckpointError(
            f"{path} has no weights, only {', '.join(description['contents'])} (checkpoint.save_contents of the run)",
            remedy="if the checkpoint has a folder huggingface, use it",
            path=path,
        )
    spec = RankSpec(rank=0, world_size=1, local_rank=0, device="cpu", rendezvous=dist.HashStore())
    backend = build_backend(source.config, spec, is_overwritten=True)
    try:
        with backend.in_use():
            common = backend.check_checkpoint(path, ["model"])
            backend.load_checkpoint(path, ["model"], common)
            yield backend
    finally:
        backend.shutdown()


def _run_at(out: Path) -> Callable[[Callable[[], None], str | None], None]:
    """Return a function that runs each function that writes, and reports failures for the output folder."""

    def run(function: Callable[[], None], failure: str | None) -> None:
        try:
            if failure is None:
                return function()
        except OSError as error:
            failure = str(error)
        what = f"{out} cannot be written: {failure}"
        raise CheckpointError(what, remedy="check disk, memory and permissions", path=out)

    return run


def _write_files(partial: Path, out: Path, files: dict[str, bytes]) -> None:
    partial.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (partial / name).write_bytes(content)
    sync_tree(partial)
    if out.exists():
        out.rmdir()
    partial.rename(out)

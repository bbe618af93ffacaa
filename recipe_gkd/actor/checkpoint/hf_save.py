"""Saving of a Hugging Face folder, with weight files of limited size.

The weights of one file are gathered on rank 0 and then written by another process. Therefore no rank waits for a disk
inside of a collective, and rank 0 holds at most one file in memory.
"""

from __future__ import annotations

import json
import math
import os
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors.torch import save_file
from torch import Tensor

from recipe_gkd.actor.backend import Backend
from recipe_gkd.actor.checkpoint.parallel_write import ParallelWrite
from recipe_gkd.actor.checkpoint.stop_ids import generation_config
from recipe_gkd.errors import CheckpointError
from recipe_gkd.runtime.durable_files import sync_file, sync_folder, sync_tree
from recipe_gkd.weight_sync.bucket_plan import TensorMeta

MAX_FILE_BYTES = 4 << 30
CHAT_TEMPLATES = "additional_chat_templates"
"""Folder in which a tokenizer has its named chat templates."""


@dataclass(frozen=True)
class WeightsFile:
    """A weight file of a folder, with the weights of index ``first`` (inclusive) to ``end`` (exclusive)."""

    name: str
    first: int
    end: int


RunOnFirstRank = Callable[[Callable[[], None], str | None], None]
"""Function that runs its first argument on rank 0 while the other ranks wait. Collective.

The second argument is the reason if this rank has failed already, else None. Raises on all ranks if one has failed.
"""


def save_hf_folder(
    backend: Backend, path: Path, source: Path, timeout_s: float, *, stop_token_ids: Sequence[int] = ()
) -> None:
    """Write the weights of a model as a Hugging Face folder. Collective.

    Args:
        backend: Model in training.
        path: Folder to create or replace.
        source: Folder that the model was loaded from. All its files except the weights are copied, and its named chat
            templates, but no other folder.
        timeout_s: Deadline of the save, in seconds.
        stop_token_ids: Ids that ended responses in training; see :func:`generation_config`.

    Raises:
        CheckpointError: A rank failed to write, or the deadline passed. Raised on all ranks.
    """
    deadline = time.monotonic() + timeout_s

    def run(function: Callable[[], None], failure: str | None) -> None:
        ParallelWrite(
            f"the save of the Hugging Face folder {path}",
            [function] if backend.layout.rank == 0 else [],
            path=path,
            deadline=deadline,
            limit_s=timeout_s,
            device=backend.device,
            failure=None if failure is None else CheckpointError(failure),
        ).wait()

    extra_files = {**backend.extra_files(), **generation_config(source, stop_token_ids)}
    write_hf_folder(path, source, backend.weights_meta(), backend.export_weights, run, extra_files=extra_files)


def write_hf_folder(
    path: Path,
    source: Path,
    weights: Sequence[Sequence[TensorMeta]],
    export: Callable[[int, int], Iterable[tuple[str, Tensor]]],
    run: RunOnFirstRank,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    extra_files: Mapping[str, bytes] = MappingProxyType({}),
) -> None:
    """Write a folder under a temporary name, and rename it when everything is on the disk. Collective.

    Args:
        path: Folder to create or replace.
        source: All files of this folder except the weights are copied.
        weights: Tensors of each weight. The tensors of one weight are in one file, and so is a weight without tensors
            with the weight before it.
        export: Called with a range of weights on all ranks; returns their tensors on rank 0, and nothing elsewhere.
        run: Runs each function that writes.
        max_file_bytes: Maximum size of a file. A larger weight gets its own file.
        extra_files: Content of other files on rank 0, by relative path. They replace files of ``source``.
    """
    partial_path = path.with_name(path.name + ".partial")
    run(partial(_create_folder, partial_path, source, weights[0][0][2], extra_files), None)
    files = plan_files(weights, max_file_bytes)
    for file in files:
        tensors: dict[str, Tensor] = {}
        failure: str | None = None
        for name, tensor in export(file.first, file.end):  # exhausted in any case: other ranks take part
            try:
                if failure is None:
                    tensors[name] = tensor.to("cpu", copy=True)  # safetensors rejects tensors that share memory
            except (MemoryError, RuntimeError) as error:
                failure = f"{type(error).__name__}: {error}"
        run(partial(write_file, partial_path / file.name, tensors), failure)
    run(partial(_complete, path, partial_path, weights, files), None)


def plan_files(weights: Sequence[Sequence[TensorMeta]], max_file_bytes: int) -> list[WeightsFile]:
    """Divide ``weights`` in order into files of at most ``max_file_bytes``.

    A weight without tensors is a part of one that the weight before it has.
    """
    starts, used = [0], 0
    for number, tensors in enumerate(weights):
        n_bytes = sum(map(_n_bytes, tensors))
        if used and n_bytes and used + n_bytes > max_file_bytes:
            starts.append(number)
            used = 0
        used += n_bytes
    if len(starts) == 1:
        return [WeightsFile("model.safetensors", 0, len(weights))]
    return [
        WeightsFile(f"model-{number:05d}-of-{len(starts):05d}.safetensors", first, end)
        for number, (first, end) in enumerate(zip(starts, [*starts[1:], len(weights)], strict=True), start=1)
    ]


def _create_folder(folder: Path, source: Path, dtype: str, extra_files: Mapping[str, bytes]) -> None:
    """Create a folder with all files of ``source`` except its weights, its chat templates, and ``extra_files``."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in [*source.iterdir(), *(source / CHAT_TEMPLATES).glob("*.jinja")]:
        if file.is_file() and not _is_weights(file.name):
            target = folder / file.relative_to(source)
            target.parent.mkdir(exist_ok=True)
            shutil.copyfile(file, target)  # with the permissions of the umask
    _set_dtype(folder / "config.json", dtype)
    for name, content in extra_files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    sync_tree(folder)


def write_file(file: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors to a safetensors file, and wait until it is on the disk."""
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(0o666 & ~_umask())  # safetensors makes it readable only for its owner
    sync_file(file)


def _umask() -> int:
    """Return the umask of this process. No other thread may create files meanwhile."""
    os.umask(umask := os.umask(0o077))
    return umask


def _complete(path: Path, folder: Path, weights: Sequence[Sequence[TensorMeta]], files: Sequence[WeightsFile]) -> None:
    """Write the index of a folder with several weight files, and rename the folder."""
    if len(files) > 1:
        entries = [(entry, file.name) for file in files for meta in weights[file.first : file.end] for entry in meta]
        index = {
            "metadata": {"total_size": sum(_n_bytes(entry) for entry, _ in entries)},
            "weight_map": {entry[0]: name for entry, name in entries},
        }
        index_file = folder / "model.safetensors.index.json"
        index_file.write_text(json.dumps(index, indent=2) + "\n")
        sync_file(index_file)
    sync_folder(folder)
    old = path.with_name(path.name + ".old")
    shutil.rmtree(old, ignore_errors=True)
    if path.exists():
        path.rename(old)
    folder.rename(path)
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")) or name.endswith(
        (".safetensors.index.json", ".bin.index.json")
    )


def _set_dtype(config_file: Path, dtype: str) -> None:
    config = json.loads(config_file.read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"  # transformers 5 has renamed it to dtype
    config_file.write_text(json.dumps(config | {key: dtype}, indent=2) + "\n")


def _n_bytes(entry: TensorMeta) -> int:
    _, size, dtype = entry
    return math.prod(size) * getattr(torch, dtype).itemsize

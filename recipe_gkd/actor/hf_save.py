"""Write an ordinary Hugging Face folder, in files of limited size.

The weights of one file are collected on rank 0, then written by another process: no rank is inside an exchange of
weights while a disk is waited for, and rank 0 holds one file at most.
"""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from recipe_gkd.runtime.durable_files import sync_file, sync_folder, sync_tree
from recipe_gkd.weight_sync.bucket_plan import TensorMeta

FILE_BYTES = 4 << 30


@dataclass(frozen=True)
class WeightsFile:
    """A file of a folder, and the weights that it holds: ``first`` up to, not including, ``last``."""

    name: str
    first: int
    last: int


Run = Callable[[Callable[[], None], str | None], None]
"""Function that runs its first argument on rank 0 while the other ranks wait. Collective. The second argument is the
reason if this rank has failed already, else None. Raises on all ranks if one has failed."""


def save_hf_folder(
    path: Path,
    source: Path,
    weights: Sequence[Sequence[TensorMeta]],
    export: Callable[[int, int], Iterable[tuple[str, Tensor]]],
    run: Run,
    *,
    file_bytes: int = FILE_BYTES,
) -> None:
    """Copy all files of ``source`` but its weights, and write the weights. Collective.

    ``path`` appears (or is replaced) only once everything is on the disk.

    Args:
        weights: Tensors of each weight; those of one weight are in one file.
        export: Called with a range of weights on all ranks; returns their tensors on rank 0, and nothing elsewhere.
        run: Runs each function that writes.
        file_bytes: Limit of a file's size, unless one weight alone is larger.
    """
    partial_path = path.with_name(path.name + ".partial")
    run(partial(_begin, partial_path, source, weights[0][0][2]), None)
    files = plan_files(weights, file_bytes)
    for file in files:
        held: dict[str, Tensor] = {}
        failure: str | None = None
        for name, tensor in export(file.first, file.last):  # to its end, or other ranks would wait for this one
            try:
                if failure is None:
                    held[name] = tensor.to("cpu", copy=True)  # tensors may share memory, which safetensors refuses
            except (MemoryError, RuntimeError) as error:
                failure = f"{type(error).__name__}: {error}"
        run(partial(_write_file, partial_path / file.name, held), failure)
    run(partial(_complete, path, partial_path, weights, files), None)


def plan_files(weights: Sequence[Sequence[TensorMeta]], file_bytes: int) -> list[WeightsFile]:
    """Divide ``weights`` in order into files of up to ``file_bytes``."""
    starts, used = [0], 0
    for number, tensors in enumerate(weights):
        n_bytes = sum(map(_n_bytes, tensors))
        if used and used + n_bytes > file_bytes:
            starts.append(number)
            used = 0
        used += n_bytes
    if len(starts) == 1:
        return [WeightsFile("model.safetensors", 0, len(weights))]
    return [
        WeightsFile(f"model-{number:05d}-of-{len(starts):05d}.safetensors", first, last)
        for number, (first, last) in enumerate(zip(starts, [*starts[1:], len(weights)], strict=True), start=1)
    ]


def _begin(folder: Path, source: Path, dtype: str) -> None:
    """Make a folder with all files of ``source`` but its weights."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not _is_weights(file.name):
            shutil.copyfile(file, folder / file.name)  # with the modes of the umask
    _set_dtype(folder / "config.json", dtype)
    sync_tree(folder)


def _write_file(file: Path, tensors: Mapping[str, Tensor]) -> None:
    save_file(dict(tensors), file, metadata={"format": "pt"})
    file.chmod(0o666 & ~_umask())  # safetensors makes it readable for its owner only
    sync_file(file)


def _umask() -> int:
    """Return the umask of this process, which must have no other thread that makes files."""
    os.umask(umask := os.umask(0o077))
    return umask


def _complete(path: Path, folder: Path, weights: Sequence[Sequence[TensorMeta]], files: Sequence[WeightsFile]) -> None:
    """Give a folder its index, if it has several files, and its final name."""
    if len(files) > 1:
        entries = [(entry, file.name) for file in files for meta in weights[file.first : file.last] for entry in meta]
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
    key = "torch_dtype" if "torch_dtype" in config else "dtype"  # its name before and since transformers 5
    config_file.write_text(json.dumps(config | {key: dtype}, indent=2) + "\n")


def _n_bytes(entry: TensorMeta) -> int:
    _, size, dtype = entry
    return math.prod(size) * getattr(torch, dtype).itemsize

"""Write an ordinary Hugging Face folder, one tensor after the other, in files of limited size."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from recipe_gkd.weights.buckets import TensorMeta

FILE_BYTES = 4 << 30


def save_hf_folder(
    path: Path, source: Path, tensors: Iterable[tuple[str, Tensor]], meta: Sequence[TensorMeta], *,
    file_bytes: int = FILE_BYTES,
) -> None:  # fmt: skip
    """Everything that is no weight from ``source``; the weights from ``tensors``, which come in the order of ``meta``.

    ``path`` appears (or is replaced) only once everything is written.
    """
    partial = path.with_name(path.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    for file in source.iterdir():
        if file.is_file() and not _is_weights(file.name):
            shutil.copy2(file, partial / file.name)
    _set_dtype(partial / "config.json", meta[0][2])
    _write_weights(partial, tensors, meta, file_bytes)
    shutil.rmtree(path, ignore_errors=True)
    partial.rename(path)


def _is_weights(name: str) -> bool:
    return name.endswith((".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack")) or name.endswith(
        (".safetensors.index.json", ".bin.index.json")
    )


def _set_dtype(config_file: Path, dtype: str) -> None:
    config = json.loads(config_file.read_text())
    key = "torch_dtype" if "torch_dtype" in config else "dtype"  # its name before and since transformers 5
    config_file.write_text(json.dumps(config | {key: dtype}, indent=2) + "\n")


def _write_weights(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], meta: Sequence[TensorMeta], file_bytes: int
) -> None:
    file_of = _plan_files(meta, file_bytes)
    last_in_file = {file: name for name, file in file_of.items()}
    held: dict[str, Tensor] = {}
    for name, tensor in tensors:
        held[name] = tensor.to("cpu", copy=True)  # the exporter reuses its memory
        if last_in_file[file_of[name]] == name:
            save_file(held, folder / file_of[name], metadata={"format": "pt"})
            held = {}
    if len(set(file_of.values())) > 1:
        index = {"metadata": {"total_size": sum(_n_bytes(entry) for entry in meta)}, "weight_map": file_of}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n")


def _plan_files(meta: Sequence[TensorMeta], file_bytes: int) -> dict[str, str]:
    """Name of the file of each tensor, filled in order up to ``file_bytes``."""
    number_of: dict[str, int] = {}
    number, used = 1, 0
    for entry in meta:
        if used and used + _n_bytes(entry) > file_bytes:
            number, used = number + 1, 0
        number_of[entry[0]] = number
        used += _n_bytes(entry)
    if number == 1:
        return dict.fromkeys(number_of, "model.safetensors")
    return {name: f"model-{n:05d}-of-{number:05d}.safetensors" for name, n in number_of.items()}


def _n_bytes(entry: TensorMeta) -> int:
    _, size, dtype = entry
    return math.prod(size) * getattr(torch, dtype).itemsize

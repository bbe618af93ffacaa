"""Find damaged weight files of a model folder by their headers and sizes. Imports neither torch nor an engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

INDEX_NAME = "model.safetensors.index.json"
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_REPAIR = "copy or download it again"


def find_damaged_weights(folder: Path) -> str | None:
    """Return a message that names a missing or damaged weight file of a model folder, None if all are good.

    Reads headers and sizes only, so that a checkpoint of any size takes milliseconds. A changed byte inside a tensor is
    not found. Without an index every ``*.safetensors`` file is checked, with one those that it names. Of ``*.bin``
    files, which are read only where there is no safetensors file, the size is compared with 0.
    """
    index = folder / INDEX_NAME
    if index.is_file():
        names = _names_in_index(index)
        if isinstance(names, str):
            return names
        paths = [folder / name for name in names]
        if missing := [path.name for path in paths if not path.is_file()]:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            return f"{folder / missing[0]}{more} is missing, but {INDEX_NAME} names it; {_REPAIR}"
    else:
        paths = sorted(folder.glob("*.safetensors"))
    if paths:
        return next((damage for path in paths if (damage := find_safetensors_damage(path))), None)
    return next((damage for path in sorted(folder.glob("*.bin")) if (damage := _find_unreadable(path))), None)


def find_safetensors_damage(path: Path) -> str | None:
    """Return a message if ``path`` is no whole safetensors file, None if its header and size agree."""
    try:
        n_bytes = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(len(_LFS_POINTER))
            file.seek(0)
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            fits = _LENGTH_BYTES + length <= n_bytes and length <= _MAX_HEADER_BYTES
            header = file.read(length) if fits else b""
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    if n_bytes == 0:
        return f"{path} is empty (0 bytes); {_REPAIR}"
    if start == _LFS_POINTER:
        return f"{path} is a Git LFS pointer of {n_bytes} bytes, not the weights; run `git lfs pull` in its folder"
    if n_bytes < _LENGTH_BYTES or not fits:
        return f"{path} is truncated, or no safetensors file: its {n_bytes} bytes do not hold its header; {_REPAIR}"
    data_bytes = _data_bytes(header)
    if data_bytes is None:
        return f"{path} is damaged: its header is no safetensors header; {_REPAIR}"
    if (expected := _LENGTH_BYTES + length + data_bytes) != n_bytes:
        what = "truncated" if n_bytes < expected else "damaged"
        return f"{path} is {what}: expected {expected} bytes by its header, got {n_bytes}; {_REPAIR}"
    return None


def _data_bytes(header: bytes) -> int | None:
    """Return the bytes of all tensors that a header lists, None if it is no safetensors header."""
    try:
        entries: dict[str, Any] = json.loads(header)
        ends = [int(entry["data_offsets"][1]) for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return None
    return max(ends, default=0)


def _names_in_index(index: Path) -> list[str] | str:
    """Return the file names that an index lists, or a message if it lists none."""
    try:
        names = {str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()}
    except OSError as error:
        return f"{index} cannot be read: {error.strerror or error}"
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"{index} is damaged: expected JSON with a weight_map ({type(error).__name__}: {error}); {_REPAIR}"
    return sorted(names)


def _find_unreadable(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return None if file.read(1) else f"{path} is empty (0 bytes); {_REPAIR}"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"

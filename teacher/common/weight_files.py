"""Search and validation of the weight files of a model folder. Imports neither torch nor an engine."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from safetensors import SafetensorError, safe_open

from teacher.common.detailed_error import DetailedError

INDEX_NAME = "model.safetensors.index.json"
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_REPAIR = "copy or download it again"


@dataclass(eq=False, repr=False)
class WeightFileError(DetailedError):
    """A weight file or an index is missing or damaged."""

    path: Path | None = field(default=None, kw_only=True)


def read_index(folder: Path) -> dict[str, str] | None:
    """Return the file name of each tensor from the index of a model folder, None if there is no index.

    Raises:
        WeightFileError: The index cannot be read, or names a file that is missing.
    """
    index = folder / INDEX_NAME
    if not index.is_file():
        return None
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        file_of = {str(name): str(file) for name, file in weight_map.items()}
    except OSError as error:
        raise _unreadable(index, error) from error
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise WeightFileError(
            f"{index} is damaged: expected JSON with a weight_map ({type(error).__name__}: {error})",
            path=index,
            remedy=_REPAIR,
        ) from error
    if missing := sorted({file for file in file_of.values() if not (folder / file).is_file()}):
        more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
        raise WeightFileError(
            f"{folder / missing[0]}{more} is missing, but {INDEX_NAME} names it",
            path=folder / missing[0],
            remedy=_REPAIR,
        )
    return file_of


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files with the weights of a model folder.

    These are the files that the index names, or all files if there is no index. vLLM reads the same files. A folder
    with an index can contain further files, such as ``consolidated.safetensors``.

    Raises:
        WeightFileError: The index cannot be read, or names a file that is missing.
    """
    file_of = read_index(folder)
    return sorted(folder.glob("*.safetensors") if file_of is None else {folder / file for file in file_of.values()})


def weight_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor in the weight files of a model folder, by name. Reads headers only.

    Raises:
        WeightFileError: A weight file or the index cannot be read, or is damaged.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for path in weight_files(folder):
        with open_weights(path) as file:
            shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return shapes


def open_weights(path: Path, framework: str = "np") -> safe_open:
    """Open a safetensors file, which compares its header with its size.

    Args:
        framework: Framework of the returned tensors, as in ``safetensors.safe_open``.

    Raises:
        WeightFileError: The file cannot be read, or is damaged.
    """
    try:
        return safe_open(path, framework=framework)
    except OSError as error:
        raise _unreadable(path, error) from error
    except SafetensorError as error:
        raise _damage(path, error) from error


def find_damaged_weights(folder: Path) -> WeightFileError | None:
    """Return the error of a missing or damaged weight file of a model folder, None if all are intact.

    Only headers and sizes are read, which takes milliseconds for a checkpoint of any size. A changed byte inside a
    tensor is not detected. ``*.bin`` files are checked only if there is no safetensors file, and only for size 0.
    """
    try:
        paths = weight_files(folder)
        for path in paths:
            with open_weights(path):
                pass
    except WeightFileError as error:
        return error
    bins = [] if paths else sorted(folder.glob("*.bin"))
    return next((damage for path in bins if (damage := _find_unreadable(path))), None)


def _unreadable(path: Path, error: OSError) -> WeightFileError:
    return WeightFileError(f"{path} cannot be read: {error.strerror or error}", path=path)


def _empty(path: Path) -> WeightFileError:
    return WeightFileError(f"{path} is empty (0 bytes)", path=path, remedy=_REPAIR)


def _damage(path: Path, error: SafetensorError) -> WeightFileError:
    n_bytes = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
    if n_bytes == 0:
        return _empty(path)
    if start == _LFS_POINTER:
        return WeightFileError(
            f"{path} is a Git LFS pointer of {n_bytes} bytes, not the weights",
            path=path,
            remedy="run `git lfs pull` in its folder",
        )
    return WeightFileError(
        f"{path} is damaged: its {n_bytes} bytes cannot be read as safetensors: {error}", path=path, remedy=_REPAIR
    )


def _find_unreadable(path: Path) -> WeightFileError | None:
    try:
        with path.open("rb") as file:
            return None if file.read(1) else _empty(path)
    except OSError as error:
        return _unreadable(path, error)

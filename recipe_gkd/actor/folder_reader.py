"""Reading of parts of the tensors in a model folder, so that each rank reads its own shards only."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Self

from safetensors import safe_open
from torch import Tensor

from recipe_gkd.errors import ModelError
from teacher.common.weight_files import INDEX_NAME, WeightFileError, open_weights, read_index


class FolderReader:
    """Reader of tensor slices from one safetensors file, or from several files with an index; a context manager.

    A file is opened when it is needed for the first time.
    """

    def __init__(self, folder: Path) -> None:
        self._folder, self._stack = folder, ExitStack()
        self._open: dict[str, safe_open] = {}
        single = folder / "model.safetensors"
        try:
            file_of = read_index(folder)
        except WeightFileError as error:
            raise ModelError(str(error), path=folder / INDEX_NAME) from error
        if file_of is None:
            if not single.is_file():
                raise ModelError(
                    f"no {single.name} or {INDEX_NAME} in {folder}",
                    remedy="save the model in that format (save_pretrained does)",
                    path=folder,
                )
            file_of = dict.fromkeys(self._handle(single.name).keys(), single.name)
        self._file_of = file_of

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each tensor by its name. Reads headers only."""
        return {name: self._shape(name) for name in self._file_of}

    def expect(self, name: str, size: tuple[int, ...]) -> None:
        """Check that a tensor exists with a shape.

        Raises:
            ModelError: It is missing or has another shape.
        """
        if name not in self._file_of:
            raise ModelError(
                f"{self._folder}: there is no tensor {name}, expected according to config.json",
                path=self._folder,
                names=(name,),
            )
        if (shape := self._shape(name)) != size:
            raise ModelError(
                f"{self._folder}: tensor {name} has shape {shape}, expected {size} according to config.json",
                path=self._folder / self._file_of[name],
                names=(name,),
            )

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        """Return a slice of a tensor; all of it for ``()``. Reads no other data."""
        return self._handle(self._file_of[name]).get_slice(name)[index or ...]

    def _shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._handle(self._file_of[name]).get_slice(name).get_shape())

    def _handle(self, file: str) -> safe_open:
        if file not in self._open:
            try:
                self._open[file] = self._stack.enter_context(open_weights(self._folder / file, framework="pt"))
            except WeightFileError as error:
                raise ModelError(str(error), path=self._folder / file) from error
        return self._open[file]

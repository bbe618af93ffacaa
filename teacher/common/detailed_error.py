"""Base class of all errors that this project raises deliberately: the data of a failure, rendered in one place."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self


@dataclass(eq=False, repr=False)
class DetailedError(Exception):
    """Error that carries its data as attributes. ``str()`` renders it; no other code reads the rendered text.

    Subclasses are dataclasses with further keyword-only fields, all with a default. Errors can be pickled with all
    their fields. ::

        raise ConfigError("got 0, expected at least 1", keys=("trainer.total_epochs",), remedy="set a larger number")
        raise error.located(phase="update", worker="actor worker 1 of 2") from error

    Attributes:
        what: Received and expected values, as a clause without a full stop.
        remedy: What the user can do, as an imperative clause. Empty if nothing can be done.
        phase: Phase of the run or of an operation, such as ``weight sync v3, begin``.
        worker: Label of the process that failed, such as ``rollout worker 1 of 2``.
        details: Further lines, such as the memory in use.
        diagnosis: Folder with the state of all workers at the time of the error.
    """

    what: str = ""
    remedy: str = field(default="", kw_only=True)
    phase: str = field(default="", kw_only=True)
    worker: str = field(default="", kw_only=True)
    details: tuple[str, ...] = field(default=(), kw_only=True)
    diagnosis: Path | None = field(default=None, kw_only=True)

    def __str__(self) -> str:
        """Return ``phase: worker: what; remedy``, a line for each of ``details``, and the folder of the diagnosis."""
        diagnosis = [f"diagnosis: {self.diagnosis}"] if self.diagnosis else []
        text = f"{self.summary}; {self.remedy}" if self.remedy else self.summary
        return "\n".join([text, *self.details, *diagnosis])

    @property
    def summary(self) -> str:
        """The text without the remedy and further lines."""
        return ": ".join(part for part in (*self._places(), self.what) if part)

    def _places(self) -> tuple[str, ...]:
        """Return the parts of the text before ``what``, from the outermost. Empty parts are left out."""
        return self.phase, self.worker

    def __repr__(self) -> str:
        """Return the class and the rendered text."""
        return f"{type(self).__name__}({str(self)!r})"

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        """Pickle the class and all attributes."""
        return _restore, (type(self), dict(self.__dict__))

    def located(self, *, phase: str = "", worker: str = "") -> Self:
        """Return a copy with a phase and a worker, where this error has none. The cause is the same."""
        return self.replaced(phase=self.phase or phase, worker=self.worker or worker)

    def replaced(self, **fields: Any) -> Self:
        """Return a copy with other values of some fields. The cause is the same."""
        changed = copy.copy(self)
        for name, value in fields.items():
            if not hasattr(changed, name):
                raise TypeError(f"{type(self).__name__} has no field {name!r}")
            setattr(changed, name, value)
        changed.__cause__, changed.__suppress_context__ = self.__cause__, self.__suppress_context__
        return changed


def _restore(kind: type[DetailedError], attributes: dict[str, Any]) -> DetailedError:
    error = kind.__new__(kind, attributes.get("what", ""))
    error.__dict__.update(attributes)
    return error

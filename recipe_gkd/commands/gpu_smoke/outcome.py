"""Result of a check, and what a check function receives and raises."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

Status = Literal["passed", "FAILED", "not possible here"]


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Result of a check.

    Attributes:
        status: Result.
        detail: What was compared, or the reason of a failure or of a check that is not possible.
        seconds: Duration of its process.
        figures: Measured values.
    """

    name: str
    status: Status
    detail: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as a dict."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True)
class Context:
    """Arguments of a check function.

    Attributes:
        device: ``"cuda"`` or ``"cpu"``.
        n_gpus: Number of GPUs that this process sees; 0 on a CPU.
        folder: Empty folder for its files.
        deadline_s: Time after which the process is ended.
        figures: Measured values, filled by the check. They are reported after a failure, too.
    """

    device: str
    n_gpus: int
    folder: Path
    deadline_s: float
    figures: dict[str, Any] = field(default_factory=dict)

    def compare(self, name: str, found: float, limit: float) -> None:
        """Record a measured error, and raise if it is not below its limit.

        Args:
            name: Name of the figure. The largest error of a name is recorded.
            found: Measured error. NaN fails.
            limit: Largest accepted error.

        Raises:
            CheckFailed: ``found`` is above ``limit``, or NaN.
        """
        self.figures[name] = max(found, self.figures.get(name, found))  # NaN, the first argument, stays
        if not found <= limit:
            raise CheckFailed(f"{name}: got an error of {found:.3g}, expected at most {limit:g}")


class CheckFailed(Exception):
    """Wrong result on this machine. The message contains the result and the expected one."""

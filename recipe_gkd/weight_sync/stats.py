"""What one end of an update measured."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TransferStats:
    seconds: float
    """From the moment all ends were ready to the moment all had everything."""
    n_bytes: int
    checksum: str

    @property
    def megabytes(self) -> float:
        return self.n_bytes / 1e6

    @property
    def mb_per_s(self) -> float:
        return self.megabytes / max(self.seconds, 1e-9)

"""Statistics of one transfer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class TransferStats:
    """Measurements of one rank during one update.

    Attributes:
        seconds: Time from the moment all ranks were ready until all had confirmed the checksum.
        n_bytes: Size of the buckets.
        checksum: Checksum of the buckets, 16 hexadecimal digits.
    """

    seconds: float
    n_bytes: int
    checksum: str

    @property
    def megabytes(self) -> float:
        """Size of the buckets, in 10^6 bytes."""
        return self.n_bytes / 1e6

    @property
    def mb_per_s(self) -> float:
        """Throughput, in 10^6 bytes per second."""
        return self.megabytes / max(self.seconds, 1e-9)


@dataclass(frozen=True, kw_only=True)
class ReceivedUpdate(TransferStats):
    """Measurements of a receiver.

    Attributes:
        double_buffered: True if all buckets were kept until the commit; False if they were loaded as they arrived.
    """

    double_buffered: bool

"""Timeouts that carry the name of the configuration key that sets them, for messages."""

from __future__ import annotations


class KeyedTimeout(float):
    """A timeout in seconds: a multiple of the value of a configuration key, plus a margin.

    It is passed like any other ``timeout_s``. Arithmetic gives a plain float, so use :func:`with_margin` to keep the
    key.

    Attributes:
        key: Full name of the configuration key.
        margin_s: Part of the value that is not part of the key, such as the time by which the driver's deadline is
            later than the worker's.
        factor: Multiple of the key's value, such as the number of batches.
    """

    key: str
    margin_s: float
    factor: int

    def __new__(cls, seconds: float, key: str, margin_s: float = 0.0, *, factor: int = 1) -> KeyedTimeout:
        """Return ``factor`` times ``seconds``, which is the value of a key, plus a margin."""
        timeout = super().__new__(cls, factor * seconds + margin_s)
        timeout.key, timeout.margin_s, timeout.factor = key, margin_s, factor
        return timeout

    @property
    def without_margin_s(self) -> float:
        """The timeout without its margin."""
        return self - self.margin_s

    @property
    def origin(self) -> str:
        """Key and factor, for messages."""
        return self.key if self.factor == 1 else f"{self.factor} x {self.key}"

    def __reduce__(self) -> tuple[type[float], tuple[float]]:
        """Pickle a plain float: other processes do not report the key."""
        return float, (float(self),)


def with_margin(timeout_s: float, margin_s: float) -> float:
    """Return a timeout that is longer by ``margin_s``, with the same key if it has one."""
    if isinstance(timeout_s, KeyedTimeout):
        seconds = timeout_s.without_margin_s / timeout_s.factor
        return KeyedTimeout(seconds, timeout_s.key, timeout_s.margin_s + margin_s, factor=timeout_s.factor)
    return timeout_s + margin_s


def key_of(timeout_s: float | None) -> str:
    """Return the key that sets a timeout, empty if it is not configurable."""
    return timeout_s.key if isinstance(timeout_s, KeyedTimeout) else ""


def raise_hint(timeout_s: float, otherwise: str) -> str:
    """Return the clause ``raise KEY`` for an error about a missed deadline, or ``otherwise`` without a key."""
    return f"raise {key}" if (key := key_of(timeout_s)) else otherwise

"""What a running service says about itself: to `python -m teacher status`, to /healthz and to /metrics.

Ages and durations are in seconds; totals count since the proxy started.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any, TypeVar

from teacher.errors import TeacherProtocolError


@dataclass(frozen=True, kw_only=True)
class WorkerStatus:
    """One worker, as the proxy sees it."""

    name: str
    """Host and pid."""
    joined_s: float
    """How long it has been here."""
    heard_s: float
    """Since its last message."""
    requests: int
    """In flight."""
    tokens: int
    """In flight."""
    capacity_tokens: int
    tokens_per_second: float
    """Scored in the last half minute, over that time."""
    busy_share: float
    """Of that time, spent in engine steps."""
    scored_sequences: int
    scored_tokens: int


@dataclass(frozen=True, kw_only=True)
class ClientStatus:
    """One client that waits for something, or did in the last minute."""

    name: str
    waiting_requests: int
    """Not yet given to a worker."""
    waiting_tokens: int
    running_requests: int
    oldest_s: float
    """Age of its oldest request; 0 without one."""
    answered_tokens: int


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Requests by what became of them. A sum of seconds, over a number of requests, is their mean."""

    answered: int = 0
    answered_sequences: int = 0
    answered_tokens: int = 0
    answered_bytes: int = 0
    refused: int = 0
    """By the worker: this request cannot be scored."""
    expired: int = 0
    """Their deadline passed."""
    given_up: int = 0
    """Lost with several workers."""
    cancelled: int = 0
    """Their client cancelled them, or is gone."""
    put_off: int = 0
    """Sent back to the client because the queue was full."""
    repeated: int = 0
    """Given to a worker once more, because the one that had it was lost."""
    workers_lost: int = 0
    """Died, hung, or were silent; not those that left."""
    invalid_messages: int = 0
    """From peers that do not keep to the protocol."""
    waited_seconds: float = 0.0
    """Of answered requests, from the proxy to a worker."""
    scored_seconds: float = 0.0
    """Of answered requests, from the worker's getting them to its answer."""


@dataclass(frozen=True, kw_only=True)
class ServiceStatus:
    model_name: str
    """Empty while there is no worker."""
    n_logprobs: int
    protocol_version: int
    uptime_s: float
    draining: bool
    """The proxy was told to stop: it finishes what is in flight and takes nothing new."""
    queue_requests: int
    queue_tokens: int
    queue_oldest_s: float
    max_queue_tokens: int
    tokens_per_second: float
    """Of all workers."""
    last_loss: str
    """Reason why the last lost worker was lost; "none has registered yet" before the first one."""
    workers: tuple[WorkerStatus, ...]
    clients: tuple[ClientStatus, ...]
    totals: Totals

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> ServiceStatus:
        """Raises: TeacherProtocolError if `values` is not what `to_dict` made."""
        checked = _checked(cls, values)
        return cls(
            **{
                **checked,
                "workers": tuple(_record(WorkerStatus, item) for item in _list(checked["workers"])),
                "clients": tuple(_record(ClientStatus, item) for item in _list(checked["clients"])),
                "totals": _record(Totals, checked["totals"]),
            }
        )


_Record = TypeVar("_Record")
_TYPES: dict[str, tuple[type, ...]] = {"str": (str,), "int": (int,), "float": (int, float), "bool": (bool,)}


def _record(kind: type[_Record], values: Any) -> _Record:
    return kind(**_checked(kind, values))


def _checked(kind: Any, values: Any) -> dict[str, Any]:
    names = {field.name: field.type for field in fields(kind)}
    if not isinstance(values, dict) or set(values) != set(names):
        raise TeacherProtocolError(f"a {kind.__name__} has the keys {sorted(names)}, got {values!r:.120}")
    for name, value in values.items():
        expected = _TYPES.get(str(names[name]))  # the annotations, which are texts in this module
        if expected is not None and not isinstance(value, expected):
            raise TeacherProtocolError(f"{name} of a {kind.__name__} is a {names[name]}, got {value!r:.120}")
    return values


def _list(values: Any) -> list[Any]:
    if not isinstance(values, list | tuple):
        raise TeacherProtocolError(f"expected a list, got {values!r:.120}")
    return list(values)

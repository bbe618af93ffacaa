"""Errors between a client and the teacher service, as data: received and expected value, place and remedy."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from teacher.common.detailed_error import DetailedError


@dataclass(eq=False, repr=False)
class TeacherError(DetailedError):
    """Base class of all errors of the teacher service and its client.

    Attributes:
        operation: Call that failed, such as ``scoring 8 sequences`` or ``hello``.
        address: Address of the service, such as ``tcp://127.0.0.1:15555``. The text has it with ``operation``.
        workers: Names of the service's workers, if the failure concerns single ones. The text has them in ``what``.
        options: Names of the options, environment variables or configuration keys that can be changed.
        teacher: Name of the teacher in the run. Empty outside of a run.
        step: Training step of the request.
        samples: Uids of the samples of the request.
        sequence: Position of the sequence that was refused, or has an invalid result, in its request, starting at 0.
        uid: Uid of the sample of that sequence. The text has it instead of the position.
    """

    operation: str = field(default="", kw_only=True)
    address: str = field(default="", kw_only=True)
    workers: tuple[str, ...] = field(default=(), kw_only=True)
    options: tuple[str, ...] = field(default=(), kw_only=True)
    teacher: str = field(default="", kw_only=True)
    step: int | None = field(default=None, kw_only=True)
    samples: tuple[int, ...] = field(default=(), kw_only=True)
    sequence: int | None = field(default=None, kw_only=True)
    uid: int | None = field(default=None, kw_only=True)

    def _places(self) -> tuple[str, ...]:
        step = "" if self.step is None else f"step {self.step}"
        uids = f", {len(self.samples)} samples ({', '.join(map(str, self.samples))})" if self.samples else ""
        teacher = f"teacher {self.teacher}{uids}" if self.teacher else ""
        sequence = "" if self.sequence is None else f"sequence {self.sequence}"
        sequence = sequence if self.uid is None else f"sample {self.uid}"
        return self.phase, step, teacher, self._operation(), self.worker, sequence

    def _operation(self) -> str:
        return f"{self.operation} at {self.address}" if self.operation and self.address else self.operation


@dataclass(eq=False, repr=False)
class TeacherSetupError(TeacherError):
    """Option, file or folder with which a service, a worker or a client cannot start.

    Attributes:
        path: The file or folder.
    """

    path: Path | None = field(default=None, kw_only=True)


@dataclass(eq=False, repr=False)
class TeacherClosed(TeacherError):
    """The client was closed, or failed, before the call ended; or it belongs to another process."""


@dataclass(eq=False, repr=False)
class TeacherOutOfMemory(TeacherError):
    """A device of a worker, or its host, has no memory left. ``phase`` is the engine's.

    Attributes:
        sizes: Sizes in bytes of the worker's largest allocations by name, as far as they are known.
    """

    sizes: Mapping[str, int] = field(default_factory=dict, kw_only=True)


@dataclass(eq=False, repr=False)
class TeacherModelDamaged(TeacherError):
    """The model of a worker is not the same after its wake-up.

    Attributes:
        tensors: Weights whose checksums differ, such as ``lm_head.weight of rank 0``.
    """

    tensors: tuple[str, ...] = field(default=(), kw_only=True)


@dataclass(eq=False, repr=False)
class TeacherChanged(TeacherError):
    """The service serves another model than the one that this client connected to with ``hello``."""


@dataclass(eq=False, repr=False)
class TeacherTimeout(TeacherError, TimeoutError):
    """The service is connected but did not finish a request before its deadline.

    Attributes:
        stage: Stage of the request at its deadline: ``deferred`` by a full or stopping service, ``queued`` for a
            worker, ``scoring`` in a worker, ``finishing`` if a request to sleep waited for others, ``changing`` if
            workers did not fall asleep or wake up, ``sent`` if the service did not reply. For a user's backend, the
            method that did not return.
    """

    stage: str = field(default="", kw_only=True)


@dataclass(eq=False, repr=False)
class TeacherProtocolError(TeacherError):
    """The received bytes are not a valid message of this protocol version, or a result has a wrong shape.

    Attributes:
        entry: Name of the header entry, record field or array that is invalid.
        peer_version: Protocol version of the sender, if it is another one.
    """

    entry: str = field(default="", kw_only=True)
    peer_version: int | None = field(default=None, kw_only=True)


@dataclass(eq=False, repr=False)
class TeacherRequestError(TeacherError):
    """One request was refused or failed. Other requests are not affected, and the service continues.

    Attributes:
        argument: Name of the invalid argument, such as ``temperature`` or ``prompt_len``.
        n_losses: Number of workers that were lost while they had the request.
    """

    argument: str = field(default="", kw_only=True)
    n_losses: int | None = field(default=None, kw_only=True)


@dataclass(eq=False, repr=False)
class TeacherUnavailable(TeacherError):
    """There is no service at the address, it refuses this client, it has no worker, or a worker failed."""


@dataclass(eq=False, repr=False)
class TeacherUnreachable(TeacherUnavailable):
    """There is no connection to the service: nothing listens at ``address``, or the service refuses this client.

    Attributes:
        refusal: ``key`` if the service does not allow the client's key, ``mechanism`` if only one side uses keys,
            ``handshake`` if it ended the connection early. Empty if nothing listens.
        auth_dir: Folder of the client's keys. None for a client without keys.
    """

    refusal: str = field(default="", kw_only=True)
    auth_dir: Path | None = field(default=None, kw_only=True)

    def _operation(self) -> str:
        return self.operation  # `what` has the address


@dataclass(eq=False, repr=False)
class TeacherWithoutWorker(TeacherUnavailable):
    """The service has no worker."""


@dataclass(eq=False, repr=False)
class TeacherAsleep(TeacherUnavailable):
    """The workers of the service have released their devices. They score again after a wake-up."""


def short(value: object) -> str:
    """Return a value's representation in at most 120 characters, for error messages."""
    try:
        shown = str(value) if isinstance(value, Exception) else repr(value)
    except RecursionError:  # msgpack allows deeper nesting than the remaining Python stack
        shown = f"a deeply nested {type(value).__name__}"
    return shown if len(shown) <= 120 else shown[:117] + "..."

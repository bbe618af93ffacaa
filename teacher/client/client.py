"""Synchronous client of the teacher service: concurrent calls over one connection, each with its own deadline."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import ClassVar, TypedDict

import numpy as np

from teacher.client.calls import ProxyCall
from teacher.client.chunks import ScoreCall
from teacher.client.io_thread import ClientIOThread
from teacher.errors import TeacherRequestError
from teacher.records import LogitSettings, ScoredSequence, TeacherInfo, TeacherSequence
from teacher.status import ServiceStatus
from teacher.wire.auth import ClientKeys, client_keys, is_loopback
from teacher.wire.connection import CLIENT, Connection, PeerRole
from teacher.wire.limits import LIMITS, WireDtype
from teacher.wire.messages import AsleepSet, Hello, Info, SetAsleep, Status, StatusRequest
from teacher.wire.request_checks import check_top_k, check_wire_dtype
from teacher.wire.sockets import FRONTEND_PORT

DEFAULT_TIMEOUT_S = 600.0
STATUS_TIMEOUT_S = 10.0


class ClientOptions(TypedDict, total=False):
    """Keyword arguments of `TeacherClient` and `AsyncTeacherClient`. See `TeacherClient.__init__`."""

    timeout_s: float
    auth_dir: str | Path | ClientKeys | None
    top_k: int | None
    wire_dtype: WireDtype
    n_connections: int


MAX_CONNECTIONS = 64


@dataclass(frozen=True)
class ClientSpec:
    """Description of a client that can be sent to another process. It contains the client's secret key.

    Attributes:
        server_ip: Host name or IP address of the service.
        server_port: Frontend port of the service.
        options: Options of the client, with its keys instead of their folder.
        model: The only model that the client accepts, None for any.
        n_ids: See `TeacherClient.restrict_ids`.
    """

    server_ip: str
    server_port: int
    options: ClientOptions
    model: TeacherInfo | None = None
    n_ids: int = 0

    @property
    def is_loopback(self) -> bool:
        """True if only processes of the service's own machine can reach it."""
        return is_loopback(self.server_ip)

    @property
    def n_columns(self) -> int:
        """Size of the top k of one position. An unknown one counts as 1."""
        return self.options.get("top_k") or (1 if self.model is None else self.model.n_logprobs)

    @property
    def entry_bytes(self) -> int:
        """Bytes of an id with its log-probability."""
        return np.dtype(np.int32).itemsize + np.dtype(self.options.get("wire_dtype", "float32")).itemsize

    def open(self) -> TeacherClient:
        """Return a new client that fits this description."""
        client = TeacherClient(self.server_ip, self.server_port, **self.options)
        client.restrict_ids(self.n_ids)
        client._model = self.model
        return client


class TeacherClient:
    """Thread-safe client of one teacher service.

    If the service restarts, or is full for a while, requests wait for it until their deadline. The client cannot be
    used in a forked child process, because its I/O thread stays in the parent. Create a new client there.

    Example::

        with TeacherClient("10.0.0.1", timeout_s=60) as client:
            info = client.hello()               # optional: pin the model
            future = client.submit(sequences)   # returns at once
            scored = future.result()            # at most 60 s later

    Attributes:
        address: ZeroMQ address of the service, such as ``tcp://10.0.0.1:15555``.
        n_ids: Number of ids that have a probability, 0 for all; see :meth:`restrict_ids`.
    """

    _role: ClassVar[PeerRole] = CLIENT

    def __init__(
        self,
        server_ip: str = "127.0.0.1",
        server_port: int = FRONTEND_PORT,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        auth_dir: str | Path | ClientKeys | None = None,
        top_k: int | None = None,
        wire_dtype: WireDtype = "float32",
        n_connections: int = 1,
    ) -> None:
        """Start to connect in the background.

        A missing service is reported by the first request, at its deadline. A rejected key is logged at once and
        reported by the first request as well: the service may be restarted with other keys before the deadline.

        Args:
            server_ip: Host name or IP address of the service.
            server_port: Frontend port of the service.
            timeout_s: Default time limit of a call, in seconds.
            auth_dir: Folder with the client's keys, or the keys. Required if the service uses keys.
            top_k: Number of log-probabilities per position, or None for all that the teacher returns.
            wire_dtype: Type of the log-probabilities on the wire. ``float16`` saves a quarter of the bytes (ids stay
                int32) and has a relative error of at most 2^-11.
            n_connections: Number of connections, over which calls are distributed in turn. Each has its own threads
                for encryption and decoding. The service counts and schedules each as a client.

        Raises:
            TeacherError: The address is malformed, keys are missing, or an argument is out of range.
        """
        self._timeout_s = _check_timeout_s(timeout_s)
        check_top_k(top_k)
        self._top_k, self._wire_dtype = top_k, check_wire_dtype(wire_dtype)
        self._model: TeacherInfo | None = None
        self.n_ids = 0
        if not 1 <= n_connections <= MAX_CONNECTIONS:
            raise TeacherRequestError(
                f"n_connections must be 1 to {MAX_CONNECTIONS}, got {n_connections!r}", argument="n_connections"
            )
        keys = client_keys(auth_dir)
        self._options = ClientOptions(
            timeout_s=timeout_s, auth_dir=keys, top_k=top_k, wire_dtype=wire_dtype, n_connections=n_connections
        )
        self._server = server_ip, server_port
        self._io_threads: list[ClientIOThread] = []
        try:
            for _ in range(n_connections):
                self._io_threads.append(ClientIOThread(Connection(self._role, server_ip, server_port, keys)))
        except BaseException:
            self.close()
            raise
        self._next_io_thread = itertools.cycle(self._io_threads)
        self.address = self._io_threads[0].address

    def __enter__(self) -> TeacherClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def hello(self, timeout_s: float | None = None) -> TeacherInfo:
        """Return the model and limits of the service. Wait for its first worker if there is none.

        From then on the client accepts only this model. If the service is restarted with another one, requests fail
        with `TeacherChanged`.

        Args:
            timeout_s: Time limit in seconds, or None for the client's default.

        Raises:
            TeacherUnavailable: The service cannot be reached, or has no worker, within ``timeout_s``.
            TeacherTimeout: The connection was accepted, but no reply came within ``timeout_s``.
        """
        return self.submit_hello(timeout_s).result()  # bounded: the I/O thread resolves each future at its deadline

    def status(self, timeout_s: float = STATUS_TIMEOUT_S) -> ServiceStatus:
        """Return workers, queue, clients and totals of the service, without waiting for a worker.

        Raises:
            TeacherUnavailable: The service cannot be reached within ``timeout_s``.
            TeacherTimeout: The connection was accepted, but no reply came within ``timeout_s``.
        """
        return self.submit_status(timeout_s).result()

    def sleep(self, timeout_s: float | None = None) -> int:
        """Let all workers of the service release the memory of their devices, and return the number of workers.

        Open requests of all clients are finished first. From now on new requests fail with `TeacherUnavailable`,
        until `wake`.

        Args:
            timeout_s: Time limit in seconds, or None for the client's default.

        Raises:
            TeacherRequestError: A worker was started without its sleep mode. All workers stay awake.
            TeacherTimeout: Requests were open until the deadline, and the service stays awake; or workers did not
                release their memory in time; ``workers`` of the error has their names.
            TeacherUnavailable: The service cannot be reached, a worker failed, or another client woke it.
        """
        return self.submit_sleep(timeout_s).result()

    def wake(self, timeout_s: float | None = None) -> int:
        """Let all workers restore and verify their models, and return the number of workers.

        Without a worker it waits for one.

        Args:
            timeout_s: Time limit in seconds, or None for the client's default.

        Raises:
            TeacherUnavailable: A worker failed, for example because its model is not the same as before. It has ended;
                the other workers serve. Or the service has no worker, or cannot be reached.
            TeacherTimeout: Workers did not restore their models in time. ``workers`` of the error has their names.
        """
        return self.submit_wake(timeout_s).result()

    def submit(
        self,
        sequences: Sequence[TeacherSequence],
        timeout_s: float | None = None,
        *,
        temperature: float = 1.0,
        as_float32: bool = True,
    ) -> Future[list[ScoredSequence]]:
        """Request the teacher's distributions, ``log_softmax(logits / temperature)``, of up to 4096 sequences.

        The sequences travel in chunks of `chunks.CHUNK_TOKENS` tokens, so that the service can balance them over its
        workers. If a chunk fails, the call fails with the error of that chunk. A worker scores one temperature and
        vocabulary at a time: a request with others waits until the worker has finished the earlier requests.

        ``cancel()`` has an effect until the result has arrived. The service then drops the sequences that are not
        scored yet.

        Args:
            sequences: Sequences to score. Their token ids may be plain lists, or arrays of any integer type.
            timeout_s: Time limit in seconds, or None for the client's default.
            temperature: Divisor of the logits.
            as_float32: Convert the log-probabilities to float32. Otherwise they have the client's ``wire_dtype``.

        Returns:
            Future of the scored sequences, in the order of ``sequences``. Its callbacks run in the I/O thread and must
            be short. It fails with `TeacherRequestError` (this request is invalid), `TeacherTimeout`,
            `TeacherUnavailable`, `TeacherChanged` or `TeacherProtocolError`.

        Raises:
            TeacherClosed: The client is closed or belongs to another process.
        """
        try:
            call = ScoreCall(
                sequences,
                self._resolve_timeout_s(timeout_s),
                logits=LogitSettings(temperature, self.n_ids),
                top_k=self._top_k,
                wire_dtype=self._wire_dtype,
                model=self._model,
                as_float32=as_float32,
            )
        except TeacherRequestError as error:
            failed: Future[list[ScoredSequence]] = Future()
            failed.set_exception(error)
            return failed
        next(self._next_io_thread).start(call)
        return call.future

    def restrict_ids(self, n_ids: int) -> None:
        """Exclude the ids from ``n_ids`` on from the distributions of all further requests.

        The logits of these ids are excluded before the softmax, so that the log-probabilities are as of a model without
        them. Use it for a student whose vocabulary is the first part of the teacher's. The service refuses requests
        with an excluded id, and ``n_ids`` outside of its range.

        Args:
            n_ids: Number of ids that have a probability, from 0 on. 0: all ids of the teacher's tokenizer.
        """
        self.n_ids = n_ids

    def spec(self) -> ClientSpec:
        """Return what another process needs to open an equal client.

        That client is restricted to the same ids, and accepts only the model of this client's `hello`, if it was
        called. The model's last tokens, 100 kB, are left out: no client compares them.
        """
        model = None if self._model is None else replace(self._model, last_tokens=())
        return ClientSpec(*self._server, self._options, model=model, n_ids=self.n_ids)

    def submit_hello(self, timeout_s: float | None = None) -> Future[TeacherInfo]:
        """Return the future of `hello`.

        Raises:
            TeacherError: The timeout is out of range, or the client is closed.
        """
        call = ProxyCall("hello", self._resolve_timeout_s(timeout_s), Hello, Info, self._set_model)
        self._io_threads[0].start(call)
        return call.future

    def submit_status(self, timeout_s: float = STATUS_TIMEOUT_S) -> Future[ServiceStatus]:
        """Return the future of `status`.

        Raises:
            TeacherError: The timeout is out of range, or the client is closed.
        """
        call = ProxyCall("status", _check_timeout_s(timeout_s), StatusRequest, Status, lambda reply: reply.status)
        self._io_threads[0].start(call)
        return call.future

    def submit_sleep(self, timeout_s: float | None = None) -> Future[int]:
        """Return the future of `sleep`.

        Raises:
            TeacherError: The timeout is out of range, or the client is closed.
        """
        return self._set_asleep("sleep", timeout_s, asleep=True)

    def submit_wake(self, timeout_s: float | None = None) -> Future[int]:
        """Return the future of `wake`.

        Raises:
            TeacherError: The timeout is out of range, or the client is closed.
        """
        return self._set_asleep("wake-up", timeout_s, asleep=False)

    def _set_asleep(self, description: str, timeout_s: float | None, *, asleep: bool) -> Future[int]:
        request = functools.partial(SetAsleep, asleep=asleep)
        call = ProxyCall(
            description, self._resolve_timeout_s(timeout_s), request, AsleepSet, lambda reply: int(reply.n_workers)
        )
        self._io_threads[0].start(call)
        return call.future

    def close(self) -> None:
        """Fail the open calls, cancel them at the service, and free the sockets. Further calls have no effect."""
        for io_thread in self._io_threads:
            io_thread.close()

    def _set_model(self, reply: Info) -> TeacherInfo:
        self._model = reply.info
        return reply.info

    def _resolve_timeout_s(self, timeout_s: float | None) -> float:
        return self._timeout_s if timeout_s is None else _check_timeout_s(timeout_s)


def _check_timeout_s(timeout_s: float) -> float:
    if not 0 < timeout_s <= LIMITS.timeout_s:
        raise TeacherRequestError(
            f"timeout_s must be above 0 and at most {LIMITS.timeout_s:.0f}, got {timeout_s!r}", argument="timeout_s"
        )
    return float(timeout_s)

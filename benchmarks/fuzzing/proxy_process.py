"""A real proxy process with arc coverage, and the peers that talk to it."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zmq
from teacher_processes import free_port

from fuzzing import seeds
from fuzzing.coverage import SharedCount
from fuzzing.engine import EndSignal, PreparedEngine
from fuzzing.memory import resident_bytes
from fuzzing.targets import Defect, Hang
from teacher.errors import TeacherProtocolError
from teacher.wire import protocol
from teacher.wire.messages import (
    AsleepSet,
    Cancel,
    Failure,
    Message,
    Probe,
    Score,
    ScoreReply,
    SetAsleep,
    Status,
    StatusRequest,
)
from teacher.worker import Worker

_BENCHMARKS = Path(__file__).resolve().parents[1]
_START_TIMEOUT_S = 60.0
_ANSWER_TIMEOUT_S = 10.0
_MAX_QUEUE_TOKENS = 100_000
_VALID_ID = 1 << 50


class Peer:
    """DEALER socket that sends any frames and receives decoded messages."""

    def __init__(self, port: int) -> None:
        """Connect to a port of a proxy."""
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.connect(f"tcp://127.0.0.1:{port}")

    def send(self, frames: list[Any]) -> None:
        """Send frames."""
        self._socket.send_multipart(frames)

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message that is no probe, None if there is none before the timeout.

        Raises:
            Defect: The proxy sent a message that its receiver refuses.
        """
        deadline = time.monotonic() + timeout_s
        while self._socket.poll(int(1000 * max(0.0, deadline - time.monotonic()))):
            try:
                message = protocol.decode(self._socket.recv_multipart())
            except TeacherProtocolError as error:
                raise Defect(f"the proxy sent a message that its receiver refuses: {str(error)[:60]}") from error
            if not isinstance(message, Probe):
                return message
        return None

    def wait_for(self, is_expected: Callable[[Message], bool], timeout_s: float) -> tuple[Message, list[Message]]:
        """Return the first expected message, and the messages before it.

        Raises:
            Hang: There is none.
        """
        others: list[Message] = []
        deadline = time.monotonic() + timeout_s
        while (message := self.receive(deadline - time.monotonic())) is not None:
            if is_expected(message):
                return message, others
            others.append(message)
        raise Hang(f"no answer within {timeout_s:g} s")

    def close(self) -> None:
        """Close the socket."""
        self._context.destroy(linger=0)


class ProxyProcess:
    """A proxy started by its command, in a temporary folder.

    Attributes:
        port: Port for clients.
        backend_port: Port for workers.
        http_port: Port of the HTTP endpoint.
    """

    def __init__(self) -> None:
        """Start the process, and wait until its ports are bound."""
        self._folder = tempfile.TemporaryDirectory(prefix="fuzz-proxy-")
        folder = Path(self._folder.name)
        self.port, self.backend_port, self.http_port = free_port(), free_port(), free_port()
        self._count, self._log = SharedCount(folder / "count"), folder / "proxy.log"
        ready = folder / "ready"
        command = [
            *(sys.executable, "-m", "fuzzing.traced_proxy", str(folder / "count"), "proxy"),
            *("--frontend-port", str(self.port), "--backend-port", str(self.backend_port)),
            *("--http-port", str(self.http_port), "--max-queue-tokens", str(_MAX_QUEUE_TOKENS)),
            *("--ready-file", str(ready), "--end-with-parent", str(os.getpid())),
        ]
        path = os.pathsep.join([str(_BENCHMARKS), str(_BENCHMARKS.parent), os.environ.get("PYTHONPATH", "")])
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(command, stderr=log, stdout=log, env={**os.environ, "PYTHONPATH": path})
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not ready.exists():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the proxy did not start:\n{self.log_tail()}")
            time.sleep(0.02)

    def n_arcs(self) -> int:
        """Return the number of arcs."""
        return self._count.get()

    def resident_bytes(self) -> int:
        """Return the resident memory, 0 after the end of the process."""
        return resident_bytes(self._process.pid)

    def log_tail(self) -> str:
        """Return the end of the log."""
        return self._log.read_text(errors="replace")[-3000:]

    def ensure_alive(self) -> None:
        """Raise a defect with the log's end if the process has ended, or logged a traceback."""
        if (code := self._process.poll()) is not None:
            lines = self.log_tail().strip().splitlines()
            raise Defect(f"the proxy ended with status {code}: {lines[-1] if lines else ''}\n{self.log_tail()}")

    def close(self) -> None:
        """Kill the process."""
        self._process.kill()
        self._process.wait(timeout=_ANSWER_TIMEOUT_S)
        self._folder.cleanup()


class ValidClient:
    """Client that sends valid requests, to show that the proxy still serves."""

    def __init__(self, port: int) -> None:
        """Connect."""
        self._peer = Peer(port)
        self._n_requests = 0

    def _next_id(self) -> int:
        self._n_requests += 1
        return _VALID_ID + self._n_requests

    def status(self) -> Status:
        """Return the status."""
        request_id = self._next_id()
        self._peer.send(protocol.encode(StatusRequest(request_id, 5.0)))
        found, _ = self._peer.wait_for(
            lambda message: getattr(message, "request_id", 0) == request_id, _ANSWER_TIMEOUT_S
        )
        if not isinstance(found, Status):
            raise Defect(f"a status request was answered by {found!r:.200}")
        return found

    def score(self) -> None:
        """Wake up the service, and let it score a request.

        Raises:
            Defect: A reply is an error.
            Hang: There is no reply.
        """
        for frames, kind in (
            (lambda i: protocol.encode(SetAsleep(i, 5.0, asleep=False)), AsleepSet),
            (lambda i: protocol.encode(Score(i, 5.0, seeds.SEQUENCES)), ScoreReply),
        ):
            request_id = self._next_id()
            self._peer.send(frames(request_id))
            found, _ = self._peer.wait_for(
                lambda message, i=request_id: getattr(message, "request_id", 0) == i,  # type: ignore[misc]
                _ANSWER_TIMEOUT_S,
            )
            if not isinstance(found, kind):
                text = str(found.error) if isinstance(found, Failure) else repr(found)
                raise Defect(f"expected {kind.__name__} for a valid request, got {text[:120]}")

    def wake(self) -> None:
        """Send a request to wake up the service. Its reply is dropped."""
        self._peer.send(protocol.encode(SetAsleep(self._next_id(), 60.0, asleep=False)))

    def submit(self) -> int:
        """Send a request, and return its id."""
        request_id = self._next_id()
        self._peer.send(protocol.encode(Score(request_id, 60.0, seeds.SEQUENCES)))
        return request_id

    def cancel(self, request_id: int) -> None:
        """Cancel a request."""
        self._peer.send(protocol.encode(Cancel(request_id)))

    def has_reply(self, request_id: int) -> bool:
        """Drop all received messages. Return True if one of them belongs to the request."""
        found = False
        while (message := self._peer.receive(0.0)) is not None:
            found |= getattr(message, "request_id", 0) == request_id
        return found

    def close(self) -> None:
        """Close the socket."""
        self._peer.close()


class WorkerThread:
    """Real worker in a thread of this process, whose engine returns prepared arrays."""

    def __init__(self, backend_port: int) -> None:
        """Start the worker, and wait for its registration."""
        self._end, registered = EndSignal(), threading.Event()
        worker = Worker(PreparedEngine(), backend_port=backend_port)
        self._thread = threading.Thread(target=lambda: worker.run(self._end, on_registered=registered.set), daemon=True)
        self._thread.start()
        if not registered.wait(_START_TIMEOUT_S):
            raise RuntimeError("the worker did not register")

    def is_alive(self) -> bool:
        """Return True while the worker serves."""
        return self._thread.is_alive()

    def close(self) -> None:
        """End the worker."""
        self._end.set()
        self._thread.join(timeout=_ANSWER_TIMEOUT_S)
        self._end.close()

"""`/healthz` and `/metrics` of a proxy, over plain HTTP: counts and names, no data, and no keys."""

from __future__ import annotations

import io
import json
import logging
import socket
import socketserver
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from types import TracebackType
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, ProcessCollector, generate_latest

from teacher.errors import TeacherError
from teacher.proxy.metrics import StatusCollector, StatusSource
from teacher.status import ServiceStatus

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
_MAX_REQUEST_BYTES = 16 << 10
_MAX_CONNECTIONS = 64
_STUCK_S = 10.0  # the loop looks at itself once a second


class HttpServer:
    """Listens once constructed, on threads of its own, until the context ends."""

    def __init__(
        self, bind: str, port: int, source: StatusSource, *, request_timeout_s: float = REQUEST_TIMEOUT_S
    ) -> None:
        """Args:
            port: 0 for a free one, which `port` then is.
            source: the proxy's latest status and its age in seconds.
            request_timeout_s: a connection that has not sent its request by then is closed.

        Raises: TeacherError if the address cannot be bound.
        """
        registry = CollectorRegistry()
        registry.register(StatusCollector(source))
        ProcessCollector(registry=registry)
        pages = {"/healthz": lambda: _health(source), "/metrics": lambda: _metrics(registry)}
        try:
            self._server = _Server(bind, port, pages, request_timeout_s)
        except (OSError, OverflowError) as error:
            raise TeacherError(
                f"cannot listen on {bind}:{port} for /healthz and /metrics: {error}; choose another port with "
                "--http-port (HTTP_PORT; 0 takes a free one, -1 does without), or correct --http-bind (HTTP_BIND)"
            ) from None
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="teacher-http", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> HttpServer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


Page = tuple[HTTPStatus, str, bytes]


def _health(source: StatusSource) -> Page:
    status, age_s = source()
    reason = _unhealthy(status, age_s)
    body = {
        "status": reason or "ok",
        "model_name": status.model_name,
        "workers": len(status.workers),
        "queue_requests": status.queue_requests,
        "queue_tokens": status.queue_tokens,
        "status_age_s": round(age_s, 3),
    }
    code = HTTPStatus.SERVICE_UNAVAILABLE if reason else HTTPStatus.OK
    return code, "application/json", json.dumps(body).encode() + b"\n"


def _unhealthy(status: ServiceStatus, age_s: float) -> str:
    if age_s > _STUCK_S:
        return f"the proxy's loop has not come round for {age_s:.0f} s: it is stuck"
    if status.draining:
        return "the proxy is going down and takes nothing new"
    if not status.workers:
        return "no worker: requests wait until their deadline; add one with teacher/join_server.sh"
    return ""


def _metrics(registry: CollectorRegistry) -> Page:
    return HTTPStatus.OK, CONTENT_TYPE_LATEST, generate_latest(registry)


class _Server(socketserver.ThreadingTCPServer):
    """Not http.server's: that asks the name service who it is, which can take long."""

    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = _MAX_CONNECTIONS

    def __init__(self, bind: str, port: int, pages: dict[str, Callable[[], Page]], request_timeout_s: float) -> None:
        self.pages, self.request_timeout_s = pages, request_timeout_s
        self._places = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self.address_family = socket.getaddrinfo(bind or "0.0.0.0", port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((bind, port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._places.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._places.release()

    def handle_error(self, request: object, client_address: object) -> None:
        logger.debug("an HTTP connection of %s failed", client_address, exc_info=True)


class _Handler(BaseHTTPRequestHandler):
    """One GET a connection, which is read within a deadline, however slowly its bytes come."""

    server: _Server
    server_version, sys_version = "teacher", ""

    def setup(self) -> None:
        super().setup()
        deadline = time.monotonic() + self.server.request_timeout_s
        self.rfile = io.BufferedReader(_Bounded(self.connection, deadline), 1024)  # type: ignore[type-var]

    def do_GET(self) -> None:
        self.connection.settimeout(self.server.request_timeout_s)  # of the whole answer
        page = self.server.pages.get(self.path.partition("?")[0])
        if page is None:
            self._answer(HTTPStatus.NOT_FOUND, "text/plain", b"there are /healthz and /metrics\n")
            return
        self._answer(*page())

    def _answer(self, code: HTTPStatus, content_type: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        logger.debug("%s %s", self.address_string(), format % args)


class _Bounded(io.RawIOBase):
    """What a connection sends until a deadline, `_MAX_REQUEST_BYTES` at most."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        self._connection, self._deadline, self._n_bytes = connection, deadline, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: bytearray) -> int:  # type: ignore[override]
        remaining_s = self._deadline - time.monotonic()
        if remaining_s <= 0 or self._n_bytes >= _MAX_REQUEST_BYTES:
            raise TimeoutError("the request did not come in time, or is too long")
        self._connection.settimeout(remaining_s)
        n = self._connection.recv_into(buffer)
        self._n_bytes += n
        return n

"""HTTP server for ``/healthz`` and ``/metrics`` of a proxy: counts and names, no request data, no authentication.

The application is WSGI, with prometheus_client's application for ``/metrics``, on wsgiref's server. The limits are code
of this module: neither wsgiref, nor the server of prometheus_client, nor another HTTP server among the dependencies
bounds the total time of a connection, so a client that sends one byte at a time could hold a thread forever.

==================================  ================================================================================
limit                               enforced by
==================================  ================================================================================
``_MAX_CONNECTIONS`` at a time      ``process_request`` closes further connections
``request_timeout_s`` in total      ``service_actions``, called by the server's loop, shuts down older connections
``_MAX_REQUEST_BYTES``              ``_read_request`` closes connections that send more
==================================  ================================================================================
"""

from __future__ import annotations

import io
import json
import logging
import socket
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from http import HTTPStatus
from socketserver import TCPServer, ThreadingMixIn
from types import TracebackType
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer
from wsgiref.types import StartResponse, WSGIApplication, WSGIEnvironment

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.exposition import choose_encoder

from teacher.errors import TeacherSetupError
from teacher.proxy.metrics import StatusCollector, StatusSource
from teacher.status import ServiceStatus

logger = logging.getLogger(__name__)

REQUEST_TIMEOUT_S = 5.0
_MAX_REQUEST_BYTES = 16 << 10
_MAX_CONNECTIONS = 64
_POLL_INTERVAL_S = 0.1
_MAX_STATUS_AGE_S = 10.0
"""Age above which the proxy's loop is regarded as stuck, in seconds. The loop refreshes the status once per second."""


class HttpServer:
    """HTTP server in separate threads, so that it never blocks the proxy's loop.

    Example::

        with HttpServer("127.0.0.1", 0, source) as server:
            print(server.port)

    Attributes:
        port: Port on which it listens.
    """

    def __init__(
        self, bind: str, port: int, source: StatusSource, *, request_timeout_s: float = REQUEST_TIMEOUT_S
    ) -> None:
        """Listen and start the thread.

        Args:
            bind: Address or interface.
            port: Port, 0 for a free one.
            source: Function that returns the proxy's latest status and its age in seconds.
            request_timeout_s: Time after which a connection is closed, in seconds.

        Raises:
            TeacherSetupError: The address cannot be bound.
        """
        try:
            self._server = _BoundedServer(bind, port, request_timeout_s)
        except (OSError, OverflowError) as error:
            raise TeacherSetupError(
                f"cannot listen on {bind}:{port} for /healthz and /metrics: {error}",
                address=f"http://{bind}:{port}",
                options=("--http-port", "--http-bind"),
                remedy="choose another port with --http-port (HTTP_PORT; 0 for a free one, -1 for none), or correct "
                "--http-bind (HTTP_BIND)",
            ) from None
        self._server.set_app(make_app(source))
        self.port = int(self._server.server_address[1])
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(_POLL_INTERVAL_S,), name="teacher-http", daemon=True
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


def make_app(source: StatusSource) -> WSGIApplication:
    """Return the WSGI application with ``/healthz`` and ``/metrics``.

    Args:
        source: Function that returns the proxy's latest status and its age in seconds.
    """
    registry = CollectorRegistry()
    registry.register(StatusCollector(source))
    ProcessCollector(registry=registry)
    metrics_app = make_wsgi_app(registry)

    def app(environ: WSGIEnvironment, start_response: StartResponse) -> Iterable[bytes]:
        path = environ["PATH_INFO"]
        if path == "/metrics":
            if not _is_format(environ.get("HTTP_ACCEPT", "")):
                return _respond(start_response, HTTPStatus.BAD_REQUEST, "text/plain", b"Accept has no valid version\n")
            result: Iterable[bytes] = metrics_app(environ, start_response)
            return result
        if path != "/healthz":
            return _respond(start_response, HTTPStatus.NOT_FOUND, "text/plain", b"paths: /healthz, /metrics\n")
        if environ["REQUEST_METHOD"] != "GET":
            return _respond(start_response, HTTPStatus.METHOD_NOT_ALLOWED, "text/plain", b"expected GET\n")
        code, body = _health(source)
        return _respond(start_response, code, "application/json", body)

    return app


def _is_format(accept: str) -> bool:
    """Return False for an Accept header in which prometheus_client finds a version that is not a number."""
    try:
        choose_encoder(accept)
    except (TypeError, ValueError):
        return False
    return True


def _respond(start_response: StartResponse, code: HTTPStatus, content_type: str, body: bytes) -> list[bytes]:
    start_response(f"{code.value} {code.phrase}", [("Content-Type", content_type)])
    return [body]


def _health(source: StatusSource) -> tuple[HTTPStatus, bytes]:
    status, age_s = source()
    problem = _find_problem(status, age_s)
    body = {
        "status": problem or "ok",
        "model_name": status.model_name,
        "state": status.state,
        "workers": len(status.workers),
        "queue_requests": status.queue_requests,
        "queue_tokens": status.queue_tokens,
        "status_age_s": round(age_s, 3),
    }
    code = HTTPStatus.SERVICE_UNAVAILABLE if problem else HTTPStatus.OK
    return code, json.dumps(body).encode() + b"\n"


def _find_problem(status: ServiceStatus, age_s: float) -> str:
    if age_s > _MAX_STATUS_AGE_S:
        return f"the proxy is stuck: its loop made no progress for {age_s:.0f} s; see proxy.log and restart it"
    if status.draining:
        return "the proxy is shutting down and accepts no new requests"
    if not status.workers:
        return "no worker: requests wait until their deadline; add one with teacher/join_server.sh"
    return ""


class _BoundedServer(ThreadingMixIn, WSGIServer):
    """WSGI server with the limits of this module."""

    daemon_threads = True
    request_queue_size = _MAX_CONNECTIONS

    def __init__(self, bind: str, port: int, request_timeout_s: float) -> None:
        self._request_timeout_s = request_timeout_s
        self._free_slots = threading.BoundedSemaphore(_MAX_CONNECTIONS)
        self._deadlines: dict[socket.socket, float] = {}
        self.address_family = socket.getaddrinfo(bind or "0.0.0.0", port, type=socket.SOCK_STREAM)[0][0]
        super().__init__((bind, port), _RequestHandler)

    def server_bind(self) -> None:
        """Bind without the DNS lookup of ``HTTPServer.server_bind``, which can take seconds."""
        TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Serve a connection in a thread, or close it if there are too many."""
        if not self._free_slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        self._deadlines[request] = time.monotonic() + self._request_timeout_s
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self._free(request)
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Serve a connection in its thread."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free(request)

    def _free(self, request: socket.socket) -> None:
        self._deadlines.pop(request, None)
        self._free_slots.release()

    def service_actions(self) -> None:
        """Shut down the connections whose time is over. Their threads then fail to read or write, and end."""
        now = time.monotonic()
        for request, deadline in list(self._deadlines.items()):
            if now >= deadline:
                with suppress(OSError):  # closed in the meantime
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: object, client_address: object) -> None:
        """Log a failed connection. Its client is the cause, so the level is DEBUG."""
        logger.debug("an HTTP connection of %s failed", client_address, exc_info=True)


class _DebugLog(io.StringIO):
    """Text stream that writes to the log at the level DEBUG."""

    def write(self, text: str) -> int:
        """Log ``text``, which may be a traceback."""
        logger.debug("%s", text.rstrip())
        return len(text)


class _RequestHandler(WSGIRequestHandler):
    """Handler of one request per connection."""

    server_version, sys_version = "teacher", ""

    def setup(self) -> None:
        """Read the whole request, so that wsgiref parses at most ``_MAX_REQUEST_BYTES``."""
        super().setup()
        self.rfile = io.BufferedReader(io.BytesIO(self._read_request()))

    def _read_request(self) -> bytes:
        request = b""
        while b"\r\n\r\n" not in request and b"\n\n" not in request:
            if len(request) > _MAX_REQUEST_BYTES:
                raise ConnectionError(f"a request has more than {_MAX_REQUEST_BYTES} bytes")
            if not (received := self.connection.recv(_MAX_REQUEST_BYTES)):
                break
            request += received
        return request

    def get_stderr(self) -> Any:
        """Return a stream that logs wsgiref's error messages at the level DEBUG."""
        return _DebugLog()

    def log_message(self, format: str, *args: object) -> None:
        """Log a request at the level DEBUG."""
        logger.debug("%s %s", self.address_string(), format % args)

"""Target of a connection below ZeroMQ: a TCP server sends mutated bytes to a real ``Connection`` of a client."""

from __future__ import annotations

import socket
import time
from contextlib import suppress

import zmq

from fuzzing import seeds
from fuzzing.coverage import ArcTracer
from fuzzing.targets import HANG_S, Frames, Hang
from teacher.errors import TeacherProtocolError
from teacher.wire import protocol
from teacher.wire.connection import CLIENT, RECONNECT_AFTER_LOSS_S, Connection


class ConnectionTarget:
    """A new ``Connection`` for each input. It must report the end of the connection, and explain it."""

    name, is_message, is_stateful = "connection", False, True

    def __init__(self) -> None:
        """Create the target."""
        self.seeds = seeds.zmtp(b"ROUTER")
        self._tracer = ArcTracer()

    def run(self, frames: Frames) -> bool:
        """Connect, send the input, close the TCP connection, and wait until the connection reports it.

        Returns:
            True if the handshake succeeded.
        """
        # A server of its own: the renewed connection of another input would be accepted instead.
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(HANG_S)
            self._tracer.start()
            connection = Connection(CLIENT, "127.0.0.1", server.getsockname()[1], None)
            try:
                _serve(server, frames)
                return self._follow(connection)
            finally:
                connection.close(linger_ms=0)
                self._tracer.stop()

    def _follow(self, connection: Connection) -> bool:
        """Process the events and messages of a connection until it is down."""
        was_up, deadline = False, time.monotonic() + HANG_S
        poller = zmq.Poller()
        for source in (connection.socket, connection.monitor):
            poller.register(source, zmq.POLLIN)
        while (left_s := deadline - time.monotonic()) > 0:
            ready = dict(poller.poll(int(1000 * left_s) + 1))
            if connection.socket in ready:
                self._read(connection)
            if connection.monitor in ready:
                connection.read_event()
                was_up |= connection.is_up
                if not connection.is_up:
                    self._read(connection)
                    connection.outage()
                    connection.reconnect_if_due(time.monotonic() + 2 * RECONNECT_AFTER_LOSS_S)
                    return was_up
        raise Hang("the end of the connection was not reported")

    def _read(self, connection: Connection) -> None:
        while (frames := connection.receive()) is not None:
            with suppress(TeacherProtocolError):
                protocol.decode(frames)

    def n_arcs(self) -> int:
        """Return the number of arcs."""
        return len(self._tracer.arcs)

    def resident_bytes(self) -> int | None:
        """Return None."""
        return None

    def reset(self) -> None:
        """Do nothing, because each input has a connection of its own."""

    def close(self) -> None:
        """Do nothing."""


def _serve(server: socket.socket, frames: Frames) -> None:
    """Accept one TCP connection, send the input and close it."""
    try:
        peer = server.accept()[0]
    except TimeoutError:
        raise Hang("no connection was made") from None
    with peer, suppress(OSError):  # the connection may refuse the first bytes and close
        for frame in frames:
            peer.sendall(frame)

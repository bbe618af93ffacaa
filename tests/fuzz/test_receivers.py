"""Client, worker and connection: they survive any message, and what they keep of it does not add up."""

from __future__ import annotations

import socket
import time
from contextlib import closing, suppress

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st

from teacher.errors import TeacherProtocolError
from teacher.wire import protocol
from teacher.wire.connection import CLIENT, RECONNECT_AFTER_LOSS_S, Connection
from tests.fuzz.hostile import Frames, hostile
from tests.fuzz.memory import Allocations, growth_bytes
from tests.fuzz.messages import kinds
from tests.fuzz.profile import examples
from tests.fuzz.receivers import DEADLINE_S, ClientReceiver, WorkerReceiver
from tests.fuzz.streams import zmtp

MAX_KEPT_BYTES = 200
"""Growth per message that the caches of the interpreter explain."""
RECEIVERS = {"client": ClientReceiver, "worker": WorkerReceiver}


@pytest.mark.parametrize("role", RECEIVERS)
def test_receiver_hostile_message_is_survived(role: str) -> None:
    allocations = Allocations(spare_bytes=1 << 20)
    with closing(RECEIVERS[role]()) as receiver:

        @examples(100, shrink=False)
        @given(hostile(*kinds(role, sent=False)))
        def check(frames: Frames) -> None:
            with allocations.of(frames):
                receiver.handle(frames)

        check()


@pytest.mark.parametrize("role", RECEIVERS)
def test_receiver_repeated_messages_leave_no_memory(role: str) -> None:
    with closing(RECEIVERS[role]()) as receiver:

        @examples(3, shrink=False)
        @given(st.lists(hostile(*kinds(role, sent=False)), min_size=20, max_size=20))
        def check(messages: list[Frames]) -> None:
            grown_bytes = growth_bytes(lambda: [receiver.handle(frames) for frames in messages], n_times=5)
            assert grown_bytes < MAX_KEPT_BYTES * 5 * len(messages)

        check()


@examples(60)
@given(zmtp(b"ROUTER", *kinds("client", sent=False)))
def test_connection_reports_the_end_of_any_stream(writes: Frames) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:  # a new one, which no renewed connection of others uses
        server.settimeout(DEADLINE_S)
        connection = Connection(CLIENT, "127.0.0.1", server.getsockname()[1], None)
        try:
            with server.accept()[0] as peer, suppress(OSError):  # the connection may refuse the first bytes and close
                for data in writes:
                    peer.sendall(data)
            follow(connection)
        finally:
            connection.close(linger_ms=0)


def follow(connection: Connection) -> None:
    """Process the events and messages of a connection until it is down, as its owner does."""
    deadline = time.monotonic() + DEADLINE_S
    poller = zmq.Poller()
    for source in (connection.socket, connection.monitor):
        poller.register(source, zmq.POLLIN)
    while (left_s := deadline - time.monotonic()) > 0:
        ready = dict(poller.poll(int(1000 * left_s) + 1))
        if connection.monitor in ready:
            connection.read_event()
        while (frames := connection.receive()) is not None:
            with suppress(TeacherProtocolError):
                protocol.decode(frames)
        if connection.monitor in ready and not connection.is_up:
            connection.outage()
            connection.reconnect_if_due(time.monotonic() + 2 * RECONNECT_AFTER_LOSS_S)
            return
    raise AssertionError("the end of the connection was not reported")

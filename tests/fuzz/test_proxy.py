"""A real proxy process: it survives any bytes, serves valid requests after them, and does not grow."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis.strategies import SearchStrategy

from tests._support.fake_worker import RunningWorker
from tests._support.waiting import wait_until
from tests.fuzz.hostile import Frames, hostile
from tests.fuzz.messages import kinds
from tests.fuzz.profile import examples
from tests.fuzz.proxy_peers import HostileClient, HostileWorker
from tests.fuzz.proxy_process import DEADLINE_S, ProxyProcess
from tests.fuzz.receivers import StrictEngine
from tests.fuzz.streams import http_requests, zmtp

COPIES = 40
"""Copies of each message that are sent at once."""
MAX_GROWTH_BYTES = 3 << 19
"""Growth in 6000 messages. The allocator explains 0.6 MB; a proxy that kept the messages would need 3 MB."""
_HANDSHAKE_S = 0.002
"""Time for the proxy's part of a handshake."""


@pytest.fixture
def proxy(tmp_path: Path) -> Iterator[ProxyProcess]:
    """Proxy with one worker."""
    with closing(ProxyProcess(tmp_path)) as proxy:
        worker = RunningWorker(proxy.backend_port, StrictEngine())
        assert worker.settled.wait(DEADLINE_S)
        yield proxy
        assert worker.thread.is_alive(), "the worker ended because of a message that the proxy passed on"
        worker.stop()


def check_survives(
    proxy: ProxyProcess,
    inputs: SearchStrategy[Frames],
    send: Callable[[Frames], None],
    check_serves: Callable[[], None],
    n_examples: int = 150,
) -> None:
    """Send inputs twice, and check that the proxy serves and does not grow in the second half."""

    @examples(n_examples, shrink=False)
    @given(inputs)
    def check(frames: Frames) -> None:
        send(frames)
        proxy.ensure_alive()

    check()
    check_serves()
    before_bytes = proxy.rss_bytes()
    check()
    check_serves()
    grown_bytes = proxy.rss_bytes() - before_bytes
    assert grown_bytes < MAX_GROWTH_BYTES, f"the proxy grew by {grown_bytes} bytes"


def check_client_messages(proxy: ProxyProcess, check_serves: Callable[[], None], n_examples: int = 150) -> None:
    """Send messages of a client."""
    with closing(HostileClient(proxy)) as peer:
        messages = hostile(*kinds("client", sent=True))
        check_survives(proxy, messages, lambda frames: peer.send([frames] * COPIES), check_serves, n_examples)


def test_proxy_survives_messages_of_a_client(proxy: ProxyProcess) -> None:
    check_client_messages(proxy, proxy.check_serves)


def test_proxy_survives_messages_of_a_worker(tmp_path: Path) -> None:
    with ExitStack() as stack:
        proxy = stack.enter_context(closing(ProxyProcess(tmp_path)))
        peer = stack.enter_context(closing(HostileWorker(proxy)))
        messages = hostile(*kinds("worker", sent=True))
        check_survives(proxy, messages, lambda frames: peer.send([frames] * COPIES), peer.check_serves)


def test_proxy_survives_bytes_below_zeromq(proxy: ProxyProcess) -> None:
    def send(writes: Frames) -> None:
        proxy.exchange(proxy.port, writes, answer_s=_HANDSHAKE_S)

    check_survives(proxy, zmtp(b"DEALER", *kinds("client", sent=True)), send, proxy.check_serves)


def test_proxy_survives_http_requests(proxy: ProxyProcess) -> None:
    def send(writes: Frames) -> None:
        line = proxy.exchange(proxy.http_port, writes).partition(b"\r\n")[0]
        if line.startswith(b"HTTP/"):  # a response to HTTP/0.9 has no status
            assert line[9:10] != b"5" or line[9:12] == b"503", line

    def check_serves() -> None:
        proxy.check_serves()
        # The status is refreshed once per second.
        wait_until(lambda: b" 200 " in proxy.exchange(proxy.http_port, [b"GET /healthz HTTP/1.1\r\n\r\n"])[:16])

    check_survives(proxy, http_requests(), send, check_serves)

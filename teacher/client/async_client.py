"""`TeacherClient` for asyncio code."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import TracebackType
from typing import Unpack

from teacher.client.client import STATUS_TIMEOUT_S, ClientOptions, TeacherClient
from teacher.records import ScoredSequence, TeacherInfo, TeacherSequence
from teacher.status import ServiceStatus
from teacher.wire.sockets import FRONTEND_PORT


class AsyncTeacherClient:
    """Awaitable interface to a `TeacherClient`.

    Each method awaits the future of the method of the same name. One client can be used from several event loops.
    Canceling the awaiting task cancels the request at the service.

    Example::

        async with AsyncTeacherClient("10.0.0.1", timeout_s=60) as client:
            info = await client.hello()
            scored = await client.score(sequences, temperature=1.0)
    """

    def __init__(
        self, server_ip: str = "127.0.0.1", server_port: int = FRONTEND_PORT, **options: Unpack[ClientOptions]
    ) -> None:
        """Create a `TeacherClient` with the same arguments. See there."""
        self._client = TeacherClient(server_ip, server_port, **options)
        self.address = self._client.address

    async def __aenter__(self) -> AsyncTeacherClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def hello(self, timeout_s: float | None = None) -> TeacherInfo:
        """Return the model and limits of the service. See `TeacherClient.hello`."""
        return await asyncio.wrap_future(self._client.submit_hello(timeout_s))

    async def status(self, timeout_s: float = STATUS_TIMEOUT_S) -> ServiceStatus:
        """Return workers, queue, clients and totals of the service. See `TeacherClient.status`."""
        return await asyncio.wrap_future(self._client.submit_status(timeout_s))

    async def sleep(self, timeout_s: float | None = None) -> int:
        """Let all workers release the memory of their devices. See `TeacherClient.sleep`."""
        return await asyncio.wrap_future(self._client.submit_sleep(timeout_s))

    async def wake(self, timeout_s: float | None = None) -> int:
        """Let all workers restore and verify their models. See `TeacherClient.wake`."""
        return await asyncio.wrap_future(self._client.submit_wake(timeout_s))

    async def score(
        self, sequences: Sequence[TeacherSequence], timeout_s: float | None = None, *, temperature: float = 1.0
    ) -> list[ScoredSequence]:
        """Return the scored sequences in the order of ``sequences``. See `TeacherClient.submit`."""
        return await asyncio.wrap_future(self._client.submit(sequences, timeout_s, temperature=temperature))

    async def close(self) -> None:
        """Close the client without blocking the event loop. See `TeacherClient.close`."""
        await asyncio.to_thread(self._client.close)

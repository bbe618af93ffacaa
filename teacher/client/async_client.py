"""`TeacherClient` for code that awaits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from teacher.client.client import DEFAULT_TIMEOUT_S, STATUS_TIMEOUT_S, TeacherClient
from teacher.records import ScoredSequence, TeacherInfo, TeacherSequence
from teacher.status import ServiceStatus
from teacher.wire.messages import WireDtype
from teacher.wire.sockets import FRONTEND_PORT


class AsyncTeacherClient:
    """The same calls, awaitable from any event loop, also several. Cancelling the task cancels the request."""

    def __init__(
        self,
        server_ip: str = "127.0.0.1",
        server_port: int = FRONTEND_PORT,
        *,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        auth_dir: str | Path | None = None,
        top_k: int | None = None,
        wire_dtype: WireDtype = "float32",
    ) -> None:
        """See `TeacherClient`."""
        self._client = TeacherClient(
            server_ip, server_port, timeout_s=timeout_s, auth_dir=auth_dir, top_k=top_k, wire_dtype=wire_dtype
        )
        self.address = self._client.address

    async def __aenter__(self) -> AsyncTeacherClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def hello(self, timeout_s: float | None = None) -> TeacherInfo:
        return await asyncio.wrap_future(self._client.submit_hello(timeout_s))

    async def status(self, timeout_s: float = STATUS_TIMEOUT_S) -> ServiceStatus:
        return await asyncio.wrap_future(self._client.submit_status(timeout_s))

    async def score(
        self, sequences: Sequence[TeacherSequence], timeout_s: float | None = None, *, temperature: float = 1.0
    ) -> list[ScoredSequence]:
        """The answers, in order. Raises what the future of `TeacherClient.submit` would."""
        return await asyncio.wrap_future(self._client.submit(sequences, timeout_s, temperature=temperature))

    async def close(self) -> None:
        await asyncio.to_thread(self._client.close)

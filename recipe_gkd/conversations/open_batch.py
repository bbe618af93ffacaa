"""A batch of conversations on a replica, and the turns that they wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.samples import Response
from recipe_gkd.rollout.sampling import SamplingName
from recipe_gkd.rollout.turns import Turn, TurnRequest


@dataclass(frozen=True, kw_only=True)
class Batch:
    """Prompts of a step on a replica.

    Attributes:
        data: Data set that the prompts come from.
        replica: Index of the replica.
        step: Training step.
        sampling: Name of the sampling parameters.
    """

    data: PromptData
    replica: int
    step: int
    sampling: SamplingName = "train"

    @property
    def key(self) -> tuple[str, int, int]:
        """Key among the open batches."""
        return self.sampling, self.step, self.replica


@dataclass
class OpenBatch:
    """Conversations of a batch, and the turns that they wait for.

    Attributes:
        on_outside: Function that is called with the change of the number of conversations that wait for environments.
        pending: Requests that no replica has received.
        sent: Requests of a replica, by uid.
        turns: Future of the turn of each conversation that waits for one, by uid.
        ended: Responses that were not yielded, and errors.
        tasks: Task of each conversation, by uid.
        has_pending: Set while there are pending requests.
        n_outside: Number of conversations that wait for their environments.
        is_parked: True after the death of the replica, until the next call.
    """

    on_outside: Callable[[int], None]
    pending: list[TurnRequest] = field(default_factory=list)
    sent: dict[int, TurnRequest] = field(default_factory=dict)
    turns: dict[int, asyncio.Future[Turn]] = field(default_factory=dict)
    ended: asyncio.Queue[Response | BaseException] = field(default_factory=asyncio.Queue)
    tasks: dict[int, asyncio.Task[None]] = field(default_factory=dict)
    has_pending: asyncio.Event = field(default_factory=asyncio.Event)
    n_outside: int = 0
    is_parked: bool = False

    async def turn(self, request: TurnRequest) -> Turn:
        """Return the next turn of a conversation, also from another replica than the first one."""
        uid = request.prompt.uid
        self.turns[uid] = asyncio.get_running_loop().create_future()
        self.add([request])
        try:
            return await self.turns[uid]
        finally:
            del self.turns[uid]

    def add(self, requests: Sequence[TurnRequest]) -> None:
        """Add requests for the next call of a replica."""
        self.pending += requests
        if requests:
            self.has_pending.set()

    def take(self) -> list[TurnRequest]:
        """Return the pending requests of conversations that still wait, which are sent now."""
        taken, self.pending = self.pending, []
        self.has_pending.clear()
        taken = [request for request in taken if request.prompt.uid in self.turns]
        self.sent |= {request.prompt.uid: request for request in taken}
        return taken

    def resolve(self, turn: Turn) -> None:
        """Pass a turn to its conversation, if it still waits."""
        uid = turn.response.uid
        self.sent.pop(uid, None)
        if (waiting := self.turns.get(uid)) is not None and not waiting.done():
            waiting.set_result(turn)

    @contextmanager
    def outside(self) -> Iterator[None]:
        """Count a conversation as one that does not use its replica."""
        self._count_outside(1)
        try:
            yield
        finally:
            self._count_outside(-1)

    def _count_outside(self, n: int) -> None:
        self.n_outside += n
        if not self.is_parked:
            self.on_outside(n)

    def park(self) -> None:
        """Keep the conversations for the next call, which sends the unanswered requests again.

        The schedule does not count parked conversations.
        """
        unanswered, self.sent = list(self.sent.values()), {}
        self.add(unanswered)
        self._set_parked(True)

    def continue_(self) -> None:
        """End :meth:`park`."""
        self._set_parked(False)

    def _set_parked(self, is_parked: bool) -> None:
        if self.is_parked != is_parked and self.n_outside:
            self.on_outside(-self.n_outside if is_parked else self.n_outside)
        self.is_parked = is_parked

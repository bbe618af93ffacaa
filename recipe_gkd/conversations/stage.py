"""Generation of conversations: turns of the student on a rollout replica, and steps of the environments in between.

A conversation is a task that outlives a call of :meth:`ConversationStage.generate`. If its replica dies, the call
raises :class:`WorkerDied`, and the next call, after the replacement of the worker, continues the conversation from its
tokens.

======== ==================================== =========================================================================
State    Entered by                           Next
======== ==================================== =========================================================================
reset    start; the process of its            a turn, or failed
         environment was ended by another
turn     reset; messages of a step            a step; the end (length); a turn again after the death of the replica
step     the end of a turn                    a turn; the end (stop, length, turns); or failed
failed   an error of the environment, or no   ``fail`` raises it, ``truncate`` ends with the tokens so far, ``skip``
         answer                               ends without tokens
======== ==================================== =========================================================================
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing

from recipe_gkd.conversations.attempt import Attempt
from recipe_gkd.conversations.context import ConversationContext
from recipe_gkd.conversations.open_batch import Batch, OpenBatch
from recipe_gkd.conversations.process import CallError, EnvironmentLost
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.errors import DataError, WorkerDied
from recipe_gkd.rollout.sampling import SamplingName
from recipe_gkd.rollout.turns import Turn, TurnRequest
from recipe_gkd.runtime.run_log import FILE_ONLY

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Number of times that a conversation starts again because others have ended the process of its environment."""

SEND_INTERVAL_S = 0.02
"""Time between two calls of a replica. Each call takes milliseconds of driver and worker, so turns share one."""

SendTurns = Callable[[Sequence[TurnRequest]], AsyncGenerator[list[Turn]]]
"""Function that generates turns on a replica, in any order."""


class ConversationStage:
    """Generation of all conversations of a run.

    Lifecycle::

        conversations = ConversationStage(ConversationContext(config, tokenizer, pool))
        async for responses in conversations.generate(batch, prompts, send_turns): ...   # several batches at a time
        await conversations.close()

    Attributes:
        on_outside: Function that is called with 1 when a conversation waits for its environment instead of the
            replica, and with -1 afterwards.
        failures: Number of failed conversations.
    """

    def __init__(self, context: ConversationContext) -> None:
        self._context = context
        self.on_outside: Callable[[int], None] = lambda _: None
        self.failures = 0
        self._open: dict[tuple[str, int, int], OpenBatch] = {}
        self._keys = itertools.count()

    async def generate(
        self, batch: Batch, prompts: Sequence[Prompt], send: SendTurns
    ) -> AsyncGenerator[list[Response]]:
        """Yield the conversations of prompts as they end.

        Args:
            batch: Batch of the prompts. A second call for the same one continues the conversations that have begun.
            prompts: Prompts without a response.
            send: Function that generates turns on the replica.

        Raises:
            WorkerDied: The worker of the replica died. Its conversations wait for the next call.
            ConversationError: An environment failed with ``rollout.on_environment_failure=fail``, or too many did.
            GkdError: Generation failed in another way.
        """
        opened = self._open.setdefault(batch.key, OpenBatch(lambda n: self.on_outside(n)))
        opened.continue_()
        sender = asyncio.ensure_future(self._send(opened, send))
        sender.add_done_callback(lambda ended: None if ended.cancelled() else _report(ended, opened))
        is_parked = False
        try:
            for prompt in prompts:
                if prompt.uid not in opened.tasks:
                    opened.tasks[prompt.uid] = asyncio.ensure_future(self._run(batch, prompt, opened))
            n_left = len(prompts)
            while n_left:
                found = [await opened.ended.get()]
                while not opened.ended.empty():
                    found.append(opened.ended.get_nowait())
                responses = [each for each in found if isinstance(each, Response)]
                n_left -= len(responses)
                if responses:
                    yield responses
                errors = [each for each in found if isinstance(each, BaseException)]
                if errors:  # after a death alone, the conversations continue
                    raise next((each for each in errors if not isinstance(each, WorkerDied)), errors[0])
        except WorkerDied:
            is_parked = True
            raise
        finally:
            sender.cancel()
            await asyncio.gather(sender, return_exceptions=True)
            if is_parked:
                opened.park()
            else:
                await self._drop(batch.key)

    async def close(self, sampling: SamplingName | None = None) -> None:
        """Cancel all conversations, or only those with these sampling parameters."""
        for key in [key for key in self._open if sampling in (None, key[0])]:
            await self._drop(key)

    async def _drop(self, key: tuple[str, int, int]) -> None:
        if (opened := self._open.pop(key, None)) is not None:
            for task in opened.tasks.values():
                task.cancel()
            await asyncio.gather(*opened.tasks.values(), return_exceptions=True)

    async def _send(self, opened: OpenBatch, send: SendTurns) -> None:
        """Send all pending requests together, while earlier ones are generated, at most once per interval."""
        loop, next_at = asyncio.get_running_loop(), 0.0
        async with asyncio.TaskGroup() as calls:
            while True:
                await opened.has_pending.wait()
                await asyncio.sleep(max(0.0, next_at - loop.time()))  # 0: for those that go on at the same time
                if requests := opened.take():
                    next_at = loop.time() + SEND_INTERVAL_S
                    calls.create_task(self._receive(opened, send, requests))

    @staticmethod
    async def _receive(opened: OpenBatch, send: SendTurns, requests: Sequence[TurnRequest]) -> None:
        async with aclosing(send(requests)) as stream:
            async for turns in stream:
                for turn in turns:
                    opened.resolve(turn)

    async def _run(self, batch: Batch, prompt: Prompt, opened: OpenBatch) -> None:
        """Run a conversation, and put its response or its error into the queue of its batch."""
        try:
            opened.ended.put_nowait(await self._converse(batch, prompt, opened))
        except Exception as error:  # noqa: BLE001 - raised where the responses are awaited
            opened.ended.put_nowait(error)

    async def _converse(self, batch: Batch, prompt: Prompt, opened: OpenBatch) -> Response:
        n_suspected = 0
        for n_restarts in itertools.count():
            attempt = Attempt(self._context, batch, prompt, opened, n_restarts, key := next(self._keys))
            try:
                return await attempt.run()
            except (CallError, EnvironmentLost, DataError) as error:
                if isinstance(error, EnvironmentLost):
                    n_suspected += key in error.suspects
                    is_culprit = error.suspects == {key} or n_suspected > 1
                    if not is_culprit and n_restarts < MAX_RESTARTS:
                        continue
                return self._failed(attempt, error)
        raise AssertionError("the loop has no end")

    def _failed(self, attempt: Attempt, error: Exception) -> Response:
        """Return the response of a conversation whose environment failed, as configured."""
        mode, limit = self._context.settings.on_environment_failure, self._context.settings.max_environment_failures
        self.failures += 1
        failure = attempt.describe(error)
        if mode == "fail":
            raise failure
        if limit is not None and self.failures > limit:
            end = (
                f"the run ends because {self.failures} conversations have failed, more than "
                f"rollout.max_environment_failures={limit}; correct the environment, or raise the limit"
            )
            raise failure.replaced(details=(*failure.details, end), failures=self.failures)
        log.warning(
            "%s\nrollout.on_environment_failure=%s: the run continues%s", failure, mode,
            "; further failures are in run.log and in the metric conversation/failures" if self.failures == 1 else "",
            extra={} if self.failures == 1 else FILE_ONLY,
        )  # fmt: skip
        return attempt.response("failure", failure=failure.what, keeps_turns=mode == "truncate")


def _report(sender: asyncio.Future[None], opened: OpenBatch) -> None:
    """Put the error of the sender into the queue of its batch."""
    error = sender.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        opened.ended.put_nowait(error)

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
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from recipe_gkd.config import Config
from recipe_gkd.conversations.conversation import ConversationState
from recipe_gkd.conversations.pool import EnvironmentPool, EnvironmentSession
from recipe_gkd.conversations.process import CallError, EnvironmentLost
from recipe_gkd.conversations.template import TurnTemplate, cut
from recipe_gkd.data.messages import Message
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import Row
from recipe_gkd.data.samples import ConversationEnd, Prompt, Response
from recipe_gkd.data.tokenization import tokenize_prompt
from recipe_gkd.errors import ConversationError, DataError, WorkerDied
from recipe_gkd.rollout.sampling import SamplingName
from recipe_gkd.rollout.turns import Turn, TurnRequest
from recipe_gkd.runtime.run_log import FILE_ONLY
from recipe_gkd.runtime.threads import in_thread

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Number of times that a conversation starts again because others have ended the process of its environment."""

SendTurns = Callable[[Sequence[TurnRequest]], AsyncGenerator[list[Turn]]]
"""Function that generates turns on a replica, in any order."""


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
class _OpenBatch:
    """ConversationStage of a batch, and the turns that they wait for.

    Attributes:
        pending: Requests that no replica has received.
        sent: Requests of a replica, by uid.
        turns: Future of the turn of each conversation that waits for one, by uid.
        ended: Responses that were not yielded, and errors.
        tasks: Task of each conversation, by uid.
        has_pending: Set while there are pending requests.
        n_outside: Number of conversations that wait for their environments.
        is_parked: True after the death of the replica, until the next call.
    """

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

    def park(self) -> int:
        """Keep the conversations for the next call, which sends the unanswered requests again.

        Returns:
            Number of conversations that wait for their environments. The schedule does not count parked ones.
        """
        unanswered, self.sent = list(self.sent.values()), {}
        self.add(unanswered)
        self.is_parked = True
        return self.n_outside

    def continue_(self) -> int:
        """End :meth:`park`, and return the number of conversations that the schedule must count again."""
        n_parked = self.n_outside if self.is_parked else 0
        self.is_parked = False
        return n_parked


class ConversationStage:
    """Generation of all conversations of a run.

    Lifecycle::

        conversations = ConversationStage(config, tokenizer, pool)
        async for responses in conversations.generate(batch, prompts, send_turns): ...   # several batches at a time
        await conversations.close()

    Attributes:
        on_outside: Function that is called with 1 when a conversation waits for its environment instead of the
            replica, and with -1 afterwards.
        failures: Number of failed conversations.
    """

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, pool: EnvironmentPool) -> None:
        self._settings, self._data, self._pool = config.rollout, config.data, pool
        self._tokenizer = tokenizer
        self.on_outside: Callable[[int], None] = lambda _: None
        self.failures, self._has_reported_tool = 0, False
        self._open: dict[tuple[str, int, int], _OpenBatch] = {}
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
        opened = self._open.setdefault(batch.key, _OpenBatch())
        if n_outside := opened.continue_():
            self.on_outside(n_outside)
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
                if n_outside := opened.park():
                    self.on_outside(-n_outside)
            else:
                await self._drop(batch.key)

    async def close(self) -> None:
        """Cancel all conversations."""
        for key in list(self._open):
            await self._drop(key)

    async def _drop(self, key: tuple[str, int, int]) -> None:
        if (opened := self._open.pop(key, None)) is not None:
            for task in opened.tasks.values():
                task.cancel()
            await asyncio.gather(*opened.tasks.values(), return_exceptions=True)

    async def _send(self, opened: _OpenBatch, send: SendTurns) -> None:
        """Send all pending requests together, as soon as there are any, while earlier ones are generated."""
        async with asyncio.TaskGroup() as calls:
            while True:
                await opened.has_pending.wait()
                await asyncio.sleep(0)  # conversations that go on at the same time are one call
                if requests := opened.take():
                    calls.create_task(self._receive(opened, send, requests))

    @staticmethod
    async def _receive(opened: _OpenBatch, send: SendTurns, requests: Sequence[TurnRequest]) -> None:
        async with aclosing(send(requests)) as stream:
            async for turns in stream:
                for turn in turns:
                    opened.resolve(turn)

    async def _run(self, batch: Batch, prompt: Prompt, opened: _OpenBatch) -> None:
        """Run a conversation, and put its response or its error into the queue of its batch."""
        try:
            opened.ended.put_nowait(await self._converse(batch, prompt, opened))
        except Exception as error:  # noqa: BLE001 - raised where the responses are awaited
            opened.ended.put_nowait(error)

    async def _converse(self, batch: Batch, prompt: Prompt, opened: _OpenBatch) -> Response:
        n_suspected = 0
        for n_restarts in itertools.count():
            attempt = _Attempt(self, batch, prompt, opened, n_restarts, key := next(self._keys))
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

    def _failed(self, attempt: _Attempt, error: Exception) -> Response:
        """Return the response of a conversation whose environment failed, as configured."""
        mode, limit = self._settings.on_environment_failure, self._settings.max_environment_failures
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

    def report_tool_errors(self, result: dict[str, Any]) -> None:
        """Log the first call of a tool that failed. The student may have caused it."""
        if result["tool_errors"] and not self._has_reported_tool:
            self._has_reported_tool = True
            texts = [message["content"] for message in result["messages"] if message["content"].startswith("error: ")]
            log.warning(
                "a tool call failed, which the student sees: %s; conversation/tool_errors counts them", texts[0]
            )

    @contextmanager
    def outside(self, opened: _OpenBatch) -> Iterator[None]:
        """Count a conversation as one that does not use its replica."""
        self._count_outside(opened, 1)
        try:
            yield
        finally:
            self._count_outside(opened, -1)

    def _count_outside(self, opened: _OpenBatch, n: int) -> None:
        opened.n_outside += n
        if not opened.is_parked:
            self.on_outside(n)

    def first_prompt(self, batch: Batch, prompt: Prompt, row: Row, messages: list[Message] | None) -> Prompt:
        """Return the prompt of a conversation.

        Args:
            messages: Messages that the environment has set in place of the row's prompt, if any.

        Raises:
            DataError: They are too long, or a teacher has other prompts.
        """
        if messages is None:
            return prompt
        if prompt.teacher_ids is not None:
            raise DataError(
                f"{row.where}: reset returned a prompt, but the teacher has its own prompts, which it cannot replace",
                remedy="return None, or remove the prompt settings of the teacher",
                row=row.index,
            )
        ids = tokenize_prompt(messages, self._tokenizer, row.where, template=batch.data.template, tools=row.tools)
        if len(ids) > self._data.max_prompt_length:
            raise DataError(
                f"{row.where}: reset returned a prompt of {len(ids)} tokens, more than data.max_prompt_length="
                f"{self._data.max_prompt_length}",
                remedy="raise it",
                row=row.index,
            )
        return replace(prompt, ids=ids)

    async def tokens_between(
        self, batch: Batch, row: Row, prompt: list[Message], turn: Turn, messages: list[Message]
    ) -> tuple[list[Message], np.ndarray]:
        """Return messages, cut at ``rollout.max_tool_response_length``, and the tokens that they add."""
        settings, template = self._settings, TurnTemplate(self._tokenizer, batch.data.template)

        def compute() -> tuple[list[Message], np.ndarray]:
            limit, side, found = settings.max_tool_response_length, settings.tool_response_truncate_side, messages
            if limit is not None:
                found = [
                    message | {"content": cut(message["content"], self._tokenizer, limit, side)} for message in messages
                ]
            end_id = int(turn.response.ids[-1])
            return found, template.between(prompt, turn.message, found, tools=row.tools, end_id=end_id, where=row.where)

        return await in_thread(compute)

    @property
    def limits(self) -> tuple[int, int, float | None]:
        """Maximum number of tokens and of turns, and the time limit in seconds."""
        settings = self._settings
        return self._data.max_response_length, settings.max_turns, settings.conversation_timeout_s


class _Attempt:
    """One attempt of a conversation, from its prompt to its end."""

    def __init__(
        self,
        conversations: ConversationStage,
        batch: Batch,
        prompt: Prompt,
        opened: _OpenBatch,
        n_restarts: int,
        key: int,
    ) -> None:
        self._conversations, self._batch, self._opened = conversations, batch, opened
        self._n_restarts, self._key = n_restarts, key
        self._row = batch.data.data_set[prompt.row]
        self._state, self._original = ConversationState(prompt), prompt
        self._messages: list[Message] = self._row.prompt if isinstance(self._row.prompt, list) else []
        self._session: EnvironmentSession | None = None

    async def run(self) -> Response:
        """Return the response.

        Raises:
            CallError, EnvironmentLost: The environment failed.
            DataError: Its messages cannot be used.
        """
        *_, timeout_s = self._conversations.limits
        try:
            async with asyncio.timeout(timeout_s):
                end = await self._talk()
        except TimeoutError:
            end = "time"
        finally:
            if self._session is not None:
                self._session.close()
        return self.response(end)

    async def _talk(self) -> ConversationEnd:
        state, row, (max_tokens, max_turns, _) = self._state, self._row, self._conversations.limits
        with self._conversations.outside(self._opened):
            self._session = await self._conversations._pool.open(self._key)
            messages = await self._session.reset(_values_of(row))
        self._messages = messages or self._messages
        state.prompt = self._conversations.first_prompt(self._batch, state.prompt, row, messages)
        for number in range(max_turns):
            prompt = replace(state.prompt, ids=state.context_ids)
            turn = await self._opened.turn(
                TurnRequest(prompt=prompt, number=number, max_tokens=max_tokens - state.n_tokens, tools=row.tools)
            )
            calls = turn.message.get("tool_calls", [])
            state.turns.append(turn.response)
            state.messages.append(turn.message)
            state.n_tool_calls += len(calls)
            if turn.response.finish_reason != "stop":
                return "length"
            with self._conversations.outside(self._opened):
                result = await self._session.step(turn.message, calls)
                state.n_tool_errors += result["tool_errors"]
                self._conversations.report_tool_errors(result)
                state.rewards += [] if result["reward"] is None else [result["reward"]]
                state.numbers |= result["info"]
                if result["done"] or number + 1 == max_turns:
                    state.messages += result["messages"]
                    return "stop" if result["done"] else "turns"
                history = [*self._messages, *state.messages[:-1]]
                found, ids = await self._conversations.tokens_between(
                    self._batch, row, history, turn, result["messages"]
                )
            state.messages += found
            if state.n_tokens + len(ids) >= max_tokens:
                return "length"
            state.between.append(ids)
        raise AssertionError("the last turn returns")

    def response(self, end: ConversationEnd, *, failure: str = "", keeps_turns: bool = True) -> Response:
        """Return the conversation so far as a response.

        Args:
            keeps_turns: False for a response without tokens.
        """
        state = self._state if keeps_turns else ConversationState(self._original)
        seconds = 0.0 if self._session is None else self._session.seconds
        response = state.response(
            end, version=self._batch.step, environment_s=seconds, n_restarts=self._n_restarts, failure=failure
        )
        is_replaced = state.prompt.ids is not self._original.ids
        return replace(response, prompt_ids=state.prompt.ids) if is_replaced else response

    def describe(self, error: Exception) -> ConversationError:
        """Return the error of the environment for the user."""
        uid, where, n_turns = self._original.uid, self._row.where, len(self._state.turns)
        place = f"in the conversation of sample {uid} ({where}), {f'after turn {n_turns}' if n_turns else 'in reset'}"
        if isinstance(error, EnvironmentLost):
            what, trace, kind = (
                f"the environment failed {place}: it {error.end.reason}",
                error.end.stack,
                error.end.kind,
            )
        elif isinstance(error, CallError):
            last = f": {error.trace.splitlines()[-1]}" if error.trace and error.kind == "exception" else ""
            what, trace, kind = f"the environment failed {place}: {error.reason}{last}", error.trace, error.kind
        else:
            what, trace, kind = f"the messages of the environment cannot be used {place}: {error}", "", "result"
        return ConversationError(what, details=(trace,) if trace else (), uid=uid, kind=kind)


def _values_of(row: Row) -> dict[str, Any]:
    """Return the argument of ``reset``: the same values that reward functions receive."""
    return {
        "prompt": row.prompt,
        "ground_truth": row.ground_truth,
        "data_source": row.data_source,
        "extra": row.extra,
    }


def _report(sender: asyncio.Future[None], opened: _OpenBatch) -> None:
    """Put the error of the sender into the queue of its batch."""
    error = sender.exception()
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if error is not None:
        opened.ended.put_nowait(error)

"""One attempt of a conversation: turns of the student, and steps of its environment in between."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from recipe_gkd.conversations.context import ConversationContext
from recipe_gkd.conversations.conversation import ConversationState
from recipe_gkd.conversations.open_batch import Batch, OpenBatch
from recipe_gkd.conversations.pool import EnvironmentSession
from recipe_gkd.conversations.process import CallError, EnvironmentLost
from recipe_gkd.data.messages import Message, read_messages
from recipe_gkd.data.rows import Row
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.data.transcript import ConversationEnd
from recipe_gkd.errors import ConversationError
from recipe_gkd.rollout.turns import TurnRequest


class Attempt:
    """One attempt of a conversation, from its prompt to its end."""

    def __init__(
        self,
        context: ConversationContext,
        batch: Batch,
        prompt: Prompt,
        opened: OpenBatch,
        n_restarts: int,
        key: int,
    ) -> None:
        self._context, self._batch, self._opened = context, batch, opened
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
        *_, timeout_s = self._context.limits
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
        state, row, (max_tokens, max_turns, _) = self._state, self._row, self._context.limits
        with self._opened.outside():
            self._session = await self._context.pool.open(self._key)
            messages = await self._session.reset(_values_of(row))
        if messages is not None:
            self._messages = state.reset_messages = messages = read_messages(messages, f"{row.where}: reset")
        state.prompt = self._context.first_prompt(self._batch.data, state.prompt, row, messages)
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
            with self._opened.outside():
                result = await self._session.step(turn.message, calls)
                state.n_tool_errors += result["tool_errors"]
                self._context.report_tool_errors(result)
                state.rewards.append(result["reward"])
                state.numbers |= result["info"]
                if result["done"] or number + 1 == max_turns:
                    state.messages += result["messages"]
                    return "stop" if result["done"] else "turns"
                history = [*self._messages, *state.messages[:-1]]
                found, tokens = await self._context.tokens_between(
                    self._batch.data, row, history, turn, result["messages"]
                )
            state.messages += found
            if state.n_tokens_with(tokens) >= max_tokens:
                return "length"
            state.add(tokens)
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

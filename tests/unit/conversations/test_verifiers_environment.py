"""Inverted rollouts without the package verifiers: order, histories that do not continue, ends, and rows."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from recipe_gkd.conversations.adapters.completions_endpoint import completion, events
from recipe_gkd.conversations.adapters.inverted_rollout import HistoryError, InvertedRollout, RolloutFailed, plain
from recipe_gkd.conversations.adapters.verifiers_environment import parse_config, row_of, step_of, with_null_harness
from tests._support.waiting import PATIENCE_S

TOOLS = [{"type": "function", "function": {"name": "add"}}]


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


class Agent:
    """Agent of verifiers that asks its model, and appends."""

    def __init__(self, complete: Callable[..., Coroutine[Any, Any, dict[str, Any]]]) -> None:
        self.complete, self.history = complete, [user("1")]

    async def turn(self, *more: dict[str, Any], source: str = "a") -> dict[str, Any]:
        self.history += more
        message = await self.complete(source, self.history, TOOLS)
        self.history = [*self.history, message]
        return message


Program = Callable[[Agent], Coroutine[Any, Any, Any]]


def drive(program: Program, *replies: str) -> tuple[list[Any], InvertedRollout]:
    """Return the requests of a rollout, and its error, if it has one."""

    async def main() -> tuple[list[Any], InvertedRollout]:
        rollout = InvertedRollout(lambda: program(agent))
        agent = Agent(rollout.complete)
        found: list[Any] = []
        try:
            async with asyncio.timeout(PATIENCE_S):
                found.append(await rollout.start())
                for reply in replies:
                    found.append(await rollout.reply(assistant(reply)))
        except (HistoryError, RolloutFailed, KeyError) as error:
            found.append(error)
        finally:
            async with asyncio.timeout(PATIENCE_S):
                await rollout.close()
        assert len(asyncio.all_tasks()) == 1
        return found, rollout

    return asyncio.run(main())


async def two_turns(agent: Agent) -> str:
    first = await agent.turn()
    second = await agent.turn(user(f"not {first['content']}"))
    return f"{first['content']}+{second['content']}"


class TestTurns:
    def test_requests_have_the_new_messages_and_the_end_has_the_result(self) -> None:
        found, rollout = drive(two_turns, "5", "7")
        assert [request and request.messages for request in found] == [[user("1")], [user("not 5")], None]
        assert found[0].tools == TOOLS and rollout.result == "5+7" and rollout.source == "a"

    def test_reply_after_the_end_is_the_end(self) -> None:
        async def gives_up(agent: Agent) -> int:
            waiting = asyncio.ensure_future(agent.turn())
            await asyncio.sleep(0.05)
            waiting.cancel()
            return 3

        async def main() -> tuple[Any, Any]:
            rollout = InvertedRollout(lambda: gives_up(agent))
            agent = Agent(rollout.complete)
            await rollout.start()
            await asyncio.sleep(0.2)
            return await rollout.reply(assistant("5")), rollout.result

        assert asyncio.run(main()) == (None, 3)

    def test_whitespace_and_the_form_of_arguments_may_change(self) -> None:
        """SDKs write the student's message in their own form. Its tokens are the sampled ones."""
        call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
        text = {**call, "function": {"name": "add", "arguments": '{"a":1}'}}

        async def program(agent: Agent) -> None:
            await agent.turn()
            agent.history[-1] = assistant("", tool_calls=[text]) | {"content": None}
            result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "2"}]}
            await agent.turn(result)

        async def main() -> Any:
            rollout = InvertedRollout(lambda: program(agent))
            agent = Agent(rollout.complete)
            await rollout.start()
            request = await rollout.reply(assistant(" ", tool_calls=[call]))
            await rollout.close()
            return request

        assert asyncio.run(main()).messages == [{"role": "tool", "tool_call_id": "1", "content": "2"}]


class TestHistories:
    @pytest.mark.parametrize(
        ("change", "text"),
        [
            (lambda history: [user("2"), *history[1:]], r"message 0 of the history has changed.*'1'.*'2'"),
            (lambda history: [*history[:1], assistant("6")], "message 1 of the history has changed"),
            (lambda history: history[:1], "the history has 1 messages, but 2 are"),
            (lambda history: history, "the history has 2 messages, but 2 are"),
            (lambda history: [*history, assistant("x"), user("y")], "new assistant message"),
            (lambda history: [*history, user([{"type": "image_url"}])], "image_url, but only text"),
        ],
        ids=["prompt", "turn", "shorter", "same", "assistant", "image"],
    )
    def test_history_that_does_not_continue_fails_the_conversation(self, change: Any, text: str) -> None:
        async def program(agent: Agent) -> None:
            await agent.turn()
            agent.history = change(agent.history)
            await agent.turn()

        found, _ = drive(program, "5", "7")
        assert isinstance(found[1], HistoryError) and len(found) == 2
        with pytest.raises(HistoryError, match=text):
            raise found[1]

    def test_second_agent_fails_the_conversation(self) -> None:
        async def program(agent: Agent) -> None:
            await agent.turn()
            await agent.turn(user("2"), source="b")

        found, _ = drive(program, "5", "7")
        assert "a second agent requested a turn" in str(found[1]) and "agent.harness.id=null" in str(found[1])

    def test_requests_at_the_same_time_fail_the_conversation_and_end_the_rollout(self) -> None:
        ended: list[BaseException] = []

        async def program(agent: Agent) -> None:
            try:
                await asyncio.gather(agent.turn(), agent.turn())
            except BaseException as error:
                ended.append(error)
                raise

        found, _ = drive(program, "5")
        assert "before the first one was sampled" in str(found[-1]) and len(ended) == 1


class TestEnds:
    def test_error_of_the_rollout_is_raised(self) -> None:
        async def program(agent: Agent) -> None:
            await agent.turn()
            raise KeyError("shop")

        found, _ = drive(program, "5")
        assert isinstance(found[1], KeyError)

    def test_rollout_without_a_request_ends(self) -> None:
        async def program(agent: Agent) -> int:
            return 3

        found, rollout = drive(program)
        assert found == [None] and rollout.result == 3

    def test_close_cancels_and_waits_for_cleanup(self) -> None:
        cleaned: list[str] = []

        async def program(agent: Agent) -> None:
            try:
                await agent.turn()
                await asyncio.sleep(3600)
            finally:
                await asyncio.sleep(0.01)
                cleaned.append("cleaned")

        drive(program)
        assert cleaned == ["cleaned"]

    def test_caller_that_was_cancelled_can_close(self) -> None:
        """A missed deadline of a step cancels the call. A request that comes later does not fail the process."""

        async def slow(agent: Agent) -> None:
            await agent.turn()
            await asyncio.sleep(0.1)
            await agent.turn(user("2"))

        async def main() -> None:
            errors: list[Any] = []
            asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
            rollout = InvertedRollout(lambda: slow(agent))
            agent = Agent(rollout.complete)
            await rollout.start()
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(rollout.reply(assistant("5")), 0.02)
            await asyncio.sleep(0.2)
            await rollout.close()
            assert not errors and len(asyncio.all_tasks()) == 1

        asyncio.run(main())


def episode(*, ok: bool = True, errors: tuple[Any, ...] = ()) -> Any:
    rewards = {"exact": SimpleNamespace(score=0.5), "skipped": None}
    trace = SimpleNamespace(id="a", rewards=rewards, metrics={"length": 3.0}, reward=1.0, errors=[])
    return SimpleNamespace(ok=ok, errors=list(errors), traces=[trace])


class TestSteps:
    def test_last_step_has_reward_scores_and_metrics(self) -> None:
        assert step_of(episode(), "a") == {"done": True, "reward": 1.0, "info": {"exact": 0.5, "length": 3.0}}

    def test_failed_episode_raises_its_errors(self) -> None:
        error = SimpleNamespace(type="TaskError", message="the referee is ill")
        with pytest.raises(RolloutFailed, match="TaskError: the referee is ill"):
            step_of(episode(ok=False, errors=(error,)), "a")
        with pytest.raises(RolloutFailed, match="requested no turn"):
            step_of(episode(), None)


class TestWire:
    CALL = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": 1}}}  # noqa: RUF012

    def test_completion_has_arguments_as_text(self) -> None:
        [choice] = completion(assistant("x", tool_calls=[self.CALL]))["choices"]
        assert choice["message"]["tool_calls"][0]["function"] == {"name": "add", "arguments": '{"a": 1}'}
        assert choice["finish_reason"] == "tool_calls" and plain(choice["message"])["tool_calls"] == [self.CALL]

    def test_arguments_that_are_no_json_stay_as_they_are(self) -> None:
        call = {**self.CALL, "function": {"name": "add", "arguments": "{a"}}
        [choice] = completion(assistant("x", tool_calls=[call]))["choices"]
        assert plain(choice["message"])["tool_calls"] == [call]

    def test_stream_has_the_message_its_end_and_done(self) -> None:
        *chunks, done, rest = events(assistant("x", tool_calls=[self.CALL])).decode().split("\n\n")
        first, last = (json.loads(chunk.removeprefix("data: "))["choices"][0] for chunk in chunks)
        assert first["delta"]["content"] == "x" and first["delta"]["tool_calls"][0]["index"] == 0
        assert (last["finish_reason"], done, rest) == ("tool_calls", "data: [DONE]", "")


class TestRows:
    def test_row_has_prompt_truth_and_the_task(self) -> None:
        data = SimpleNamespace(
            prompt="1+1=", system_prompt="add", answer=2, model_dump_json=lambda exclude_none: '{"prompt": "1+1="}'
        )
        assert row_of(SimpleNamespace(data=data), "sums") == {
            "prompt": [{"role": "system", "content": "add"}, user("1+1=")],
            "data_source": "sums",
            "verifiers_task": '{"prompt": "1+1="}',
            "ground_truth": "2",
        }

    def test_config_of_pairs_is_nested(self) -> None:
        found = parse_config(["taskset.id=sums", "agent.runtime.type=subprocess", "taskset.num_tasks=3"])
        assert found == {"taskset": {"id": "sums", "num_tasks": 3}, "agent": {"runtime": {"type": "subprocess"}}}
        assert with_null_harness(parse_config(["a.harness.id=null", "a.id=null", "harness.x=1"])) == {
            "a": {"harness": {"id": "null"}, "id": None}, "harness": {"x": 1},
        }  # fmt: skip
        with pytest.raises(ValueError, match="expected KEY=VALUE"):
            parse_config(["taskset.id"])

"""Processes with environments and tools: calls, deadlines, and ends that cost one conversation only."""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.config.environments import EnvironmentSettings
from recipe_gkd.conversations.pool import EnvironmentPool
from recipe_gkd.conversations.process import CallError, EnvironmentLost
from recipe_gkd.errors import ConfigError
from tests._support.conversations import FILE, settings_of
from tests._support.errors import raises
from tests._support.waiting import PATIENCE_S, wait_until

TOOLS = [f"{FILE}:{name}" for name in ("add", "wait", "block", "fail", "unreadable")]
WITH_TOOLS = (f"rollout.tools=[{','.join(TOOLS)}]", "rollout.tool_parser=hermes")


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"id": f"call_{name}", "type": "function", "function": {"name": name, "arguments": arguments}}


def row(name: str) -> dict[str, Any]:
    return {"prompt": [], "ground_truth": "2", "data_source": None, "extra": {"name": name}}


MESSAGE = {"role": "assistant", "content": "hello"}


@pytest.fixture(scope="module")
def tools() -> Iterator[EnvironmentPool]:
    """Pool of one process with tools, whose calls end after 2 s."""
    with EnvironmentPool(settings_of(*WITH_TOOLS, "rollout.environment_timeout_s=2"), 1) as pool:
        yield pool


def step(pool: EnvironmentPool, *calls: dict[str, Any]) -> dict[str, Any]:
    async def once() -> dict[str, Any]:
        session = await pool.open(next(KEYS))
        await session.reset(row(""))
        try:
            return await session.step(MESSAGE, list(calls))
        finally:
            session.close()

    # Connections belong to an event loop, so that one is used for a pool.
    return LOOP.run_until_complete(once())


LOOP, KEYS = asyncio.new_event_loop(), itertools.count()


class TestTools:
    def test_schemas_have_types_and_descriptions(self, tools: EnvironmentPool) -> None:
        schema = tools.tools[0]["function"]
        assert schema["name"] == "add" and schema["description"] == "Add two numbers."
        assert schema["parameters"]["properties"]["b"] == {"type": "integer", "description": "Second number."}
        assert schema["parameters"]["required"] == ["a"]

    def test_calls_are_made_at_the_same_time_and_results_are_in_order(self, tools: EnvironmentPool) -> None:
        calls = [call("wait", seconds=0.5), call("block", seconds=0.5), call("add", a=1, b=2), call("add", a=5)]
        found = step(tools, *calls, *[call("wait", seconds=0.5)] * 3)
        assert [message["content"] for message in found["messages"]] == ["waited", "blocked", "3", "6", *["waited"] * 3]
        assert found["messages"][2] == {"role": "tool", "tool_call_id": "call_add", "name": "add", "content": "3"}
        assert (found["done"], found["tool_errors"], found["reward"]) == (False, 0, None)

    def test_turn_without_call_ends_the_conversation(self, tools: EnvironmentPool) -> None:
        assert step(tools) == {"messages": [], "done": True, "reward": None, "info": {}, "tool_errors": 0}

    @pytest.mark.parametrize(
        ("wrong", "text"),
        [
            (call("fail"), "error: fail: RuntimeError: no luck"),
            (call("minus", a=1), "error: there is no tool 'minus'; the tools are add, wait, block, fail, unreadable"),
            (call("unreadable"), "error: unreadable: its result cannot become text: TypeError"),
            (call("add", c=1), "error: add: missing a required argument: 'a'"),
            (call("wait", seconds=100), "error: wait: it took longer than 2 s"),
            (call("block", seconds=4), "error: block: it took longer than 2 s"),
            (call("add", a="x"), "error: add: TypeError: can only concatenate str"),
            ({**call("add"), "function": {"name": "add", "arguments": "{"}}, "error: the arguments of add are no JSON"),
        ],
    )
    def test_error_of_a_call_is_its_result(self, tools: EnvironmentPool, wrong: dict[str, Any], text: str) -> None:
        found = step(tools, call("add", a=1), wrong)
        assert found["messages"][0]["content"] == "2"
        assert found["messages"][1]["content"].startswith(text)
        assert found["tool_errors"] == 1


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        ((f"rollout.tools=[{FILE}:nothing]", "rollout.tool_parser=hermes"), "it has no nothing; it defines:"),
        ((f"rollout.tools=[{FILE}:undescribed]", "rollout.tool_parser=hermes"), "undescribed has no schema"),
        ((f"rollout.environment={FILE}:NoReset",), "its NoReset has no method reset"),
    ],
)
def test_file_that_cannot_be_used_is_named(overrides: tuple[str, ...], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        EnvironmentPool(settings_of(*overrides), 1)


def test_missing_file_is_named(tmp_path: Path) -> None:
    with raises(ConfigError, keys=("rollout.environment",)):
        settings_of(f"rollout.environment={tmp_path}/absent.py:Shop")


def faulty(*overrides: str) -> EnvironmentSettings:
    return settings_of(f"rollout.environment={FILE}:Faulty", "rollout.environment_timeout_s=1.5", *overrides)


class TestFaults:
    def test_environments_of_one_process_are_independent(self, tmp_path: Path) -> None:
        settings = settings_of(
            f"rollout.environment={FILE}:Echo", f"rollout.environment_kwargs={{folder: {tmp_path}, reward: 0.5}}"
        )

        async def main(pool: EnvironmentPool) -> list[Any]:
            sessions = [await pool.open(key) for key in range(300)]
            await asyncio.gather(*(session.reset(row(f"s{key}")) for key, session in enumerate(sessions)))
            first = await asyncio.gather(
                *(each.step(MESSAGE | {"content": str(k + 1)}, []) for k, each in enumerate(sessions))
            )
            assert [found["messages"][0]["content"] for found in first] == [str(key + 1) for key in range(300)]
            last = await asyncio.gather(*(each.step(MESSAGE | {"content": "0"}, []) for each in sessions))
            for session in sessions:
                session.close()
            await asyncio.sleep(0.5)
            return last

        with EnvironmentPool(settings, 2) as pool:
            last = asyncio.run(main(pool))
        assert all(found["done"] and found["reward"] == 0.5 and found["info"]["steps"] == 2 for found in last)
        assert sorted(path.name for path in tmp_path.iterdir()) == sorted(f"s{key}" for key in range(300))
        assert {path.read_text() for path in tmp_path.iterdir()} == {"reset\nclose\n"}

    @pytest.mark.parametrize(
        ("name", "kind", "text"),
        [
            ("raises", "exception", "the shop is closed"),
            ("returns", "result", "step returned"),
            ("class", "result", "expected messages"),
            ("huge", "result", "expected a finite number"),
            ("hostile", "result", "no number"),
            ("waits", "timeout", "longer than 1.5 s"),
        ],
    )
    def test_failed_call_leaves_the_process(self, name: str, kind: str, text: str) -> None:
        async def main(pool: EnvironmentPool) -> None:
            broken, other = await pool.open(0), await pool.open(1)
            await asyncio.gather(broken.reset(row(name)), other.reset(row("good")))
            with pytest.raises(CallError) as caught:
                await broken.step(MESSAGE, [])
            assert caught.value.kind == kind and text in f"{caught.value.reason} {caught.value.trace}"
            assert (await other.step(MESSAGE, []))["messages"][0]["content"] == "hello"
            assert not pool.n_ended

        with EnvironmentPool(faulty(), 1) as pool:
            asyncio.run(main(pool))

    @pytest.mark.parametrize(
        ("name", "kind", "text"),
        [
            ("exits", "exit", "exit status 3"),
            ("crashes", "exit", "SIGSEGV"),
            ("blocks", "timeout", "longer than 1.5 s"),
        ],
    )
    def test_end_of_the_process_names_the_conversation_that_ended_it(self, name: str, kind: str, text: str) -> None:
        async def main(pool: EnvironmentPool) -> None:
            sessions = [await pool.open(key) for key in range(20)]
            for key, session in enumerate(sessions):
                await session.reset(row(name if key == 7 else "good"))
            outcomes = await asyncio.gather(*(each.step(MESSAGE, []) for each in sessions), return_exceptions=True)
            lost = [outcome for outcome in outcomes if isinstance(outcome, EnvironmentLost)]
            assert isinstance(outcomes[7], EnvironmentLost)
            assert {each.suspects for each in lost} == {frozenset({7})}
            assert lost[0].end.kind == kind and text in lost[0].end.reason
            for session in sessions:
                session.close()
            again = await pool.open(100)
            await again.reset(row("good"))
            assert (await again.step(MESSAGE, []))["messages"] and pool.n_ended == 1

        with EnvironmentPool(faulty(), 1) as pool:
            asyncio.run(main(pool))

    def test_results_have_plain_values(self) -> None:
        async def main(pool: EnvironmentPool) -> None:
            numbers, surrogate = await pool.open(0), await pool.open(1)
            await asyncio.gather(numbers.reset(row("numbers")), surrogate.reset(row("surrogate")))
            assert (await numbers.step(MESSAGE, []))["info"] == {"n": 0.5}
            [message] = (await surrogate.step(MESSAGE, []))["messages"]
            assert message["content"] == "\ufffd" and isinstance(message["extra"], str)

        with EnvironmentPool(faulty(), 1) as pool:
            asyncio.run(main(pool))

    def test_plain_functions_wait_for_a_thread_before_their_deadline(self) -> None:
        """200 calls of a second in 64 threads, with a deadline of 2 s each."""
        settings = settings_of(f"rollout.environment={FILE}:Slow", "rollout.environment_timeout_s=2")

        async def main(pool: EnvironmentPool) -> None:
            sessions = [await pool.open(key) for key in range(200)]
            await asyncio.gather(*(each.reset(row("good")) for each in sessions))
            assert len(await asyncio.gather(*(each.step(MESSAGE, []) for each in sessions))) == 200
            assert not pool.n_ended

        with EnvironmentPool(settings, 1) as pool:
            asyncio.run(main(pool))

    @pytest.mark.slow
    def test_process_with_many_late_threads_is_replaced(self) -> None:
        settings = settings_of(
            f"rollout.tools=[{FILE}:block]", "rollout.tool_parser=hermes", "rollout.environment_timeout_s=1"
        )

        async def main(pool: EnvironmentPool) -> None:
            session = await pool.open(0)
            await session.reset(row(""))
            with pytest.raises(EnvironmentLost) as caught:
                await session.step(MESSAGE, [call("block", seconds=3600)] * 40)
            assert caught.value.end.kind == "timeout" and "calls are late" in caught.value.end.stack
            again = await pool.open(1)
            await again.reset(row(""))
            assert (await again.step(MESSAGE, [call("block", seconds=0)]))["messages"][0]["content"] == "blocked"

        with EnvironmentPool(settings, 1) as pool:
            asyncio.run(main(pool))

    def test_late_threads_of_closed_conversations_count(self) -> None:
        settings = settings_of(
            f"rollout.tools=[{FILE}:block]", "rollout.tool_parser=hermes", "rollout.environment_timeout_s=2"
        )

        async def hang(pool: EnvironmentPool, key: int) -> None:
            session = await pool.open(key)
            try:
                async with asyncio.timeout(1):
                    await session.reset(row(""))
                    await session.step(MESSAGE, [call("block", seconds=3600)])
            finally:
                session.close()

        async def main(pool: EnvironmentPool) -> None:
            ends = await asyncio.gather(*(hang(pool, key) for key in range(40)), return_exceptions=True)
            assert {type(end) for end in ends} == {TimeoutError}
            other = await pool.open(100)
            with pytest.raises(EnvironmentLost) as caught:
                async with asyncio.timeout(PATIENCE_S):
                    await other.reset(row(""))
                    while True:
                        await other.step(MESSAGE, [call("block", seconds=0.1)])
            assert "calls are late" in caught.value.end.stack and len(caught.value.suspects) >= 40

        with EnvironmentPool(settings, 1) as pool:
            asyncio.run(main(pool))

    @pytest.mark.parametrize("timeout_s", [0.5, 20])
    def test_environment_that_starts_after_its_conversation_is_closed(self, tmp_path: Path, timeout_s: float) -> None:
        settings = settings_of(
            f"rollout.environment={FILE}:SlowStart",
            f"rollout.environment_kwargs={{folder: {tmp_path}}}",
            f"rollout.environment_timeout_s={timeout_s}",
        )

        async def main(pool: EnvironmentPool) -> None:
            session = await pool.open(0)
            with pytest.raises((TimeoutError, CallError)):
                await asyncio.wait_for(session.reset(row("")), 0.8)
            session.close()
            await asyncio.to_thread(wait_until, (tmp_path / "started").exists)

        with EnvironmentPool(settings, 1) as pool:
            asyncio.run(main(pool))
        assert (tmp_path / "started").read_text() == "close\n"

    def test_silent_process_is_ended(self) -> None:
        async def main(pool: EnvironmentPool) -> None:
            session = await pool.open(0)
            await session.reset(row("good"))
            await asyncio.sleep(0.3)  # its event loop waits
            os.kill(pool._processes[0]._process._process.pid, signal.SIGSTOP)
            with pytest.raises(EnvironmentLost) as caught:
                await session.step(MESSAGE, [])
            assert caught.value.end.kind == "timeout" and not caught.value.suspects
            assert await (await pool.open(1)).reset(row("good")) is None

        with EnvironmentPool(faulty(), 1) as pool:
            asyncio.run(main(pool))

    def test_closed_session_ends_its_call(self, tmp_path: Path) -> None:
        settings = settings_of(
            f"rollout.environment={FILE}:Faulty", f"rollout.environment_kwargs={{folder: {tmp_path}}}"
        )

        async def main(pool: EnvironmentPool) -> None:
            session = await pool.open(0)
            await session.reset(row("waits"))
            waiting = asyncio.ensure_future(session.step(MESSAGE, []))
            await asyncio.sleep(0.2)
            waiting.cancel()
            session.close()
            await asyncio.sleep(0.5)
            assert (tmp_path / "waits").read_text() == "reset\nclose\n"

        with EnvironmentPool(settings, 1) as pool:
            asyncio.run(main(pool))

    def test_closed_pool_leaves_no_process(self) -> None:
        pool = EnvironmentPool(faulty(), 2)
        pids = [process._process._process.pid for process in pool._processes]
        pool.close()
        assert not any(Path(f"/proc/{pid}").exists() for pid in pids)

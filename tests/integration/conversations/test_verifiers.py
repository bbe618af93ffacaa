"""Environments of the real package verifiers: turns, tools, rewards, failures and cancellation."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from recipe_gkd.config import Config
from recipe_gkd.config.environments import EnvironmentSettings
from recipe_gkd.conversations.adapters import verifiers_environment
from recipe_gkd.conversations.context import ConversationContext
from recipe_gkd.conversations.pool import EnvironmentPool
from recipe_gkd.conversations.process import CallError
from recipe_gkd.conversations.stage import ConversationStage
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.samples import Response
from recipe_gkd.data.transcript import Transcript
from recipe_gkd.errors import ConfigError
from recipe_gkd.rollout.turns import TurnRequest
from tests._support.conversations import TOKENIZER, all_of, configured, scripted, text_of
from tests._support.data_sets import data_set_of
from tests._support.waiting import PATIENCE_S

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

ADAPTER = verifiers_environment.__file__
LOCAL = ("agent.runtime.type=subprocess", "agent.harness.id=null")
"""A loop of chat completions and tools, in a process of this machine."""


def rows_of(python: Path, folder: Path, *pairs: str) -> list[dict[str, Any]]:
    """Return the rows that the program writes."""
    output = folder / "rows.jsonl"
    command = [str(python), ADAPTER, "--output", str(output), *pairs, *LOCAL]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    return [json.loads(line) for line in output.read_text().splitlines()]


def config_of(python: Path, *pairs: str, timeout_s: int = 150) -> Config:
    return configured(
        f"rollout.environment={ADAPTER}:Verifiers",
        f"rollout.environment_python={python}",
        "rollout.tool_parser=hermes",
        f"rollout.environment_timeout_s={timeout_s}",
        *(f"rollout.environment_kwargs.{pair}" for pair in (*pairs, *LOCAL)),
    )


def run(
    config: Config, rows: list[dict[str, Any]], student: Callable[[TurnRequest], str]
) -> tuple[dict[int, Response], list[TurnRequest], list[str]]:
    """Return the conversations, the requests of turns, and the errors."""
    requests: list[TurnRequest] = []
    errors: list[str] = []

    async def main(pool: EnvironmentPool) -> dict[int, Response]:
        stage = ConversationStage(ConversationContext(config, TOKENIZER, pool))
        data_set = data_set_of({name: [row[name] for row in rows] for name in rows[0]}, config.data)
        data_set.default_tools = pool.tools or None
        data = PromptData(data_set, config.data, TOKENIZER)
        prompts = [data.prompt(index, index) for index in range(len(data))]
        async with asyncio.timeout(PATIENCE_S):
            found = await all_of(stage, data, scripted(student, requests), prompts)
        await stage.close()
        return found

    with EnvironmentPool(EnvironmentSettings.of(config), 1) as pool:
        found = asyncio.run(main(pool))
    errors += [transcript_of(found[uid]).failure for uid in sorted(found)]
    return found, requests, errors


def transcript_of(response: Response) -> Transcript:
    assert response.transcript is not None
    return response.transcript


def test_single_turn_has_reward_and_metrics(verifiers_python: Path, hub: Path, tmp_path: Path) -> None:
    rows = rows_of(verifiers_python, tmp_path, "taskset.id=vf-sums", "taskset.num_tasks=3", "--skip=1", "--limit=2")
    assert [row["prompt"][-1]["content"] for row in rows] == ["2+2=", "3+3="]
    assert [(row["ground_truth"], row["data_source"]) for row in rows] == [("4", "vf-sums"), ("6", "vf-sums")]
    found, requests, _ = run(config_of(verifiers_python, "taskset.id=vf-sums"), rows, lambda request: "4")
    right, wrong = (transcript_of(found[uid]) for uid in (0, 1))
    assert [message["content"] for message in right.messages] == ["4"] and right.end == wrong.end == "stop"
    assert (right.rewards, right.numbers) == ((2.0,), {"exact": 1.0, "length": 1.0})
    assert (wrong.rewards, wrong.numbers) == ((0.0,), {"exact": 0.0, "length": 1.0})
    assert text_of(found[0].ids) == "4<|end|>" and not any(request.tools for request in requests)


def test_turns_end_with_the_environment_and_faults_cost_their_conversation(
    verifiers_python: Path, hub: Path, tmp_path: Path
) -> None:
    rows = rows_of(verifiers_python, tmp_path, "taskset.id=vf-guess", "--limit=4")
    config = config_of(verifiers_python, "taskset.id=vf-guess")
    found, _, errors = run(config, rows, lambda request: "17"[request.number])
    good = transcript_of(found[0])
    assert [(message["role"], message["content"]) for message in good.messages] == [
        ("assistant", "1"), ("user", "0"), ("assistant", "7"),
    ]  # fmt: skip
    assert (good.rewards, good.numbers, good.end) == ((1.0,), {"found": 1.0, "guesses": 2.0}, "stop")
    assert text_of(found[0].ids) == "1<|end|>7<|end|>"
    scoring, agents, rewrite = errors[1:]
    assert errors[0] == "" and "the referee is ill" in scoring
    assert "a second agent requested a turn of the student" in agents
    assert "message 1 of the history has changed" in rewrite and "'content': '1'" in rewrite
    assert [len(transcript_of(found[uid]).rewards) for uid in (1, 2, 3)] == [0, 0, 0]


def test_tools_are_described_and_executed(verifiers_python: Path, hub: Path, tmp_path: Path) -> None:
    rows = rows_of(verifiers_python, tmp_path, "taskset.id=vf-tools")
    call = '<tool_call>{"name": "add", "arguments": {"a": 12, "b": 34}}</tool_call>'
    config = config_of(verifiers_python, "taskset.id=vf-tools")
    found, requests, errors = run(config, rows, lambda request: (call, "46")[request.number])
    assert errors == [""]
    [tool] = requests[0].tools or []
    assert tool["function"]["name"] == "add" and tool["function"]["description"] == "Add two numbers."
    assert set(tool["function"]["parameters"]["properties"]) == {"a", "b"}
    transcript = transcript_of(found[0])
    assert transcript.messages[1] == {"role": "tool", "content": "46", "tool_call_id": "call0", "name": "add"}
    assert (transcript.rewards, transcript.numbers) == ((1.0,), {"exact": 1.0, "calls": 1.0})


def test_late_step_is_cancelled_with_its_processes(verifiers_python: Path, hub: Path, tmp_path: Path) -> None:
    """Missing rows, a missed deadline, and a conversation that is closed while a turn is sampled."""
    *_, row = rows_of(verifiers_python, tmp_path, "taskset.id=vf-guess")
    config = config_of(verifiers_python, "taskset.id=vf-guess", timeout_s=30)

    async def main(pool: EnvironmentPool) -> None:
        late, parked, other = [await pool.open(key) for key in range(3)]
        values = {"prompt": row["prompt"], "ground_truth": "7", "data_source": None, "extra": row}
        await asyncio.gather(late.reset(values), parked.reset(values))
        with pytest.raises(CallError) as missing:
            await other.reset({**values, "extra": {}})
        assert "no text in the column verifiers_task" in missing.value.trace
        assert programs()
        with pytest.raises(CallError) as caught:
            await late.step({"role": "assistant", "content": "1"}, [])
        assert caught.value.kind == "timeout"
        for session in (late, parked, other):
            session.close()
        async with asyncio.timeout(PATIENCE_S):
            while programs():
                await asyncio.sleep(0.1)

    def programs() -> list[psutil.Process]:
        [child] = [each for each in psutil.Process().children() if "child.py" in " ".join(each.cmdline())]
        return child.children(recursive=True)

    with EnvironmentPool(EnvironmentSettings.of(config), 1) as pool:
        asyncio.run(main(pool))


def test_unknown_environment_ends_the_start(verifiers_python: Path, hub: Path) -> None:
    with pytest.raises(ConfigError, match="taskset 'vf-nothing' not found"):
        EnvironmentPool(EnvironmentSettings.of(config_of(verifiers_python, "taskset.id=vf-nothing")), 1)

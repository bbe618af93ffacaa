"""The loop of conversations: exact tokens, limits, failures, and deaths of replicas."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from pathlib import Path

import numpy as np
import pytest
from transformers import PreTrainedTokenizerBase

from recipe_gkd.config import Config
from recipe_gkd.config.environments import EnvironmentSettings
from recipe_gkd.conversations import stage as stage_module
from recipe_gkd.conversations.context import ConversationContext
from recipe_gkd.conversations.open_batch import Batch
from recipe_gkd.conversations.pool import EnvironmentPool
from recipe_gkd.conversations.stage import ConversationStage, SendTurns
from recipe_gkd.data.parts import parts_of
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.samples import Response, Sample, TeacherTopK
from recipe_gkd.errors import ConversationError, WorkerDied
from recipe_gkd.metrics.conversations import conversation_metrics
from recipe_gkd.rewards.items import RewardItems
from recipe_gkd.rollout.sampling import SamplingName
from recipe_gkd.rollout.turns import Turn, TurnRequest
from tests._support.conversations import (
    FILE,
    QWEN3,
    TOKENIZER,
    all_of,
    configured,
    prompt_data,
    prompts_of,
    scripted,
    text_of,
    turn_of,
    with_chat_template,
)
from tests._support.errors import raises
from tests._support.waiting import PATIENCE_S

CALCULATOR = Path(FILE).parents[2] / "examples/calculator/tools.py"
TOOLS = (f"rollout.tools=[{CALCULATOR}:calculator]", "rollout.tool_parser=hermes")
ECHO = (f"rollout.environment={FILE}:Echo",)
FAULTY = (f"rollout.environment={FILE}:Faulty", "rollout.environment_timeout_s=1.5")


def call(expression: str) -> str:
    return f'<tool_call>{{"name": "calculator", "arguments": {{"expression": "{expression}"}}}}</tool_call>'


def run(
    overrides: Sequence[str],
    send: SendTurns,
    *names: str,
    config: Config | None = None,
    tokenizer: PreTrainedTokenizerBase = TOKENIZER,
    times: list[ConversationStage] | None = None,
) -> tuple[dict[int, Response], PromptData]:
    """Run the conversations of one prompt for each name."""
    config = config or configured(*overrides)

    async def main(pool: EnvironmentPool) -> tuple[dict[int, Response], PromptData]:
        stage = ConversationStage(ConversationContext(config, tokenizer, pool))
        outside: list[int] = []
        stage.on_outside = outside.append
        if times is not None:
            times.append(stage)
        data = prompt_data(config, *names, tools=pool.tools or None, tokenizer=tokenizer)
        async with asyncio.timeout(PATIENCE_S):
            found = await all_of(stage, data, send)
        assert sum(outside) == 0 and set(outside) <= {1, -1} and not stage._open
        return found, data

    with EnvironmentPool(EnvironmentSettings.of(config), 1) as pool:
        return asyncio.run(main(pool))


def replica(*turns: str) -> SendTurns:
    """Return a student that says the same in each conversation."""
    return scripted(lambda request: turns[request.number])


def test_turns_that_begin_within_an_interval_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each conversation goes on at another time, 10 ms after the one before."""
    monkeypatch.setattr(stage_module, "SEND_INTERVAL_S", 2.0)
    sizes: list[int] = []
    one_by_one = scripted(lambda request: [call("1+1"), "2"][request.number])

    async def send(requests: Sequence[TurnRequest]) -> AsyncGenerator[list[Turn]]:
        sizes.append(len(requests))
        async for turns in one_by_one(requests):
            for turn in turns:
                await asyncio.sleep(0.01)
                yield [turn]

    found, _ = run(TOOLS, send, *"abcdefgh")
    assert [response.transcript.n_turns for response in found.values()] == [2] * 8  # type: ignore[union-attr]
    assert sum(sizes) == 16 and len(sizes) <= 4, sizes  # one for each turn of each conversation would be up to 16


class TestTokens:
    def test_conversation_is_what_the_template_writes_and_what_was_sampled(self) -> None:
        requests: list[TurnRequest] = []
        turns = [call("12+34"), call("46+1"), "47"]
        found, data = run(TOOLS, scripted(lambda request: turns[request.number], requests), "a", "b")
        for response, prompt in zip((found[0], found[1]), prompts_of(data), strict=True):
            sequence = np.concatenate([prompt.ids, response.sequence_ids])
            messages = [*data.data_set[0].prompt, *response.transcript.messages]  # type: ignore[misc,union-attr]
            rendered = TOKENIZER.apply_chat_template(messages, tools=data.data_set[0].tools, return_dict=False)
            assert sequence.tolist() == rendered
            assert text_of(response.ids) == "".join(f"{turn}<|end|>" for turn in turns)
            assert text_of(response.last_turn_ids) == "47<|end|>"
            np.testing.assert_array_equal(response.logprobs, (-1 - response.ids / 100).astype(np.float32))
            assert response.finish_reason == "stop" and len(response.versions_T) == len(response.ids)
            Sample(prompt=prompt, response=response, teacher=TeacherTopK.absent(len(response.ids)))
            of_sample = [request for request in requests if request.prompt.uid == prompt.uid]
            assert [request.number for request in of_sample] == [0, 1, 2]
            for request in of_sample:  # the context of a turn is the beginning of the whole sequence
                assert request.prompt.ids.tolist() == sequence[: len(request.prompt.ids)].tolist()
                assert request.max_tokens == 200 - (len(request.prompt.ids) - len(prompt.ids))

    def test_rewritten_conversation_is_divided_where_its_history_changes(self) -> None:
        """Each turn is sampled from what the template writes, and in a sequence with it."""
        requests: list[TurnRequest] = []
        turns = ["<think>1</think>2", f"<think>1</think>{call('12+34')}", "<think>3</think>4", "0"]
        config = configured(
            f"rollout.environment={FILE}:Calling", "rollout.tool_parser=hermes", "rollout.history=rewrite"
        )
        tokenizer = with_chat_template(QWEN3)
        send = scripted(lambda request: turns[request.number], requests)
        found, data = run((), send, "a", config=config, tokenizer=tokenizer)
        prompt, response = prompts_of(data)[0], found[0]
        parts = parts_of(prompt, response)
        assert response.transcript is not None and response.transcript.n_turns == 4
        messages = [*data.data_set[0].prompt, *response.transcript.messages]  # type: ignore[misc]
        n_before = [1, 3, 7]  # the second part has a tool call, whose result changes nothing
        assert len(parts) == 3
        for (context, part), n in zip(parts, n_before, strict=True):
            expected = tokenizer.apply_chat_template(messages[:n], add_generation_prompt=True, return_dict=False)
            assert context.ids.tolist() == expected
            Sample(prompt=context, response=part, teacher=TeacherTopK.absent(len(part.ids)))
        sampled = [turns[:1], turns[1:3], turns[3:]]
        for (_, part), of_part in zip(parts, sampled, strict=True):
            assert part.ids.tolist() == TOKENIZER("".join(f"{turn}<|end|>" for turn in of_part))["input_ids"]
        contexts = [request.prompt.ids.tolist() for request in requests]
        assert [contexts[0], contexts[1], contexts[3]] == [context.ids.tolist() for context, _ in parts]
        second = np.concatenate([parts[1][0].ids, parts[1][1].sequence_ids]).tolist()
        assert second[: len(contexts[2])] == contexts[2]
        with pytest.raises(ValueError, match="several sequences"):
            Sample(prompt=prompt, response=response, teacher=TeacherTopK.absent(len(response.ids)))

    def test_conversation_of_one_turn_is_a_plain_response(self) -> None:
        found, _ = run(TOOLS, replica("47"), "a")
        assert found[0].inserted is None and text_of(found[0].ids) == "47<|end|>"
        assert found[0].offsets_T.tolist() == [0, 1, 2]

    def test_student_ids_of_all_turns_are_kept(self) -> None:
        async def send(batch: Sequence[TurnRequest]) -> AsyncGenerator[list[Turn]]:
            for request in batch:
                turn = turn_of(request, ("1", "0")[request.number])
                ids_TJ = np.arange(2 * len(turn.response.ids), dtype=np.int32).reshape(-1, 2) + request.number
                vars(turn.response)["student_ids_TJ"] = ids_TJ
                yield [turn]

        found, _ = run(ECHO, send, "a")
        assert found[0].student_ids_TJ is not None and found[0].student_ids_TJ.shape == (len(found[0].ids), 2)

    def test_reset_may_set_the_prompt(self) -> None:
        found, _ = run([f"rollout.environment={FILE}:Prompting"], replica("0"), "a")
        assert found[0].prompt_ids is not None and text_of(found[0].prompt_ids) == "<|user|>2<|assistant|>"
        assert found[0].transcript is not None and found[0].transcript.prompt == [{"role": "user", "content": "2"}]

    def test_environment_may_write_arguments_of_calls_as_json_text(self) -> None:
        found, _ = run([f"rollout.environment={FILE}:Recalling"], replica("0"), "a")
        assert found[0].transcript is not None and found[0].transcript.prompt is not None
        assert found[0].transcript.prompt[0]["tool_calls"][0]["function"]["arguments"] == {"x": 1}

    def test_long_message_is_cut(self) -> None:
        limit = ("rollout.max_tool_response_length=3", "rollout.tool_response_truncate_side=right")
        found, _ = run([*ECHO, *limit], replica("123456", "0"), "a")
        assert found[0].transcript is not None
        assert found[0].transcript.messages[1]["content"] == "123..."


class TestLimits:
    def test_last_turn_ends_the_conversation(self) -> None:
        found, _ = run([*ECHO, "rollout.max_turns=2"], replica("1", "2"), "a")
        assert found[0].transcript is not None and found[0].transcript.end == "turns"
        assert found[0].finish_reason == "length" and text_of(found[0].ids) == "1<|end|>2<|end|>"

    @pytest.mark.parametrize("limit", range(1, 14))
    def test_conversation_has_at_most_the_length_of_a_response(self, limit: int) -> None:
        found, _ = run([*ECHO, f"data.max_response_length={limit}"], replica("12", "34", "0"), "a")
        transcript = found[0].transcript
        assert transcript is not None and len(found[0].sequence_ids) <= limit
        assert transcript.end == "length" and found[0].finish_reason == "length"
        assert len(found[0].ids) >= min(limit, 3)

    def test_time_limit_keeps_the_turns(self) -> None:
        async def send(batch: Sequence[TurnRequest]) -> AsyncGenerator[list[Turn]]:
            for request in batch:
                if request.number:
                    await asyncio.sleep(3600)
                yield [turn_of(request, "1")]

        found, _ = run([*ECHO, "rollout.conversation_timeout_s=1"], send, "a")
        assert found[0].transcript is not None and found[0].transcript.end == "time"
        assert text_of(found[0].ids) == "1<|end|>"


class TestFailures:
    @pytest.mark.parametrize(("mode", "text"), [("truncate", "1<|end|>"), ("skip", "")])
    @pytest.mark.parametrize("fault", ["raises", "waits", "exits", "blocks"])
    def test_failure_costs_its_conversation_only(self, fault: str, mode: str, text: str) -> None:
        names = ["good", fault, "good", "good"]
        overrides = [*FAULTY, f"rollout.on_environment_failure={mode}"]
        stages: list[ConversationStage] = []
        found, _ = run(overrides, replica("1", "0"), *names, times=stages)
        assert text_of(found[1].ids) == text
        assert found[1].transcript is not None and found[1].transcript.end == "failure"
        assert found[1].weights_version == (3 if mode == "skip" else 0)
        for uid in (0, 2, 3):
            assert text_of(found[uid].ids) == "1<|end|>0<|end|>"
            assert found[uid].transcript is not None and found[uid].transcript.end == "stop"
        assert stages[0].failures == 1

    def test_failure_ends_the_run_if_it_must(self) -> None:
        with raises(ConversationError, uid=1, kind="exception"):
            run([*FAULTY, "rollout.on_environment_failure=fail"], replica("1", "0"), "good", "raises")

    def test_too_many_failures_end_the_run(self) -> None:
        with raises(ConversationError, failures=2):
            run([*FAULTY, "rollout.max_environment_failures=1"], replica("1"), "raises", "raises", "good")

    def test_metrics_of_a_batch(self) -> None:
        found, data = run([*FAULTY], replica("1", "0"), "good", "raises")
        samples = [
            Sample(prompt=prompt, response=found[prompt.uid], teacher=TeacherTopK.absent(len(found[prompt.uid].ids)))
            for prompt in prompts_of(data)
        ]
        metrics = conversation_metrics(samples)
        assert metrics["conversation/failures"] == 1 and metrics["conversation/turns_mean"] == 1.5
        assert metrics["environment/steps"] == 2 and 0 < metrics["conversation/sampled_share"] < 1
        with raises(ConversationError, failures=1):
            conversation_metrics(samples[1:])
        assert conversation_metrics([]) == {}

    def test_reward_function_gets_the_conversation(self) -> None:
        kwargs = "rollout.environment_kwargs={reward: 0.25}"
        found, data = run([*ECHO, kwargs], replica("1", "0"), "a")
        config = configured(*ECHO)
        item = RewardItems(data, config.data, TOKENIZER).build_item(prompts_of(data)[0], found[0])
        assert item.response == "stop" or set(item.response) <= set("0")
        conversation = item.extra["conversation"]
        assert (conversation["rewards"], conversation["reward"]) == ([0.25, 0.25], 0.5)
        assert [message["role"] for message in conversation["messages"]] == ["assistant", "user", "assistant"]


class TestDeaths:
    def test_conversation_continues_on_another_replica_from_its_tokens(self, tmp_path: Path) -> None:
        """The environment is reset once, and each turn is sampled once."""
        overrides = [*ECHO, f"rollout.environment_kwargs={{folder: {tmp_path}}}"]
        config = configured(*overrides)
        turns, requests, n_deaths = ["1", "2", "0"], Counter[tuple[int, int]](), 0

        async def send(batch: Sequence[TurnRequest]) -> AsyncGenerator[list[Turn]]:
            for request in batch:
                key = request.prompt.uid, request.number
                requests[key] += 1
                if requests[key] == 1 and sum(key) % 3 == 1:
                    raise WorkerDied("died")
                yield [turn_of(request, turns[request.number])]

        async def main(pool: EnvironmentPool) -> dict[int, Response]:
            nonlocal n_deaths
            stage, data = ConversationStage(ConversationContext(config, TOKENIZER, pool)), prompt_data(config, *"abcd")
            found: dict[int, Response] = {}
            while len(found) < 4:
                left = [prompt for prompt in prompts_of(data) if prompt.uid not in found]
                try:
                    async for responses in stage.generate(Batch(data=data, replica=0, step=0), left, send):
                        found |= {response.uid: response for response in responses}
                except WorkerDied:
                    n_deaths += 1
            await asyncio.sleep(0.3)  # environments are closed in the background
            assert not stage._open
            return found

        with EnvironmentPool(EnvironmentSettings.of(config), 1) as pool:
            found = asyncio.run(main(pool))
        assert n_deaths >= 2
        assert {text_of(each.ids) for each in found.values()} == {"1<|end|>2<|end|>0<|end|>"}
        assert {path.read_text() for path in tmp_path.iterdir()} == {"reset\nclose\n"}

    def test_conversations_of_a_failed_validation_are_closed(self) -> None:
        """Conversations that wait for a new worker after a death, for which no second call comes."""
        config = configured(*ECHO)
        names: tuple[SamplingName, ...] = ("train", "validation")

        async def main(pool: EnvironmentPool) -> None:
            stage, data = ConversationStage(ConversationContext(config, TOKENIZER, pool)), prompt_data(config, "a")

            async def send(batch: Sequence[TurnRequest]) -> AsyncGenerator[list[Turn]]:
                raise WorkerDied("died")
                yield []

            for sampling in names:
                with pytest.raises(WorkerDied):
                    batch = Batch(data=data, replica=0, step=0, sampling=sampling)
                    async for _ in stage.generate(batch, prompts_of(data), send):
                        pass
            waiting = [task for opened in stage._open.values() for task in opened.tasks.values()]
            await stage.close("validation")
            assert [key[0] for key in stage._open] == ["train"] and [task.done() for task in waiting] == [False, True]
            await stage.close()

        with EnvironmentPool(EnvironmentSettings.of(config), 1) as pool:
            asyncio.run(asyncio.wait_for(main(pool), PATIENCE_S))

    def test_failure_beside_a_death_ends_the_run(self) -> None:
        config = configured(*FAULTY, "rollout.on_environment_failure=fail")

        async def main(pool: EnvironmentPool) -> None:
            stage, data = (
                ConversationStage(ConversationContext(config, TOKENIZER, pool)),
                prompt_data(config, "raises", "good"),
            )

            async def send(batch: Sequence[TurnRequest]) -> AsyncGenerator[list[Turn]]:
                opened = next(iter(stage._open.values()))
                opened.ended.put_nowait(WorkerDied("died"))
                opened.ended.put_nowait(ConversationError("failed"))
                yield []

            with pytest.raises(ConversationError):
                await all_of(stage, data, send)
            assert not stage._open

        with EnvironmentPool(EnvironmentSettings.of(config), 1) as pool:
            asyncio.run(main(pool))

    def test_closed_generator_ends_its_conversations(self, tmp_path: Path) -> None:
        config = configured(*ECHO, f"rollout.environment_kwargs={{folder: {tmp_path}}}")

        async def main(pool: EnvironmentPool) -> None:
            stage, data = ConversationStage(ConversationContext(config, TOKENIZER, pool)), prompt_data(config, *"ab")

            async def send(batch: Sequence[TurnRequest]) -> AsyncGenerator[list[Turn]]:
                yield [turn_of(request, "0") for request in batch if not request.prompt.uid]
                await asyncio.sleep(3600)

            batch = Batch(data=data, replica=0, step=0)
            async with aclosing(stage.generate(batch, prompts_of(data), send)) as stream:
                [first] = await anext(stream)
                assert first.uid == 0
            assert not stage._open and len(asyncio.all_tasks()) <= 5
            await asyncio.sleep(0.3)

        with EnvironmentPool(EnvironmentSettings.of(config), 1) as pool:
            asyncio.run(main(pool))
        assert {path.read_text() for path in tmp_path.iterdir()} == {"reset\nclose\n"}


class TestTimes:
    def test_turns_of_others_are_generated_while_a_tool_runs(self) -> None:
        """Calls of the replica overlap with the environments of other conversations."""
        active, most = 0, 0

        async def send(batch: Sequence[TurnRequest]) -> AsyncGenerator[list[Turn]]:
            nonlocal active, most
            for request in batch:
                active += 1
                most = max(most, active)
                await asyncio.sleep(0.01)
                active -= 1
                yield [turn_of(request, ("1", "2", "0")[request.number])]

        found, _ = run(ECHO, send, *"abcdefgh")
        assert len(found) == 8 and most > 1

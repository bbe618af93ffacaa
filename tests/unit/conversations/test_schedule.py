"""Conversations under the real schedule in virtual time: random turns, tool times, sizes, bounds and deaths."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pipeline_stages import Pools
from pipeline_turns import throughput_share
from virtual_time import run

from recipe_gkd.conversations.context import ConversationContext
from recipe_gkd.conversations.open_batch import Batch
from recipe_gkd.conversations.stage import ConversationStage
from recipe_gkd.conversations.template import NextTokens
from recipe_gkd.data.batches import PromptBatch
from recipe_gkd.data.messages import Message
from recipe_gkd.data.parts import by_response, parts_of
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import Row
from recipe_gkd.data.samples import Prompt, Response, Sample, TeacherTopK
from recipe_gkd.errors import WorkerDied
from recipe_gkd.pipeline.config import PipelineConfig
from recipe_gkd.pipeline.pipeline import Pipeline
from recipe_gkd.pipeline.stages import PipelineStages
from recipe_gkd.rollout.turns import Turn, TurnRequest
from tests._support.conversations import TOKENIZER, configured, prompt_data, turn_of

BETWEEN = NextTokens(ids=np.array([21, 22], np.int32), is_rewrite=False)
HISTORY = NextTokens(ids=np.array([2, 21, 21, 21, 22], np.int32), is_rewrite=True)


class FakePool:
    """Environments that take random times, and end after random numbers of turns."""

    def __init__(self, rng: random.Random) -> None:
        self.rng, self.resets, self.n_open = rng, Counter[int](), 0

    async def open(self, key: int) -> FakeSession:
        self.n_open += 1
        return FakeSession(self, key)


class FakeSession:
    seconds = 0.0

    def __init__(self, pool: FakePool, key: int) -> None:
        self.pool, self.key, self.left = pool, key, pool.rng.randint(1, 5)

    async def reset(self, row: dict[str, Any]) -> None:
        await asyncio.sleep(self.pool.rng.uniform(0, 2))
        self.pool.resets[self.key] += 1

    async def step(self, message: Message, calls: Sequence[Any]) -> dict[str, Any]:
        await asyncio.sleep(self.pool.rng.uniform(0, 2))
        self.left -= 1
        messages = [{"role": "user", "content": "0"}] if self.left else []
        return {"messages": messages, "done": not self.left, "reward": None, "info": {}, "tool_errors": 0}

    def close(self) -> None:
        self.pool.n_open -= 1


class Context(ConversationContext):
    """Context that tokenizes in the event loop, because virtual time cannot wait for threads.

    Its template rewrites the history before some turns.
    """

    rng: random.Random

    async def tokens_between(
        self, data: PromptData, row: Row, before: list[Message], turn: Turn, messages: list[Message]
    ) -> tuple[list[Message], NextTokens]:
        return messages, HISTORY if self.rng.random() < 0.3 else BETWEEN


class Simulation:
    """Stages of a run with conversations. Replicas have slots, and die at given calls."""

    def __init__(self, data: PromptData, *, n_replicas: int, n_slots: int, seed: int, deaths: set[int]) -> None:
        self.rng, self.data, self.deaths = random.Random(seed), data, deaths
        self.pool: Any = FakePool(self.rng)
        config = configured("rollout.environment=x.py:X", "rollout.max_turns=20")
        context = Context(config, TOKENIZER, self.pool)
        context.rng = self.rng
        self.stage = ConversationStage(context)
        self.slots = [asyncio.Semaphore(n_slots) for _ in range(n_replicas)]
        self.n_calls, self.n_replaced, self.version = 0, 0, 0
        self.contexts: dict[int, list[list[int]]] = {}
        self.outside, self.least_free = 0, 0

    async def generate(self, replica: int, prompts: Sequence[Prompt], step: int) -> AsyncIterator[list[Response]]:
        async def send(requests: Sequence[TurnRequest]) -> AsyncGenerator[list[Turn]]:
            self.n_calls += 1
            dies = self.n_calls in self.deaths
            for request in requests:
                async with self.slots[replica]:
                    await asyncio.sleep(self.rng.uniform(0.1, 1))
                if dies and self.rng.random() < 0.5:
                    raise WorkerDied("died")
                self.contexts.setdefault(request.prompt.uid, []).append(request.prompt.ids.tolist())
                yield [turn_of(request, "12", self.version)]

        batch = Batch(data=self.data, replica=replica, step=step)
        async with aclosing(self.stage.generate(batch, prompts, send)) as stream:
            async for responses in stream:
                yield responses

    async def score(self, group: Sequence[tuple[Prompt, Response]], step: int) -> list[Sample]:
        await asyncio.sleep(self.rng.uniform(0, 1))
        return [
            Sample(prompt=prompt, response=response, teacher=TeacherTopK.absent(len(response.ids)))
            for pair in group
            for prompt, response in parts_of(*pair)
        ]

    async def sync(self, version: int) -> dict[str, float]:
        await asyncio.sleep(0.1)
        self.version = version
        return {}

    async def replace(self, death: WorkerDied) -> None:
        await asyncio.sleep(self.rng.uniform(0, 3))
        self.n_replaced += 1

    def count_outside(self, n: int, pipeline: Pipeline) -> None:
        self.outside += n
        pipeline.add_outside(n)
        self.least_free = min(self.least_free, pipeline._state.n_in_flight - self.outside)


async def train(simulation: Simulation, config: PipelineConfig, n_steps: int, batch_size: int) -> list[Sample]:
    def batch(step: int) -> PromptBatch:
        uids = range(step * batch_size, (step + 1) * batch_size)
        return PromptBatch(step, 0.0, [Prompt(uid=uid, ids=np.array([2, 3], np.int32), row=0) for uid in uids])

    stages = PipelineStages(
        generate=simulation.generate, score=simulation.score, sync=simulation.sync, replace=simulation.replace
    )
    found: list[Sample] = []
    async with Pipeline(map(batch, range(n_steps)), config, stages) as pipeline:
        simulation.stage.on_outside = lambda n: simulation.count_outside(n, pipeline)
        async for ready in pipeline:
            assert max(ready.staleness) <= config.max_staleness
            assert min(ready.staleness) >= 0
            async with pipeline.actor_update(ready):
                await asyncio.sleep(simulation.rng.uniform(0, 2))
            found += ready.samples
    return found


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    n_replicas=st.integers(1, 3),
    n_slots=st.integers(1, 4),
    batch_size=st.integers(1, 7),
    bound=st.integers(0, 3),
    inflight=st.booleans(),
    deaths=st.sets(st.integers(1, 30), max_size=4),
)
def test_every_conversation_is_trained_on_once_with_all_its_turns(
    seed: int, n_replicas: int, n_slots: int, batch_size: int, bound: int, inflight: bool, deaths: set[int]
) -> None:
    simulation = Simulation(DATA, n_replicas=n_replicas, n_slots=n_slots, seed=seed, deaths=deaths)
    config = PipelineConfig(
        max_staleness=bound,
        n_replicas=n_replicas,
        capacity=n_replicas * n_slots,
        inflight_update=inflight and bound > 0,
    )
    samples = run(train(simulation, config, 4, batch_size))
    conversations = by_response(samples)
    assert [parts[0].prompt.uid for parts in conversations] == list(range(4 * batch_size))
    assert not simulation.stage._open and not simulation.pool.n_open and simulation.outside == 0
    assert simulation.least_free >= 0
    assert set(simulation.pool.resets.values()) == {1} and len(simulation.pool.resets) == 4 * batch_size
    for parts in conversations:
        transcript, contexts = parts[0].response.transcript, iter(simulation.contexts[parts[0].prompt.uid])
        assert transcript is not None and transcript.end == "stop"
        assert sum(len(part.response.ids) for part in parts) == 3 * transcript.n_turns
        n_inserted = sum(part.response.n_inserted for part in parts)
        assert n_inserted == 2 * (transcript.n_turns - len(parts))
        for number, part in enumerate(parts):
            assert part.prompt.ids.tolist() == (HISTORY.ids.tolist() if number else [2, 3])
            ids, n_turns = part.token_ids.tolist(), len(part.response.ids) // 3
            for turn in range(n_turns):  # each turn was sampled from the tokens before it
                assert next(contexts) == ids[: len(part.prompt.ids) + 5 * turn]
        assert next(contexts, None) is None  # no turn was sampled twice
        assert (np.diff(np.concatenate([part.response.versions_T for part in parts])) >= 0).all()


DATA = prompt_data(configured("rollout.environment=x.py:X"), "a")


@pytest.mark.parametrize("staleness", [1, 2])
def test_tools_leave_the_engine_busy_if_enough_conversations_are_in_flight(staleness: int) -> None:
    """Tools of 0 to 2 s between turns of 1 s: at least 0.9 of the throughput without tools."""
    assert throughput_share(3, 2.0, Pools(n_replicas=2, n_slots=8), staleness, 4) >= 0.9

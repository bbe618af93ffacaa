"""Tests of generation by real engines in Ray actors: sampling, streaming and errors."""

from __future__ import annotations

import asyncio
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from recipe_gkd.config import Config
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.errors import DeadlineError, WorkerError
from recipe_gkd.rollout.ray_worker import RolloutWorker
from tests._support.errors import raises
from tests._support.qwen2 import EOS
from tests._support.rollout_models import (
    TEACHER_EOS,
    VOCABULARY,
    config_for,
    make_model,
    make_padded_model,
    prompts,
    reference_logprobs,
)
from tests._support.waiting import PATIENCE_S
from tests.integration.rollout.conftest import N_STUDENT_IDS, NEW, OLD, Pool

MANY = 3000  # prompts that keep an engine busy for longer than any deadline of these tests


def generate(pool: Pool, rank: int, given: list[Prompt], step: int = 0, *, greedy: bool = False) -> dict[int, Response]:
    return asyncio.run(pool.responses(rank, given, step, greedy=greedy))


def test_setup_describes_engine(pool: Pool) -> None:
    for description in pool.descriptions:
        assert description.dtype == "float32"
        assert description.head_dtype == "float32" and description.max_num_batched_tokens == 4096
        assert description.max_model_len == 32 + 48 and description.kv_cache_tokens > 1000
        assert description.seconds > 0


def test_generate_never_samples_padding(pool: Pool) -> None:
    given = prompts(20)
    for greedy in (False, True):
        responses = generate(pool, 2, given, greedy=greedy)
        assert max(response.ids.max() for response in responses.values()) < VOCABULARY
    ids = torch.as_tensor(given[0].ids).long()[None]
    with torch.no_grad():
        assert make_padded_model(OLD, tied=False)(ids).logits[0].argmax(1).min() >= VOCABULARY


@pytest.mark.parametrize(("rank", "seed", "tied"), [(1, NEW, True), (2, OLD, False)], ids=["plain", "shaped"])
def test_generate_logprobs_are_at_temperature_one(pool: Pool, rank: int, seed: int, tied: bool) -> None:
    model = make_model(seed, tied=tied)
    given = prompts(20)
    found = generate(pool, rank, given)
    for prompt in given:
        response = found[prompt.uid]
        assert response.ids.dtype == np.int32 and response.logprobs.dtype == np.float32
        np.testing.assert_allclose(response.logprobs, reference_logprobs(model, prompt, response), atol=1e-4)


def test_generate_returns_likeliest_ids_at_temperature_one_without_padding(pool: Pool) -> None:
    model, given = make_model(OLD, tied=False), prompts(20)
    found, plain = generate(pool, 2, given), generate(pool, 0, given[:1])
    assert [response.student_ids_TJ for response in plain.values()] == [None]
    for prompt in given:
        response = found[prompt.uid]
        ids_TJ = response.student_ids_TJ
        assert ids_TJ is not None and ids_TJ.dtype == np.int32 and ids_TJ.shape == (len(response.ids), N_STUDENT_IDS)
        ids = torch.as_tensor(np.concatenate([prompt.ids, response.ids])).long()[None]
        with torch.no_grad():
            logits_TV = model(ids).logits[0, len(prompt.ids) - 1 : -1, :VOCABULARY]
        best = logits_TV.topk(N_STUDENT_IDS, dim=1).values
        torch.testing.assert_close(logits_TV.gather(1, torch.as_tensor(ids_TJ).long()), best, atol=1e-4, rtol=0)


def test_generate_stops_at_eos_of_student_or_teacher_or_at_limit(pool: Pool) -> None:
    stops = {EOS, TEACHER_EOS}
    last: dict[str, set[int]] = {"stop": set(), "length": set()}
    for response in generate(pool, 2, prompts(200)).values():
        assert not stops & set(response.ids[:-1])
        assert response.finish_reason == "stop" or len(response.ids) == 48
        last[response.finish_reason].add(int(response.ids[-1]))
    assert last["stop"] == stops and last["length"] and not last["length"] & stops


def test_generate_depends_on_seed_uid_and_step_only(pool: Pool) -> None:
    together = generate(pool, 2, prompts(40), step=3)
    alone = generate(pool, 2, prompts(5, first_uid=20)[::-1], step=3)
    for uid, response in alone.items():
        assert np.array_equal(response.ids, together[uid].ids)
    other_step = generate(pool, 2, prompts(5, first_uid=20), step=4)
    assert not any(np.array_equal(response.ids, alone[uid].ids) for uid, response in other_step.items())
    twins = [Prompt(uid=uid, ids=prompts(1)[0].ids, row=0) for uid in range(4)]
    assert len({tuple(response.ids) for response in generate(pool, 2, twins).values()}) == 4


def test_generate_equal_weights_give_equal_responses(pool: Pool) -> None:
    pool.call_actor("set_weights", NEW, True)
    asyncio.run(pool.sync(0, 1).sync(0))
    here, there = generate(pool, 0, prompts(30), step=8), generate(pool, 1, prompts(10, first_uid=20), step=8)
    for uid, response in there.items():
        assert np.array_equal(response.ids, here[uid].ids)


def test_generate_greedy_ignores_seed(pool: Pool) -> None:
    first, second = (generate(pool, 2, prompts(10), step=step, greedy=True) for step in (1, 2))
    model = make_model(OLD, tied=False)
    for prompt in prompts(10):
        assert np.array_equal(first[prompt.uid].ids, second[prompt.uid].ids)
        logprobs = reference_logprobs(model, prompt, first[prompt.uid])
        np.testing.assert_allclose(first[prompt.uid].logprobs, logprobs, atol=1e-4)


def test_generate_streams_short_responses_first(pool: Pool) -> None:
    async def batches() -> list[list[Response]]:
        stream = pool.group(2).stream(
            0, RolloutWorker.generate, prompts(200), 0, timeout_s=PATIENCE_S, phase="generate"
        )
        return [batch async for batch in stream]

    batches_read = asyncio.run(batches())
    assert 1 < len(batches_read) < 100 and sum(len(batch) for batch in batches_read) == 200
    assert {response.finish_reason for response in batches_read[0]} == {"stop"}
    assert any(response.finish_reason == "length" for response in batches_read[-1])


def test_generate_concurrent_calls_get_own_responses(pool: Pool) -> None:
    async def at_once() -> list[dict[int, Response]]:
        return await asyncio.gather(*(pool.responses(2, prompts(10, first_uid=10 * i)) for i in range(4)))

    for i, found in enumerate(asyncio.run(at_once())):
        assert found.keys() == set(range(10 * i, 10 * i + 10))
    assert asyncio.run(pool.responses(2, [])) == {}


@pytest.mark.parametrize("n_read", [0, 1])
def test_generate_canceled_stream_drops_requests(pool: Pool, n_read: int) -> None:
    before = generate(pool, 2, prompts(5))
    pool.call_actor("set_weights", OLD, False)
    meta, handle = asyncio.run(pool.connect(2)), pool.handles[2]  # an update begins on an open transport
    stream = handle.generate.options(num_returns="streaming").remote(prompts(MANY), 0)
    for _ in range(n_read):
        assert ray.get(next(stream), timeout=PATIENCE_S)
    ray.cancel(stream)
    while not ray.wait([stream.completed()], timeout=0.2)[0]:
        ray.cancel(stream)  # Ray loses a cancel that arrives before the call
    ray.get(handle.begin_weight_update.remote(1, meta), timeout=PATIENCE_S)  # raises if it still generates
    ray.get(handle.drop_weights.remote(), timeout=PATIENCE_S)
    after = generate(pool, 2, prompts(5))
    assert all(np.array_equal(after[uid].ids, before[uid].ids) for uid in before)


def test_generate_deadline_error_counts_unfinished_responses(pool: Pool, folders: dict[tuple[int, bool], Path]) -> None:
    def configure(worker: Any, config: Config) -> Config:
        before, worker._config = worker._config, config
        return before

    def set_step_delay(worker: Any, seconds: float) -> None:
        def set_on(engine: Any) -> None:
            engine.__dict__.pop("step", None)
            if seconds:
                step = engine.step
                engine.step = lambda: time.sleep(seconds) or step()

        worker._engine.run(set_on).result(PATIENCE_S)

    impatient = config_for(folders[OLD, False], "actor_rollout_ref.rollout.timeout_s=2")
    before = ray.get(pool.handles[2].__ray_call__.remote(configure, impatient), timeout=PATIENCE_S)
    ray.get(pool.handles[2].__ray_call__.remote(set_step_delay, 0.5), timeout=PATIENCE_S)
    try:
        with raises(DeadlineError, worker="rollout worker 2", waited_s=2) as caught:
            generate(pool, 2, prompts(20))
        assert re.match(r"\d+ of 20 responses of step 0 are unfinished", caught.value.what)
    finally:
        ray.get(pool.handles[2].__ray_call__.remote(set_step_delay, 0.0), timeout=PATIENCE_S)
        ray.get(pool.handles[2].__ray_call__.remote(configure, before), timeout=PATIENCE_S)
    assert len(generate(pool, 2, prompts(5))) == 5


def test_generate_too_long_prompt_raises_and_engine_continues(pool: Pool) -> None:
    long = Prompt(uid=7, ids=np.full(80, 5, np.int32), row=3)
    with raises(WorkerError, uids=(7,), keys=("actor_rollout_ref.rollout.max_model_len",)):
        generate(pool, 2, [*prompts(3), long])
    assert len(generate(pool, 2, prompts(3))) == 3

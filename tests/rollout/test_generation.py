"""Answers of real engines in Ray actors: how they stream, how they are drawn, what they carry."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import ray
from conftest import NEW, OLD, Pool
from tiny import EOS, model_of, prompts, reference_logprobs

from recipe_gkd.errors import WorkerError
from recipe_gkd.samples import Answer, Prompt

pytestmark = pytest.mark.timeout(120)


def generate(pool: Pool, rank: int, given: list[Prompt], step: int = 0, *, greedy: bool = False) -> dict[int, Answer]:
    return asyncio.run(pool.answers(rank, given, step, greedy=greedy))


def test_setup_tells_what_the_engine_is_and_where_it_runs(pool: Pool) -> None:
    for described in pool.described:
        assert described["device"] == "cpu" and described["pid"] and described["dtype"] == "float32"
        assert described["max_model_len"] == 32 + 48 and described["kv_cache_tokens"] > 1000
        assert described["seconds"] > 0


def test_logprobs_are_those_of_transformers_at_temperature_one(pool: Pool) -> None:
    model = model_of(OLD, tied=False)
    given = prompts(20)
    found = generate(pool, 2, given)
    for prompt in given:
        answer = found[prompt.uid]
        assert answer.ids.dtype == np.int32 and answer.logprobs.dtype == np.float32
        np.testing.assert_allclose(answer.logprobs, reference_logprobs(model, prompt, answer), atol=1e-4)


def test_answers_end_with_the_stop_token_or_at_the_limit(pool: Pool) -> None:
    found = generate(pool, 2, prompts(200)).values()
    assert {answer.finish_reason for answer in found} == {"stop", "length"}
    for answer in found:
        assert EOS not in answer.ids[:-1]
        assert (answer.ids[-1] == EOS) if answer.finish_reason == "stop" else len(answer.ids) == 48


def test_an_answer_depends_on_seed_uid_and_step_alone(pool: Pool) -> None:
    together = generate(pool, 2, prompts(40), step=3)
    alone = generate(pool, 2, prompts(5, first_uid=20)[::-1], step=3)
    for uid, answer in alone.items():
        assert np.array_equal(answer.ids, together[uid].ids)
    other_step = generate(pool, 2, prompts(5, first_uid=20), step=4)
    assert not any(np.array_equal(answer.ids, alone[uid].ids) for uid, answer in other_step.items())
    twins = [Prompt(uid=uid, ids=prompts(1)[0].ids, row=0) for uid in range(4)]
    assert len({tuple(answer.ids) for answer in generate(pool, 2, twins).values()}) == 4


def test_another_worker_with_the_same_weights_gives_the_same_answers(pool: Pool) -> None:
    pool.tell_actor("become", NEW, True)
    asyncio.run(pool.sync(0, 1).sync(0))
    here, there = generate(pool, 0, prompts(30), step=8), generate(pool, 1, prompts(10, first_uid=20), step=8)
    for uid, answer in there.items():
        assert np.array_equal(answer.ids, here[uid].ids)


def test_greedy_takes_the_likeliest_token_whatever_the_seed(pool: Pool) -> None:
    first, second = (generate(pool, 2, prompts(10), step=step, greedy=True) for step in (1, 2))
    model = model_of(OLD, tied=False)
    for prompt in prompts(10):
        assert np.array_equal(first[prompt.uid].ids, second[prompt.uid].ids)
        logprobs = reference_logprobs(model, prompt, first[prompt.uid])
        np.testing.assert_allclose(first[prompt.uid].logprobs, logprobs, atol=1e-4)


def test_short_answers_leave_before_long_ones_end(pool: Pool) -> None:
    async def batches() -> list[list[Answer]]:
        stream = pool.group(2).stream(0, "generate", prompts(200), 0, timeout_s=30, phase="generate")
        return [batch async for batch in stream]

    got = asyncio.run(batches())
    assert 1 < len(got) < 100 and sum(len(batch) for batch in got) == 200
    assert {answer.finish_reason for answer in got[0]} == {"stop"}
    assert any(answer.finish_reason == "length" for answer in got[-1])


def test_several_calls_at_a_time_get_each_their_own_answers(pool: Pool) -> None:
    async def at_once() -> list[dict[int, Answer]]:
        return await asyncio.gather(*(pool.answers(2, prompts(10, first_uid=10 * i)) for i in range(4)))

    for i, found in enumerate(asyncio.run(at_once())):
        assert found.keys() == set(range(10 * i, 10 * i + 10))
    assert asyncio.run(pool.answers(2, [])) == {}


def test_abort_ends_every_call_and_leaves_the_engine_clean(pool: Pool) -> None:
    async def aborted() -> None:
        group = pool.group(2)
        running = asyncio.ensure_future(pool.answers(2, prompts(256)))
        while not (await group.call("abort", timeout_s=10, phase="abort"))[0]:
            await asyncio.sleep(0)
        with pytest.raises(WorkerError, match="rollout worker 2: generation was aborted on request"):
            await running

    before = generate(pool, 2, prompts(5))
    asyncio.run(aborted())
    after = generate(pool, 2, prompts(5))
    assert all(np.array_equal(after[uid].ids, before[uid].ids) for uid in before)


def test_a_consumer_that_leaves_early_leaves_the_engine_clean(pool: Pool) -> None:
    handle = pool.handles[2]
    stream = handle.generate.options(num_returns="streaming").remote(prompts(256), 0)
    assert ray.get(next(stream), timeout=20)
    ray.cancel(stream)
    assert ray.get(handle.abort.remote(), timeout=20) <= 1
    assert len(generate(pool, 2, prompts(5))) == 5


def test_a_prompt_that_leaves_no_room_is_refused_and_the_engine_lives(pool: Pool) -> None:
    long = Prompt(uid=7, ids=np.full(80, 5, np.int32), row=3)
    with pytest.raises(WorkerError, match=r"prompt 7 .row 3. has 80 tokens; expected 1 to 79"):
        generate(pool, 2, [*prompts(3), long])
    assert len(generate(pool, 2, prompts(3))) == 3

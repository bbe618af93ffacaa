"""Tests of weight updates during generation: requests are paused, and lose or repeat no token."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.errors import DeadlineError, WeightSyncError
from recipe_gkd.rollout.ray_worker import RolloutWorker
from tests._support.errors import check_error, raises
from tests._support.rollout_models import config_for, make_model, prompts, reference_logprobs
from tests._support.waiting import PATIENCE_S
from tests.integration.rollout.conftest import NEW, OLD, Pool

MANY = 200
"""Prompts with more tokens than one engine step may compute, so that resuming all of them takes several steps."""


async def call_worker(pool: Pool, method: Callable[..., Any], *args: Any) -> list[Any]:
    return await pool.group(0).call(method, *args, timeout_s=PATIENCE_S, phase=method.__name__)


async def update(pool: Pool, version: int, *, seed: int = NEW) -> None:
    pool.call_actor("set_weights", seed, True)
    assert (await pool.sync(0, inflight=True).sync(version))["weights/retries"] == 0


async def broken_update(pool: Pool, version: int, *, double_buffered: bool) -> Any:
    """Run an update that fails in its transfer, drop it, and return the reason why the worker is invalid."""
    pool.call_actor("set_weights", NEW, True)
    pool.call_actor("break_next_export", 8, 0.0)
    meta = await pool.connect(0)
    await call_worker(pool, RolloutWorker.begin_weight_update, version, meta, True)
    results = await pool.transfer(0, version, meta, double_buffered)
    assert all(isinstance(result, Exception) for result in results)
    return (await call_worker(pool, RolloutWorker.drop_weights))[0]


async def generate_during(
    pool: Pool, given: list[Prompt], meanwhile: Callable[[], Awaitable[Any]]
) -> dict[int, Response]:
    """Return the responses of worker 0. Run ``meanwhile`` after the first of them have arrived."""
    found: dict[int, Response] = {}
    async for batch in pool.group(0).stream(
        0, RolloutWorker.generate, given, 0, timeout_s=PATIENCE_S, phase="generate"
    ):
        if not found:
            await meanwhile()
        found |= {response.uid: response for response in batch}
    return found


def reset(pool: Pool) -> None:
    pool.call_actor("set_weights", OLD, True)
    asyncio.run(pool.sync(0).sync(0))


def same(one: dict[int, Response], other: dict[int, Response]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[uid].ids, other[uid].ids) for uid in one)


def test_inflight_update_every_token_is_from_its_version(pool: Pool) -> None:
    reset(pool)
    given = prompts(MANY)
    found = asyncio.run(generate_during(pool, given, lambda: update(pool, 3)))
    models = {0: make_model(OLD, tied=True), 3: make_model(NEW, tied=True)}
    for prompt in given:
        response = found[prompt.uid]
        assert len(response.ids) == len(response.logprobs) == len(response.versions_T)
        assert response.versions_T.dtype == np.int32 and (np.diff(response.versions_T) >= 0).all()
        assert response.weights_version == response.versions_T[0]
        expected = {version: reference_logprobs(model, prompt, response) for version, model in models.items()}
        by_token = np.where(response.versions_T == 0, expected[0], expected[3])
        np.testing.assert_allclose(response.logprobs, by_token, atol=1e-5)
    assert sum(set(response.versions_T) == {0, 3} for response in found.values()) > MANY / 4


def test_inflight_update_continues_like_fresh_engine(pool: Pool) -> None:
    async def greedy_beside_sampled() -> dict[int, Response]:
        """Return greedy responses, which all end at the limit. Some of the sampled responses end before."""
        greedy = asyncio.ensure_future(pool.responses(0, given, greedy=True))
        await generate_during(pool, prompts(MANY), lambda: update(pool, 3))
        return await greedy

    reset(pool)
    given = prompts(40)
    found = asyncio.run(greedy_beside_sampled())
    prefixes, rest = [], {}
    for prompt in given:
        response = found[prompt.uid]
        n_old = int(sum(response.versions_T == 0))
        if n_old < len(response.ids):
            prefix = np.concatenate([prompt.ids, response.ids[:n_old]])
            prefixes.append(Prompt(uid=prompt.uid, ids=prefix, row=0))
            rest[prompt.uid] = response.ids[n_old:], response.logprobs[n_old:]
    assert len(rest) > 10
    pool.call_actor("set_weights", NEW, True)
    asyncio.run(pool.sync(1).sync(0))
    fresh = asyncio.run(pool.responses(1, prefixes, greedy=True))
    for uid, (ids, logprobs) in rest.items():
        assert np.array_equal(fresh[uid].ids[: len(ids)], ids)
        np.testing.assert_allclose(fresh[uid].logprobs[: len(ids)], logprobs, atol=1e-5)


@pytest.mark.parametrize("ends", ["commit of the same weights", "drop"])
def test_inflight_update_equal_weights_change_no_token(pool: Pool, ends: str) -> None:
    reset(pool)
    undisturbed = asyncio.run(pool.responses(0, prompts(MANY)))

    async def meanwhile() -> None:
        if ends == "drop":
            assert await broken_update(pool, 3, double_buffered=True) is None
        else:
            await update(pool, 3, seed=OLD)

    found = asyncio.run(generate_during(pool, prompts(MANY), meanwhile))
    assert same(found, undisturbed)
    assert (max(response.versions_T[-1] for response in found.values()) == 3) == (ends != "drop")


def test_inflight_invalid_worker_waits_for_next_update(pool: Pool) -> None:
    reset(pool)

    async def meanwhile() -> None:
        assert "it may have mixed weights" in await broken_update(pool, 3, double_buffered=False)
        await update(pool, 4)

    found = asyncio.run(generate_during(pool, prompts(MANY), meanwhile))
    assert len(found) == MANY
    assert {version for response in found.values() for version in response.versions_T} == {0, 4}


def test_inflight_second_failure_ends_responses_with_reason(pool: Pool) -> None:
    reset(pool)

    async def meanwhile() -> None:
        for version in (3, 4):
            assert "it may have mixed weights" in await broken_update(pool, version, double_buffered=False)

    with raises(WeightSyncError, worker="rollout worker 0", invalid=("rollout worker 0",)):
        asyncio.run(generate_during(pool, prompts(MANY), meanwhile))
    with raises(WeightSyncError, worker="rollout worker 0", invalid=("rollout worker 0",)):
        asyncio.run(pool.responses(0, prompts(3)))
    reset(pool)
    assert len(asyncio.run(pool.responses(0, prompts(3)))) == 3


def test_inflight_endless_pause_calls_end_at_own_deadline(pool: Pool, folders: Any) -> None:
    async def calls() -> list[Any]:
        meta = pool.call_actor("weights_meta")
        late: list[asyncio.Future[Any]] = []

        async def pause() -> None:
            await call_worker(pool, RolloutWorker.begin_weight_update, 3, meta, True)
            late.append(asyncio.ensure_future(pool.responses(0, prompts(3))))

        early = asyncio.ensure_future(generate_during(pool, prompts(MANY), pause))
        await asyncio.wait([early], timeout=PATIENCE_S)
        return await asyncio.gather(early, *late, return_exceptions=True)

    reset(pool)
    impatient = config_for(folders[OLD, True], "actor_rollout_ref.rollout.timeout_s=5")
    with pool.configured(0, impatient):
        early, late = asyncio.run(calls())
    for error in (early, late):
        check_error(error, DeadlineError, worker="rollout worker 0", waited_s=5)
    assert f"of {MANY} responses of step 0 are unfinished" in early.what
    assert "the weight update before this call did not end" in late.what
    asyncio.run(call_worker(pool, RolloutWorker.drop_weights))
    assert len(asyncio.run(pool.responses(0, prompts(3)))) == 3


def test_inflight_new_calls_wait_for_new_weights(pool: Pool) -> None:
    reset(pool)

    async def overlap() -> tuple[dict[int, Response], dict[int, Response]]:
        late: list[asyncio.Future[dict[int, Response]]] = []

        async def meanwhile() -> None:
            pool.call_actor("set_weights", NEW, True)
            meta = await pool.connect(0)
            await call_worker(pool, RolloutWorker.begin_weight_update, 3, meta, True)
            late.append(asyncio.ensure_future(pool.responses(0, prompts(12), greedy=True)))
            assert not (await asyncio.wait(late, timeout=0.2))[0]
            await pool.transfer(0, 3, meta, None)
            await call_worker(pool, RolloutWorker.commit_weights, 3)

        early = await generate_during(pool, prompts(MANY), meanwhile)
        return early, await late[0]

    early, late = asyncio.run(overlap())
    assert len(early) == MANY
    assert same(late, pool.fresh[1]) and {response.weights_version for response in late.values()} == {3}

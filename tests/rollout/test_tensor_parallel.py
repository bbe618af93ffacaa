"""An engine of two worker processes: the same answers, and weight updates that reach both, even after a failed one."""

from __future__ import annotations

import asyncio
import time

import numpy as np
import pytest
from conftest import CHANNEL_TIMEOUT_S, NEW, OLD, Pool, answers_of
from small_models import model_of, prompts, reference_logprobs

from recipe_gkd.diagnosis import on_node
from recipe_gkd.diagnosis.processes import locate
from recipe_gkd.groups import WorkerGroup
from recipe_gkd.weights.sync import WeightSync


@pytest.mark.timeout(240)
def test_two_tensor_ranks_generate_and_are_updated_as_one(pool: Pool, tensor_pair: WorkerGroup) -> None:
    sync = WeightSync(
        pool.actor,
        tensor_pair,
        tensor_parallel_size=2,
        bucket_bytes=30_000,
        timeout_s=CHANNEL_TIMEOUT_S,
        transport="collective",
    )
    given = prompts(12)

    def check(seed: int, version: int) -> None:
        model, found = model_of(seed, tied=True), asyncio.run(answers_of(tensor_pair, 0, given))
        for prompt in given:
            answer = found[prompt.uid]
            assert answer.weights_version == version
            np.testing.assert_allclose(answer.logprobs, reference_logprobs(model, prompt, answer), atol=1e-4)

    pool.tell_actor("become", NEW, True)
    asyncio.run(sync.sync(3))
    check(NEW, 3)
    pool.tell_actor("become", OLD, True)
    pool.tell_actor("misbehave", 8, 0.0)
    assert asyncio.run(sync.sync(4))["weights/retries"] == 1
    check(OLD, 4)


def test_each_tensor_rank_can_be_looked_into_where_py_spy_is_not_allowed_to(tensor_pair: WorkerGroup) -> None:
    (place,) = asyncio.run(locate(tensor_pair.handles))
    stacks = [on_node._faulthandler_stacks(pid, time.monotonic() + 2) for pid, _ in on_node.tree([place.pid])]
    assert sum("worker_busy_loop" in text for text in stacks) == 2

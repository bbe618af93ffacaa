"""Errors of rollout engine and teacher after a failed assertion of vLLM's async scheduler, which vLLM itself raises."""

from __future__ import annotations

from typing import Any

import pytest

from recipe_gkd.errors import WorkerDied
from recipe_gkd.rollout import engine as rollout
from teacher.engines.vllm_engine import VllmEngine
from teacher.errors import TeacherError
from tests._support.errors import check_error


class InconsistentEngine:
    """Engine whose step adds a token that its async scheduler did not expect."""

    def step(self) -> list[Any]:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.sched.async_scheduler import AsyncScheduler
        from vllm.v1.request import Request

        scheduler = object.__new__(AsyncScheduler)
        scheduler.max_model_len = 8
        request = Request("0", [1, 2], SamplingParams(max_tokens=2), None)
        scheduler._update_request_with_output(request, [3])
        return []


class OneSequence:
    """Queue with an admitted sequence."""

    def __len__(self) -> int:
        return 1

    def admit(self) -> list[Any]:
        return []


def test_rollout_engine_after_assertion_of_async_scheduler_names_the_key() -> None:
    with pytest.raises(AssertionError) as caught:
        InconsistentEngine().step()
    found = rollout._to_worker_died(caught.value)
    check_error(found, WorkerDied, keys=("actor_rollout_ref.rollout.async_scheduling",))
    check_error(rollout._to_worker_died(AssertionError("another")), WorkerDied, keys=())


def test_teacher_after_assertion_of_async_scheduler_names_the_option() -> None:
    engine = object.__new__(VllmEngine)
    vars(engine).update(_engine=InconsistentEngine(), _queue=OneSequence(), _sizes={})
    with pytest.raises(TeacherError, match="start the worker with ASYNC_SCHEDULING=off"):
        engine.step()

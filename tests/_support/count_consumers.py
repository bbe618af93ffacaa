"""Consumers of numeric keys that are counts, for ``test_limits.py``.

Each function calls the code that uses a key with the value of a configuration.
"""

from __future__ import annotations

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from pipeline_stages import BatchTimes, Pools, Stages, drive
from virtual_time import run

from recipe_gkd.actor.profile import profiled
from recipe_gkd.actor.student_dims import StudentDims
from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.checkpoints.save_failures import FailedSave, SaveFailures
from recipe_gkd.checkpoints.store import remove_old
from recipe_gkd.config import Config, limits
from recipe_gkd.config.staleness import staleness_bound
from recipe_gkd.config.teachers import addresses, n_connections, requests_per_batch
from recipe_gkd.conversations.context import ConversationContext
from recipe_gkd.conversations.stage import ConversationStage
from recipe_gkd.conversations.template import cut
from recipe_gkd.data.samples import Prompt, Response, Reward
from recipe_gkd.errors import CheckpointError, ConversationError, WorkerDied
from recipe_gkd.metrics.loggers.prometheus_logger import check_metrics_port
from recipe_gkd.metrics.utilization import ActorUtilization
from recipe_gkd.pipeline.config import PipelineConfig
from recipe_gkd.pipeline.row_memory import RowMemory
from recipe_gkd.ray_cluster.actor_restarts import ActorRestarts
from recipe_gkd.ray_cluster.rollout_restarts import RolloutRestarts
from recipe_gkd.rewards.items import RewardItem
from recipe_gkd.teachers.cache.setup import open_caches
from recipe_gkd.teachers.failure_policy import FailurePolicy
from recipe_gkd.teachers.scoring.pool import ScoringPool
from recipe_gkd.teachers.scoring.requests import TeacherRequest
from recipe_gkd.teachers.scoring.setup import max_row_bytes
from recipe_gkd.trainer import Trainer
from recipe_gkd.validation.records import ScoredResponse, table_of
from teacher.client import ClientSpec, TeacherClient
from teacher.errors import TeacherTimeout
from tests._support.fake_teachers import InstantTeacher

PROMPT = Prompt(uid=0, ids=np.zeros(3, np.int32), row=0)
RESPONSE = Response(
    uid=0, ids=np.zeros(2, np.int32), logprobs=np.zeros(2, np.float32), finish_reason="stop",
    weights_version=0, versions_T=np.zeros(2, np.int32),
)  # fmt: skip
EMPTY_MODEL = StudentDims(layers=0, hidden=1, ffn=1, heads=1, kv_heads=1, head_dim=1, vocab_size=1, max_positions=1)


def value_at(config: Config, name: str) -> Any:
    """Return the value of the key with the dotted ``name``."""
    value: Any = config
    for part in name.split("."):
        value = getattr(value, part)
    return value


def connect_to_teacher(config: Config, name: str) -> None:
    """Open and close a client of the teacher."""
    teacher = config.actor_rollout_ref.teacher
    ((ip, port),) = addresses(teacher).values()
    TeacherClient(ip, port, n_connections=n_connections(teacher, teacher.auth_dir)).close()


def run_schedule(config: Config, name: str) -> None:
    """Pass batches of two responses through all stages."""
    teacher = config.actor_rollout_ref.teacher
    pipeline_config = PipelineConfig(
        max_staleness=staleness_bound(config.trainer),
        requests_per_batch=requests_per_batch(teacher),
    )
    times = BatchTimes(responses=[1.0, 2.0], teacher=1.0, update=1.0, sync=0.1)
    course = run(drive(Stages(lambda step: times, Pools(n_replicas=1)), pipeline_config, 3))
    assert len(course.staleness) == 3 and max(course.staleness) <= pipeline_config.max_staleness


def hold_conversation(config: Config, name: str) -> None:
    """Cut a message, and reach the limits of turns, of time and of failures."""
    tokenizer, settings, value = build_tokenizer(), config.rollout, value_at(config, name)
    assert cut("123", tokenizer, settings.max_tool_response_length or 1, "middle").count("...") == (
        (settings.max_tool_response_length or 1) < 3
    )
    context = ConversationContext(config, tokenizer, SimpleNamespace())  # type: ignore[arg-type]
    _, max_turns, timeout_s = context.limits
    assert len(range(max_turns)) == settings.max_turns
    asyncio.run(asyncio.wait_for(asyncio.sleep(0), None if timeout_s is None else timeout_s + 60))
    if name.endswith("max_environment_failures"):
        stage = ConversationStage(context)
        stage.failures = value
        attempt: Any = SimpleNamespace(describe=lambda error: ConversationError(str(error)))
        with pytest.raises(ConversationError, match=f"{name}={value};"):
            stage._failed(attempt, ValueError("broken"))
    if name.endswith("num_environment_workers"):
        assert min(range(value), key=lambda number: 0) == 0


def check_intervals(config: Config, name: str) -> None:
    """Check the first and the last step of a run against an interval."""
    every, last = value_at(config, name), limits.MAX_STEPS
    trainers: list[Any] = [SimpleNamespace(progress=SimpleNamespace(step=step), last_step=last) for step in (1, last)]
    assert [Trainer._is_due(trainer, every) for trainer in trainers] == [every == 1, every > 0]


def check_count_limit(config: Config, name: str) -> None:
    """Check a key that is only compared with, or a divisor of, a quantity of the run."""
    limit = value_at(config, name)
    match name.rsplit(".", 1)[-1]:
        case "save_failures_allowed":
            failures = SaveFailures(limit)
            failures.count = limit
            progress: Any = SimpleNamespace(step=1)
            with pytest.raises(CheckpointError, match=f"{name}={limit};"):
                failures.record(CheckpointError("full"), FailedSave(progress, None))
        case "max_worker_restarts":
            rollouts: Any = SimpleNamespace(dead=lambda: asyncio.sleep(0, [0]), label=str)
            restarts = RolloutRestarts(rollouts, print, allowed=limit, timeout_s=1)
            restarts._used = limit
            with pytest.raises(WorkerDied, match=f"{name}={limit} "):
                asyncio.run(restarts.replace_dead())
        case "max_actor_restarts":
            actors: Any = SimpleNamespace(dead=lambda: asyncio.sleep(0, [0]), label=str, __len__=lambda: 1)
            actor_restarts = ActorRestarts(actors, print, print, allowed=limit, save_state=print)  # type: ignore[arg-type]
            actor_restarts.n_restarts = limit
            with pytest.raises(WorkerDied, match="lost"):
                asyncio.run(actor_restarts.restart(WorkerDied("lost")))
        case "max_skipped_samples":
            policy = FailurePolicy(config.actor_rollout_ref.teacher)
            policy.n_skipped = limit
            with pytest.raises(TeacherTimeout, match=f"{name}={limit};"):
                policy._skip(TeacherRequest(teacher="a", step=0, uids=[0]), TeacherTimeout("late"))
        case "cache_gb":
            with tempfile.TemporaryDirectory() as folder:
                teacher = replace(config.actor_rollout_ref.teacher, cache_dir=folder)
                config = replace(config, actor_rollout_ref=replace(config.actor_rollout_ref, teacher=teacher))
                [cache] = open_caches(config, {"default": InstantTeacher()}).values()
            assert cache.max_bytes == int(limit * (1 << 30))
        case "max_rows_gb":
            rows = RowMemory(max_row_bytes(config, None))
            rows.begin(0)
            rows.add(0, 1)
            rows.complete(0)
            assert rows.has_room() == (limit * (1 << 30) >= 2)
        case "scoring_workers_per_node":
            specs = {"default": ClientSpec("10.0.0.9", 1, {})}
            pool = ScoringPool(specs, "a", lambda *_: None, per_node=limit)
            pool.start_on({"a": "10.0.0.1", "b": "10.0.0.2"})
            assert {next(pool._workers_of["b"]) for _ in range(limit)} == set(range(limit, 2 * limit))
        case "max_actor_ckpt_to_keep":
            assert remove_old(Path("no checkpoints"), newest=1, keep=limit) == []
        case "device_peak_tflops":
            assert ActorUtilization(EMPTY_MODEL, limit).metrics([], 1.0) == {"perf/mfu/actor": 0.0}
        case "metrics_port":
            check_metrics_port(limit)
        case "steps" | "ranks":
            with profiled(config.trainer.profile, Path("nowhere"), step=0, rank=0):  # steps begin at 1
                assert limit[0] >= 0
        case "log_val_generations":
            item = RewardItem(uid=0, where="", prompt="", response="", ground_truth="", extra={}, data_source=None)
            scored = ScoredResponse("gsm8k", PROMPT, RESPONSE, item, Reward(1.0))
            assert table_of([scored], limit, Path("x")).startswith(f"{min(limit, 1)} of 1 responses")
        case _:
            raise AssertionError(f"{name} has no consumer in this function; add it")

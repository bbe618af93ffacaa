"""A rollout engine after weight syncs: it must generate like an engine that has loaded the same weights."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path

import numpy as np
import torch

from recipe_gkd.commands.gpu_smoke.outcome import CheckFailed, Context
from recipe_gkd.commands.gpu_smoke.peer_process import running_peer
from recipe_gkd.commands.gpu_smoke.reference import sampled_logps
from recipe_gkd.commands.gpu_smoke.tiny_engine import (
    CACHE_MIB,
    TIMEOUT_S,
    Responses,
    engine_config,
    generate,
    join_sender,
    running_engine,
    serve_weights,
    sync_weights,
)
from recipe_gkd.commands.gpu_smoke.tiny_models import engine_dtype, make_prompts, read_model, write_model
from recipe_gkd.data.samples import Response
from recipe_gkd.rollout.engine import RolloutEngine
from recipe_gkd.rollout.engine_sleep import EngineSleep

_N_PROMPTS = 12
_RESPONSE_TOKENS = 24
_OLD, _NEW = 0, 1
"""Seeds of the two models."""
# Largest accepted difference of log-probabilities: between two engines with the same weights, and to transformers. An
# engine in bfloat16 rounds the outputs of its layers.
_LIMITS = {"float32": (1e-4, 1e-3), "bfloat16": (0.05, 0.1)}
_MAX_SAME = 0.5
"""Fraction of equal responses of two models above which the check would show nothing."""
_MIN_SAME = 0.9
"""Fraction of equal responses of two engines with the same weights. A near tie of two tokens can go either way."""


def check_rollout(context: Context) -> str:
    """Check an engine on one device."""
    return _check_engine(context, tensor_parallel_size=1)


def check_rollout_tp2(context: Context) -> str:
    """Check an engine of two tensor-parallel ranks."""
    return _check_engine(context, tensor_parallel_size=2)


def _check_engine(context: Context, tensor_parallel_size: int) -> str:
    folders = {seed: write_model(context.folder / f"model-{seed}", seed=seed) for seed in (_OLD, _NEW)}
    # NCCL connects one process per GPU, so it needs a GPU that the engine does not use.
    collective = context.device == "cpu" or context.n_gpus > tensor_parallel_size
    transport, sender = ("collective", tensor_parallel_size) if collective else ("ipc", 0)
    fresh = (context, folders[_NEW], tensor_parallel_size)
    # In its own process, because vLLM keeps state of its first engine.
    with running_peer(_generate_fresh, *fresh, timeout_s=context.deadline_s) as peer:
        fresh_new: Responses = peer.receive()
    with _engine(context, folders[_OLD], tensor_parallel_size) as engine:
        fresh_old = _generate(engine)
        if (same := _fraction_same(fresh_old, fresh_new)) > _MAX_SAME:
            raise CheckFailed(f"two models gave {same:.0%} equal responses, so a sync could not be noticed")
        with running_peer(serve_weights, context.device, sender, timeout_s=2 * TIMEOUT_S) as peer:
            updates = join_sender(engine, peer, transport, tensor_parallel_size)
            for version, (seed, double_buffered) in enumerate([(_NEW, True), (_OLD, False), (_NEW, False)], start=1):
                sync_weights(engine, updates, peer, (folders[seed], version, double_buffered))
                kind = "double-buffered" if double_buffered else "in place"
                expected = {_OLD: fresh_old, _NEW: fresh_new}[seed]
                _compare(context, f"v{version}, {kind}", _generate(engine), expected)
            peer.send(None)
    _compare_with_transformers(context, folders[_NEW], fresh_new)
    return f"{_N_PROMPTS} responses after each of 3 syncs over {transport} agree with freshly loaded engines"


def check_rollout_sleep(context: Context) -> str:
    """Check that an engine wakes from both sleep levels as it was, with a weight sync after level 2."""
    folder = write_model(context.folder / "model", seed=_NEW)
    hybrid = ("actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync")
    with (
        _engine(context, folder, 1, *hybrid) as engine,
        running_peer(serve_weights, context.device, 0, timeout_s=2 * TIMEOUT_S) as peer,
    ):
        fresh = _generate(engine)
        updates = join_sender(engine, peer, "ipc", 1)
        state = EngineSleep("the rollout engine", updates)
        for level in (1, 2):
            released = engine.run(partial(state.sleep, level=level)).result(2 * TIMEOUT_S).released_bytes
            context.figures[f"level {level}: released MiB"] = released >> 20
            if released < 0.9 * (CACHE_MIB << 20):
                raise CheckFailed(f"sleep level {level} released {released >> 20} MiB, expected about {CACHE_MIB}")
            engine.run(lambda inner: state.wake(inner, "weights")).result(2 * TIMEOUT_S)
            if level == 2:
                sync_weights(engine, updates, peer, (folder, 1, True))
            engine.run(lambda inner: state.wake(inner, "kv_cache")).result(2 * TIMEOUT_S)
            _compare(context, f"after sleep level {level}", _generate(engine), fresh)
        peer.send(None)
    return f"{_N_PROMPTS} responses after sleep levels 1 and 2 agree with those before"


@contextmanager
def _engine(context: Context, folder: Path, tensor_parallel_size: int, *overrides: str) -> Iterator[RolloutEngine]:
    config = engine_config(folder, context.device, tensor_parallel_size, *overrides)
    with running_engine(config, timeout_s=context.deadline_s) as (engine, report):
        context.figures.update(dtype=report.dtype, head_dtype=report.head_dtype)
        yield engine


def _generate_fresh(connection: Connection, context: Context, folder: Path, tensor_parallel_size: int) -> None:
    """Process of a freshly loaded engine: send its responses."""
    with _engine(context, folder, tensor_parallel_size) as engine:
        connection.send(_generate(engine))


def _generate(engine: RolloutEngine) -> Responses:
    """Return greedy responses to the prompts, by uid."""
    params = [{"max_tokens": _RESPONSE_TOKENS, "temperature": 0.0}] * _N_PROMPTS
    return generate(engine, make_prompts(_N_PROMPTS), params)


# ---- comparison


def _fraction_same(found: Responses, expected: Responses) -> float:
    return sum(np.array_equal(found[uid].ids, expected[uid].ids) for uid in expected) / len(expected)


def _compare(context: Context, name: str, found: Responses, expected: Responses) -> None:
    """Compare responses: equal tokens, and log-probabilities up to the first token that differs."""
    limit, _ = _LIMITS[engine_dtype(context.device)]
    errors = [_error_of_common_tokens(found[uid], expected[uid]) for uid in expected]
    context.compare(f"{name}: log-probabilities", max(errors), limit)
    context.compare(f"{name}: fraction of other responses", 1 - _fraction_same(found, expected), 1 - _MIN_SAME)


def _error_of_common_tokens(found: Response, expected: Response) -> float:
    length = min(len(found.ids), len(expected.ids))
    different = np.flatnonzero(found.ids[:length] != expected.ids[:length])
    length = int(different[0]) if len(different) else length
    return float(np.abs(found.logprobs[:length] - expected.logprobs[:length]).max(initial=0.0))


def _compare_with_transformers(context: Context, folder: Path, responses: Responses) -> None:
    """Compare the log-probabilities of the engine with transformers in float32, as a mean over tokens."""
    model = read_model(folder, torch.float32)
    errors = []
    for prompt in make_prompts(_N_PROMPTS):
        response = responses[prompt.uid]
        expected_T = sampled_logps(model, np.concatenate([prompt.ids, response.ids]), len(prompt.ids))
        errors.append(np.abs(expected_T - response.logprobs))
    _, limit = _LIMITS[engine_dtype(context.device)]
    context.compare("log-probabilities, difference to transformers (mean)", float(np.concatenate(errors).mean()), limit)

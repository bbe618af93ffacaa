"""Sections ``actor`` (tokens per second, MFU, memory) and ``mismatch`` (log-probabilities of rollout and actor)."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from actor import make_samples
from gpu_models import write_model

from recipe_gkd.actor.megatron.families.reading import read_model_dims
from recipe_gkd.commands.gpu_smoke.peer_process import running_peer
from recipe_gkd.commands.gpu_smoke.tiny_actor import actor_config, running_actor
from recipe_gkd.config import Config
from recipe_gkd.data.samples import Response, Sample
from recipe_gkd.metrics.device_peaks import peak_tflops
from recipe_gkd.metrics.utilization import ActorUtilization

_SHAPE = {"cpu": "tiny", "cuda": "1.5B"}
_LENGTHS = {"cpu": [48] * 8, "cuda": [1024] * 64}
_ROUNDS = {"cpu": 2, "cuda": 4}
_TOP_K = 64
_TIMEOUT_S = 600
_ACTOR, _ROLLOUT, _MODEL = (f"actor_rollout_ref.{name}" for name in ("actor", "rollout", "model"))
_KEYS = (
    f"{_ACTOR}.megatron.dtype=bfloat16", f"{_ACTOR}.fsdp_config.dtype=bfloat16", f"{_ACTOR}.max_token_len=16384",
    f"{_ACTOR}.timeout_s={_TIMEOUT_S}", f"{_ACTOR}.optim.lr=1e-6", f"{_ROLLOUT}.dtype=bfloat16",
    "data.max_prompt_length=256", "data.max_response_length=1024",
)  # fmt: skip
_METRICS = ("actor/rollout_probs_diff_mean", "actor/rollout_probs_diff_max", "actor/rollout_kl")


def measure_megatron(device: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row without and with the fused output layer."""
    return _measure_actor("megatron", device, folder)


def measure_fsdp(device: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row without and with the fused output layer."""
    return _measure_actor("fsdp", device, folder)


def _measure_actor(strategy: str, device: str, folder: Path) -> Iterator[dict[str, Any]]:
    shape = _SHAPE[device]
    model, samples = write_model(folder / "model", shape, device), make_samples(_LENGTHS[device], _TOP_K)
    n_tokens = sum(sample.n_tokens for sample in samples)
    peak = peak_tflops(torch.cuda.get_device_name(), "bfloat16") if device == "cuda" else None
    utilization = ActorUtilization(read_model_dims(str(model)), peak) if peak else None
    for fused in (False, True):
        options = (f"{_ACTOR}.strategy={strategy}", f"gkd.fuse_lm_head={str(fused).lower()}")
        config = actor_config(model, device, *_KEYS, *options)
        with running_actor(config) as actor:
            seconds = []
            for step in range(_ROUNDS[device] + 1):
                started = time.perf_counter()
                metrics = actor.update(samples, step)  # its metrics wait for the device
                seconds.append(time.perf_counter() - started)
        del actor
        _free_memory()
        best = statistics.median(seconds[1:])
        yield {
            "shape": shape,
            "strategy": strategy,
            "fused_head": fused,
            "k": _TOP_K,
            "tokens_per_s": n_tokens / best,
            "mfu": utilization.metrics(samples, best)["perf/mfu/actor"] if utilization else None,
            "max_memory_gb": metrics["perf/max_memory_allocated_gb"],
            "first_update_s": seconds[0],
            "update_s": best,
        }


def measure_mismatch(device: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each data type of the output layers: float32, and the model's (bfloat16)."""
    model = write_model(folder / "model", _SHAPE[device], device)
    configs = {
        head_dtype: actor_config(model, device, *_KEYS, f"{_MODEL}.head_dtype={head_dtype}", *_engine_keys(device))
        for head_dtype in ("float32", "model")
    }
    samples, responses = make_samples(_LENGTHS[device], _TOP_K), {}
    # The engines come first, each in a separate process, because an actor in this process does not free all memory.
    for head_dtype, config in configs.items():
        with running_peer(_generate, config, samples, timeout_s=_TIMEOUT_S) as peer:
            responses[head_dtype] = peer.receive()
    for head_dtype, config in configs.items():
        with running_actor(config) as actor:
            metrics = actor.update([_sampled(sample, responses[head_dtype]) for sample in samples], 0)
        del actor
        _free_memory()
        row = {name.removeprefix("actor/"): metrics[name] for name in _METRICS}
        yield {"shape": _SHAPE[device], "head_dtype": head_dtype, **row}


def _free_memory() -> None:
    """Free the memory of a deleted actor, whose parts refer to each other, and begin a new maximum."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _engine_keys(device: str) -> list[str]:
    megabytes = 64 if device == "cpu" else 8192
    return [f"{_ROLLOUT}.kv_cache_memory_megabytes={megabytes}", f"{_ROLLOUT}.gpu_memory_utilization=0.4"]


def _generate(connection: Connection, config: Config, samples: list[Sample]) -> None:
    """Process of the engine: send sampled responses of the samples' lengths, by uid."""
    from recipe_gkd.commands.gpu_smoke.tiny_engine import generate, running_engine

    params = [
        {"max_tokens": len(sample.response.ids), "temperature": 1.0, "seed": sample.prompt.uid} for sample in samples
    ]
    with running_engine(config, timeout_s=_TIMEOUT_S) as (engine, _):
        connection.send(generate(engine, [sample.prompt for sample in samples], params, _TIMEOUT_S))


def _sampled(sample: Sample, responses: dict[int, Response]) -> Sample:
    """Return a sample with its sampled response, and as many rows of the teacher."""
    response = responses[sample.prompt.uid]
    n, teacher = len(response.ids), sample.teacher
    rows = {name: getattr(teacher, name)[:n] for name in ("logps_TK", "ids_TK", "sampled_logps_T")}
    return replace(sample, response=response, teacher=replace(teacher, **rows))

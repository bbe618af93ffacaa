"""Data types in which the student computes: its training, and the rollout engines."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from recipe_gkd.config.keys import DTYPES, FSDP, MEGATRON, ROLLOUT
from recipe_gkd.config.schema import Config
from teacher.common.data_types import fast_dtype, is_fast, needs_bfloat16

AUTO = "auto"


def with_data_types(config: Config, device: str, trained: Mapping[str, str] | None = None) -> Config:
    """Return a configuration with data types in the place of ``auto``.

    The actor gets ``bfloat16``, or ``float32`` on a CPU that emulates 16-bit products. The rollout engines get the type
    of the actor, or ``bfloat16`` if vLLM computes the model in no other type on a CPU.

    Args:
        config: Configuration whose model path is a folder.
        device: ``"cpu"`` or ``"cuda"``. The CPUs of all workers count as equal to the one of this process.
        trained: Data types with which the run has trained so far, by their keys. They come before those of the device.
    """
    settings, trained = config.actor_rollout_ref, trained or {}
    actor, rollout = settings.actor, settings.rollout

    def of_actor(key: str, dtype: str) -> Any:
        return trained.get(key) or fast_dtype("bfloat16", device) if dtype == AUTO else dtype

    actor = replace(
        actor,
        megatron=replace(actor.megatron, dtype=of_actor(DTYPES[0], actor.megatron.dtype)),
        fsdp_config=replace(actor.fsdp_config, dtype=of_actor(DTYPES[1], actor.fsdp_config.dtype)),
    )
    if rollout.dtype == AUTO:
        is_limited = device == "cpu" and needs_bfloat16(Path(settings.model.path))
        rollout = replace(rollout, dtype="bfloat16" if is_limited else actor.dtype)
    return replace(config, actor_rollout_ref=replace(settings, actor=actor, rollout=rollout))


def conversion_warnings(config: Config) -> list[str]:
    """Return a warning if the rollout engines convert the actor's weights to another data type.

    Args:
        config: Result of :func:`with_data_types`.
    """
    actor, rollout = config.actor_rollout_ref.actor.dtype, config.actor_rollout_ref.rollout.dtype
    if actor == rollout:
        return []
    return [
        f"the actor trains in {actor}, but the rollout engines compute in {rollout}, so that their log-probabilities "
        f"differ; remove {ROLLOUT}.dtype={rollout} if that is not intended"
    ]


def slow_type_advice(config: Config, device: str) -> str:
    """Return advice if the student computes in 16-bit types that this CPU emulates, else nothing.

    Args:
        config: Result of :func:`with_data_types`.
        device: ``"cpu"`` or ``"cuda"``.
    """
    actor = config.actor_rollout_ref.actor
    section = MEGATRON if actor.strategy == "megatron" else FSDP
    types = {f"{section}.dtype": actor.dtype, f"{ROLLOUT}.dtype": config.actor_rollout_ref.rollout.dtype}
    slow = {key: dtype for key, dtype in types.items() if not is_fast(dtype, device)}
    if not slow:
        return ""
    return (
        f"this CPU has no instructions for {' and '.join(sorted({*slow.values()}))}, so that float32 is many times "
        f"faster (docs/performance.md); set {' and '.join(f'{key}=float32' for key in slow)}"
    )

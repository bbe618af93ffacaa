"""Search for the smallest change of a configuration with which everything fits into the memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from recipe_gkd.actor.megatron.layout_checks import ensure_heads_fit_context, ensure_layout_fits
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.strategy import read_student_dims
from recipe_gkd.commands.plan.estimate import RunEstimate, estimate_run
from recipe_gkd.config.keys import ACTOR, ROLLOUT
from recipe_gkd.config.schema import Config
from recipe_gkd.config.validate import validate
from recipe_gkd.errors import ConfigError, ModelError
from recipe_gkd.rollout.limits import check_engine_fits

_RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
_LEAST_UTILIZATION = 0.2


@dataclass(frozen=True, kw_only=True)
class Change:
    """A change of the configuration.

    Attributes:
        overrides: Overrides of the form ``key=value``.
        estimate: Figures of the changed run.
    """

    overrides: list[str]
    estimate: RunEstimate


def smallest_change(config: Config, device: str, device_memory: int) -> Change | None:
    """Return the first change with which everything fits; None if there is none.

    Each candidate is tried alone, in the order of its cost. Then candidates are added to each other in the same order,
    without changes that do not help.

    Args:
        config: Configuration of a run that does not fit.
        device: ``"cuda"`` or ``"cpu"``.
        device_memory: Memory of a GPU or a CPU slot in bytes.
    """
    for values in _candidates(config, device):
        estimate = _try(config, values, device, device_memory)
        if estimate is not None and not estimate.problems:
            return Change(overrides=_overrides(values), estimate=estimate)
    chosen: dict[str, Any] = {}
    current = estimate_run(config, device, device_memory)
    for values in _candidates(config, device):
        estimate = _try(config, chosen | values, device, device_memory)
        if estimate is None or estimate.excess >= current.excess:
            continue
        chosen, current = chosen | values, estimate
        if not current.problems:
            return Change(overrides=_overrides(chosen), estimate=current)
    return None


def with_values(config: Config, values: Mapping[str, Any]) -> Config:
    """Return the configuration with other values.

    Args:
        values: Dotted key -> value.

    Raises:
        ConfigError: The result is invalid.
    """
    for key, value in values.items():
        config = _replaced(config, key.split("."), value)
    validate(config)
    return config


def _replaced(section: Any, path: list[str], value: object) -> Any:
    """Return a dataclass, or a mapping, with another value."""
    name, *rest = path
    if isinstance(section, Mapping):  # of names that users choose
        return {**section, name: value}
    return replace(section, **{name: _replaced(getattr(section, name), rest, value) if rest else value})


def _try(config: Config, values: Mapping[str, Any], device: str, memory: int) -> RunEstimate | None:
    """Return the estimate with other values; None if the configuration or the model does not allow them."""
    try:
        changed = with_values(config, values)
        dims = read_student_dims(changed.actor_rollout_ref.model.path, changed)
        if isinstance(dims, ModelDims):
            ensure_layout_fits(dims, changed.actor_rollout_ref.actor.megatron)
            ensure_heads_fit_context(dims, changed.actor_rollout_ref.actor.megatron)
        check_engine_fits(dims, changed)
        return estimate_run(changed, device, memory)
    except (ConfigError, ModelError):
        return None


def _candidates(config: Config, device: str) -> Iterator[dict[str, Any]]:
    """Yield changes of single keys, the cheapest first."""
    settings, gkd = config.actor_rollout_ref, config.gkd
    if settings.hybrid_engine or device == "cuda":
        yield from _rollout_candidates(config)
    if not gkd.fuse_lm_head:
        yield {"gkd.fuse_lm_head": True}
    actor, longest = settings.actor, config.data.max_prompt_length + config.data.max_response_length
    limit = actor.max_token_len
    while actor.use_dynamic_bsz and limit > longest:
        limit = max(limit // 2, longest)
        yield {f"{ACTOR}.max_token_len": limit}
    if not actor.use_dynamic_bsz and actor.micro_batch_size > 1:
        yield {f"{ACTOR}.micro_batch_size": max(1, actor.micro_batch_size // 2)}
        yield {f"{ACTOR}.micro_batch_size": 1}
    yield from _actor_candidates(config)


def _rollout_candidates(config: Config) -> Iterator[dict[str, Any]]:
    rollout, is_hybrid = config.actor_rollout_ref.rollout, config.actor_rollout_ref.hybrid_engine
    if is_hybrid and rollout.sleep_level == 0:
        yield {f"{ROLLOUT}.sleep_level": 2}
    if rollout.kv_cache_memory_megabytes is None:
        tenths = range(9, int(_LEAST_UTILIZATION * 10) - 1, -1) if is_hybrid else (9,)
        yield from ({f"{ROLLOUT}.gpu_memory_utilization": tenth / 10} for tenth in tenths)
    size = rollout.tensor_model_parallel_size
    while (size := size * 2) <= config.rollout_pool[1]:
        yield {f"{ROLLOUT}.tensor_model_parallel_size": size}


def _actor_candidates(config: Config) -> Iterator[dict[str, Any]]:
    actor, each = config.actor_rollout_ref.actor, config.trainer.n_gpus_per_node
    if actor.strategy == "fsdp":
        section = f"{ACTOR}.fsdp_config"
        if not actor.fsdp_config.gradient_checkpointing:
            yield {f"{section}.gradient_checkpointing": True}
        if actor.fsdp_config.fsdp_size not in (-1, each * config.trainer.nnodes):
            yield {f"{section}.fsdp_size": -1}
        yield from ({f"{section}.{key}": True} for key in ("optimizer_offload", "param_offload"))
    else:
        section, megatron = f"{ACTOR}.megatron", actor.megatron
        if not megatron.use_distributed_optimizer:
            yield {f"{section}.use_distributed_optimizer": True}
        if "recompute_granularity" not in megatron.override_transformer_config:
            yield {f"{section}.override_transformer_config.{name}": value for name, value in _RECOMPUTE.items()}
        yield from ({f"{section}.{key}": True} for key in ("optimizer_offload", "grad_offload", "param_offload"))
        size = megatron.tensor_model_parallel_size
        while (size := size * 2) <= each:
            yield {f"{section}.tensor_model_parallel_size": size, f"{section}.sequence_parallel": True}
    yield {"trainer.n_gpus_per_node": 2 * each}


def _overrides(values: Mapping[str, Any]) -> list[str]:
    """Return the values as arguments of a command."""
    return [f"{key}={str(value).lower() if isinstance(value, bool) else value}" for key, value in values.items()]

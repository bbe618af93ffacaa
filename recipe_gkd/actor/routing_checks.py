"""Checks that the actor can replay the experts of the rollout engine (``rollout.routing_replay``)."""

from __future__ import annotations

from recipe_gkd.actor.fsdp.model_dims import CausalLMDims
from recipe_gkd.actor.student_dims import StudentDims
from recipe_gkd.config.keys import MEGATRON, ROLLOUT
from recipe_gkd.config.schema import Config
from recipe_gkd.errors import ConfigError

KEY = f"{ROLLOUT}.routing_replay"
OVERRIDE = f"{MEGATRON}.override_transformer_config"


def check_routing_replay(dims: StudentDims, config: Config) -> None:
    """Check model, device and layout against ``rollout.routing_replay=true``.

    Raises:
        ConfigError: The engine does not return experts, or the actor cannot use them.
    """
    if not config.actor_rollout_ref.rollout.routing_replay:
        return
    if config.trainer.device == "cpu":
        raise _refusal("trainer.device=cpu: vLLM returns the experts of its tokens on GPUs only", "trainer.device")
    if isinstance(dims, CausalLMDims):
        _check_family(dims.family)
    elif dims.moe is None:
        raise _refusal("the student has no experts", "actor_rollout_ref.model.path")
    else:
        _check_megatron(config)


def _refusal(reason: str, *keys: str) -> ConfigError:
    return ConfigError(f"{KEY}=true, but {reason}", remedy=f"set {KEY}=false", keys=(KEY, *keys))


def _check_family(family: str) -> None:
    from recipe_gkd.actor.fsdp.routing_replay import ROUTERS  # imports torch

    if family not in ROUTERS:
        raise _refusal(
            f"the student is a {family!r} model; actor_rollout_ref.actor.strategy=fsdp replays experts of "
            f"{', '.join(ROUTERS)}",
            "actor_rollout_ref.model.path",
        )


def _check_megatron(config: Config) -> None:
    megatron = config.actor_rollout_ref.actor.megatron
    overrides = megatron.override_transformer_config
    if overrides.get("moe_router_fusion"):
        raise _refusal("a fused router chooses the experts itself", f"{OVERRIDE}.moe_router_fusion")
    # Such a layer computes its router again without its packed sequences, when those of a later micro-batch are set.
    if "moe" in (overrides.get("recompute_modules") or []) and megatron.pipeline_model_parallel_size > 1:
        raise _refusal(
            f"{MEGATRON}.pipeline_model_parallel_size={megatron.pipeline_model_parallel_size} with selective "
            "recomputation of `moe` replays experts of another micro-batch; recompute_granularity=full does not",
            f"{OVERRIDE}.recompute_modules",
        )

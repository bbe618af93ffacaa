"""Predicted time of an update of the actor."""

from __future__ import annotations

import math

from recipe_gkd.actor.student_dims import StudentDims
from recipe_gkd.commands.plan.assumptions import HOST_GB_PER_S
from recipe_gkd.commands.plan.rooflines import DeviceRates, Workload, optimizer_seconds, pass_seconds
from recipe_gkd.config.schema import Config
from recipe_gkd.memory_budget.actor_states import States, read_actor_memory
from recipe_gkd.metrics.flops import BACKWARD_OVER_FORWARD, forward_flops, update_flops


def update_parts(config: Config, dims: StudentDims, workload: Workload, device: DeviceRates) -> dict[str, float]:
    """Return the parts of an update in seconds: ``passes``, ``optimizer`` and ``offload``.

    Recomputed layers and the second logits of the fused output layer count with their FLOPs. An update with LoRA has no
    weight gradients. The bubble of ``p`` pipeline stages, ``v`` chunks each and ``m`` micro-batches is ``(p - 1) / (v
    m)`` (Narayanan et al. 2021, arXiv:2104.04473, section 2.2). Communication between ranks is not counted.

    Args:
        workload: Responses of the step.
        device: Rates of an actor's GPU.
    """
    actor = config.actor_rollout_ref.actor
    passes = pass_seconds(
        _executed_flops(config, dims, workload), actor.strategy, actor.dtype, device, n_actor_ranks(config)
    )
    states = max(read_actor_memory(config).stages, key=lambda stage: sum(stage.values()))
    copied: float = sum(states[name] for name in actor.offloaded_states if name != "grads")
    return {
        "passes": passes * (1 + _pipeline_bubble(config, workload)),
        "optimizer": optimizer_seconds(_optimizer_bytes(states), device),
        "offload": 2 * copied / (HOST_GB_PER_S * 1e9),
    }


def model_flops(config: Config, dims: StudentDims, workload: Workload) -> float:
    """Return the model FLOPs of an update; with LoRA without the FLOPs of weight gradients.

    Args:
        workload: Responses of the step.
    """
    n, tokens = workload.n_responses, workload.prompt_tokens + workload.response_tokens - 1
    flops = update_flops(dims, [tokens] * n, n * workload.response_tokens)
    without_weights = BACKWARD_OVER_FORWARD / (1 + BACKWARD_OVER_FORWARD)
    return flops * (without_weights if config.actor_rollout_ref.actor.lora.rank else 1)


def n_actor_ranks(config: Config) -> int:
    """Return the number of GPUs of the actor pool."""
    return config.trainer.nnodes * config.trainer.n_gpus_per_node


def _executed_flops(config: Config, dims: StudentDims, workload: Workload) -> float:
    actor, n = config.actor_rollout_ref.actor, workload.n_responses
    tokens, rows = workload.prompt_tokens + workload.response_tokens - 1, n * workload.response_tokens
    flops = model_flops(config, dims, workload)
    recomputes = actor.megatron.override_transformer_config.get("recompute_granularity") == "full"
    if actor.fsdp_config.gradient_checkpointing if actor.strategy == "fsdp" else recomputes:
        flops += forward_flops(dims, [tokens] * n, 0)
    if config.gkd.fuse_lm_head:
        flops += forward_flops(dims, [], rows)
    return flops


def _pipeline_bubble(config: Config, workload: Workload) -> float:
    actor = config.actor_rollout_ref.actor
    stages = actor.megatron.pipeline_model_parallel_size
    if actor.strategy != "megatron" or stages == 1:
        return 0.0
    replicas = n_actor_ranks(config) / (
        stages * actor.megatron.tensor_model_parallel_size * actor.megatron.context_parallel_size
    )
    tokens = workload.n_responses * (workload.prompt_tokens + workload.response_tokens) / replicas
    sequences = workload.n_responses / replicas
    micro_batches = tokens / actor.max_token_len if actor.use_dynamic_bsz else sequences / actor.micro_batch_size
    chunks = actor.megatron.virtual_pipeline_model_parallel_size or 1
    return (stages - 1) / (chunks * max(1, math.ceil(micro_batches)))


def _optimizer_bytes(states: States) -> float:
    """Return the bytes of an optimizer step: state read and written, gradients read twice, weights written."""
    return 2 * states["optimizer"] + 2 * states["grads"] + states["params"]

"""Requirements of the actor: training backend, parallel layout, adapters, optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from recipe_gkd.config.conditions import uses_sampled_token_loss
from recipe_gkd.config.keys import FSDP, HYBRID, LORA, MEGATRON, POOL_KEYS
from recipe_gkd.config.megatron_fields import fixed_field_problems
from recipe_gkd.config.schema import Config
from recipe_gkd.errors import ConfigError

ADAPTER_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Sizes of vLLM's buffers for an adapter (``vllm.config.lora.MaxLoRARanks``). A lower rank uses a part of one."""


def actor_problems(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each value of the actor's section that cannot work."""
    yield from _actor_layout(config)
    yield from fixed_field_problems(config)
    yield from _lora(config)
    yield from _optimizer(config)
    yield from _out_of_memory(config)


def _actor_layout(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each size of the training backend that does not fit the actor pool."""
    yield from (_fsdp_layout if config.actor_rollout_ref.actor.strategy == "fsdp" else _megatron_layout)(config)


def _fsdp_layout(config: Config) -> Iterator[ConfigError]:
    size, trainer = config.actor_rollout_ref.actor.fsdp_config.fsdp_size, config.trainer
    slots = trainer.nnodes * trainer.n_gpus_per_node
    if size == 0:
        yield ConfigError(
            f"{FSDP}.fsdp_size=0: a copy of the model needs at least one rank",
            remedy="set it to -1 (all ranks) or above 0",
            keys=(f"{FSDP}.fsdp_size",),
        )
    elif size > 0 and slots % size:
        yield ConfigError(
            f"the actor pool has trainer.nnodes x trainer.n_gpus_per_node = {trainer.nnodes} x "
            f"{trainer.n_gpus_per_node} = {slots} slots, which is not a multiple of {FSDP}.fsdp_size={size}",
            remedy="change the pool, or set fsdp_size=-1 (all ranks)",
            keys=(*POOL_KEYS, f"{FSDP}.fsdp_size"),
        )


def _megatron_layout(config: Config) -> Iterator[ConfigError]:
    megatron, trainer = config.actor_rollout_ref.actor.megatron, config.trainer
    slots = trainer.nnodes * trainer.n_gpus_per_node
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    cp = megatron.context_parallel_size
    if slots % (tp * cp * pp):
        yield ConfigError(
            f"the actor pool has trainer.nnodes x trainer.n_gpus_per_node = {trainer.nnodes} x "
            f"{trainer.n_gpus_per_node} = {slots} slots, which is not a multiple of tensor x context x pipeline "
            f"parallel size = {tp} x {cp} x {pp} = {tp * cp * pp}",
            remedy="change the pool or the layout",
            keys=(
                *POOL_KEYS,
                *(f"{MEGATRON}.{name}_parallel_size" for name in ("tensor_model", "context", "pipeline_model")),
            ),
        )
    ep, etp = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size or tp
    if slots % (etp * ep * pp):
        yield ConfigError(
            f"the actor pool has {slots} slots, which is not a multiple of expert tensor x expert x pipeline parallel "
            f"size = {etp} x {ep} x {pp} = {etp * ep * pp}",
            remedy=(
                f"change the pool, {MEGATRON}.expert_model_parallel_size, or "
                "expert_tensor_parallel_size (null: the tensor parallel size)"
            ),
            keys=(
                *POOL_KEYS,
                *(f"{MEGATRON}.{name}_parallel_size" for name in ("expert_tensor", "expert_model", "pipeline_model")),
            ),
        )
    if megatron.transformer_impl == "transformer_engine" and trainer.device == "cpu":
        yield ConfigError(
            f"{MEGATRON}.transformer_impl=transformer_engine with trainer.device=cpu needs a GPU",
            remedy="set it to auto",
            keys=(f"{MEGATRON}.transformer_impl", "trainer.device"),
        )
    if megatron.virtual_pipeline_model_parallel_size is not None and pp == 1:
        yield ConfigError(
            f"{MEGATRON}.virtual_pipeline_model_parallel_size={megatron.virtual_pipeline_model_parallel_size} needs "
            f"{MEGATRON}.pipeline_model_parallel_size > 1, but it is 1",
            remedy="raise the latter, or set the former to null",
            keys=(f"{MEGATRON}.virtual_pipeline_model_parallel_size", f"{MEGATRON}.pipeline_model_parallel_size"),
        )


def _lora(config: Config) -> Iterator[ConfigError]:
    actor = config.actor_rollout_ref.actor
    lora = actor.lora
    if not lora.rank:
        return
    if actor.strategy == "megatron":
        yield from _megatron_lora(config)
    if lora.target_modules == []:
        yield ConfigError(
            f"{LORA}.target_modules=[]: no layer gets an adapter",
            remedy="name layers, or set it to null (all linear layers)",
            keys=(f"{LORA}.target_modules",),
        )
    if lora.sync == "adapter":
        yield from _adapter_sync(config)
    if lora.dropout and (config.gkd.use_rl_loss or uses_sampled_token_loss(config.gkd)):
        yield ConfigError(
            f"{LORA}.dropout={lora.dropout:g} with a policy loss, or with gkd.distill_loss_type="
            f"{config.gkd.distill_loss_type}: such a loss needs the distribution that sampled the tokens, and the "
            "rollout workers have no dropout",
            remedy=f"set {LORA}.dropout=0",
            keys=(f"{LORA}.dropout", "gkd.use_rl_loss" if config.gkd.use_rl_loss else "gkd.distill_loss_type"),
        )


def _adapter_sync(config: Config) -> Iterator[ConfigError]:
    settings = config.actor_rollout_ref
    rank, limit = settings.actor.lora.rank or 0, ADAPTER_RANKS[-1]
    if rank > limit:
        yield ConfigError(
            f"{LORA}.sync=adapter with {LORA}.rank={rank}: vLLM supports ranks up to {limit}",
            remedy=f"lower {LORA}.rank, or set {LORA}.sync=merged",
            keys=(f"{LORA}.sync", f"{LORA}.rank"),
        )
    if settings.hybrid_engine and settings.rollout.sleep_level == 2:
        yield ConfigError(
            f"{LORA}.sync=adapter with {HYBRID}=true and actor_rollout_ref.rollout.sleep_level=2: the engine would "
            "lose the weights of the model folder in its sleep, and a sync transfers only the adapters",
            remedy=f"set sleep_level=1, or {LORA}.sync=merged",
            keys=(f"{LORA}.sync", "actor_rollout_ref.rollout.sleep_level"),
        )


def _megatron_lora(config: Config) -> Iterator[ConfigError]:
    megatron, lora = config.actor_rollout_ref.actor.megatron, config.actor_rollout_ref.actor.lora
    tp = megatron.tensor_model_parallel_size
    if megatron.transformer_impl == "transformer_engine":
        yield ConfigError(
            f"{LORA}.rank={lora.rank} with {MEGATRON}.transformer_impl=transformer_engine: its layers compute a norm "
            "and a product at once, so that an adapter does not get its input",
            remedy=f"set {MEGATRON}.transformer_impl=local or auto",
            keys=(f"{LORA}.rank", f"{MEGATRON}.transformer_impl"),
        )
    if lora.dropout and tp > 1:
        yield ConfigError(
            f"{LORA}.dropout={lora.dropout:g} with {MEGATRON}.tensor_model_parallel_size={tp}: the ranks of a layer "
            "would drop different numbers of the same input",
            remedy=f"set {LORA}.dropout=0, or tensor_model_parallel_size=1",
            keys=(f"{LORA}.dropout", f"{MEGATRON}.tensor_model_parallel_size"),
        )


def _optimizer(config: Config) -> Iterator[ConfigError]:
    optim = config.actor_rollout_ref.actor.optim
    if optim.min_lr > optim.lr:
        yield ConfigError(
            f"actor_rollout_ref.actor.optim.min_lr={optim.min_lr:g} is above lr={optim.lr:g}",
            remedy="lower it",
            keys=("actor_rollout_ref.actor.optim.min_lr", "actor_rollout_ref.actor.optim.lr"),
        )


def _out_of_memory(config: Config) -> Iterator[ConfigError]:
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    if trainer.oom != "split":
        return
    if not actor.use_dynamic_bsz:
        yield ConfigError(
            "trainer.oom=split with actor_rollout_ref.actor.use_dynamic_bsz=false: micro-batches have a fixed number "
            "of samples, so lowering max_token_len has no effect",
            remedy="set use_dynamic_bsz=true, or trainer.oom=fail",
            keys=("trainer.oom", "actor_rollout_ref.actor.use_dynamic_bsz"),
        )
    megatron, n_ranks = actor.megatron, trainer.nnodes * trainer.n_gpus_per_node
    sizes = {
        f"{MEGATRON}.{name}": getattr(megatron, name)
        for name in (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
        )
    }
    if actor.strategy == "fsdp":
        sizes = {f"{FSDP}.fsdp_size": n_ranks if actor.fsdp_config.fsdp_size == -1 else actor.fsdp_config.fsdp_size}
    if together := [name for name, size in sizes.items() if size > 1]:
        shown = ", ".join(f"{name}={sizes[name]}" for name in together)
        yield ConfigError(
            f"trainer.oom=split with {shown}: ranks that share a model wait for each other within a "
            "pass, so one of them cannot leave it",
            remedy="set trainer.oom=fail, or these sizes to 1",
            keys=("trainer.oom", *together),
        )

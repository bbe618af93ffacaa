"""Requirements of the actor: training backend, parallel layout, adapters, optimizer."""

from __future__ import annotations

from collections.abc import Iterator

from recipe_gkd.config.megatron_fields import fixed_field_problems
from recipe_gkd.config.objective import uses_sampled_token_loss
from recipe_gkd.config.schema import Config

STRATEGY = "actor_rollout_ref.actor.strategy"
MEGATRON = "actor_rollout_ref.actor.megatron"
FSDP = "actor_rollout_ref.actor.fsdp_config"
LORA = "actor_rollout_ref.actor.lora"

MEGATRON_LAYOUT: dict[str, object] = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "virtual_pipeline_model_parallel_size": None,
    "context_parallel_size": 1,
    "expert_model_parallel_size": 1,
    "expert_tensor_parallel_size": None,
    "sequence_parallel": False,
    "override_transformer_config": {},
    "override_ddp_config": {},
    "param_offload": False,
    "grad_offload": False,
    "optimizer_offload": False,
}
"""Keys of Megatron's section that a run with FSDP would not follow, and the values that it does follow."""

FSDP_LAYOUT: dict[str, object] = {
    "fsdp_size": -1,
    "wrap_policy": None,
    "gradient_checkpointing": False,
    "reshard_after_forward": True,
    "param_offload": False,
    "optimizer_offload": False,
}
"""Keys of FSDP's section that a run with Megatron would not follow, and the defaults."""


def actor_problems(config: Config) -> Iterator[str]:
    """Yield a message for each value of the actor's section that cannot work, or that its backend does not read."""
    yield from _unused_backend(config)
    yield from _actor_layout(config)
    yield from fixed_field_problems(config)
    yield from _lora(config)
    yield from _optimizer(config)
    yield from _out_of_memory(config)


def _unused_backend(config: Config) -> Iterator[str]:
    """Yield a message for each layout key of the training backend that the run does not use."""
    actor = config.actor_rollout_ref.actor
    prefix, section, neutral, other = (
        (MEGATRON, actor.megatron, MEGATRON_LAYOUT, "megatron")
        if actor.strategy == "fsdp"
        else (FSDP, actor.fsdp_config, FSDP_LAYOUT, "fsdp")
    )
    for name, value in neutral.items():
        got = getattr(section, name)
        if got != value:
            yield (
                f"{prefix}.{name}={as_override_value(got)} has no effect with {STRATEGY}={actor.strategy}; set it to "
                f"{as_override_value(value)}, or set {STRATEGY}={other}"
            )


def as_override_value(value: object) -> str:
    """Return a value as it is written in an override."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _actor_layout(config: Config) -> Iterator[str]:
    """Yield a message for each size of the training backend that does not fit the actor pool."""
    yield from (_fsdp_layout if config.actor_rollout_ref.actor.strategy == "fsdp" else _megatron_layout)(config)


def _fsdp_layout(config: Config) -> Iterator[str]:
    size, trainer = config.actor_rollout_ref.actor.fsdp_config.fsdp_size, config.trainer
    slots = trainer.nnodes * trainer.n_gpus_per_node
    if size == 0:
        yield f"{FSDP}.fsdp_size=0: a copy of the model needs at least one rank; set it to -1 (all ranks) or above 0"
    elif size > 0 and slots % size:
        yield (
            f"the actor pool has trainer.nnodes x trainer.n_gpus_per_node = {trainer.nnodes} x "
            f"{trainer.n_gpus_per_node} = {slots} slots, which is not a multiple of {FSDP}.fsdp_size={size}; change "
            "the pool, or set fsdp_size=-1 (all ranks)"
        )


def _megatron_layout(config: Config) -> Iterator[str]:
    megatron, trainer = config.actor_rollout_ref.actor.megatron, config.trainer
    slots = trainer.nnodes * trainer.n_gpus_per_node
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    cp = megatron.context_parallel_size
    if slots % (tp * cp * pp):
        yield (
            f"the actor pool has trainer.nnodes x trainer.n_gpus_per_node = {trainer.nnodes} x "
            f"{trainer.n_gpus_per_node} = {slots} slots, which is not a multiple of tensor x context x pipeline "
            f"parallel size = {tp} x {cp} x {pp} = {tp * cp * pp}; change the pool or the layout"
        )
    ep, etp = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size or tp
    if slots % (etp * ep * pp):
        yield (
            f"the actor pool has {slots} slots, which is not a multiple of expert tensor x expert x pipeline parallel "
            f"size = {etp} x {ep} x {pp} = {etp * ep * pp}; change the pool, {MEGATRON}.expert_model_parallel_size, or "
            "expert_tensor_parallel_size (null: the tensor parallel size)"
        )
    if megatron.transformer_impl == "transformer_engine" and trainer.device == "cpu":
        yield f"{MEGATRON}.transformer_impl=transformer_engine with trainer.device=cpu needs a GPU; set it to auto"
    if megatron.virtual_pipeline_model_parallel_size is not None and pp == 1:
        yield (
            f"{MEGATRON}.virtual_pipeline_model_parallel_size={megatron.virtual_pipeline_model_parallel_size} needs "
            f"{MEGATRON}.pipeline_model_parallel_size > 1; it is 1"
        )


def _lora(config: Config) -> Iterator[str]:
    actor = config.actor_rollout_ref.actor
    lora = actor.lora
    if not lora.rank:
        for name, default in (("target_modules", None), ("dropout", 0.0)):
            if (got := getattr(lora, name)) != default:
                yield (
                    f"{LORA}.{name}={as_override_value(got)} has no effect with {LORA}.rank="
                    f"{as_override_value(lora.rank)}; set it to {as_override_value(default)}, or set a rank, such as "
                    f"{LORA}.rank=16"
                )
        return
    if actor.strategy != "fsdp":
        yield (
            f"{LORA}.rank={lora.rank} with {STRATEGY}={actor.strategy}: only the layers of transformers can have "
            f"adapters; set {STRATEGY}=fsdp, or {LORA}.rank=null"
        )
    if lora.target_modules == []:
        yield f"{LORA}.target_modules=[]: no layer gets an adapter; name layers, or set it to null (all linear layers)"
    if lora.dropout and (config.gkd.use_rl_loss or uses_sampled_token_loss(config.gkd)):
        yield (
            f"{LORA}.dropout={lora.dropout:g} with a policy loss, or with gkd.distill_loss_type="
            f"{config.gkd.distill_loss_type}: such a loss needs the distribution that sampled the tokens, and the "
            f"rollout workers have no dropout; set {LORA}.dropout=0"
        )


def _optimizer(config: Config) -> Iterator[str]:
    optim = config.actor_rollout_ref.actor.optim
    if optim.min_lr > optim.lr:
        yield f"actor_rollout_ref.actor.optim.min_lr={optim.min_lr:g} is above lr={optim.lr:g}; lower it"


def _out_of_memory(config: Config) -> Iterator[str]:
    actor, trainer = config.actor_rollout_ref.actor, config.trainer
    if trainer.oom != "split":
        return
    if not actor.use_dynamic_bsz:
        yield (
            "trainer.oom=split with actor_rollout_ref.actor.use_dynamic_bsz=false: micro-batches have a fixed number "
            "of samples, so lowering max_token_len has no effect; set use_dynamic_bsz=true, or trainer.oom=fail"
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
    if together := [f"{name}={size}" for name, size in sizes.items() if size > 1]:
        yield (
            f"trainer.oom=split with {', '.join(together)}: ranks that share a model wait for each other within a "
            "pass, so one of them cannot leave it; set trainer.oom=fail, or these sizes to 1"
        )

"""Combinations of values that cannot work, each refused with what to change, before any process is started.

What needs the model's own numbers (heads divisible by tensor parallel, say) is checked by ``preflight.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe_gkd.config.objective import objective_complaints
from recipe_gkd.config.schema import Config
from recipe_gkd.config.teachers import teacher_complaints
from recipe_gkd.errors import ConfigError

MEGATRON = "actor_rollout_ref.actor.megatron"


def validate(config: Config) -> None:
    """Raise :class:`ConfigError` with every complaint at once."""
    checks = (
        _not_supported,
        _schedule,
        _actor_layout,
        _rollout_layout,
        _shared_gpus,
        _lengths,
        _ray,
        _resume,
        objective_complaints,
        teacher_complaints,
        _validation,
    )
    if complaints := [complaint for check in checks for complaint in check(config)]:
        raise ConfigError("\n".join(complaints))


def _not_supported(config: Config) -> Iterator[str]:
    """Values that this family of recipes knows and this one cannot honor yet: refused, never ignored."""
    megatron = config.actor_rollout_ref.actor.megatron
    if config.actor_rollout_ref.hybrid_engine:
        yield (
            "actor_rollout_ref.hybrid_engine=true: actor and rollout workers have pools of their own here; "
            "set it to false and size the pools with trainer.n_gpus_per_node and rollout.n_gpus_per_node"
        )
    for name in ("param_offload", "grad_offload", "optimizer_offload"):
        if getattr(megatron, name):
            yield f"{MEGATRON}.{name}=true: offloading is not implemented; set it to false"
    if megatron.context_parallel_size > 1:
        yield (
            f"{MEGATRON}.context_parallel_size={megatron.context_parallel_size}: context parallel is not supported; "
            "set it to 1, and tensor_model_parallel_size with sequence_parallel higher for long sequences"
        )


def _schedule(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if (trainer.scheduler == "n_step_off") != (trainer.max_staleness is not None):
        yield (
            f"trainer.scheduler={trainer.scheduler} with trainer.max_staleness={trainer.max_staleness}: n_step_off "
            "needs a bound, such as trainer.max_staleness=4, and the others have theirs; change one of the two"
        )
    if trainer.inflight_update and (trainer.scheduler == "sync" or trainer.max_staleness == 0):
        yield (
            f"trainer.inflight_update=true with trainer.scheduler={trainer.scheduler} and a staleness bound of 0: "
            "nothing is under way when the weights change; set it to false, or choose one_step_off or more"
        )


def _actor_layout(config: Config) -> Iterator[str]:
    megatron, trainer = config.actor_rollout_ref.actor.megatron, config.trainer
    slots = trainer.nnodes * trainer.n_gpus_per_node
    tp, pp = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size
    if slots % (tp * pp):
        yield (
            f"the actor pool has trainer.nnodes x trainer.n_gpus_per_node = {trainer.nnodes} x "
            f"{trainer.n_gpus_per_node} = {slots} slots, which tensor x pipeline parallel = {tp} x {pp} = {tp * pp} "
            "does not divide; change the pool or the layout"
        )
    ep, etp = megatron.expert_model_parallel_size, megatron.expert_tensor_parallel_size or tp
    if slots % (etp * ep * pp):
        yield (
            f"the actor pool has {slots} slots, which expert tensor x expert x pipeline parallel = {etp} x {ep} x {pp} "
            f"= {etp * ep * pp} does not divide; change the pool, {MEGATRON}.expert_model_parallel_size, or "
            "expert_tensor_parallel_size (null: that of tensor parallel)"
        )
    if megatron.sequence_parallel and tp == 1:
        yield f"{MEGATRON}.sequence_parallel=true needs {MEGATRON}.tensor_model_parallel_size > 1; it is 1"
    if megatron.virtual_pipeline_model_parallel_size is not None and pp == 1:
        yield (
            f"{MEGATRON}.virtual_pipeline_model_parallel_size={megatron.virtual_pipeline_model_parallel_size} needs "
            f"{MEGATRON}.pipeline_model_parallel_size > 1; it is 1"
        )
    optim = config.actor_rollout_ref.actor.optim
    if optim.min_lr > optim.lr:
        yield f"actor_rollout_ref.actor.optim.min_lr={optim.min_lr:g} is above lr={optim.lr:g}; lower it"


def _rollout_layout(config: Config) -> Iterator[str]:
    tp, per_node = config.actor_rollout_ref.rollout.tensor_model_parallel_size, config.rollout.n_gpus_per_node
    if per_node % tp:
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp} does not divide rollout.n_gpus_per_node="
            f"{per_node}; an engine lives on one node"
        )


def _shared_gpus(config: Config) -> Iterator[str]:
    trainer, rollout = config.trainer, config.rollout
    tp = config.actor_rollout_ref.rollout.tensor_model_parallel_size
    if not rollout.share_actor_gpus:
        return
    if (trainer.nnodes, trainer.n_gpus_per_node) != (rollout.nnodes, rollout.n_gpus_per_node) or tp > 1:
        yield (
            f"rollout.share_actor_gpus=true puts one rollout worker beside each actor rank, but the actor pool has "
            f"{trainer.nnodes} x {trainer.n_gpus_per_node} slots, the rollout pool {rollout.nnodes} x "
            f"{rollout.n_gpus_per_node}, and an engine {tp}; give both pools the same size, and "
            "actor_rollout_ref.rollout.tensor_model_parallel_size=1"
        )


def _lengths(config: Config) -> Iterator[str]:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    longest = data.max_prompt_length + data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield (
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len} is less than data.max_prompt_length + "
            f"data.max_response_length = {longest}; raise it, or set it to null"
        )


def _ray(config: Config) -> Iterator[str]:
    if config.ray_init.address is not None and config.ray_init.num_cpus is not None:
        yield (
            f"ray_init.num_cpus={config.ray_init.num_cpus} with ray_init.address={config.ray_init.address}: a cluster "
            "that is already there has the CPUs it has; set one of the two to null"
        )


def _resume(config: Config) -> Iterator[str]:
    trainer, checkpoint = config.trainer, config.actor_rollout_ref.actor.checkpoint
    if (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None):
        yield (
            f"trainer.resume_mode={trainer.resume_mode} with trainer.resume_from_path={trainer.resume_from_path}: "
            "resume_path needs a folder, and the other modes do not take one"
        )
    for name in ("save_contents", "load_contents"):
        if "model" not in getattr(checkpoint, name):
            yield f"actor_rollout_ref.actor.checkpoint.{name} has no `model`, without which nothing can resume; add it"
    if unsaved := [part for part in checkpoint.load_contents if part not in checkpoint.save_contents]:
        yield (
            f"actor_rollout_ref.actor.checkpoint.load_contents has {unsaved}, which save_contents does not have; "
            "a run could not resume from its own checkpoints"
        )


def validates(config: Config) -> bool:
    """Return True if the run validates at all, before the first step or later."""
    return config.trainer.test_freq > 0 or config.trainer.val_before_train


def _validation(config: Config) -> Iterator[str]:
    trainer, sampling = config.trainer, config.actor_rollout_ref.rollout.val_kwargs
    wanted = validates(config)
    if wanted and not config.data.val_files:
        yield (
            f"trainer.test_freq={trainer.test_freq}, trainer.val_before_train={str(trainer.val_before_train).lower()} "
            "without validation data; set data.val_files, or trainer.test_freq=-1 and trainer.val_before_train=false"
        )
    if wanted and config.custom_reward_function.path is None:
        yield (
            "validation scores answers with the reward function, and there is none; set custom_reward_function.path, "
            "or trainer.test_freq=-1 and trainer.val_before_train=false"
        )
    rollout = config.actor_rollout_ref.rollout
    for name, own in (("rollout", rollout), ("rollout.val_kwargs", sampling)):
        if own.n > 1 and own.temperature == 0:
            yield (
                f"actor_rollout_ref.{name}.n={own.n} with temperature 0: greedy answers to the same prompt are all the "
                "same; set n=1, or a temperature above 0"
            )
    if trainer.best_metric is not None and trainer.test_freq <= 0:
        yield (
            f"trainer.best_metric={trainer.best_metric} needs validation in the loop: set trainer.test_freq, or "
            "trainer.best_metric=null"
        )

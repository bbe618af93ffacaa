"""Rejection of combinations of values that cannot work, before any process is started.

Each message contains the values and what to change. Checks that need the model or files are in ``preflight.py``.
"""

from __future__ import annotations

from collections.abc import Iterator

from recipe_gkd.config.hybrid_engine import hybrid_problems, teacher_sleep_problems
from recipe_gkd.config.objective import objective_problems, uses_sampled_token_loss
from recipe_gkd.config.schema import BUILT_IN_LOGGERS, Config
from recipe_gkd.config.teachers import teacher_problems
from recipe_gkd.errors import ConfigError
from recipe_gkd.runtime.user_code import call_problem, load_attribute, split_spec
from recipe_gkd.runtime.worker_variables import FIXED, PER_NODE

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


def validate(config: Config) -> None:
    """Check all combinations of values.

    Raises:
        ConfigError: At least one combination cannot work. The message lists all of them.
    """
    checks = (
        _schedule,
        _unused_backend,
        _actor_layout,
        _lora,
        _optimizer,
        _rollout_layout,
        hybrid_problems,
        teacher_sleep_problems,
        _out_of_memory,
        _lengths,
        _ray,
        _resume,
        _loggers,
        objective_problems,
        teacher_problems,
        _validation,
        _sampling,
    )
    if problems := [problem for check in checks for problem in check(config)]:
        raise ConfigError("\n".join(problems))


def _schedule(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if (trainer.scheduler == "n_step_off") != (trainer.max_staleness is not None):
        yield (
            f"trainer.scheduler={trainer.scheduler} with trainer.max_staleness={trainer.max_staleness}: n_step_off "
            "needs a bound, such as trainer.max_staleness=4, and the other schedulers do not take one; change one of "
            "the two"
        )
    if trainer.inflight_update and (trainer.scheduler == "sync" or trainer.max_staleness == 0):
        yield (
            f"trainer.inflight_update=true with trainer.scheduler={trainer.scheduler} and a staleness bound of 0: "
            "no response is in flight when the weights change; set it to false, or choose a scheduler with "
            "a larger bound, such as one_step_off"
        )


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
                f"{prefix}.{name}={_yaml(got)} has no effect with {STRATEGY}={actor.strategy}; set it to "
                f"{_yaml(value)}, or set {STRATEGY}={other}"
            )


def _yaml(value: object) -> str:
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
    if megatron.sequence_parallel and tp == 1:
        yield f"{MEGATRON}.sequence_parallel=true needs {MEGATRON}.tensor_model_parallel_size > 1; it is 1"
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
                    f"{LORA}.{name}={_yaml(got)} has no effect with {LORA}.rank={_yaml(lora.rank)}; set it to "
                    f"{_yaml(default)}, or set a rank, such as {LORA}.rank=16"
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


def _rollout_layout(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    tokens, sequences = rollout.max_num_batched_tokens, rollout.max_num_seqs
    if tokens is not None and tokens < sequences:
        yield (
            f"actor_rollout_ref.rollout.max_num_batched_tokens={tokens} is less than max_num_seqs={sequences}, and a "
            "step has at least one token per response; raise the former, lower the latter, or set "
            "max_num_batched_tokens to null"
        )
    tp, (_, per_node) = rollout.tensor_model_parallel_size, config.rollout_pool
    if per_node % tp:
        pool = "trainer" if config.actor_rollout_ref.hybrid_engine else "rollout"
        yield (
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp} does not divide {pool}.n_gpus_per_node="
            f"{per_node}, and an engine cannot span nodes; change one of the two"
        )


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
            f"ray_init.num_cpus={config.ray_init.num_cpus} with ray_init.address={config.ray_init.address}: the number "
            "of CPUs of a running cluster cannot be set; set one of the two to null"
        )
    for name in config.ray_init.env_vars:
        if name in FIXED:
            yield f"ray_init.env_vars.{name} is set by Ray or by this project for each worker; remove it"
        if name in PER_NODE:
            yield (
                f"ray_init.env_vars.{name} would have one value on all nodes, but each node needs its own; set {name} "
                "in the environment of `ray start` on each node instead"
            )


def _resume(config: Config) -> Iterator[str]:
    trainer, checkpoint = config.trainer, config.actor_rollout_ref.actor.checkpoint
    if (trainer.resume_mode == "resume_path") != (trainer.resume_from_path is not None):
        yield (
            f"trainer.resume_mode={trainer.resume_mode} with trainer.resume_from_path={trainer.resume_from_path}: "
            "resume_path needs a folder, and the other modes do not take one; change one of the two"
        )
    for name in ("save_contents", "load_contents"):
        if "model" not in getattr(checkpoint, name):
            yield f"actor_rollout_ref.actor.checkpoint.{name} has no `model`, which every resumed run needs; add it"
    if unsaved := [part for part in checkpoint.load_contents if part not in checkpoint.save_contents]:
        yield (
            f"actor_rollout_ref.actor.checkpoint.load_contents has {unsaved}, which save_contents does not have; "
            "a run could not resume from its own checkpoints; add it to save_contents"
        )


def _loggers(config: Config) -> Iterator[str]:
    for spec in config.trainer.logger:
        if spec in BUILT_IN_LOGGERS:
            continue
        try:
            path, name = split_spec(spec, key="trainer.logger", example="loggers.py:MyLogger")
            logger_class = load_attribute(path, name, key="trainer.logger")
        except ConfigError as error:
            yield str(error)
            continue
        if not isinstance(logger_class, type):
            yield f"trainer.logger={spec}: {name} is not a class; give the name of a class with log() and close()"
        elif absent := [method for method in ("log", "close") if not callable(getattr(logger_class, method, None))]:
            yield (
                f"trainer.logger={spec}: the class {name} has no {'() and no '.join(absent)}(); define "
                "log(self, step, metrics) and close(self)"
            )
        elif problem := call_problem(logger_class, "run_info"):
            yield f"trainer.logger={spec}: {name}(run_info) fails: {problem}; define __init__(self, run_info)"


def runs_validation(config: Config) -> bool:
    """Return True if the run validates at least once."""
    return config.trainer.test_freq > 0 or config.trainer.val_before_train


def _validation(config: Config) -> Iterator[str]:
    trainer = config.trainer
    if runs_validation(config) and not config.data.val_files:
        yield (
            f"trainer.test_freq={trainer.test_freq}, trainer.val_before_train={str(trainer.val_before_train).lower()} "
            "without validation data; set data.val_files, or trainer.test_freq=-1 and trainer.val_before_train=false"
        )
    if runs_validation(config) and config.custom_reward_function.path is None:
        yield (
            "validation scores responses with the reward function, and there is none; set custom_reward_function.path, "
            "or trainer.test_freq=-1 and trainer.val_before_train=false"
        )
    if trainer.best_metric is not None and trainer.test_freq <= 0:
        yield (
            f"trainer.best_metric={trainer.best_metric} needs validation during training: set trainer.test_freq, or "
            "trainer.best_metric=null"
        )


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.actor_rollout_ref.rollout
    for name, sampling in (("rollout", rollout), ("rollout.val_kwargs", rollout.val_kwargs)):
        if sampling.n > 1 and sampling.temperature == 0:
            yield (
                f"actor_rollout_ref.{name}.n={sampling.n} with temperature 0: greedy responses to the same prompt are "
                "identical; set n=1, or a temperature above 0"
            )

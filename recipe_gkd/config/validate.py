"""Rejection of combinations of values that cannot work, before any process is started.

Each error has the keys, the values and what to change. Checks that need the model or files are in ``preflight.py``.
"""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from recipe_gkd.config.actor_layout import actor_problems
from recipe_gkd.config.conditions import has_reward, runs_validation, saves_checkpoints, uses_teacher, validates_kl
from recipe_gkd.config.environments import conversation_problems
from recipe_gkd.config.hybrid_engine import hybrid_problems, teacher_sleep_problems
from recipe_gkd.config.keys import ROLLOUT
from recipe_gkd.config.objective import objective_problems
from recipe_gkd.config.reward_functions import reward_problems
from recipe_gkd.config.schema import BUILT_IN_LOGGERS, TRACKING_SERVICES, Config
from recipe_gkd.config.teachers import teacher_problems
from recipe_gkd.config.unused_keys import unused_key_problems
from recipe_gkd.errors import ConfigError
from recipe_gkd.runtime.user_code import call_problem, load_attribute, split_spec
from recipe_gkd.runtime.worker_variables import FIXED, PER_NODE


def validate(config: Config) -> None:
    """Check all combinations of values.

    Raises:
        ConfigError: At least one combination cannot work. It has the keys of all of them.
    """
    checks = (
        unused_key_problems,
        _schedule,
        actor_problems,
        _rollout_layout,
        _weight_transport,
        hybrid_problems,
        teacher_sleep_problems,
        _lengths,
        _ray,
        _resume,
        _loggers,
        _observation,
        objective_problems,
        reward_problems,
        teacher_problems,
        conversation_problems,
        _validation,
        _sampling,
    )
    if problems := [problem for check in checks for problem in check(config)]:
        raise ConfigError.joined(problems)


def _schedule(config: Config) -> Iterator[ConfigError]:
    trainer = config.trainer
    if (trainer.scheduler == "n_step_off") != (trainer.max_staleness is not None):
        yield ConfigError(
            f"trainer.scheduler={trainer.scheduler} with trainer.max_staleness={trainer.max_staleness}: n_step_off "
            "needs a bound, such as trainer.max_staleness=4, and the other schedulers do not take one",
            remedy="change one of the two",
            keys=("trainer.scheduler", "trainer.max_staleness"),
        )
    if trainer.inflight_update and (trainer.scheduler == "sync" or trainer.max_staleness == 0):
        yield ConfigError(
            f"trainer.inflight_update=true with trainer.scheduler={trainer.scheduler} and a staleness bound of 0: "
            "no response is in flight when the weights change",
            remedy="set it to false, or choose a scheduler with a larger bound, such as one_step_off",
            keys=("trainer.inflight_update", "trainer.scheduler", "trainer.max_staleness"),
        )


def _rollout_layout(config: Config) -> Iterator[ConfigError]:
    rollout = config.actor_rollout_ref.rollout
    tokens, sequences = rollout.max_num_batched_tokens, rollout.max_num_seqs
    if tokens is not None and tokens < sequences:
        yield ConfigError(
            f"actor_rollout_ref.rollout.max_num_batched_tokens={tokens} is less than max_num_seqs={sequences}, and a "
            "step has at least one token per response",
            remedy="raise the former, lower the latter, or set max_num_batched_tokens to null",
            keys=(f"{ROLLOUT}.max_num_batched_tokens", f"{ROLLOUT}.max_num_seqs"),
        )
    tp, (_, per_node) = rollout.tensor_model_parallel_size, config.rollout_pool
    if per_node % tp:
        pool = "trainer" if config.actor_rollout_ref.hybrid_engine else "rollout"
        yield ConfigError(
            f"actor_rollout_ref.rollout.tensor_model_parallel_size={tp} does not divide {pool}.n_gpus_per_node="
            f"{per_node}, and an engine cannot span nodes",
            remedy="change one of the two",
            keys=(f"{ROLLOUT}.tensor_model_parallel_size", f"{pool}.n_gpus_per_node"),
        )


def _weight_transport(config: Config) -> Iterator[ConfigError]:
    if config.actor_rollout_ref.rollout.weight_transport != "ipc":
        return
    nodes = {"trainer.nnodes": config.trainer.nnodes}
    if not config.actor_rollout_ref.hybrid_engine:
        nodes["rollout.nnodes"] = config.rollout.nnodes
    if several := {name: n for name, n in nodes.items() if n > 1}:
        yield ConfigError(
            f"{ROLLOUT}.weight_transport=ipc with {' and '.join(f'{name}={n}' for name, n in several.items())}: it "
            "sends weights through the shared memory of one node",
            remedy="set it to collective or auto",
            keys=(f"{ROLLOUT}.weight_transport", *several),
        )


def _lengths(config: Config) -> Iterator[ConfigError]:
    data, rollout = config.data, config.actor_rollout_ref.rollout
    longest = data.max_prompt_length + data.max_response_length
    if rollout.max_model_len is not None and rollout.max_model_len < longest:
        yield ConfigError(
            f"actor_rollout_ref.rollout.max_model_len={rollout.max_model_len} is less than data.max_prompt_length + "
            f"data.max_response_length = {longest}",
            remedy="raise it, or set it to null",
            keys=("actor_rollout_ref.rollout.max_model_len", "data.max_prompt_length", "data.max_response_length"),
        )


def _ray(config: Config) -> Iterator[ConfigError]:
    if config.ray_init.address is not None and config.ray_init.num_cpus is not None:
        yield ConfigError(
            f"ray_init.num_cpus={config.ray_init.num_cpus} with ray_init.address={config.ray_init.address}: the number "
            "of CPUs of a running cluster cannot be set",
            remedy="set one of the two to null",
            keys=("ray_init.num_cpus", "ray_init.address"),
        )
    for name in config.ray_init.env_vars:
        if name in FIXED:
            yield ConfigError(
                f"ray_init.env_vars.{name} is set by Ray or by this project for each worker",
                remedy="remove it",
                keys=(f"ray_init.env_vars.{name}",),
            )
        if name in PER_NODE:
            yield ConfigError(
                f"ray_init.env_vars.{name} would have one value on all nodes, but each node needs its own",
                remedy=f"set {name} in the environment of `ray start` on each node instead",
                keys=(f"ray_init.env_vars.{name}",),
            )


def _resume(config: Config) -> Iterator[ConfigError]:
    trainer, checkpoint = config.trainer, config.actor_rollout_ref.actor.checkpoint
    mode, has_path = trainer.resume_mode, trainer.resume_from_path is not None
    if (mode == "resume_path" and not has_path) or (mode == "disable" and has_path):
        yield ConfigError(
            f"trainer.resume_mode={mode} with trainer.resume_from_path={trainer.resume_from_path}: resume_path needs a "
            "folder, and disable does not take one",
            remedy="change one of the two",
            keys=("trainer.resume_mode", "trainer.resume_from_path"),
        )
    for name in ("save_contents", "load_contents"):
        if "model" not in getattr(checkpoint, name):
            yield ConfigError(
                f"actor_rollout_ref.actor.checkpoint.{name} has no `model`, which every resumed run needs",
                remedy="add it",
                keys=(f"actor_rollout_ref.actor.checkpoint.{name}",),
            )
    if unsaved := [part for part in checkpoint.load_contents if part not in checkpoint.save_contents]:
        yield ConfigError(
            f"actor_rollout_ref.actor.checkpoint.load_contents has {unsaved}, which save_contents does not have; "
            "a run could not resume from its own checkpoints",
            remedy="add it to save_contents",
            keys=tuple(f"actor_rollout_ref.actor.checkpoint.{name}" for name in ("load_contents", "save_contents")),
        )


def _loggers(config: Config) -> Iterator[ConfigError]:
    for spec in config.trainer.logger:
        # A folder with files of the service, but without the package, would be a namespace package without an origin.
        if spec in TRACKING_SERVICES and getattr(find_spec(spec), "origin", None) is None:
            yield ConfigError(
                f"trainer.logger={spec}: the package {spec} is not installed",
                remedy=f"install it with `pip install 'recipe-gkd[{spec}]'`, or remove {spec} from trainer.logger",
                keys=("trainer.logger",),
            )
        if spec in BUILT_IN_LOGGERS:
            continue
        try:
            path, name = split_spec(spec, key="trainer.logger", example="loggers.py:MyLogger")
            logger_class = load_attribute(path, name, key="trainer.logger")
        except ConfigError as error:
            yield error
            continue
        if not isinstance(logger_class, type):
            yield ConfigError(
                f"trainer.logger={spec}: {name} is not a class",
                remedy="give the name of a class with log() and close()",
                keys=("trainer.logger",),
            )
        elif absent := [method for method in ("log", "close") if not callable(getattr(logger_class, method, None))]:
            yield ConfigError(
                f"trainer.logger={spec}: the class {name} has no {'() and no '.join(absent)}()",
                remedy="define log(self, step, metrics) and close(self)",
                keys=("trainer.logger",),
            )
        elif problem := call_problem(logger_class, "run_info"):
            yield ConfigError(
                f"trainer.logger={spec}: {name}(run_info) fails: {problem}",
                remedy="define __init__(self, run_info)",
                keys=("trainer.logger",),
            )


def _observation(config: Config) -> Iterator[ConfigError]:
    trainer = config.trainer
    n_ranks = trainer.nnodes * trainer.n_gpus_per_node
    if trainer.profile.steps and (absent := [rank for rank in trainer.profile.ranks if rank >= n_ranks]):
        yield ConfigError(
            f"trainer.profile.ranks={trainer.profile.ranks}: the actor has the ranks 0 to {n_ranks - 1}",
            remedy=f"remove {', '.join(map(str, absent))}",
            keys=("trainer.profile.ranks",),
        )
    if trainer.save_before is not None and not saves_checkpoints(config):
        yield ConfigError(
            f"trainer.save_before={trainer.save_before} with trainer.save_freq={trainer.save_freq}: the run saves no "
            "checkpoints",
            remedy="set trainer.save_freq above 0, or trainer.save_before=null",
            keys=("trainer.save_before", "trainer.save_freq"),
        )


def _validation(config: Config) -> Iterator[ConfigError]:
    trainer = config.trainer
    if runs_validation(config) and not config.data.val_files:
        yield ConfigError(
            f"trainer.test_freq={trainer.test_freq}, trainer.val_before_train={str(trainer.val_before_train).lower()} "
            "without validation data",
            remedy="set data.val_files, or trainer.test_freq=-1 and trainer.val_before_train=false",
            keys=("trainer.test_freq", "trainer.val_before_train", "data.val_files"),
        )
    if runs_validation(config) and not has_reward(config) and not validates_kl(config):
        reason = "trainer.val_kl=false" if uses_teacher(config.gkd) else "there is no teacher"
        yield ConfigError(
            "validation scores responses with the reward function or by the KL divergence to the teacher, but "
            f"custom_reward_function.path=null, and {reason}",
            remedy=(
                "set custom_reward_function.path, or trainer.val_kl=null "
                "with a teacher, or trainer.test_freq=-1 and trainer.val_before_train=false"
            ),
            keys=("custom_reward_function.path", "trainer.val_kl"),
        )
    if trainer.best_metric is not None and trainer.test_freq <= 0:
        yield ConfigError(
            f"trainer.best_metric={trainer.best_metric} needs validation during training",
            remedy="set trainer.test_freq, or trainer.best_metric=null",
            keys=("trainer.best_metric", "trainer.test_freq"),
        )


def _sampling(config: Config) -> Iterator[ConfigError]:
    rollout = config.actor_rollout_ref.rollout
    for name, sampling in (("rollout", rollout), ("rollout.val_kwargs", rollout.val_kwargs)):
        if sampling.n > 1 and sampling.temperature == 0:
            yield ConfigError(
                f"actor_rollout_ref.{name}.n={sampling.n} with temperature 0: greedy responses to the same prompt are "
                "identical",
                remedy="set n=1, or a temperature above 0",
                keys=(f"actor_rollout_ref.{name}.n", f"actor_rollout_ref.{name}.temperature"),
            )

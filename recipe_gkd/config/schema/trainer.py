"""Sections ``trainer`` and ``ray_init``."""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass

from recipe_gkd.config.durations import duration_s, to_clock
from recipe_gkd.config.limits import MAX_CPUS, MAX_DEVICES, MAX_EPOCHS, MAX_NODES, MAX_STEPS
from recipe_gkd.config.schema.fields import STRICT, Name, OutputPath, SourcePath, UserPath, key, null_to_list, timeout
from recipe_gkd.config.schema.unused import NO_CHECKPOINTS, NO_TEACHER, NO_VALIDATION, needs, unused_with
from recipe_gkd.errors import ConfigError
from recipe_gkd.runtime.user_code import split_spec

Device = Literal["auto", "cuda", "cpu"]
ResumeMode = Literal["disable", "auto", "resume_path"]
Scheduler = Literal["sync", "one_step_off", "two_step_off", "n_step_off"]
OomPolicy = Literal["fail", "split"]

TrackingService = Literal["wandb", "mlflow", "swanlab"]
TRACKING_SERVICES: tuple[str, ...] = get_args(TrackingService)
"""Loggers with a package of the same name, which is installed as an extra."""
BUILT_IN_LOGGERS: tuple[str, ...] = ("console", "jsonl", "tensorboard", *TRACKING_SERVICES)


def _check_logger(value: str) -> str:
    if value in BUILT_IN_LOGGERS:
        return value
    try:
        split_spec(value, key="trainer.logger", example="loggers.py:MyLogger")
    except ConfigError as error:
        choices = ", ".join(BUILT_IN_LOGGERS)
        raise ConfigError(
            f"got {value!r}; expected one of {choices}, or FILE.py:Name for a logger class of your own"
        ) from error
    return value


def _check_duration(value: str) -> str:
    duration_s(value)
    return value


LoggerSpec = Annotated[SourcePath, AfterValidator(_check_logger)]
Duration = Annotated[str, BeforeValidator(to_clock), AfterValidator(_check_duration)]
ProfiledStep = Annotated[int, Field(ge=1, le=MAX_STEPS)]
ProfiledRank = Annotated[int, Field(ge=0, le=MAX_NODES * MAX_DEVICES - 1)]


def _to_text(value: Any) -> Any:
    if isinstance(value, bool):
        raise ConfigError(
            f"got {value}, but the value of an environment variable is a text", remedy="quote it, or write 1 or 0"
        )
    return str(value) if isinstance(value, int | float) else value


EnvironmentValue = Annotated[str, BeforeValidator(_to_text)]  # Hydra reads NAME=1 as a number


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ProfileConfig:
    """Traces of torch's profiler, section ``trainer.profile``."""

    steps: Annotated[list[ProfiledStep], BeforeValidator(null_to_list)] = key(
        "Steps, counted from 1, whose update is recorded by torch's profiler. The traces are written to the run folder "
        "as `profile/step_N_rank_R.json.gz`. Empty: no profile."
    )
    ranks: list[ProfiledRank] = key(
        "Ranks of the actor that are recorded.",
        unused=[unused_with(lambda config: config.trainer.profile.steps, [], "[3]")],
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainerConfig:
    """Schedule, length, outputs and actor pool of a run, section ``trainer``."""

    scheduler: Scheduler = key(
        "Maximum policy lag in optimizer steps: 0 for `sync`, 1 for `one_step_off`, 2 for `two_step_off`, and "
        "`max_staleness` for `n_step_off`. A larger lag overlaps more stages and trains on older responses."
    )
    max_staleness: int | None = key(
        "Maximum policy lag of `n_step_off`, in optimizer steps. null for the other schedulers.", ge=0, le=1000
    )
    inflight_update: bool = key(
        "Update the rollout weights in the middle of responses: generation pauses, loads the weights and continues. "
        "false: a weight sync waits for all responses in flight."
    )
    device: Device = key("Device of the workers. `auto`: `cuda` if Ray has a GPU, else `cpu`.")
    nnodes: int = key("Number of nodes of the actor pool.", ge=1, le=MAX_NODES)
    n_gpus_per_node: int = key(
        "Number of GPUs per node of the actor pool (CPU slots if `device` is `cpu`).", ge=1, le=MAX_DEVICES
    )
    total_epochs: int = key(
        "Number of passes over the training data. Ignored if `total_training_steps` is set.",
        unused=[needs(lambda config: config.trainer.total_training_steps, None)],
        ge=1,
        le=MAX_EPOCHS,
    )
    total_training_steps: int | None = key(
        "Number of training steps, over as many epochs as needed. null: `total_epochs` determines it.",
        ge=1,
        le=MAX_STEPS,
    )
    save_freq: int = key(
        "Number of steps between checkpoints. A checkpoint is also saved at the last step. -1: no checkpoints, except "
        "those of `best_metric`.",
        ge=-1,
        le=MAX_STEPS,
    )
    max_actor_ckpt_to_keep: int | None = key(
        "Number of recent checkpoints to keep. The best checkpoint is kept in addition. Older ones are removed after "
        "each save. null: keep all.",
        unused=[NO_CHECKPOINTS],
        ge=1,
        le=MAX_STEPS,
    )
    save_failures_allowed: int = key(
        "Maximum number of failed saves (full disk, killed writer, timeout). One more ends the run with an error. A "
        "resumed run starts at 0.",
        unused=[NO_CHECKPOINTS],
        ge=0,
        le=MAX_STEPS,
    )
    test_freq: int = key("Number of steps between validations. -1: no validation.", ge=-1, le=MAX_STEPS)
    val_before_train: bool = key("Validate before the first step.")
    val_kl: bool | None = key(
        "Report the KL divergence between student and teacher on the validation responses, as `val/SOURCE/kl`. null: "
        "only without a reward function.",
        unused=[NO_TEACHER, NO_VALIDATION],
    )
    log_val_generations: int = key(
        "Number of responses to log at each validation.", unused=[NO_VALIDATION], ge=0, le=MAX_STEPS
    )
    best_metric: str | None = key(
        "Validation metric that selects the best checkpoint, such as `val/gsm8k/compute_score`. The checkpoint with "
        "the highest value, or the lowest KL divergence, is kept and linked as `best`. With `val_before_train` it must "
        "also be better than before training. null: no best checkpoint."
    )
    logger: list[LoggerSpec] = key(
        "Destinations of the metrics. Any of `console`, `jsonl`, `tensorboard`, `wandb`, `mlflow`, `swanlab` (see "
        "docs/metrics.md), and `FILE.py:Name` for a logger class of your own (see docs/customization.md)."
    )
    project_name: Name = key(
        "Project name. Part of `default_local_dir` and of the TensorBoard folder; project or experiment of the "
        "tracking services."
    )
    experiment_name: Name = key(
        "Experiment name. Part of `default_local_dir` and of the TensorBoard folder; name of the run at the tracking "
        "services."
    )
    default_local_dir: OutputPath = key("Run folder: checkpoints, logs, metrics and the trained model.")
    resume_mode: ResumeMode = key(
        "Starting point of the run. `auto`: the last complete checkpoint in `default_local_dir` if there is one, where "
        "damaged checkpoints are skipped with a warning, else the checkpoint at `resume_from_path` if it is set; "
        "`resume_path`: the checkpoint at `resume_from_path`; `disable`: the model folder."
    )
    resume_from_path: UserPath | None = key(
        "Checkpoint folder (`.../global_step_N`) to resume from. With `resume_mode=auto` only until the run has saved "
        "a checkpoint, so that the same command can be repeated after a failure."
    )
    startup_timeout_s: float | None = timeout(
        "each phase of the start of all workers, in seconds. null: 600 on a CPU, and 1800 on CUDA, where vLLM, Triton "
        "and FlashInfer compile kernels at the first start."
    )
    check_nodes: bool = key(
        "Refuse to start if a node has a problem that would make workers fail: an old CUDA driver, no C compiler or "
        "Python headers, a small /dev/shm, a full disk. false: log these problems as warnings."
    )
    oom: OomPolicy = key(
        "Reaction of an actor that runs out of memory during an update. `fail`: the run ends. `split`: "
        "`actor.max_token_len` is lowered by halving for the rest of the run and the update is repeated, with the same "
        "result up to the order of sums. Needs ranks that do not wait for each other within a pass (data parallelism "
        "only; with FSDP on several ranks `fsdp_size=1`): see docs/failures.md."
    )
    max_worker_restarts: int = key(
        "Maximum number of rollout workers that are replaced during a run, because they died or missed a deadline, and "
        "of restarts of each scoring worker. The next fault ends the run.",
        ge=0,
        le=MAX_STEPS,
    )
    max_actor_restarts: int = key(
        "Maximum number of times that all actor ranks are started again during a run, because one died or missed a "
        "deadline. The run continues from its newest checkpoint; the rollout engines stay. Not with `hybrid_engine` or "
        "`teacher.sleep_between_batches`, whose ranks share their devices.",
        ge=0,
        le=MAX_STEPS,
    )
    device_peak_tflops: float | None = key(
        "Peak rate of an actor device in TFLOP/s, in the data type of training and without sparsity, for "
        "`perf/mfu/actor`. null: the rate of the data sheet for common GPUs; the metric is left out for other devices.",
        gt=0,
        le=1e6,
    )
    metrics_port: int | None = key(
        "Port of the driver's machine that serves `/metrics` for Prometheus, on all interfaces, without "
        "authentication. 0: a free port, which is logged. null: no server.",
        ge=0,
        le=65535,
    )
    save_before: Duration | None = key(
        "Time since the start of the command, as `HH:MM:SS` or `D-HH:MM:SS`, at which the run saves a checkpoint "
        "between steps and ends with status 75. Leave time for a step and a save before the limit of the job. null: "
        "no limit."
    )
    profile: ProfileConfig
    trace_file: OutputPath | None = key(
        "File for a trace of every stage, worker and batch, to be opened at https://ui.perfetto.dev. null: no trace."
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RayInitConfig:
    """Connection to Ray, section ``ray_init``."""

    num_cpus: int | None = key(
        "Number of CPU slots of a local cluster. null: number of CPUs of the machine.", ge=1, le=MAX_CPUS
    )
    address: str | None = key("Address of a running cluster, or `auto`. null: start a local cluster.")
    env_vars: dict[str, EnvironmentValue] = key(
        "Environment variables of all workers, such as `NCCL_SOCKET_IFNAME`. They take precedence over the driver's "
        "variables that start with `NCCL_`, `GLOO_`, `TORCH_`, `PYTORCH_` or `VLLM_`, and `RES_OPTIONS`, which all "
        "workers get too (except those that differ between nodes, such as `VLLM_HOST_IP`)."
    )
    timeline_json_file: OutputPath | None = key("File for Ray's own timeline, written at the end. null: no timeline.")

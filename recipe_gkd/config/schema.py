"""Schema of the configuration: type, range and description of every key.

The schema contains no defaults. All values are in the YAML files under ``config/``. ``load.py`` composes and converts
them, and ``validate.py`` rejects combinations that cannot work. ``python -m recipe_gkd.config`` prints the descriptions
as a table.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass

from recipe_gkd.config.choices import OneOf, absolute_path, importance_modes, kernel_backends, loss_names, tail_modes
from recipe_gkd.config.limits import (
    MAX_BATCH,
    MAX_COEFFICIENT,
    MAX_CPUS,
    MAX_DEVICES,
    MAX_EPOCHS,
    MAX_GROUP,
    MAX_INT32,
    MAX_NODES,
    MAX_SEED,
    MAX_STEPS,
    MAX_TEACHER_WAIT_S,
    MAX_TEMPERATURE,
    MAX_TIMEOUT_S,
    MAX_TOKENS,
    MIN_TIMEOUT_S,
    Beta,
    Temperature,
)
from recipe_gkd.errors import ConfigError
from recipe_gkd.runtime.user_code import split_spec

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


def key(doc: str, **bounds: Any) -> Any:
    """Return a field with the description ``doc``; ``bounds`` are pydantic's ``ge``, ``gt``, ``le`` and ``lt``."""
    return Field(description=doc, **bounds)


def timeout(doc: str, longest_s: float = MAX_TIMEOUT_S) -> Any:
    """Return a field for a deadline in seconds."""
    return key(f"Timeout in seconds: {doc}", ge=MIN_TIMEOUT_S, le=longest_s)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


def _check_logger(value: str) -> str:
    if value in BUILT_IN_LOGGERS:
        return value
    try:
        split_spec(value, key="trainer.logger")
    except ConfigError as error:
        choices = ", ".join(BUILT_IN_LOGGERS)
        raise ValueError(f"expected one of {choices}, or FILE.py:Name for a logger class of your own") from error
    return value


Files = Annotated[list[str], BeforeValidator(_as_list)]  # a single string is accepted as a list of one

AdvantageBaseline = Literal["none", "expected", "group"]
AggregationMode = Literal["token-mean", "seq-mean-token-mean"]
CheckpointPart = Literal["model", "optimizer", "extra"]
DecayStyle = Literal["constant", "linear", "cosine"]
Device = Literal["auto", "cuda", "cpu"]
ResumeMode = Literal["disable", "auto", "resume_path"]
RolloutDtype = Literal["auto", "bfloat16", "float16", "float32"]
SavedPart = Literal[CheckpointPart, "hf_model"]
Scheduler = Literal["sync", "one_step_off", "two_step_off", "n_step_off"]
SftTarget = Literal["data", "teacher"]
TeacherFailureMode = Literal["fail", "wait", "skip_samples"]
TrainingDtype = Literal["bfloat16", "float32"]
Truncation = Literal["error", "left", "right", "middle"]
WeightTransport = Literal["auto", "collective", "ipc"]
WireDtype = Literal["float32", "float16"]

BuiltInLogger = Literal["console", "jsonl", "tensorboard"]
BUILT_IN_LOGGERS: tuple[str, ...] = get_args(BuiltInLogger)
LoggerSpec = Annotated[str, AfterValidator(_check_logger)]


def _current_tail_mode(value: Any) -> Any:
    return "renormalize" if value == "renormalise" else value  # former spelling


LossType = Annotated[str, AfterValidator(OneOf(loss_names))]
TailMode = Annotated[str, BeforeValidator(_current_tail_mode), AfterValidator(OneOf(tail_modes))]
ImportanceMode = Annotated[str, AfterValidator(OneOf(importance_modes))]
KernelBackend = Annotated[str, AfterValidator(OneOf(kernel_backends))]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """Training and validation prompts, section ``data``."""

    train_files: Files = key("Parquet files with the training prompts. A single path is accepted.")
    val_files: Files = key("Parquet files with held-out prompts for validation. May be empty.")
    prompt_key: str = key("Column with the prompt: a list of {role, content} messages, or a string.")
    response_key: str = key("Column with the reference response, a string. Used if `gkd.sft_share` is above 0.")
    ground_truth_key: str = key(
        "Column with the ground truth that the reward function receives. Dots select a field of a structure, such as "
        "`reward_model.ground_truth`."
    )
    data_source_key: str = key(
        "Column with the name of the data source. Validation metrics are reported per source, and reward functions "
        "receive the name as `data_source`."
    )
    max_prompt_length: int = key("Maximum prompt length in tokens, after the chat template.", ge=1, le=MAX_TOKENS)
    max_response_length: int = key(
        "Maximum response length in tokens. Longer responses are truncated.", ge=1, le=MAX_TOKENS
    )
    train_batch_size: int = key("Number of prompts per training step.", ge=1, le=MAX_BATCH)
    shuffle: bool = key("Shuffle the prompts in each epoch. The order depends on `seed` and the epoch only.")
    seed: int = key("Seed of the data order and of sampling.", ge=0, le=MAX_SEED)
    filter_overlong_prompts: bool = key(
        "Drop prompts longer than `max_prompt_length`. The number of dropped prompts is logged."
    )
    truncation: Truncation = key(
        "Treatment of overlong prompts that were not filtered. `error`: the run ends; `left`, `right`, "
        "`middle`: tokens are removed from the start, the end or the middle."
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """Student model, section ``actor_rollout_ref.model``."""

    path: str = key("Hugging Face folder of the student, with config, tokenizer and safetensors.")
    trust_remote_code: bool = key("Allow the tokenizer and the rollout engine to execute code from the model folder.")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MegatronConfig:
    """Parallel layout of the actor, section ``actor_rollout_ref.actor.megatron``."""

    tensor_model_parallel_size: int = key("Number of ranks that share each layer.", ge=1, le=MAX_DEVICES)
    pipeline_model_parallel_size: int = key("Number of pipeline stages.", ge=1, le=MAX_DEVICES)
    virtual_pipeline_model_parallel_size: int | None = key(
        "Number of interleaved layer chunks per pipeline stage. null: no interleaving.", ge=2, le=MAX_DEVICES
    )
    context_parallel_size: int = key(
        "Number of ranks that share each sequence. Only 1 is supported.", ge=1, le=MAX_DEVICES
    )
    expert_model_parallel_size: int = key(
        "Number of ranks that share the experts of a mixture-of-experts model.", ge=1, le=MAX_DEVICES
    )
    expert_tensor_parallel_size: int | None = key(
        "Number of ranks that share each expert. null: `tensor_model_parallel_size`.", ge=1, le=MAX_DEVICES
    )
    sequence_parallel: bool = key(
        "Split activations between layers along the sequence, which saves memory. Requires "
        "`tensor_model_parallel_size` above 1."
    )
    use_distributed_optimizer: bool = key("Shard the optimizer state over the data-parallel ranks.")
    dtype: TrainingDtype = key("Data type of weights and activations. The optimizer keeps float32 copies.")
    param_offload: bool = key("Move parameters to host memory between updates. Only false is supported.")
    grad_offload: bool = key("Move gradients to host memory between updates. Only false is supported.")
    optimizer_offload: bool = key("Move the optimizer state to host memory between updates. Only false is supported.")
    override_transformer_config: dict[str, Any] = key(
        "Fields of Megatron's TransformerConfig that are set directly, such as `recompute_granularity`."
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimConfig:
    """Optimizer and learning rate schedule, section ``actor_rollout_ref.actor.optim``."""

    lr: float = key("Peak learning rate.", gt=0, le=1)
    min_lr: float = key("Learning rate at the end of the decay.", ge=0, le=1)
    lr_warmup_steps: int = key(
        "Number of linear warm-up steps. -1: use `lr_warmup_steps_ratio` instead.", ge=-1, le=MAX_STEPS
    )
    lr_warmup_steps_ratio: float = key(
        "Number of warm-up steps as a fraction of all steps. Used if `lr_warmup_steps` is -1.", ge=0, le=1
    )
    lr_decay_style: DecayStyle = key("Shape of the learning rate schedule after the warm-up.")
    weight_decay: float = key(
        "AdamW weight decay. Biases, norm weights and vocabulary padding are excluded.", ge=0, le=100
    )
    betas: tuple[Beta, Beta] = key("AdamW decay rates of the first and second moment.")
    clip_grad: float = key("Maximum gradient norm. 0: no clipping.", ge=0, le=MAX_COEFFICIENT)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    """Content of checkpoints, section ``actor_rollout_ref.actor.checkpoint``."""

    save_contents: list[SavedPart] = key(
        "Parts of a checkpoint: `model` (weights), `optimizer` (state), `extra` (learning rate schedule), and "
        "`hf_model` (a Hugging Face folder for inference)."
    )
    load_contents: list[CheckpointPart] = key("Parts that a resumed run loads.")
    async_save: bool = key("Write checkpoints in the background while training continues.")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ActorConfig:
    """Actor, the student in training, section ``actor_rollout_ref.actor``."""

    strategy: Literal["megatron"] = key("Training backend.")
    micro_batch_size: int = key(
        "Number of samples per micro-batch and rank. Used if `use_dynamic_bsz` is false.", ge=1, le=MAX_BATCH
    )
    use_dynamic_bsz: bool = key(
        "Fill micro-batches up to `max_token_len` tokens. false: `micro_batch_size` samples each."
    )
    max_token_len: int = key(
        "Maximum number of tokens per micro-batch and rank. Used if `use_dynamic_bsz` is true. Lower it if the actor "
        "runs out of memory.",
        ge=1,
        le=MAX_INT32,
    )
    timeout_s: float = timeout("one update, save or load. A background save is timed from its start.")
    megatron: MegatronConfig
    optim: OptimConfig
    checkpoint: CheckpointConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ValidationSamplingConfig:
    """Sampling during validation, section ``actor_rollout_ref.rollout.val_kwargs``."""

    n: int = key("Number of responses per validation prompt. Their rewards are averaged.", ge=1, le=MAX_GROUP)
    temperature: Temperature = key(
        "Sampling temperature of validation responses: 0 (greedy), or 0.01 to 2.", ge=0, le=MAX_TEMPERATURE
    )
    top_p: float = key("Nucleus sampling threshold of validation responses. 1: disabled.", gt=0, le=1)
    top_k: int = key(
        "Number of most likely tokens that validation responses are sampled from. -1 or 0: all.", ge=-1, le=MAX_INT32
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutEngineConfig:
    """Rollout engines, section ``actor_rollout_ref.rollout``."""

    name: Literal["vllm"] = key("Rollout engine.")
    n: int = key("Number of responses per training prompt.", ge=1, le=MAX_GROUP)
    temperature: Temperature = key("Sampling temperature: 0 (greedy), or 0.01 to 2.", ge=0, le=MAX_TEMPERATURE)
    top_p: float = key("Nucleus sampling threshold. 1: disabled.", gt=0, le=1)
    top_k: int = key("Number of most likely tokens to sample from. -1 or 0: all.", ge=-1, le=MAX_INT32)
    dtype: RolloutDtype = key("Data type of the rollout engine. `auto`: the type in the model's config.")
    gpu_memory_utilization: float = key("Fraction of a GPU's memory that vLLM uses. Ignored on a CPU.", gt=0, le=1)
    kv_cache_memory_megabytes: int | None = key(
        "Size of the KV cache in MiB. null: on CUDA derived from `gpu_memory_utilization`, on a CPU 256.",
        ge=1,
        le=1 << 24,
    )
    tensor_model_parallel_size: int = key("Number of GPUs per engine.", ge=1, le=MAX_DEVICES)
    max_num_seqs: int = key("Maximum number of responses that one engine generates at a time.", ge=1, le=1 << 14)
    max_model_len: int | None = key(
        "Maximum sequence length in tokens. null: `data.max_prompt_length` + `data.max_response_length`.",
        ge=2,
        le=MAX_TOKENS,
    )
    enforce_eager: bool = key("Disable CUDA graphs. On a CPU they are always disabled.")
    update_weights_bucket_megabytes: float = key(
        "Size in MiB of the buckets in which weights are sent to the rollout workers. Larger buckets are faster and "
        "use more memory.",
        ge=1e-3,
        le=1 << 16,
    )
    weight_transport: WeightTransport = key(
        "Transport of weight updates. `collective`: NCCL or gloo; `ipc`: shared memory of one node; `auto`: `ipc` if "
        "`rollout.share_actor_gpus` is true on CUDA, else `collective`."
    )
    timeout_s: float = timeout("the responses of one batch.")
    val_kwargs: ValidationSamplingConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TeacherConfig:
    """Teacher service, section ``actor_rollout_ref.teacher``."""

    backend: str = key(
        "Teacher backend. `zmq`: a teacher service. `hf`: a transformers model in the driver process, for small "
        "teachers, tests and debugging. `FILE.py:Class`: a class that implements "
        "`recipe_gkd.teacher_routing.TeacherBackend`."
    )
    model_path: str | None = key("Folder of the teacher model for `backend=hf`; passed on to a custom backend.")
    server_ip: str = key("Address of the teacher's proxy.")
    server_port: int = key("Front-end port of the teacher's proxy (`PROXY_FRONTEND_PORT`).", ge=1, le=65535)
    teachers: dict[str, str] = key(
        "Several named teachers, as name -> `host:port`. They replace the teacher at `server_ip`, which has the name "
        "`default`. Command line, once per teacher: `actor_rollout_ref.teacher.teachers.math=10.0.0.1:15555`."
    )
    route_key: str | None = key(
        "Column with the name of each prompt's teacher. Dots select a field of a structure. Required with more than "
        "one teacher."
    )
    n_server_workers: int = key("Total number of teacher workers over all teachers.", ge=1, le=MAX_NODES)
    num_microbatches: int = key(
        "Number of requests per teacher worker that a batch is split into. Higher values start scoring earlier, and "
        "have more overhead per request.",
        ge=1,
        le=1 << 16,
    )
    timeout_s: float = timeout("one request to the teacher.")
    top_k: int | None = key(
        "Number of token ids per position to request. null: all that the teacher returns.", ge=1, le=1 << 24
    )
    wire_dtype: WireDtype = key(
        "Data type of top-k log-probabilities in transit. `float16` saves a quarter of the bytes and keeps 11 bits of "
        "precision; use it for teachers on other hosts."
    )
    auth_dir: str | None = key(
        "Folder with the CURVE keys of this client and the public key of the server. null: no authentication."
    )
    on_failure: TeacherFailureMode = key(
        "Reaction to a request that fails or exceeds `timeout_s`. `fail`: the run ends. `wait`: the request is "
        "repeated for up to `max_wait_s`; a rejected request ends the run. `skip_samples`: its samples stay in the "
        "batch without a distillation loss, up to `max_skipped_samples`."
    )
    max_wait_s: float = timeout(
        "all attempts of one request before the run ends. Used if `on_failure` is `wait`.", MAX_TEACHER_WAIT_S
    )
    max_skipped_samples: int = key(
        "Number of skipped samples above which the run ends. Resumed runs continue the count. Used if `on_failure` is "
        "`skip_samples`.",
        ge=0,
        le=MAX_STEPS,
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ActorRolloutRefConfig:
    """Student, rollout and teacher, section ``actor_rollout_ref``."""

    hybrid_engine: bool = key("Run actor and rollout in one process. Only false is supported.")
    nccl_timeout: float = timeout("one weight sync. Collectives of the actor get 60 s more.")
    model: ModelConfig
    actor: ActorConfig
    rollout: RolloutEngineConfig
    teacher: TeacherConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CustomLossConfig:
    """Distillation loss from a user's file."""

    path: Annotated[str | None, AfterValidator(absolute_path)] = key(
        "Python file of a loss function that replaces `gkd.distill_loss_type`. null: no custom loss."
    )
    name: str | None = key("Name of the function in that file: `LossInputs` -> `LossOutputs` of `recipe_gkd.losses`.")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GkdConfig:
    """Objective, section ``gkd``: distillation, policy loss and cross-entropy, each with a coefficient."""

    distill_loss_type: LossType = key(
        "Distillation loss at each position: a divergence between teacher P and student Q on the teacher's top-k, or "
        "an estimate of reverse KL from the sampled token alone (`k1`: policy gradient, `k2`, `k3`)."
    )
    distill_loss_coef: float = key(
        "Coefficient of the distillation loss. 0: the loss is measured but not trained on.", ge=0, le=MAX_COEFFICIENT
    )
    distill_temperature: float = key(
        "Temperature of both distributions: logits are divided by it before the softmax.", ge=1e-3, le=1e3
    )
    tail: TailMode = key(
        "Ids outside the teacher's top-k. `bucket` merges them into one outcome; `renormalize` omits them and divides "
        "both distributions by their remaining mass (biased); `none` omits them from the sum (biased)."
    )
    beta: float = key(
        "Weight of the teacher in the mixture of `jsd`. Near 0 the loss behaves like forward KL, near 1 like reverse "
        "KL.",
        ge=1e-6,
        le=1 - 1e-6,
    )
    rkl_ratio: float = key("Weight of reverse KL in `kl_rkl`. Forward KL has the remaining weight.", ge=0, le=1)
    skew_alpha: float = key(
        "Weight of the first distribution in the mixture of `skewed_forward_kl` and `skewed_reverse_kl`.",
        ge=1e-6,
        le=1 - 1e-6,
    )
    use_rl_loss: bool = key("Add a GRPO policy loss on the rewards of `custom_reward_function`.")
    rl_loss_coef: float = key("Coefficient of the policy loss.", ge=0, le=MAX_COEFFICIENT)
    clip_ratio_low: float = key(
        "Lower clip range of the policy loss: the probability ratio is clipped at 1 - this value.", gt=0, le=1
    )
    clip_ratio_high: float = key(
        "Upper clip range of the policy loss: the probability ratio is clipped at 1 + this value.",
        gt=0,
        le=MAX_COEFFICIENT,
    )
    clip_ratio_c: float = key(
        "Dual-clip bound of the policy loss: maximum probability ratio for negative advantages.",
        gt=1,
        le=MAX_COEFFICIENT,
    )
    norm_adv_by_std: bool = key(
        "Divide advantages by the standard deviation of the rewards of the same prompt, plus 1e-6."
    )
    importance: ImportanceMode = key(
        "Importance sampling correction of `k1`, `k2` and `k3` for tokens that older weights sampled. `truncate`: the "
        "probability ratio is limited to `importance_cap`; `mask`: tokens with a higher ratio are excluded; `none`: no "
        "correction."
    )
    importance_cap: float = key(
        "Maximum probability ratio of the importance sampling correction.", ge=1, le=MAX_COEFFICIENT
    )
    baseline: AdvantageBaseline = key(
        "Baseline of `k1`, subtracted from log p - log q of the sampled token to reduce variance. `expected`: the "
        "expectation at this position, from the teacher's top-k; `group`: the mean over the tokens of the other "
        "responses to the same prompt, after which the result is divided by their standard deviation (at least 0.1 "
        "nats); `none`: no baseline."
    )
    sft_share: float = key(
        "Fraction of the prompts that are trained on the reference response instead of a sampled one.", ge=0, le=1
    )
    sft_target: SftTarget = key(
        "Target of reference responses. `data`: cross-entropy with their tokens; `teacher`: distillation from the "
        "teacher's distributions along them."
    )
    sft_loss_coef: float = key("Coefficient of the cross-entropy with reference responses.", ge=0, le=MAX_COEFFICIENT)
    loss_agg_mode: AggregationMode = key(
        "Normalization of the loss over the global batch. `token-mean`: every token has the same weight; "
        "`seq-mean-token-mean`: every non-empty response has the same weight."
    )
    chunk_tokens: int | None = key(
        "Number of positions per chunk of the loss. Lower values use less memory. null: chosen for the device.",
        ge=1,
        le=MAX_INT32,
    )
    fuse_lm_head: bool = key(
        "Compute the output layer inside the loss, chunk by chunk. The full logits are never stored; they are computed "
        "twice. Set it to true if the logits do not fit into memory."
    )
    kernel_backend: KernelBackend = key(
        "Kernels of the loss: `torch`; `triton`, on a GPU; `auto`: Triton on a GPU where it is installed and compiles."
    )
    custom_loss: CustomLossConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardFunctionConfig:
    """Reward function, section ``custom_reward_function``."""

    path: str | None = key("Python file that defines the reward function. null: no reward function.")
    name: str = key(
        "Name of the function in the file. Its parameters are (prompt, response, ground_truth, extra), or "
        "verl's (data_source, solution_str, ground_truth, extra_info). It returns a number, or a dict with `score`."
    )
    on_training: bool = key("Score training responses even if no loss uses the reward, to report `reward/*` metrics.")
    timeout_s: float = timeout("one call of the reward function.")
    num_workers: int = key("Number of processes that call the reward function.", ge=1, le=MAX_DEVICES)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutPoolConfig:
    """Size of the rollout pool, section ``rollout``."""

    nnodes: int = key("Number of nodes of the rollout pool.", ge=1, le=MAX_NODES)
    n_gpus_per_node: int = key(
        "Number of GPUs per node of the rollout pool (CPU slots if `trainer.device` is `cpu`).", ge=1, le=MAX_DEVICES
    )
    share_actor_gpus: bool = key(
        "Place each rollout worker on the GPU of an actor rank. Both pools must have the same size."
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
        "Number of passes over the training data. Ignored if `total_training_steps` is set.", ge=1, le=MAX_EPOCHS
    )
    total_training_steps: int | None = key(
        "Number of training steps, over as many epochs as needed. null: `total_epochs` determines it.",
        ge=1,
        le=MAX_STEPS,
    )
    save_freq: int = key(
        "Number of steps between checkpoints. A checkpoint is also saved at the last step. -1: no checkpoints.",
        ge=-1,
        le=MAX_STEPS,
    )
    max_actor_ckpt_to_keep: int | None = key(
        "Number of recent checkpoints to keep. The best checkpoint is kept in addition. Older ones are removed after "
        "each save. null: keep all.",
        ge=1,
        le=MAX_STEPS,
    )
    save_failures_allowed: int = key(
        "Maximum number of failed saves (full disk, killed writer, timeout). One more ends the run with an error. A "
        "resumed run starts at 0.",
        ge=0,
        le=MAX_STEPS,
    )
    test_freq: int = key("Number of steps between validations. -1: no validation.", ge=-1, le=MAX_STEPS)
    val_before_train: bool = key("Validate before the first step.")
    log_val_generations: int = key("Number of responses to log at each validation.", ge=0, le=MAX_STEPS)
    best_metric: str | None = key(
        "Validation metric that selects the best checkpoint, such as `val/gsm8k/compute_score`. The checkpoint with "
        "the highest value is kept and linked as `best`. With `val_before_train` it must also exceed the value before "
        "training. null: no best checkpoint."
    )
    logger: list[LoggerSpec] = key(
        "Destinations of the metrics. Any of `console`, `jsonl`, `tensorboard`, and `FILE.py:Name` for a logger class "
        "of your own (see docs/customization.md)."
    )
    project_name: str = key("Project name. Part of `default_local_dir` and of the TensorBoard folder.")
    experiment_name: str = key("Experiment name. Part of `default_local_dir` and of the TensorBoard folder.")
    default_local_dir: str = key("Run folder: checkpoints, logs, metrics and the trained model.")
    resume_mode: ResumeMode = key(
        "Starting point of the run. `auto`: the last complete checkpoint in `default_local_dir` if there is one, where "
        "damaged checkpoints are skipped with a warning; `resume_path`: the checkpoint at `resume_from_path`; "
        "`disable`: the model folder."
    )
    resume_from_path: str | None = key(
        "Checkpoint folder (`.../global_step_N`) to resume from. Used if `resume_mode` is `resume_path`."
    )
    startup_timeout_s: float = timeout("start of all workers together.")
    max_worker_restarts: int = key(
        "Maximum number of dead rollout workers that are replaced during a run. The next death ends the run.",
        ge=0,
        le=MAX_STEPS,
    )
    trace_file: str | None = key(
        "File for a trace of every stage, worker and batch, to be opened at https://ui.perfetto.dev. null: no trace."
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RayInitConfig:
    """Connection to Ray, section ``ray_init``."""

    num_cpus: int | None = key(
        "Number of CPU slots of a local cluster. null: number of CPUs of the machine.", ge=1, le=MAX_CPUS
    )
    address: str | None = key("Address of a running cluster, or `auto`. null: start a local cluster.")
    timeline_json_file: str | None = key("File for Ray's own timeline, written at the end. null: no timeline.")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """Complete configuration of a run, converted and validated."""

    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    rollout: RolloutPoolConfig
    gkd: GkdConfig
    custom_reward_function: RewardFunctionConfig
    trainer: TrainerConfig
    ray_init: RayInitConfig

"""Every key of the configuration: its type, its meaning, and the range it may have.

The values live in one place, the YAML files under ``config/``; nothing here has a default. ``load.py`` composes and
converts, ``validate.py`` refuses combinations that cannot work. ``python -m recipe_gkd.config`` prints this as a table.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

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

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False)


def key(doc: str, **bounds: Any) -> Any:
    """A documented field; bounds are pydantic's ``ge``, ``gt``, ``le``, ``lt``."""
    return Field(description=doc, **bounds)


def seconds(doc: str, longest: float = MAX_TIMEOUT_S) -> Any:
    """The deadline of a wait."""
    return key(f"Seconds that {doc}", ge=MIN_TIMEOUT_S, le=longest)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Files = Annotated[list[str], BeforeValidator(_as_list)]
"""A list of paths; one string stands for a list of one."""


def _current_tail_mode(value: Any) -> Any:
    return "renormalize" if value == "renormalise" else value  # former spelling


LossType = Annotated[str, AfterValidator(OneOf(loss_names))]
TailMode = Annotated[str, BeforeValidator(_current_tail_mode), AfterValidator(OneOf(tail_modes))]
ImportanceMode = Annotated[str, AfterValidator(OneOf(importance_modes))]
KernelBackend = Annotated[str, AfterValidator(OneOf(kernel_backends))]
AggregationMode = Literal["token-mean", "seq-mean-token-mean"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    train_files: Files = key("Parquet files (or one) with the training prompts.")
    val_files: Files = key("Parquet files with held-out prompts; may be empty.")
    prompt_key: str = key("Column of the prompt: a list of {role, content} messages, or a string.")
    response_key: str = key("Column of the given answer, a string: for `gkd.sft_share`.")
    ground_truth_key: str = key(
        "Column of what the reward function compares an answer with; dots lead into a structure, such as "
        "`reward_model.ground_truth`."
    )
    data_source_key: str = key(
        "Column of the origin of a row: validation is reported by it, and reward functions receive it as `data_source`."
    )
    max_prompt_length: int = key("Longest prompt, in tokens after the chat template.", ge=1, le=MAX_TOKENS)
    max_response_length: int = key("Longest answer, in tokens; generation is cut there.", ge=1, le=MAX_TOKENS)
    train_batch_size: int = key("Prompts of one training step.", ge=1, le=MAX_BATCH)
    shuffle: bool = key("Shuffle each epoch, from `seed` and the epoch's number.")
    seed: int = key("Seed of the order of the data and of every sampled token.", ge=0, le=MAX_SEED)
    filter_overlong_prompts: bool = key("Drop prompts longer than `max_prompt_length` (their number is logged).")
    truncation: Literal["error", "left", "right", "middle"] = key(
        "What to do with an overlong prompt that was not filtered."
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    path: str = key("Hugging Face folder of the student: config, tokenizer, safetensors.")
    trust_remote_code: bool = key("Let the tokenizer and the rollout engine run code that comes with the model.")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MegatronConfig:
    tensor_model_parallel_size: int = key("Ranks that share each layer.", ge=1, le=MAX_DEVICES)
    pipeline_model_parallel_size: int = key("Stages that the layers are divided into.", ge=1, le=MAX_DEVICES)
    virtual_pipeline_model_parallel_size: int | None = key(
        "Interleaved chunks of layers a stage.", ge=2, le=MAX_DEVICES
    )
    context_parallel_size: int = key("Ranks that share each sequence.", ge=1, le=MAX_DEVICES)
    expert_model_parallel_size: int = key("Ranks that share the experts of a mixture.", ge=1, le=MAX_DEVICES)
    expert_tensor_parallel_size: int | None = key(
        "Ranks that share each expert; null: as `tensor_model_parallel_size`.", ge=1, le=MAX_DEVICES
    )
    sequence_parallel: bool = key("Divide activations between layers by sequence (needs tensor parallel > 1).")
    use_distributed_optimizer: bool = key("Divide the optimizer state between the data-parallel ranks.")
    dtype: Literal["bfloat16", "float32"] = key(
        "Precision of weights and activations; the optimizer keeps fp32 copies."
    )
    param_offload: bool = key("Move parameters to the host between updates.")
    grad_offload: bool = key("Move gradients to the host between updates.")
    optimizer_offload: bool = key("Move the optimizer state to the host between updates.")
    override_transformer_config: dict[str, Any] = key(
        "Fields of Megatron's TransformerConfig to set as they are, such as `recompute_granularity`."
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimConfig:
    lr: float = key("Peak learning rate.", gt=0, le=1)
    min_lr: float = key("Where the decay ends.", ge=0, le=1)
    lr_warmup_steps: int = key("Steps of linear warm-up; -1: take `lr_warmup_steps_ratio`.", ge=-1, le=MAX_STEPS)
    lr_warmup_steps_ratio: float = key("Warm-up as a share of all steps.", ge=0, le=1)
    lr_decay_style: Literal["constant", "linear", "cosine"] = key(
        "How the rate falls over all steps after the warm-up."
    )
    weight_decay: float = key("AdamW's decay; not applied to biases, norms and padding rows.", ge=0, le=100)
    betas: tuple[Beta, Beta] = key("AdamW's two betas.")
    clip_grad: float = key("Largest norm of the gradient; 0: no clipping.", ge=0, le=MAX_COEFFICIENT)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CheckpointConfig:
    save_contents: list[Literal["model", "optimizer", "extra", "hf_model"]] = key(
        "Parts of a checkpoint: weights, optimizer state, the rate's schedule, and a Hugging Face folder."
    )
    load_contents: list[Literal["model", "optimizer", "extra"]] = key("Parts to read when resuming.")
    async_save: bool = key("Write in the background while training goes on.")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ActorConfig:
    strategy: Literal["megatron"] = key("Training engine.")
    micro_batch_size: int = key(
        "Samples of one forward pass on one rank, when `use_dynamic_bsz` is off.", ge=1, le=MAX_BATCH
    )
    use_dynamic_bsz: bool = key("Fill micro-batches by tokens, up to `max_token_len`, instead of by samples.")
    max_token_len: int = key("Tokens of one micro-batch when `use_dynamic_bsz` is on.", ge=1, le=MAX_INT32)
    timeout_s: float = seconds("one update, save or load may take; a save in the background, from its start.")
    megatron: MegatronConfig
    optim: OptimConfig
    checkpoint: CheckpointConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ValidationSamplingConfig:
    n: int = key("Answers to each validation prompt; their rewards are averaged.", ge=1, le=MAX_GROUP)
    temperature: Temperature = key(
        "Sampling temperature of validation answers; 0 is greedy, else 0.01 to 2.", ge=0, le=MAX_TEMPERATURE
    )
    top_p: float = key("Nucleus sampling of validation answers; 1: off.", gt=0, le=1)
    top_k: int = key("Sample validation answers among the k likeliest tokens; -1 or 0: among all.", ge=-1, le=MAX_INT32)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutEngineConfig:
    name: Literal["vllm"] = key("Generation engine.")
    n: int = key("Answers to each prompt.", ge=1, le=MAX_GROUP)
    temperature: Temperature = key("Sampling temperature; 0 is greedy, else 0.01 to 2.", ge=0, le=MAX_TEMPERATURE)
    top_p: float = key("Nucleus sampling; 1: off.", gt=0, le=1)
    top_k: int = key("Sample among the k likeliest tokens; -1 or 0: among all.", ge=-1, le=MAX_INT32)
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = key("Precision of the rollout engine.")
    gpu_memory_utilization: float = key("Share of a GPU's memory for vLLM (CUDA only).", gt=0, le=1)
    kv_cache_memory_megabytes: int | None = key(
        "Size of the KV cache; null: on CUDA what `gpu_memory_utilization` leaves, on a CPU 256.", ge=1, le=1 << 24
    )
    tensor_model_parallel_size: int = key("GPUs of one engine.", ge=1, le=MAX_DEVICES)
    max_num_seqs: int = key("Answers that one engine generates at the same time.", ge=1, le=1 << 14)
    max_model_len: int | None = key("Longest sequence; null: prompt plus response length.", ge=2, le=MAX_TOKENS)
    enforce_eager: bool = key("No CUDA graphs (a CPU is always eager).")
    update_weights_bucket_megabytes: float = key("Weights are sent in buckets of this size.", ge=1e-3, le=1 << 16)
    weight_transport: Literal["auto", "collective", "ipc"] = key(
        "`collective`: NCCL or gloo; `ipc`: memory shared on one node; `auto`: `ipc` where GPUs are shared."
    )
    timeout_s: float = seconds("the answers of one batch may take.")
    val_kwargs: ValidationSamplingConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TeacherConfig:
    server_ip: str = key("Address of the teacher's proxy.")
    server_port: int = key("Its front-end port (`PROXY_FRONTEND_PORT`).", ge=1, le=65535)
    teachers: dict[str, str] = key(
        "Several teachers instead of the one at `server_ip` (which is called `default`): name -> `host:port`. On the "
        "command line `actor_rollout_ref.teacher.teachers.math=10.0.0.1:15555`, once a teacher."
    )
    route_key: str | None = key(
        "Column that names each prompt's teacher; dots lead into a structure. Needed with more than one."
    )
    n_server_workers: int = key("Teacher workers, of all teachers together.", ge=1, le=MAX_NODES)
    num_microbatches: int = key(
        "Times `n_server_workers`: the groups of equally many answers in which a batch goes to the teachers; of each "
        "group a teacher gets its own answers as one request.",
        ge=1,
        le=1 << 16,
    )
    timeout_s: float = seconds("the teacher may take for one request.")
    top_k: int | None = key(
        "How many ids a position are asked for; null: all that the teacher returns.", ge=1, le=1 << 24
    )
    wire_dtype: Literal["float32", "float16"] = key(
        "How top-k log-probabilities travel; `float16` is for teachers on other hosts: a quarter fewer "
        "bytes, log-probabilities to 11 bits."
    )
    auth_dir: str | None = key("Folder with this client's CURVE keys and the server's public one; null: no keys.")
    on_failure: Literal["fail", "wait", "skip_samples"] = key(
        "When a request has no answer after `timeout_s`, or is refused. `fail`: the run ends. `wait`: it is asked "
        "again, up to `max_wait_s` (one that is refused ends the run). `skip_samples`: its samples stay in the batch, "
        "but nothing is learned from the teacher on them, up to `max_skipped_samples`."
    )
    max_wait_s: float = seconds(
        "a request may be asked again, one time after the other, before the run ends: of `wait`.", MAX_TEACHER_WAIT_S
    )
    max_skipped_samples: int = key(
        "Samples that may be skipped in the whole run, resumed or not, before it ends: of `skip_samples`.",
        ge=0,
        le=MAX_STEPS,
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ActorRolloutRefConfig:
    hybrid_engine: bool = key("Actor and rollout in one process.")
    nccl_timeout: float = seconds("a weight sync may wait; collectives of the actor get 60 more.")
    model: ModelConfig
    actor: ActorConfig
    rollout: RolloutEngineConfig
    teacher: TeacherConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class CustomLossConfig:
    """Distillation loss from a user's file."""

    path: Annotated[str | None, AfterValidator(absolute_path)] = key(
        "Python file of a loss function that replaces `gkd.distill_loss_type`; null: there is none."
    )
    name: str | None = key("Name of the function in that file: `LossInputs` -> `LossOutputs` of `recipe_gkd.losses`.")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class GkdConfig:
    """The objective: distillation, a reward, and given answers, each with its coefficient."""

    distill_loss_type: LossType = key(
        "Distillation loss at each position: a divergence between teacher P and student Q on the teacher's top-k, or "
        "an estimate of reverse KL from the sampled token alone (`k1`: policy gradient, `k2`, `k3`)."
    )
    distill_loss_coef: float = key("Weight of the distillation loss; 0: it is only measured.", ge=0, le=MAX_COEFFICIENT)
    distill_temperature: float = key("Both distributions are those of logits / this.", ge=1e-3, le=1e3)
    tail: TailMode = key(
        "Ids outside the teacher's top-k. `bucket` merges them into one outcome; `renormalize` omits them and divides "
        "both distributions by their remaining mass (biased); `none` omits them from the sum (biased)."
    )
    beta: float = key(
        "Of `jsd`: the teacher's share of the mixture; near 0 forward KL, near 1 reverse KL.", ge=1e-6, le=1 - 1e-6
    )
    rkl_ratio: float = key("Of `kl_rkl`: the share of reverse KL.", ge=0, le=1)
    skew_alpha: float = key(
        "Of the skewed divergences: how much of the first distribution is mixed into the second.", ge=1e-6, le=1 - 1e-6
    )
    use_rl_loss: bool = key("Add a GRPO policy loss on the reward of `custom_reward_function`.")
    rl_loss_coef: float = key("Weight of the policy loss.", ge=0, le=MAX_COEFFICIENT)
    clip_ratio_low: float = key("The policy loss stops at a probability ratio of 1 - this.", gt=0, le=1)
    clip_ratio_high: float = key("The policy loss stops at a probability ratio of 1 + this.", gt=0, le=MAX_COEFFICIENT)
    clip_ratio_c: float = key(
        "For answers below the mean it stops at this ratio (dual clip).", gt=1, le=MAX_COEFFICIENT
    )
    norm_adv_by_std: bool = key(
        "Divide advantages by the standard deviation of the rewards of the same prompt, plus 1e-6."
    )
    importance: ImportanceMode = key(
        "Of `k1`, `k2`, `k3`: correct for the weights that sampled being older, by the probability ratio: at most "
        "`importance_cap`, or tokens above it left out."
    )
    importance_cap: float = key("Largest probability ratio of the correction.", ge=1, le=MAX_COEFFICIENT)
    baseline: Literal["none", "expected", "group"] = key(
        "Of `k1`, subtracted from log p - log q of the sampled token: `expected`: what it is on average at this "
        "position, from the teacher's top-k; `group`: the mean over the tokens of the other answers to the same "
        "prompt, then divided by their deviation, at least 0.1 nats."
    )
    sft_share: float = key("Share of the prompts that are trained on the given answer, not a sampled one.", ge=0, le=1)
    sft_target: Literal["data", "teacher"] = key(
        "Given answers teach by cross-entropy with their own tokens, or by the teacher's distributions along them."
    )
    sft_loss_coef: float = key("Weight of the cross-entropy with given answers.", ge=0, le=MAX_COEFFICIENT)
    loss_agg_mode: AggregationMode = key(
        "Every token of the global batch counts the same, or every answer that has tokens."
    )
    chunk_tokens: int | None = key(
        "Positions that the loss takes at a time; null: what suits the device.", ge=1, le=MAX_INT32
    )
    fuse_lm_head: bool = key(
        "Compute the output layer inside the loss, chunk by chunk: the logits are never whole, and computed twice."
    )
    kernel_backend: KernelBackend = key(
        "Kernels of the loss: `torch`; `triton`, on a GPU; `auto`: Triton on a GPU where it is installed and compiles."
    )
    custom_loss: CustomLossConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardFunctionConfig:
    path: str | None = key("Python file of the reward function; null: there is none.")
    name: str = key(
        "Its name there: a function with parameters named as (prompt, answer, ground_truth, extra), or as verl's "
        "(data_source, solution_str, ground_truth, extra_info), that returns a number or a dict with `score`."
    )
    on_training: bool = key("Judge training answers also where no loss needs it: `reward/*` is then measured.")
    timeout_s: float = seconds("one call may take.")
    num_workers: int = key("Processes that call it.", ge=1, le=MAX_DEVICES)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutPoolConfig:
    nnodes: int = key("Nodes of the rollout pool.", ge=1, le=MAX_NODES)
    n_gpus_per_node: int = key("GPUs (CPU slots when `trainer.device` is cpu) on each.", ge=1, le=MAX_DEVICES)
    share_actor_gpus: bool = key("Each rollout worker lives on the GPU of an actor rank instead of one of its own.")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class TrainerConfig:
    scheduler: Literal["sync", "one_step_off", "two_step_off", "n_step_off"] = key(
        "Updates that the weights that generate may be behind: 0, 1, 2, or `max_staleness`."
    )
    max_staleness: int | None = key("The bound of `n_step_off`; null with the other schedulers.", ge=0, le=1000)
    inflight_update: bool = key(
        "New weights do not wait for the answers under way: generation pauses, loads them and goes on."
    )
    device: Literal["auto", "cuda", "cpu"] = key("`auto` takes CUDA where Ray sees a GPU.")
    nnodes: int = key("Nodes of the actor pool.", ge=1, le=MAX_NODES)
    n_gpus_per_node: int = key("GPUs (CPU slots when `device` is cpu) on each.", ge=1, le=MAX_DEVICES)
    total_epochs: int = key(
        "Passes over the training data; not used if `total_training_steps` is set.", ge=1, le=MAX_EPOCHS
    )
    total_training_steps: int | None = key(
        "Length of the run in steps, over as many passes over the data as that takes; null: `total_epochs` passes.",
        ge=1,
        le=MAX_STEPS,
    )
    save_freq: int = key("Save every so many steps and at the end; -1: never.", ge=-1, le=MAX_STEPS)
    max_actor_ckpt_to_keep: int | None = key(
        "Keep the last so many checkpoints, and the best one in addition; older ones are removed after each save; "
        "null: keep all.",
        ge=1,
        le=MAX_STEPS,
    )
    save_failures_allowed: int = key(
        "Saves that may fail (full disk, killed writer, overdue) before the run ends with an error; a resumed run "
        "counts from 0. Training goes on, and the last complete checkpoint stays the latest.",
        ge=0,
        le=MAX_STEPS,
    )
    test_freq: int = key("Validate every so many steps; -1: never.", ge=-1, le=MAX_STEPS)
    val_before_train: bool = key("Validate before the first step.")
    log_val_generations: int = key("Validation answers shown in the log, each time.", ge=0, le=MAX_STEPS)
    best_metric: str | None = key(
        "A validation metric, such as `val/gsm8k/compute_score`: the checkpoint where it was highest is kept as "
        "`best`. With `val_before_train` it must also exceed the value before training."
    )
    logger: list[Literal["console", "jsonl", "tensorboard"]] = key("Where metrics go.")
    project_name: str = key("First folder of the logs.")
    experiment_name: str = key("Second folder of the logs.")
    default_local_dir: str = key("Where checkpoints, logs and the trained model go.")
    resume_mode: Literal["disable", "auto", "resume_path"] = key(
        "`auto`: from the last complete checkpoint in `default_local_dir`, if there is one; damaged ones are skipped "
        "with a warning."
    )
    resume_from_path: str | None = key("Checkpoint folder (`.../global_step_N`) for `resume_path`.")
    startup_timeout_s: float = seconds("all workers together may take to start.")
    max_worker_restarts: int = key(
        "Rollout workers that may be replaced in one run when they die; 0: none.", ge=0, le=MAX_STEPS
    )
    trace_file: str | None = key("Write a trace of every stage, worker and batch there, for Perfetto.")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RayInitConfig:
    num_cpus: int | None = key("CPUs of a local cluster; null: those of the machine.", ge=1, le=MAX_CPUS)
    address: str | None = key("Address of a running cluster, or `auto`; null: start a local one.")
    timeline_json_file: str | None = key("Write Ray's timeline there at the end.")


@dataclass(frozen=True, kw_only=True, config=STRICT)
class Config:
    """The whole configuration, converted and checked: what every other room is given."""

    data: DataConfig
    actor_rollout_ref: ActorRolloutRefConfig
    rollout: RolloutPoolConfig
    gkd: GkdConfig
    custom_reward_function: RewardFunctionConfig
    trainer: TrainerConfig
    ray_init: RayInitConfig

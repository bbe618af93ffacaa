"""Sections ``actor_rollout_ref.rollout`` (engines) and ``rollout`` (their workers)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from recipe_gkd.config.limits import (
    MAX_DEVICES,
    MAX_GROUP,
    MAX_INT32,
    MAX_MISMATCH,
    MAX_NODES,
    MAX_STEPS,
    MAX_TEMPERATURE,
    MAX_TOKENS,
    Temperature,
)
from recipe_gkd.config.schema.fields import STRICT, key, timeout
from recipe_gkd.config.schema.unused import (
    GREEDY,
    GREEDY_VALIDATION,
    NO_VALIDATION,
    ON_CPU,
    SHARED_DEVICES,
    needs,
    unused_with,
)

RolloutDtype = Literal["auto", "bfloat16", "float16", "float32"]
WeightTransport = Literal["auto", "collective", "ipc"]
SleepLevel = Literal[0, 1, 2]
MismatchBound = Annotated[float | None, BeforeValidator(lambda value: 0.0 if value == "auto" else value)]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ValidationSamplingConfig:
    """Sampling during validation, section ``actor_rollout_ref.rollout.val_kwargs``."""

    n: int = key(
        "Number of responses per validation prompt. Their rewards are averaged.",
        unused=[NO_VALIDATION],
        ge=1,
        le=MAX_GROUP,
    )
    temperature: Temperature = key(
        "Sampling temperature of validation responses: 0 (greedy), or 0.01 to 2.",
        unused=[NO_VALIDATION],
        ge=0,
        le=MAX_TEMPERATURE,
    )
    top_p: float = key(
        "Nucleus sampling threshold of validation responses. 1: disabled.",
        unused=[NO_VALIDATION, GREEDY_VALIDATION],
        gt=0,
        le=1,
    )
    top_k: int = key(
        "Number of most likely tokens that validation responses are sampled from. -1 or 0: all.",
        unused=[NO_VALIDATION, GREEDY_VALIDATION],
        ge=-1,
        le=MAX_INT32,
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutEngineConfig:
    """Rollout engines, section ``actor_rollout_ref.rollout``."""

    name: Literal["vllm"] = key("Rollout engine.")
    n: int = key("Number of responses per training prompt.", ge=1, le=MAX_GROUP)
    temperature: Temperature = key("Sampling temperature: 0 (greedy), or 0.01 to 2.", ge=0, le=MAX_TEMPERATURE)
    top_p: float = key("Nucleus sampling threshold. 1: disabled.", unused=[GREEDY], gt=0, le=1)
    top_k: int = key("Number of most likely tokens to sample from. -1 or 0: all.", unused=[GREEDY], ge=-1, le=MAX_INT32)
    dtype: RolloutDtype = key(
        "Data type of the rollout engine. `auto`: the type in the model's config, or 16 bits if that is float32."
    )
    gpu_memory_utilization: float = key(
        "Fraction of a GPU's memory that vLLM uses. With `hybrid_engine` it must leave room for the actor's states "
        "that are not offloaded, and for the CUDA contexts of actor and teacher. No effect on a CPU.",
        unused=[needs(lambda config: config.actor_rollout_ref.rollout.kv_cache_memory_megabytes, None), ON_CPU],
        gt=0,
        le=1,
    )
    kv_cache_memory_megabytes: int | None = key(
        "Size of the KV cache in MiB. null: on CUDA derived from `gpu_memory_utilization`, on a CPU 256.",
        ge=1,
        le=1 << 24,
    )
    tensor_model_parallel_size: int = key("Number of GPUs per engine.", ge=1, le=MAX_DEVICES)
    max_num_seqs: int = key(
        "Maximum number of responses that one engine generates at a time. More responses make better use of a GPU, "
        "if the KV cache holds them. vLLM's `LLM` class uses 1024 on GPUs of 70 GiB or more, and 256 on smaller ones.",
        ge=1,
        le=1 << 14,
    )
    max_num_batched_tokens: int | None = key(
        "Maximum number of tokens in one engine step: prompt tokens, and one per response in progress. Large steps "
        "process prompts faster and leave less memory for the KV cache. At least `max_num_seqs`. null: on CUDA 8192, "
        "and 16384 on GPUs of 70 GiB or more except the A100 (defaults of vLLM's `LLM` class); on a CPU at least 4096 "
        "and a whole sequence, because prompts are not split there.",
        ge=1,
        le=1 << 20,
    )
    max_model_len: int | None = key(
        "Maximum sequence length in tokens. null: `data.max_prompt_length` + `data.max_response_length`.",
        ge=2,
        le=MAX_TOKENS,
    )
    enforce_eager: bool = key("Disable CUDA graphs. On a CPU they are always disabled.", unused=[ON_CPU])
    async_scheduling: bool | None = key(
        "Schedule a step while the GPU computes the one before it. null: vLLM's choice, which is true unless its "
        "executor cannot do so. false: slower steps; use it if an engine ends with the assertion "
        "`num_output_placeholders >= 0`. If true is impossible, vLLM ends the start with an error. On a CPU it is "
        "always disabled.",
        unused=[ON_CPU],
    )
    update_weights_bucket_megabytes: float = key(
        "Size in MiB of the buckets in which weights are sent to the rollout workers. Larger buckets are faster and "
        "use more memory.",
        ge=1e-3,
        le=1 << 16,
    )
    weight_transport: WeightTransport = key(
        "Transport of weight updates. `collective`: NCCL or gloo; `ipc`: shared memory of one node; `auto`: `ipc` if "
        "`hybrid_engine` is true and all workers are on one node, else `collective`."
    )
    sleep_level: SleepLevel = key(
        "What an engine releases while the actor trains (`hybrid_engine`). 2: weights and KV cache; the next weight "
        "sync sends the weights. 1: the KV cache, and the weights move to host memory. 0: nothing. On a CPU vLLM "
        "cannot release weights, so 1 and 2 release the KV cache.",
        unused=[needs(lambda config: config.actor_rollout_ref.hybrid_engine, True)],
    )
    mismatch_bound: MismatchBound = key(
        "Largest mean difference, in nats, between the log-probabilities that an engine reports for tokens it samples "
        "with the newest weights and the actor's for the same tokens. More is a warning, and after "
        "`mismatch_patience` steps an error, because the engine then computes another model than the actor. `auto`, or "
        "0: 0.004 on CPUs and 0.05 on GPUs if actor and engine are float32, else 0.25. null: nothing is compared.",
        ge=0,
        le=MAX_MISMATCH,
    )
    mismatch_patience: int = key(
        "Number of consecutive steps above `mismatch_bound` after which the run ends.",
        unused=[unused_with(lambda config: config.actor_rollout_ref.rollout.mismatch_bound, None, "auto")],
        ge=1,
        le=MAX_STEPS,
    )
    timeout_s: float = timeout("the responses of one batch, in seconds.")
    val_kwargs: ValidationSamplingConfig


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutPoolConfig:
    """Size of the rollout pool, section ``rollout``. Not used with ``actor_rollout_ref.hybrid_engine``."""

    nnodes: int = key("Number of nodes of the rollout pool.", unused=[SHARED_DEVICES], ge=1, le=MAX_NODES)
    n_gpus_per_node: int = key(
        "Number of GPUs per node of the rollout pool (CPU slots if `trainer.device` is `cpu`).",
        unused=[SHARED_DEVICES],
        ge=1,
        le=MAX_DEVICES,
    )

"""Sections ``actor_rollout_ref.rollout`` (engines) and ``rollout`` (their workers)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

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
    MAX_TIMEOUT_S,
    MAX_TOKENS,
    MAX_TURNS,
    MIN_TIMEOUT_S,
    Temperature,
)
from recipe_gkd.config.schema.fields import STRICT, SourcePath, UserPath, key, null_to_list, timeout
from recipe_gkd.config.schema.unused import (
    FAILED_CONVERSATION_ENDS_RUN,
    GREEDY,
    GREEDY_VALIDATION,
    NO_CONVERSATIONS,
    NO_ENVIRONMENT,
    NO_VALIDATION,
    ON_CPU,
    SHARED_DEVICES,
    needs,
    unused_with,
)

RolloutDtype = Literal["auto", "bfloat16", "float16", "float32"]
WeightTransport = Literal["auto", "collective", "ipc"]
SleepLevel = Literal[0, 1, 2]
HistoryMode = Literal["refuse", "keep", "rewrite"]
TruncateSide = Literal["left", "right", "middle"]
EnvironmentFailureMode = Literal["fail", "truncate", "skip"]
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
        "Data type of the rollout engines. `auto`: that of the actor, so that both compute the same log-probabilities."
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
    routing_replay: bool = key(
        "For a mixture of experts: the actor uses the experts that the engine chose for each token and layer, with the "
        "weights of its own router; see docs/actor.md. Other rounding in engine and actor then selects no other "
        "experts. Not on a CPU."
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
        "Number of consecutive compared steps above `mismatch_bound` after which the run ends.",
        unused=[unused_with(lambda config: config.actor_rollout_ref.rollout.mismatch_bound, None, "auto")],
        ge=1,
        le=MAX_STEPS,
    )
    timeout_s: float = timeout(
        "the responses of one batch, in seconds. With conversations: of the turns that are sent together."
    )
    val_kwargs: ValidationSamplingConfig


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else null_to_list(value)


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RolloutPoolConfig:
    """Size of the rollout pool, and conversations of several turns, section ``rollout``.

    ``actor_rollout_ref.hybrid_engine`` does not use the size.
    """

    nnodes: int = key("Number of nodes of the rollout pool.", unused=[SHARED_DEVICES], ge=1, le=MAX_NODES)
    n_gpus_per_node: int = key(
        "Number of GPUs per node of the rollout pool (CPU slots if `trainer.device` is `cpu`).",
        unused=[SHARED_DEVICES],
        ge=1,
        le=MAX_DEVICES,
    )
    environment: SourcePath | None = key(
        "Environment of conversations with several turns: `FILE.py:Class`, with `reset(row)` and "
        "`step(message, tool_calls)`; see docs/conversations.md. null: none."
    )
    environment_kwargs: dict[str, Any] = key(
        "Arguments of the constructor of the environment. Command line: `rollout.environment_kwargs.level=2`.",
        unused=[NO_ENVIRONMENT],
    )
    environment_python: UserPath | None = key(
        "Python interpreter of the processes that run environments and tools, at least 3.11: the path of the "
        "executable, for packages that do not fit the installation of this project. null: the same as this one.",
        unused=[NO_CONVERSATIONS],
    )
    tools: Annotated[list[SourcePath], BeforeValidator(_as_list)] = key(
        "Functions that the student can call: `[FILE.py:function, ...]`. Type hints and docstring describe them to "
        "the student. A response then has turns until one calls no tool."
    )
    tool_parser: str | None = key(
        "Format of the student's tool calls, one of vLLM's tool parsers, such as `hermes` (Qwen), `llama3_json` or "
        "`mistral`. null: messages have no tool calls.",
        unused=[NO_CONVERSATIONS],
    )
    history: HistoryMode = key(
        "If the chat template changes earlier turns when messages follow, for example removes their reasoning. "
        "`refuse`: the run does not start. `keep`: earlier turns stay in the conversation as they were sampled. "
        "`rewrite`: the student sees what the template writes, and the turns after a change are a separate sample.",
        unused=[NO_CONVERSATIONS],
    )
    max_turns: int = key(
        "Maximum number of turns of the student in a conversation.", unused=[NO_CONVERSATIONS], ge=1, le=MAX_TURNS
    )
    max_tool_response_length: int | None = key(
        "Maximum number of tokens of a message of a tool or an environment. Longer ones are cut. null: no limit but "
        "`data.max_response_length`, which is for the whole conversation.",
        unused=[NO_CONVERSATIONS],
        ge=1,
        le=MAX_TOKENS,
    )
    tool_response_truncate_side: TruncateSide = key(
        "Part of a long message that is cut.",
        unused=[unused_with(lambda config: config.rollout.max_tool_response_length, None, "1024")],
    )
    environment_timeout_s: float = timeout(
        "one call of the environment or of a tool, in seconds.", unused=[NO_CONVERSATIONS]
    )
    conversation_timeout_s: float | None = key(
        "Time limit of a conversation in seconds, after which it ends where it is. null: none.",
        unused=[NO_CONVERSATIONS],
        ge=MIN_TIMEOUT_S,
        le=MAX_TIMEOUT_S,
    )
    num_environment_workers: int = key(
        "Number of processes that run environments and tools, each for many conversations at a time.",
        unused=[NO_CONVERSATIONS],
        ge=1,
        le=MAX_DEVICES,
    )
    on_environment_failure: EnvironmentFailureMode = key(
        "If the environment of a conversation fails or does not answer. `fail`: the run ends. `truncate`: the "
        "conversation ends where it is. `skip`: it is not trained on. A failed call of a tool is no failure: the "
        "student sees the error.",
        unused=[NO_CONVERSATIONS],
    )
    max_environment_failures: int | None = key(
        "Number of failed conversations since the start of the command above which the run ends. null: no limit, but "
        "the run ends if all conversations of a batch have failed.",
        unused=[NO_CONVERSATIONS, FAILED_CONVERSATION_ENDS_RUN],
        ge=0,
        le=MAX_STEPS,
    )

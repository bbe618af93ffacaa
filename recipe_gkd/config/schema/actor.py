"""Sections ``actor_rollout_ref.model`` (student) and ``actor_rollout_ref.actor`` (its training)."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator
from pydantic.dataclasses import dataclass

from recipe_gkd.config.limits import MAX_BATCH, MAX_COEFFICIENT, MAX_DEVICES, MAX_INT32, MAX_STEPS, Beta
from recipe_gkd.config.schema.fields import STRICT, UserPath, key, timeout
from recipe_gkd.config.schema.unused import (
    NO_ADAPTERS,
    NO_CHECKPOINTS,
    NO_FSDP,
    NO_MEGATRON,
    NO_TENSOR_PARALLELISM,
    needs,
    unused_with,
)
from teacher.common.head_dtype import HeadDtype

MAX_LORA_RANK = 1 << 14
_AUTO_DTYPE = (
    "`auto`: `bfloat16`, or `float32` on a CPU without instructions for it (AVX512-BF16 or AMX), which would be many "
    "times slower; a resumed run keeps its type."
)


def _without_hf_model(parts: Any) -> Any:
    """Return the parts without ``hf_model``, which verl's default ``${...save_contents}`` can contain."""
    return [part for part in parts if part != "hf_model"] if isinstance(parts, list) else parts


CheckpointPart = Literal["model", "optimizer", "extra"]
DecayStyle = Literal["constant", "linear", "cosine"]
SavedPart = Literal[CheckpointPart, "hf_model"]
LoadedParts = Annotated[list[CheckpointPart], BeforeValidator(_without_hf_model)]
TrainingDtype = Literal["auto", "bfloat16", "float32"]
Strategy = Literal["megatron", "fsdp"]
ActorState = Literal["params", "grads", "optimizer"]
WarmupSteps = Annotated[int, BeforeValidator(lambda value: -1 if value is None else value)]
TransformerImpl = Literal["auto", "transformer_engine", "local"]
AdapterSync = Literal["merged", "adapter"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ModelConfig:
    """Student model, section ``actor_rollout_ref.model``."""

    path: UserPath = key("Hugging Face folder of the student, with config, tokenizer and safetensors.")
    trust_remote_code: bool = key(
        "Allow the tokenizer, the rollout engine and an actor with `strategy=fsdp` to execute code from the model "
        "folder."
    )
    head_dtype: HeadDtype = key(
        "Data type of the logits. `float32`: the output layer multiplies 16-bit weights, but accumulates and returns "
        "float32, which removes rounding errors of up to 0.06 per log-probability (bfloat16, logits of 16 to 32). "
        "`model`: the data type of the weights. `auto`: `float32` on CUDA with 16-bit weights, else `model`."
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class MegatronConfig:
    """Parallel layout of the actor, section ``actor_rollout_ref.actor.megatron``."""

    tensor_model_parallel_size: int = key(
        "Number of ranks that share each layer.", refused=[NO_MEGATRON], ge=1, le=MAX_DEVICES
    )
    pipeline_model_parallel_size: int = key("Number of pipeline stages.", refused=[NO_MEGATRON], ge=1, le=MAX_DEVICES)
    virtual_pipeline_model_parallel_size: int | None = key(
        "Number of interleaved layer chunks per pipeline stage. null: no interleaving.",
        refused=[NO_MEGATRON],
        ge=2,
        le=MAX_DEVICES,
    )
    context_parallel_size: int = key(
        "Number of ranks that share each sequence, for sequences whose activations do not fit on one device. Without "
        "Transformer Engine's fused attention it must divide the query heads of a tensor-parallel rank, and divide "
        "its key/value heads or be a multiple of them.",
        refused=[NO_MEGATRON],
        ge=1,
        le=MAX_DEVICES,
    )
    expert_model_parallel_size: int = key(
        "Number of ranks that share the experts of a mixture-of-experts model.",
        refused=[NO_MEGATRON],
        ge=1,
        le=MAX_DEVICES,
    )
    expert_tensor_parallel_size: int | None = key(
        "Number of ranks that share each expert. null: `tensor_model_parallel_size`.",
        refused=[NO_MEGATRON],
        ge=1,
        le=MAX_DEVICES,
    )
    sequence_parallel: bool = key(
        "Split activations between layers along the sequence, which saves memory. No effect if "
        "`tensor_model_parallel_size` is 1.",
        unused=[NO_TENSOR_PARALLELISM],
        refused=[NO_MEGATRON],
    )
    use_distributed_optimizer: bool = key(
        "Shard the optimizer state over the data-parallel ranks.", unused=[NO_MEGATRON]
    )
    dtype: TrainingDtype = key(
        f"Data type of weights and activations. The optimizer keeps float32 copies. {_AUTO_DTYPE}", unused=[NO_MEGATRON]
    )
    transformer_impl: TransformerImpl = key(
        "Modules of the layers. `transformer_engine`: modules of Transformer Engine, which must be usable. `local`: "
        "modules of torch; Transformer Engine is not loaded, not even for the optimizer. `auto`: `transformer_engine` "
        "on CUDA if it is installed, else `local`.",
        unused=[NO_MEGATRON],
    )
    param_offload: bool = key(
        "Keep the weights in host memory except during updates, weight syncs, saves and loads. On a CPU they are kept "
        "in a file of the temporary folder, as are the other offloaded states.",
        refused=[NO_MEGATRON],
    )
    grad_offload: bool = key(
        "Free the memory of the gradients between updates. They are not kept, because an update starts with zeros.",
        refused=[NO_MEGATRON],
    )
    optimizer_offload: bool = key(
        "Keep the optimizer state, including the float32 weights of 16-bit training, in host memory except during "
        "optimizer steps, saves and loads.",
        refused=[NO_MEGATRON],
    )
    override_transformer_config: dict[str, Any] = key(
        "Fields of Megatron's TransformerConfig that are set directly, such as `recompute_granularity`. Fields that "
        "follow from the model or from another key are refused.",
        refused=[NO_MEGATRON],
    )
    override_ddp_config: dict[str, Any] = key(
        "Fields of Megatron's DistributedDataParallelConfig that are set directly, such as `overlap_param_gather`. "
        "`overlap_grad_reduce`, the reduction of the gradient during the backward pass, is true by default on CUDA "
        "with more than one data-parallel rank.",
        refused=[NO_MEGATRON],
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class FsdpConfig:
    """The actor on PyTorch FSDP, section ``actor_rollout_ref.actor.fsdp_config``."""

    dtype: TrainingDtype = key(
        "Data type of weights and activations in the forward and backward pass. The sharded weights, the reduction of "
        f"the gradient and the optimizer are float32. {_AUTO_DTYPE}",
        unused=[NO_FSDP],
    )
    fsdp_size: int = key(
        "Number of ranks that share one copy of the model; each such group has its own. -1: all ranks share one.",
        refused=[NO_FSDP],
        ge=-1,
        le=MAX_DEVICES,
    )
    reshard_after_forward: bool = key(
        "Free the gathered weights of a layer after its forward pass and gather them again for the backward pass. "
        "false: more memory, less communication.",
        refused=[NO_FSDP],
    )
    wrap_policy: list[str] | None = key(
        "Names of the module classes whose weights are gathered together. null: the decoder layers that the model "
        "names itself (`_no_split_modules`). []: the whole model at once.",
        refused=[NO_FSDP],
    )
    gradient_checkpointing: bool = key(
        "Keep only the inputs of the wrapped modules and compute their activations again in the backward pass.",
        refused=[NO_FSDP],
    )
    param_offload: bool = key(
        "Keep the float32 weights in host memory except during updates, weight syncs, saves and loads. On a CPU they "
        "are kept in a file of the temporary folder, as is the optimizer state. Gradients are always freed after an "
        "update.",
        refused=[NO_FSDP],
    )
    optimizer_offload: bool = key(
        "Keep the optimizer state in host memory except during optimizer steps, saves and loads.", refused=[NO_FSDP]
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class LoraConfig:
    """Low-rank adapters of the actor, section ``actor_rollout_ref.actor.lora``."""

    rank: int | None = key(
        "Rank of the adapters (LoRA). All other weights are frozen; a saved Hugging Face folder gets merged "
        "weights, and checkpoints contain the adapters only. null or 0: all weights are trained.",
        ge=0,
        le=MAX_LORA_RANK,
    )
    alpha: int = key("Numerator of the adapters' scale, alpha / rank.", unused=[NO_ADAPTERS], ge=1, le=MAX_INT32)
    target_modules: list[str] | None = key(
        "Last parts of the names of the linear layers that get an adapter, such as `q_proj`. null: all linear layers "
        "except the output layer. Routed experts have no adapters.",
        refused=[NO_ADAPTERS],
    )
    dropout: float = key(
        "Dropout of the adapters' inputs in the training passes. The rollout workers generate without it. Refused with "
        "tensor parallelism.",
        refused=[NO_ADAPTERS],
        ge=0,
        lt=1,
    )
    sync: AdapterSync = key(
        "What a weight sync transfers. `merged`: all weights, with the adapters merged. `adapter`: the adapters only, "
        "which vLLM adds to the weights of the model folder as it computes. It transfers much less; each token costs "
        "the engine more.",
        unused=[NO_ADAPTERS],
    )


@dataclass(frozen=True, kw_only=True, config=STRICT)
class OptimConfig:
    """Optimizer and learning rate schedule, section ``actor_rollout_ref.actor.optim``."""

    lr: float = key("Peak learning rate.", gt=0, le=1)
    min_lr: float = key(
        "Learning rate at the end of the decay.",
        unused=[unused_with(lambda config: config.actor_rollout_ref.actor.optim.lr_decay_style, "constant", "cosine")],
        ge=0,
        le=1,
    )
    lr_warmup_steps: WarmupSteps = key(
        "Number of linear warm-up steps. -1 or null: use `lr_warmup_steps_ratio` instead.", ge=-1, le=MAX_STEPS
    )
    lr_warmup_steps_ratio: float = key(
        "Number of warm-up steps as a fraction of all steps. Used if `lr_warmup_steps` is -1.",
        unused=[needs(lambda config: config.actor_rollout_ref.actor.optim.lr_warmup_steps, -1)],
        ge=0,
        le=1,
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
        "`hf_model` (a Hugging Face folder for inference).",
        unused=[NO_CHECKPOINTS],
    )
    load_contents: LoadedParts = key(
        "Parts that a resumed run loads. `hf_model` is accepted and not read.",
        unused=[unused_with(lambda config: config.trainer.resume_mode, "disable", "auto")],
    )
    async_save: bool = key("Write checkpoints in the background while training continues.", unused=[NO_CHECKPOINTS])


@dataclass(frozen=True, kw_only=True, config=STRICT)
class ActorConfig:
    """Actor, the student in training, section ``actor_rollout_ref.actor``."""

    strategy: Strategy = key(
        "Training backend. `megatron`: Megatron-core, any parallel layout, for the families of docs/actor.md. "
        "`fsdp`: PyTorch FSDP2 with data parallelism, for the causal language models of transformers that vLLM serves."
    )
    micro_batch_size: int = key(
        "Number of samples per micro-batch and rank. Used if `use_dynamic_bsz` is false.",
        unused=[needs(lambda config: config.actor_rollout_ref.actor.use_dynamic_bsz, False)],
        ge=1,
        le=MAX_BATCH,
    )
    use_dynamic_bsz: bool = key(
        "Fill micro-batches up to `max_token_len` tokens. false: `micro_batch_size` samples each."
    )
    max_token_len: int = key(
        "Maximum number of tokens per micro-batch and data-parallel rank; context-parallel ranks share them. Used if "
        "`use_dynamic_bsz` is true. Lower it if the actor runs out of memory.",
        unused=[needs(lambda config: config.actor_rollout_ref.actor.use_dynamic_bsz, True)],
        ge=1,
        le=MAX_INT32,
    )
    timeout_s: float = timeout("one update, save or load, in seconds. A background save is timed from its start.")
    megatron: MegatronConfig
    fsdp_config: FsdpConfig
    lora: LoraConfig
    optim: OptimConfig
    checkpoint: CheckpointConfig

    @property
    def dtype(self) -> TrainingDtype:
        """Data type of weights and activations in training. :mod:`recipe_gkd.config.data_types` replaces ``auto``."""
        return self.megatron.dtype if self.strategy == "megatron" else self.fsdp_config.dtype

    @property
    def offloaded_states(self) -> frozenset[ActorState]:
        """States that are not on the device between the calls that need them."""
        section = self.megatron if self.strategy == "megatron" else self.fsdp_config
        keys: dict[ActorState, str] = {
            "params": "param_offload",
            "grads": "grad_offload",
            "optimizer": "optimizer_offload",
        }
        return frozenset(state for state, name in keys.items() if getattr(section, name, False))

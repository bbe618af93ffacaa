"""Checks that a parallel layout fits a model."""

from __future__ import annotations

from collections.abc import Sequence

from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.student_dims import MoEConfig
from recipe_gkd.config.keys import MEGATRON
from recipe_gkd.config.schema import MegatronConfig
from recipe_gkd.errors import ConfigError

# Fields of `override_transformer_config` with which pipeline stages have different numbers of layers.
UNEQUAL_STAGES = {
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage", "pipeline_model_parallel_layout",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
}  # fmt: skip


def ensure_layout_fits(dims: ModelDims, config: MegatronConfig) -> None:
    """Check that the parallel layout divides the heads, the feed-forward columns, the experts and the layers.

    Context parallelism has its own check, :func:`ensure_heads_fit_context`. Megatron divides the layers with the fields
    of ``UNEQUAL_STAGES``; see :func:`ensure_ranks_have_experts`.

    Raises:
        ConfigError: It does not.
    """
    tp = config.tensor_model_parallel_size
    ffn = _tensor_parallel_ffn(dims)
    if any(number % tp for number in (dims.heads, dims.n_key_heads, *ffn)):
        raise ConfigError(
            f"{MEGATRON}.tensor_model_parallel_size is {tp}; it must divide the model's {dims.heads} heads, "
            f"{dims.n_key_heads} key/value heads and {' and '.join(map(str, ffn)) or 'no'} feed-forward columns",
            keys=_keys("tensor_model_parallel_size"),
        )
    _check_experts(dims.moe, config)
    _check_biases_of_experts(dims, config)
    _check_sequence_parallel(dims, config)
    stages = config.pipeline_model_parallel_size * (config.virtual_pipeline_model_parallel_size or 1)
    if UNEQUAL_STAGES & config.override_transformer_config.keys():
        return
    if dims.layers % stages:
        raise ConfigError(
            f"{dims.layers} layers cannot be divided equally into {stages} pipeline stages "
            "(pipeline_model_parallel_size x virtual_pipeline_model_parallel_size)",
            keys=_keys("pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size"),
        )
    size, ranks = dims.layers // stages, config.pipeline_model_parallel_size
    starts = [range(rank * size, dims.layers, ranks * size) for rank in range(ranks)]
    ensure_ranks_have_experts(dims.moe, [[start + layer for start in each for layer in range(size)] for each in starts])


def ensure_ranks_have_experts(moe: MoEConfig | None, layers_by_rank: Sequence[Sequence[int]]) -> None:
    """Check that each pipeline rank has a layer with experts.

    Megatron cannot save the optimizer if one rank has dense layers only and another rank has experts.

    Args:
        moe: Mixture of experts; None for a dense model.
        layers_by_rank: Indices of the layers of each pipeline rank.

    Raises:
        ConfigError: A rank has none.
    """
    if moe is None:
        return
    for rank, layers in enumerate(layers_by_rank):
        if not any(moe.layers[layer] for layer in layers):
            raise ConfigError(
                f"{MEGATRON}.pipeline_model_parallel_size={len(layers_by_rank)}: pipeline rank {rank} would have no "
                f"experts (its layers: {', '.join(map(str, layers)) or 'none'}), while other ranks have experts",
                remedy="choose fewer stages, or another division of the layers (layers with experts: "
                f"{', '.join(str(number) for number, is_moe in enumerate(moe.layers) if is_moe)})",
                keys=_keys("pipeline_model_parallel_size"),
            )


def ensure_heads_fit_context(dims: ModelDims, config: MegatronConfig) -> None:
    """Check that context-parallel ranks can exchange rows for heads, as all attention kernels but TE's fused one do.

    Raises:
        ConfigError: They cannot divide the heads. Key/value heads are copied if there are fewer of them than ranks.
    """
    tp, cp = config.tensor_model_parallel_size, config.context_parallel_size
    heads, kv_heads = dims.heads // tp, dims.n_key_heads // tp
    if heads % cp or (kv_heads % cp and cp % kv_heads):
        raise ConfigError(
            f"{MEGATRON}.context_parallel_size is {cp}; it must divide the {heads} heads of a tensor-parallel rank, "
            f"and divide its {kv_heads} key/value heads or be a multiple of them",
            remedy="choose another size, or change tensor_model_parallel_size",
            keys=_keys("context_parallel_size", "tensor_model_parallel_size"),
        )


def _keys(*names: str) -> tuple[str, ...]:
    return tuple(f"{MEGATRON}.{name}" for name in names)


def _tensor_parallel_ffn(dims: ModelDims) -> list[int]:
    """Return the feed-forward columns of dense layers and of the shared expert."""
    if dims.moe is None:
        return [dims.ffn]
    dense = [] if all(dims.moe.layers) else [dims.ffn]
    return dense if dims.moe.shared_ffn is None else [*dense, dims.moe.shared_ffn]


def _check_experts(moe: MoEConfig | None, config: MegatronConfig) -> None:
    tp, ep = config.tensor_model_parallel_size, config.expert_model_parallel_size
    etp = config.expert_tensor_parallel_size
    if moe is None:
        if ep > 1 or (etp or 1) > 1:
            raise ConfigError(
                f"{MEGATRON}.expert_model_parallel_size={ep}, expert_tensor_parallel_size={etp}: the student has no "
                "experts",
                remedy="set them to 1 and null",
                keys=_keys("expert_model_parallel_size", "expert_tensor_parallel_size"),
            )
        return
    if moe.experts % ep:
        raise ConfigError(
            f"{MEGATRON}.expert_model_parallel_size is {ep}; it must divide the model's {moe.experts} experts",
            keys=_keys("expert_model_parallel_size"),
        )
    if moe.ffn % (etp or tp):
        raise ConfigError(
            f"{MEGATRON}.expert_tensor_parallel_size is {etp or tp}"
            f"{'' if etp else ' (from tensor_model_parallel_size)'}; it must divide the {moe.ffn} feed-forward columns "
            "of an expert, or be 1",
            keys=_keys("expert_tensor_parallel_size"),
        )


def _check_biases_of_experts(dims: ModelDims, config: MegatronConfig) -> None:
    etp = config.expert_tensor_parallel_size or config.tensor_model_parallel_size
    if dims.moe is not None and dims.linear_bias and etp > 1:  # Megatron would add a bias on each rank, and sum them
        raise ConfigError(
            f"{MEGATRON}.expert_tensor_parallel_size is {etp}"
            f"{'' if config.expert_tensor_parallel_size else ' (from tensor_model_parallel_size)'}; the experts of a "
            f"{dims.family} student have biases, and Megatron does not divide such experts",
            remedy=f"set {MEGATRON}.expert_tensor_parallel_size=1, and expert_model_parallel_size to divide experts",
            keys=_keys("expert_tensor_parallel_size"),
        )


def _check_sequence_parallel(dims: ModelDims, config: MegatronConfig) -> None:
    tp = config.tensor_model_parallel_size
    if tp > 1 and not config.sequence_parallel and (dims.moe is not None or dims.latent is not None):
        kind = "mixture-of-experts model" if dims.moe else "model with multi-head latent attention"
        raise ConfigError(
            f"{MEGATRON}.tensor_model_parallel_size={tp} without sequence_parallel: a {kind} needs both",
            remedy=f"set {MEGATRON}.sequence_parallel=true",
            keys=_keys("sequence_parallel", "tensor_model_parallel_size"),
        )

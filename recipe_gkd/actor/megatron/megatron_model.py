"""The model in training on one rank: Megatron's chunks, the optimizer, and this rank's part of the weight table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from megatron.core.distributed import DistributedDataParallel
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.optimizer import MegatronOptimizer

from recipe_gkd.actor.attention_kernels import AttentionKernel
from recipe_gkd.actor.megatron.corrected_softmax import add_corrections
from recipe_gkd.actor.megatron.data_parallel import ddp_config
from recipe_gkd.actor.megatron.families.reading import read_model_dims
from recipe_gkd.actor.megatron.hf_load import LocalWeight, load_hf, local_weights
from recipe_gkd.actor.megatron.lora import MegatronLora, add_adapters
from recipe_gkd.actor.megatron.lora_table import adapted_weights
from recipe_gkd.actor.megatron.model import build_chunks, transformer_config
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.megatron.optimizer import restore_rounding_errors, wrap_and_optimize
from recipe_gkd.actor.megatron.packed_attention import attention_kernel
from recipe_gkd.actor.megatron.parallel import init_parallel
from recipe_gkd.actor.megatron.routing_replay import add_replay
from recipe_gkd.actor.megatron.transformer_impl import impl_setting
from recipe_gkd.actor.ranks import Layout, RankSpec
from recipe_gkd.config.schema import Config
from teacher.common.head_dtype import wants_float32_head


@dataclass(frozen=True, kw_only=True)
class MegatronModel:
    """One rank's part of the model in training.

    Attributes:
        layout: Coordinates of this rank.
        device: Device of the parameters and of the collectives.
        dtype: Data type of weights and activations. The optimizer keeps float32 copies.
        attention: Kernel of the attention layers.
        float32_head: True if the output layer computes float32 logits from 16-bit weights.
        chunks: One chunk, or one per virtual pipeline stage.
        wrapped: The chunks with their gradient buffers.
        optimizer: Optimizer of all chunks.
        weights: All weights of the model in order, each with this rank's parameter for it.
        stages: Pipeline stage of each weight.
        lora: Adapters. All other parameters are then frozen. None: all parameters are trained.
    """

    dims: ModelDims
    layout: Layout
    device: torch.device
    dtype: torch.dtype
    attention: AttentionKernel
    float32_head: bool
    chunks: Sequence[GPTModel]
    wrapped: Sequence[DistributedDataParallel]
    optimizer: MegatronOptimizer
    weights: Sequence[LocalWeight]
    stages: Sequence[int]
    lora: MegatronLora | None = None

    @property
    def n_parameters(self) -> int:
        """Number of parameters on this rank."""
        return sum(p.numel() for chunk in self.chunks for p in chunk.parameters())


def build_megatron_model(config: Config, spec: RankSpec, *, is_overwritten: bool = False) -> MegatronModel:
    """Join the process groups, build the model, load its Hugging Face weights and create the optimizer. Collective.

    Args:
        spec: This process.
        is_overwritten: True if a checkpoint is loaded next, so that the optimizer's weights need no exact values.

    Raises:
        ModelError: The model folder cannot be read or is not supported.
        ConfigError: The parallel layout or the adapters do not fit the model.
        DeadlineError: A rank did not reach the rendezvous within ``actor_rollout_ref.nccl_timeout``.
    """
    model, actor = config.actor_rollout_ref.model, config.actor_rollout_ref.actor
    megatron = replace(actor.megatron, transformer_impl=impl_setting(actor))
    device = spec.torch_device
    # Invalid settings raise an error here, before this rank waits for others.
    dims = read_model_dims(model.path, trust_remote_code=model.trust_remote_code)
    adapted = adapted_weights(dims, actor.lora)
    transformer = transformer_config(dims, megatron, device)
    n_model_ranks = megatron.tensor_model_parallel_size * megatron.pipeline_model_parallel_size
    ddp = ddp_config(megatron, overlaps=device.type == "cuda" and spec.world_size > n_model_ranks)
    layout = init_parallel(config, spec)
    chunks = build_chunks(dims, transformer, device)
    if dims.moe is not None and dims.moe.corrects_softmax:
        add_corrections(chunks)
    if config.actor_rollout_ref.rollout.routing_replay:
        add_replay(chunks)
    is_rounded = load_hf(Path(model.path), chunks, dims, layout)
    weights = local_weights(chunks, dims, layout)
    lora = add_adapters(chunks, adapted, weights, dims, layout, actor.lora, config.data.seed) if adapted else None
    wrapped, optimizer = wrap_and_optimize(chunks, transformer, actor.optim, ddp)
    if is_rounded and lora is None and not is_overwritten:
        load_errors = partial(load_hf, Path(model.path), chunks, dims, layout, rounding_errors=True)
        restore_rounding_errors(optimizer, chunks, load_errors)
    return MegatronModel(
        dims=dims,
        layout=layout,
        device=device,
        dtype=transformer.params_dtype,
        attention=attention_kernel(transformer),
        float32_head=megatron.dtype != "float32" and wants_float32_head(model.head_dtype, megatron.dtype, device.type),
        chunks=chunks,
        wrapped=wrapped,
        optimizer=optimizer,
        weights=weights,
        stages=_find_stages(weights, layout, device),
        lora=lora,
    )


def _find_stages(weights: Sequence[LocalWeight], layout: Layout, device: torch.device) -> list[int]:
    """Return the pipeline stage of each weight. Collective."""
    stages = torch.tensor([-1 if p is None else layout.pp_rank for _, p in weights], device=device)
    dist.all_reduce(stages, op=dist.ReduceOp.MAX)
    return stages.tolist()

"""Layers of each pipeline rank, as Megatron divides them."""

from __future__ import annotations

from itertools import islice

from megatron.core.transformer.enums import LayerType
from megatron.core.transformer.transformer_block import get_num_layers_to_build
from megatron.core.transformer.transformer_config import TransformerConfig


def layers_by_rank(config: TransformerConfig) -> list[list[int]]:
    """Return the indices of the layers of each pipeline rank, in all its virtual stages."""
    layout, virtual_stages = config.pipeline_model_parallel_layout, config.virtual_pipeline_model_parallel_size
    ranks: list[list[int]] = [[] for _ in range(config.pipeline_model_parallel_size)]
    remaining = iter(range(config.num_layers))
    for stage in range(virtual_stages or 1):
        for rank, layers in enumerate(ranks):
            if layout is not None:  # Megatron's function would return the count of this process's rank
                count = layout.layout[rank][stage].count(LayerType.decoder)
            else:
                count = get_num_layers_to_build(config, stage if virtual_stages else None, rank)
            layers += islice(remaining, count)
    return ranks

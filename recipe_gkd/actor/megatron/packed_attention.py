"""Attention within the sequences of a packed row as a layer of Megatron, without Transformer Engine.

Shape suffixes: N tokens of a packed row, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention, make_sharded_tensors_for_checkpoint
from torch import Tensor

from recipe_gkd.actor.attention_kernels import AttentionKernel, choose_attention
from recipe_gkd.actor.head_exchange import gather_rows, scatter_rows
from recipe_gkd.actor.packed_row import PackedRow, attend
from recipe_gkd.actor.replayed_experts import ReplayedExperts
from recipe_gkd.actor.stored_scores import Scores, attend_with_scores

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection


@dataclass
class PackedSequences(PackedSeqParams):
    """Positions of the sequences in a packed row, as Megatron passes them to its layers.

    Attributes:
        row: The same for :class:`PackedAttention` and
            :class:`~recipe_gkd.actor.megatron.rotary.PackedRotaryEmbedding`. Transformer Engine reads the inherited
            fields.
        experts: Experts of the tokens for :mod:`~recipe_gkd.actor.megatron.routing_replay`. None: the routers choose.
    """

    row: PackedRow | None = None
    experts: ReplayedExperts | None = None

    @classmethod
    def of(cls, row: PackedRow, experts: ReplayedExperts | None = None) -> PackedSequences:
        """Return the parameters for a row, and the experts of its tokens."""
        return cls(
            qkv_format="thd",
            cu_seqlens_q=row.boundaries,
            cu_seqlens_kv=row.boundaries,
            max_seqlen_q=row.max_length,
            max_seqlen_kv=row.max_length,
            row=row,
            experts=experts,
        )


def attention_kernel(config: TransformerConfig) -> AttentionKernel:
    """Return the kernel for the layers of a Megatron configuration on this process's device."""
    if config.softmax_type == "learnable":
        return AttentionKernel.STORED_SCORES  # the others have no sinks
    assert config.kv_channels is not None  # set by `transformer_config`
    return choose_attention(
        with_transformer_engine=config.transformer_impl == "transformer_engine",
        capability=None if config.use_cpu_initialization else torch.cuda.get_device_capability(),
        dtype=config.params_dtype,
        head_dim=config.kv_channels,
    )


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a packed row, with grouped queries, without dropout.

    The window, the factor of the scores and the sinks are those of Megatron's configuration. The parameter
    ``softmax_offset`` has the sink of each head on this rank, and Megatron's name.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        *,
        softmax_scale: float | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: object,
    ) -> None:
        super().__init__(config=config)
        # Multi-head latent attention passes its own factor.
        self.scale = softmax_scale if config.softmax_scale is None else config.softmax_scale
        has_window = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer_number)
        self.window = config.window_size[0] + 1 if has_window else None
        self._kernel = attention_kernel(config)
        self._tp_group: Any = None if pg_collection is None else pg_collection.tp
        self._cp_group: Any = None if pg_collection is None else pg_collection.cp
        self.softmax_offset: torch.nn.Parameter | None = None
        if config.softmax_type == "learnable":
            n_heads = config.num_attention_heads // config.tensor_model_parallel_size
            self.softmax_offset = torch.nn.Parameter(torch.empty(n_heads, dtype=config.params_dtype))
            set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None,
        *,
        packed_seq_params: PackedSequences,
        **_: object,
    ) -> Tensor:
        """Return the attention output of this rank's rows, [N, H * D].

        Args:
            query: Queries, [N, H, D].
            key: Keys, [N, G, D].
            value: Values, [N, G, D], or with fewer channels.
            attention_mask: Unused.
            packed_seq_params: Positions of the sequences.
        """
        row, sinks_H = packed_seq_params.row, self.softmax_offset
        assert row is not None
        if row.row_order is None:
            return self._attend(query, key, value, row, sinks_H).flatten(1)
        width = value.size(-1)
        value = F.pad(value, (0, max(0, query.size(-1) - width)))  # the exchange is one tensor
        query, key, value = gather_rows(query, key, value, row.row_order, self._cp_group)
        own_H = None if sinks_H is None else sinks_H.chunk(self._cp_group.size())[self._cp_group.rank()]
        output = self._attend(query, key, value, row, own_H)
        return scatter_rows(output[..., :width], row.row_order, self._cp_group).flatten(1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, row: PackedRow, sinks_H: Tensor | None) -> Tensor:
        if sinks_H is None:
            return attend(self._kernel, query, key, value, row, self.scale, self.window)
        return attend_with_scores(Scores(scale=self.scale, window=self.window, sinks_H=sinks_H), query, key, value, row)

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the sinks, divided by heads, as Megatron's own attention does; without them an empty state."""
        groups = {"tp_group": self._tp_group, "dp_cp_group": (metadata or {}).get("dp_cp_group")}
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(keep_vars=True), prefix, {"softmax_offset": 0}, sharded_offsets, **groups
        )
        return state

"""Attention within the sequences of a packed row as a layer of Megatron, without Transformer Engine.

Shape suffixes: N tokens of a packed row, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import is_layer_window_attention
from torch import Tensor

from recipe_gkd.actor.attention_kernels import AttentionKernel, choose_attention
from recipe_gkd.actor.head_exchange import gather_rows, scatter_rows
from recipe_gkd.actor.packed_row import PackedRow, attend
from recipe_gkd.actor.replayed_experts import ReplayedExperts

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
    assert config.kv_channels is not None  # set by `transformer_config`
    return choose_attention(
        with_transformer_engine=config.transformer_impl == "transformer_engine",
        capability=None if config.use_cpu_initialization else torch.cuda.get_device_capability(),
        dtype=config.params_dtype,
        head_dim=config.kv_channels,
    )


class PackedAttention(MegatronModule):
    """Causal attention within each sequence of a packed row, with grouped queries, without dropout.

    The window and the factor of the scores are those of Megatron's configuration.
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
        self._cp_group: Any = None if pg_collection is None else pg_collection.cp

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
        row = packed_seq_params.row
        assert row is not None
        if row.row_order is None:
            return attend(self._kernel, query, key, value, row, self.scale, self.window).flatten(1)
        width = value.size(-1)
        value = F.pad(value, (0, max(0, query.size(-1) - width)))  # the exchange is one tensor
        query, key, value = gather_rows(query, key, value, row.row_order, self._cp_group)
        output = attend(self._kernel, query, key, value, row, self.scale, self.window)
        return scatter_rows(output[..., :width], row.row_order, self._cp_group).flatten(1)

    def sharded_state_dict(self, *_: object, **__: object) -> dict[str, Any]:
        """Return an empty state: the module has no parameters."""
        return {}

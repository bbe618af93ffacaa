"""Norms of the layers with torch's operations, which support sequence parallelism and ``params_dtype``.

Two norms are created by subclasses of Megatron's attention instead of its specs. Megatron 0.19 refuses norms of queries
and keys in a spec without ``qk_layernorm``. With this option it would sum the gradients of divided norms over the
tensor-parallel ranks, and refuse latent attention without a down projection of the queries.

Shape suffixes: N tokens, H heads of a rank, D head width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state as mpu
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.nn.functional import all_reduce


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm with Megatron's constructor (Zhang and Sennrich 2019, arXiv:1910.07467).

    With ``layernorm_zero_centered_gamma`` the factor is 1 + weight, computed in float32.
    """

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, **_: object) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype, device=_device(config))
        self.has_offset = config.layernorm_zero_centered_gamma
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]  # read by finalize_model_grads

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input, of the same shape."""
        if not self.has_offset:
            return super().forward(x)
        return F.rms_norm(x.float(), self.normalized_shape, 1 + self.weight.float(), self.eps).type_as(x)


class _AllHeadsNorm(torch.nn.Module):
    """RMSNorm of all heads of a token together, which tensor-parallel ranks divide."""

    def __init__(self, config: TransformerConfig, n_heads: int, eps: float) -> None:
        super().__init__()
        self._group: ProcessGroup = mpu.get_tensor_model_parallel_group()
        assert config.kv_channels is not None  # set by `transformer_config`
        self._width, self.eps = n_heads * config.kv_channels, eps
        columns = self._width // self._group.size()
        self.weight = torch.nn.Parameter(torch.empty(columns, dtype=config.params_dtype, device=_device(config)))
        # Megatron counts a divided parameter on every rank for the norm of the gradient.
        self.weight.tensor_model_parallel = True  # type: ignore[attr-defined]

    def forward(self, heads: Tensor) -> Tensor:
        """Return the normalized heads, of the same shape [N, 1, H, D]."""
        x = heads.flatten(-2).float()
        total = x.square().sum(-1, keepdim=True)
        if self._group.size() > 1:
            total = all_reduce(total, dist.ReduceOp.SUM, self._group)
        normalized = (x * torch.rsqrt(total / self._width + self.eps)).type_as(heads)
        return (normalized * self.weight).unflatten(-1, heads.shape[-2:])

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple[Any, ...] = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """Return the state for a checkpoint, divided by rows."""
        state: dict[str, Any] = make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets
        )
        return state


class QueryNorm(_AllHeadsNorm):
    """Norm of all queries of a token."""

    def __init__(self, config: TransformerConfig, eps: float, **_: object) -> None:
        super().__init__(config, config.num_attention_heads, eps)


class KeyNorm(_AllHeadsNorm):
    """Norm of all keys of a token."""

    def __init__(self, config: TransformerConfig, eps: float, **_: object) -> None:
        assert config.num_query_groups is not None  # set by `transformer_config`
        super().__init__(config, config.num_query_groups, eps)


class AllHeadsNormAttention(SelfAttention):
    """Attention with a norm of all queries and a norm of all keys of a token."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        self.q_layernorm = QueryNorm(config, config.layernorm_epsilon)
        self.k_layernorm = KeyNorm(config, config.layernorm_epsilon)


class LatentAttentionWithNorms(MLASelfAttention):
    """Multi-head latent attention with norms of the compressed queries, keys and values."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.q_layernorm = RMSNorm(config, config.q_lora_rank, config.layernorm_epsilon)
        self.kv_layernorm = RMSNorm(config, config.kv_lora_rank, config.layernorm_epsilon)


class LayerWithNormsAfter(TransformerLayer):
    """Layer that normalizes the outputs of attention and feed-forward block before it adds them."""

    def __init__(self, config: TransformerConfig, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        size = dict(config=config, hidden_size=config.hidden_size, eps=config.layernorm_epsilon)
        self.post_attention_layernorm, self.post_mlp_layernorm = RMSNorm(**size), RMSNorm(**size)
        for name, norm in (("self_attn_bda", self.post_attention_layernorm), ("mlp_bda", self.post_mlp_layernorm)):
            setattr(self, name, partial(_add_normalized, norm, getattr(self, name)))


def _add_normalized(norm: RMSNorm, bias_dropout_add: Any, *options: Any) -> Any:
    """Return Megatron's function that adds an output to the residual stream, with a norm of the output."""
    add = bias_dropout_add(*options)

    def add_normalized(output_and_bias: tuple[Tensor, None], residual: Tensor, dropout: float) -> Tensor:
        output, bias = output_and_bias
        added: Tensor = add((norm(output), bias), residual, dropout)
        return added

    return add_normalized


def _device(config: TransformerConfig) -> torch.device | int:
    return torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()

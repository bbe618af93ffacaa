"""Rotary position embedding of packed rows without host synchronization (Su et al. 2021, RoFormer, arXiv:2104.09864).

Without Transformer Engine, Megatron copies the sequence boundaries to the host and cuts a table of angles for each
sequence, for queries and keys of each layer (models/common/embeddings/rope_utils.py ``_apply_rotary_pos_emb_thd``).
Here the cosines and sines of all rows are gathered by position once per forward pass of a model chunk, and all layers
share them. The results are equal bit by bit. On a GPU, one Triton kernel rotates all heads of a row, where PyTorch
starts seven.

Usage::

    set_rotary_embedding(chunk, dims, config)
    patches.install()  # lets the attention layers call `rotate`

Shape suffixes: N tokens of a packed row, S positions in the table, H heads, D head width, W rotated channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from recipe_gkd.actor.megatron.model_dims import ModelDims, Rope
from recipe_gkd.losses.autograd_context import SavedTensors
from recipe_gkd.losses.kernel_backend import runs_triton

if TYPE_CHECKING:
    from megatron.core.models.gpt.gpt_model import GPTModel
    from megatron.core.transformer.transformer_config import TransformerConfig

    from recipe_gkd.actor.megatron.packed_attention import PackedSequences


def frequencies(rope: Rope) -> tuple[Tensor, float]:
    """Return the angle of each pair of channels per position, float32 [W / 2], and the factor of cosines and sines.

    Scalings are computed by transformers.
    """
    if not rope.scaling:
        return 1.0 / rope.theta ** (torch.arange(0, rope.width, 2, dtype=torch.float32) / rope.width), 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = dict(rope.scaling) | {"partial_rotary_factor": 1.0}
    config = LlamaConfig(
        num_attention_heads=1,
        hidden_size=rope.width,
        head_dim=rope.width,
        max_position_embeddings=rope.max_positions,
        rope_parameters=parameters,
    )
    angles, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, torch.device("cpu"))
    return angles, float(factor)


class PackedRotaryEmbedding(torch.nn.Module):
    """Replacement of Megatron's ``rotary_pos_emb`` that returns the cosines and sines of each row.

    Args:
        ropes: Position embeddings of a model, of the same width.
        dtype: Data type of queries and keys.
    """

    def __init__(self, ropes: Sequence[Rope], dtype: torch.dtype) -> None:
        super().__init__()
        self.ropes, self.dtype = ropes, dtype
        self._table_SKW: Tensor | None = None

    def get_rotary_seq_len(self, *args: Any) -> PackedSequences:
        """Return the packed sequences, which Megatron passes to :meth:`forward` unchanged."""
        packed: PackedSequences = args[-1]
        return packed

    def forward(self, packed: PackedSequences, **_: object) -> Tensor:
        """Return cosine and sine of each row's angles for each position embedding in turn, [N, 1, 2 x ropes, W]."""
        assert packed.row is not None
        positions = packed.row.position_ids_N
        return self._table(packed.row.max_length, positions.device).index_select(0, positions).unsqueeze(1)

    def _table(self, length: int, device: torch.device) -> Tensor:
        """Return cosines and sines of at least ``length`` positions, [S, 2 x ropes, W]."""
        if self._table_SKW is None or len(self._table_SKW) < length:
            n_positions = 1 << (length - 1).bit_length()  # a power of 2, so that it is seldom computed again
            positions_S = torch.arange(n_positions, dtype=torch.float32, device=device)
            tables = []
            for rope in self.ropes:
                of_pairs, factor = frequencies(rope)
                angles_SW = torch.outer(positions_S, of_pairs.to(device)).repeat(1, 2)
                tables += [angles_SW.cos() * factor, angles_SW.sin() * factor]
            self._table_SKW = torch.stack(tables, dim=1).to(self.dtype)
        return self._table_SKW


def set_rotary_embedding(chunk: GPTModel, dims: ModelDims, config: TransformerConfig) -> None:
    """Let the layers of a model chunk rotate by the frequencies of the model.

    Args:
        chunk: Chunk with Megatron's embeddings.
        config: Megatron's configuration.
    """
    if config.apply_rope_fusion:
        chunk.rotary_pos_emb.inv_freq, _ = frequencies(dims.ropes[0])
        return
    embedding = PackedRotaryEmbedding(dims.ropes, config.params_dtype)
    if dims.latent is None:
        chunk.rotary_pos_emb = embedding
    for layer in chunk.decoder.layers:
        rope = dims.attention_of(layer.layer_number - 1).rope
        if dims.latent is not None:
            layer.self_attention.rotary_pos_emb = embedding
        elif len(dims.ropes) > 1 and rope is not None:
            layer.self_attention.register_forward_pre_hook(partial(_select_rope, rope), with_kwargs=True)


def _select_rope(rope: int, module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Replace the cosines and sines of all position embeddings by those of a layer."""
    return args, kwargs | {"rotary_pos_emb": kwargs["rotary_pos_emb"][:, :, 2 * rope : 2 * rope + 2]}


def is_gathered(table: Tensor) -> bool:
    """Return True for cosines and sines [N, 1, 2, W] of rows, False for Megatron's angles [S, 1, 1, W]."""
    return table.dim() == 4 and table.size(2) == 2


def rotate_channels(heads_NHD: Tensor, table_N12W: Tensor, *, interleaved: bool) -> Tensor:
    """Return queries or keys whose first channels are rotated by the angles of their positions, [N, H, D].

    Args:
        heads_NHD: Queries or keys.
        table_N12W: Cosines and sines of one position embedding from :class:`PackedRotaryEmbedding`.
        interleaved: If true, channels 2 i and 2 i + 1 form a pair. They become channels i and i + W / 2 of the result,
            for queries and keys alike, which does not change their products.
    """
    width = table_N12W.size(-1)
    rotated_NHW, rest = heads_NHD[..., :width], heads_NHD[..., width:]
    if interleaved:
        rotated_NHW = rotated_NHW.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    rotated_NHW = rotate(rotated_NHW, table_N12W)
    return torch.cat((rotated_NHW, rest), dim=-1) if rest.size(-1) else rotated_NHW


def rotate(heads_NHD: Tensor, table_N12D: Tensor) -> Tensor:
    """Return queries or keys rotated by the angles of their positions, [N, H, D].

    Args:
        heads_NHD: Queries or keys.
        table_N12D: Cosines and sines of one position embedding. Channels i and i + D / 2 form a pair.
    """
    if runs_triton(heads_NHD) and heads_NHD.dtype == table_N12D.dtype:
        rotated: Tensor = _TritonRotation.apply(heads_NHD, table_N12D)
        return rotated
    cos_N1D, sin_N1D = table_N12D.unbind(2)
    first, second = heads_NHD.chunk(2, dim=-1)
    return heads_NHD * cos_N1D + torch.cat((-second, first), dim=-1) * sin_N1D


class _TritonRotation(torch.autograd.Function):
    @staticmethod
    def forward(ctx: SavedTensors, heads_NHD: Tensor, table_N12D: Tensor) -> Tensor:
        ctx.save_for_backward(table_N12D)
        return _launch(heads_NHD, table_N12D, sign=1)

    @staticmethod
    @once_differentiable
    def backward(ctx: SavedTensors, gradient_NHD: Tensor) -> tuple[Tensor, None]:
        return _launch(gradient_NHD, ctx.saved_tensors[0], sign=-1), None  # the inverse of a rotation is its transpose


def _launch(heads_NHD: Tensor, table_N12D: Tensor, *, sign: int) -> Tensor:
    """Return the heads rotated by ``sign`` times the angles of their positions."""
    from recipe_gkd.actor.megatron import triton_kernels

    if heads_NHD.stride(2) != 1:
        heads_NHD = heads_NHD.contiguous()
    table_N12D = table_N12D.contiguous()
    n_rows, n_heads, width = heads_NHD.shape
    out_NHD = heads_NHD.new_empty(n_rows, n_heads, width)
    if not out_NHD.numel():
        return out_NHD
    n_pairs = width // 2
    blocks = {"HEADS": _power_of_2(n_heads), "PAIRS": _power_of_2(n_pairs)}
    with torch.cuda.device_of(heads_NHD):
        triton_kernels.rotate_heads[n_rows,](
            out_NHD, heads_NHD, table_N12D, heads_NHD.stride(0), heads_NHD.stride(1), n_heads, n_pairs, SIGN=sign,
            **blocks, num_warps=4, enable_fp_fusion=False,
        )  # fmt: skip
    return out_NHD


def _power_of_2(number: int) -> int:
    """Return the smallest power of 2 that is not smaller."""
    return 1 << (number - 1).bit_length()

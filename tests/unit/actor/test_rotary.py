"""Rotary embedding of packed rows: equal to Megatron's bit by bit, without a copy to the host."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_thd
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.transformer import attention
from torch import Tensor

from recipe_gkd.actor.megatron import patches
from recipe_gkd.actor.megatron.model_dims import Rope
from recipe_gkd.actor.megatron.packed_attention import PackedSequences
from recipe_gkd.actor.megatron.rotary import PackedRotaryEmbedding, rotate
from recipe_gkd.actor.packed_row import PackedRow
from tests._support.tiny_models import LLAMA3_ROPE

HEAD_DIM = 12
ONE_RANK: Any = SimpleNamespace(size=lambda: 1, rank=lambda: 0)


@pytest.fixture(autouse=True)
def on_cpu(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make Megatron's embedding use the CPU, except in a test of the GPU, where Triton's driver keeps this function."""
    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))


def megatron_embedding(**options: Any) -> RotaryEmbedding:
    return RotaryEmbedding(HEAD_DIM, 1.0, use_cpu_initialization=True, cp_group=ONE_RANK, **options)


def rope(*, rotary_base: float = 1e4, rope_scaling: bool = False, rope_scaling_factor: float = 1.0) -> Rope:
    """Return the description of an embedding with options of Megatron."""
    scaling = LLAMA3_ROPE | {"rope_type": "llama3", "rope_theta": rotary_base, "factor": rope_scaling_factor}
    return Rope(width=HEAD_DIM, theta=rotary_base, scaling=scaling if rope_scaling else {}, max_positions=1 << 17)


def packed_row(*lengths: int, device: str = "cpu") -> PackedSequences:
    boundaries = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    positions = torch.cat([torch.arange(length) for length in lengths]).to(device)
    row = PackedRow(boundaries=boundaries, max_length=max(lengths), position_ids_N=positions)
    return PackedSequences.of(row)


def rotate_with_megatron(heads: Tensor, row: PackedSequences, embedding: RotaryEmbedding) -> Tensor:
    angles = embedding.get_emb(row.max_seqlen_q)
    rotated: Tensor = _apply_rotary_pos_emb_thd(heads, row.cu_seqlens_q, angles, cp_group=ONE_RANK)
    return rotated


class TestEquality:
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize(
        "options", [{}, {"rotary_base": 5e5}, {"rotary_base": 5e5, "rope_scaling": True, "rope_scaling_factor": 8.0}]
    )
    @pytest.mark.parametrize("lengths", [(5,), (1, 7, 3), (2, 2), (9000, 1)])
    def test_rotate_equals_megatron_bitwise(
        self, lengths: tuple[int, ...], options: dict[str, Any], dtype: torch.dtype
    ) -> None:
        row, embedding = packed_row(*lengths), megatron_embedding(**options)
        heads = torch.randn(sum(lengths), 2, HEAD_DIM, dtype=dtype, requires_grad=True)
        weights = torch.randn_like(heads)
        wanted = rotate_with_megatron(heads, row, embedding)
        rotated = rotate(heads, PackedRotaryEmbedding([rope(**options)], dtype)(row))
        assert rotated.dtype == wanted.dtype == dtype
        assert torch.equal(rotated, wanted)
        gradients = [torch.autograd.grad((output * weights).sum(), heads)[0] for output in (rotated, wanted)]
        assert torch.equal(*gradients)

    def test_table_grows_with_longer_rows(self) -> None:
        embedding = megatron_embedding()
        packed = PackedRotaryEmbedding([rope()], torch.float32)
        for lengths in ((3,), (2, 17), (4, 4), (300,)):
            row, heads = packed_row(*lengths), torch.randn(sum(lengths), 2, HEAD_DIM)
            assert torch.equal(rotate(heads, packed(row)), rotate_with_megatron(heads, row, embedding))

    def test_rows_of_a_context_rank_use_their_own_positions(self) -> None:
        embedding = megatron_embedding()
        whole, heads = packed_row(8, 4), torch.randn(12, 2, HEAD_DIM)
        own_rows = torch.tensor([0, 1, 6, 7, 8, 11])
        assert whole.row is not None
        part = PackedSequences.of(replace(whole.row, position_ids_N=whole.row.position_ids_N[own_rows]))
        rotated = rotate(heads[own_rows], PackedRotaryEmbedding([rope()], torch.float32)(part))
        assert torch.equal(rotated, rotate_with_megatron(heads, whole, embedding)[own_rows])


class TestAttentionLayer:
    """The function that Megatron's attention layers call, after ``patches.install``."""

    @pytest.fixture(autouse=True)
    def patched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(attention, "apply_rotary_pos_emb", attention.apply_rotary_pos_emb)  # restored at the end
        patches._patch_rotary_embedding()

    def apply(self, heads: Tensor, table: Tensor, row: PackedSequences) -> Tensor:
        config: Any = SimpleNamespace(
            apply_rope_fusion=False, rotary_interleaved=False, multi_latent_attention=False, mrope_section=None
        )
        rotated: Tensor = attention.apply_rotary_pos_emb(
            heads, table, config, cu_seqlens=row.cu_seqlens_q, mscale=1.0, cp_group=ONE_RANK
        )
        return rotated

    @pytest.mark.parametrize("lengths", [(2,), (2, 5)])
    def test_layer_rotates_with_gathered_table_and_with_angles(self, lengths: tuple[int, ...]) -> None:
        row, embedding, heads = packed_row(*lengths), megatron_embedding(), torch.randn(sum(lengths), 2, HEAD_DIM)
        wanted = rotate_with_megatron(heads, row, embedding)
        packed = PackedRotaryEmbedding([rope()], torch.float32)
        assert torch.equal(self.apply(heads, packed(row), row), wanted)
        assert torch.equal(self.apply(heads, embedding.get_emb(max(lengths)), row), wanted)

    def test_layer_reads_no_tensor_on_the_host(self) -> None:
        """A tensor on the device "meta" has no data: to read it on the host is an error."""
        row, embedding = packed_row(2, 5, device="meta"), megatron_embedding()
        packed = PackedRotaryEmbedding([rope()], torch.float32)
        packed(packed_row(2, 5))
        assert packed._table_SKW is not None
        packed._table_SKW = packed._table_SKW.to("meta")
        heads = torch.randn(7, 2, HEAD_DIM, device="meta")
        assert self.apply(heads, packed(row), row).shape == heads.shape
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            self.apply(heads, embedding.get_emb(5).to("meta"), row)

    @pytest.mark.gpu
    @pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
    def test_layer_does_not_wait_for_the_gpu(self) -> None:
        row = packed_row(2, 5, device="cuda")
        packed = PackedRotaryEmbedding([rope()], torch.bfloat16)
        heads = torch.randn(7, 2, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
        self.apply(heads, packed(row), row)  # makes the table, and compiles the kernel
        torch.cuda.set_sync_debug_mode("error")
        try:
            self.apply(heads, packed(row), row)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    def test_chunk_passes_packed_sequences_to_the_embedding(self) -> None:
        """``GPTModel`` passes the result of ``get_rotary_seq_len`` to ``forward``."""
        row = packed_row(3, 2)
        packed = PackedRotaryEmbedding([rope()], torch.float32)
        length = packed.get_rotary_seq_len(None, None, None, None, row)
        assert packed(length, packed_seq=True, cp_group=None).shape == (5, 1, 2, HEAD_DIM)

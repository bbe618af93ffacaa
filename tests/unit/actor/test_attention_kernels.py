"""Choice of the attention kernel, and the kernels for packed rows."""

from __future__ import annotations

from collections.abc import Sequence
from functools import wraps
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from recipe_gkd.actor import packed_row
from recipe_gkd.actor.attention_kernels import AttentionKernel, choose_attention
from recipe_gkd.actor.batch.packing import bucket_by_length
from recipe_gkd.actor.megatron import packed_attention
from recipe_gkd.actor.megatron.packed_attention import PackedAttention, PackedSequences, attention_kernel
from recipe_gkd.actor.packed_row import PackedRow, attend_in_blocks, attend_varlen

BRAIN, SINGLE = torch.bfloat16, torch.float32
TE_FUSED, VARLEN, SDPA_BLOCKS = AttentionKernel.TE_FUSED, AttentionKernel.VARLEN, AttentionKernel.SDPA_BLOCKS
GPUS = {"V100": (7, 0), "A100": (8, 0), "L40S": (8, 9), "H100": (9, 0), "B200": (10, 0), "RTX 5090": (12, 0)}
CONFIG: Any = SimpleNamespace(
    transformer_impl="local", use_cpu_initialization=True, params_dtype=SINGLE, kv_channels=16, softmax_scale=None,
    window_size=None, window_attn_skip_freq=None, softmax_type="vanilla",
)  # fmt: skip


class TestChoice:
    @pytest.mark.parametrize(
        ("gpu", "dtype", "head_dim", "with_te", "without_te"),
        [
            ("H100", BRAIN, 128, TE_FUSED, VARLEN),
            ("B200", BRAIN, 128, TE_FUSED, VARLEN),
            ("A100", BRAIN, 128, VARLEN, VARLEN),  # cuDNN supports packed sequences from compute capability 9.0
            ("L40S", BRAIN, 64, VARLEN, VARLEN),
            ("RTX 5090", BRAIN, 128, VARLEN, VARLEN),  # excluded by Transformer Engine
            ("V100", torch.float16, 128, SDPA_BLOCKS, SDPA_BLOCKS),
            ("H100", SINGLE, 128, SDPA_BLOCKS, SDPA_BLOCKS),  # the fused kernels are for 16 bits
            ("H100", BRAIN, 256, TE_FUSED, VARLEN),
            ("B200", BRAIN, 256, VARLEN, VARLEN),
            ("L40S", BRAIN, 256, SDPA_BLOCKS, SDPA_BLOCKS),
            ("H100", BRAIN, 20, SDPA_BLOCKS, SDPA_BLOCKS),  # not a multiple of 8
        ],
    )
    def test_choose_attention_never_stores_scores(
        self, gpu: str, dtype: torch.dtype, head_dim: int, with_te: AttentionKernel, without_te: AttentionKernel
    ) -> None:
        for has_te, wanted in ((True, with_te), (False, without_te)):
            chosen = choose_attention(
                with_transformer_engine=has_te, capability=GPUS[gpu], dtype=dtype, head_dim=head_dim
            )
            assert chosen is wanted

    def test_kernel_on_cpu_is_sdpa(self) -> None:
        assert attention_kernel(CONFIG) is SDPA_BLOCKS

    def test_kernel_on_gpu_reads_its_capability(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        options = {**vars(CONFIG), "use_cpu_initialization": False, "params_dtype": BRAIN}
        assert attention_kernel(SimpleNamespace(**options)) is VARLEN
        options["transformer_impl"] = "transformer_engine"
        assert attention_kernel(SimpleNamespace(**options)) is TE_FUSED
        options["softmax_type"] = "learnable"  # sinks, which no fused kernel has
        assert attention_kernel(SimpleNamespace(**options)) is AttentionKernel.STORED_SCORES


LENGTHS = [7, 1, 20, 19, 3, 6, 8]


def make_row(device: str, lengths: Sequence[int] = LENGTHS) -> PackedRow:
    """Return the positions of sequences of these lengths in a packed row."""
    blocks = bucket_by_length(lengths)
    flat = np.concatenate([block.ravel() for block in blocks])
    unpack_index_N = np.empty(sum(lengths), dtype=np.int64)
    unpack_index_N[flat[flat >= 0]] = np.flatnonzero(flat >= 0)
    boundaries = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    return PackedRow(
        boundaries=boundaries,
        max_length=max(lengths),
        position_ids_N=torch.empty(0),
        blocks=[torch.as_tensor(np.maximum(block, 0)).to(device) for block in blocks],
        unpack_index_N=torch.as_tensor(unpack_index_N).to(device),
    )


def heads(n_kv_heads: int, dtype: torch.dtype, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """Return random queries, keys and values for sequences of :data:`LENGTHS`."""
    torch.manual_seed(0)
    options: Any = {"dtype": dtype, "device": device, "requires_grad": True}
    query, key, value = (torch.randn(sum(LENGTHS), n, 16, **options) for n in (4, n_kv_heads, n_kv_heads))
    return query, key, value


def attend_one_by_one(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return attention of each sequence alone, in float64."""
    outputs = []
    copies = query.size(1) // key.size(1)
    for q, k, v in zip(*(x.double().split(LENGTHS) for x in (query, key, value)), strict=True):
        q, k, v = (x.transpose(0, 1) for x in (q, k.repeat_interleave(copies, 1), v.repeat_interleave(copies, 1)))
        outputs.append(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(0, 1))
    return torch.cat(outputs)


class TestPackedRow:
    @pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
    @pytest.mark.parametrize(("dtype", "error"), [(torch.float64, 1e-13), (SINGLE, 1e-6), (BRAIN, 1 / 128)])
    def test_attend_in_blocks_equals_each_sequence_alone(
        self, n_kv_heads: int, dtype: torch.dtype, error: float
    ) -> None:
        """In bfloat16 the error is that of rounding the result."""
        qkv = heads(n_kv_heads, dtype, "cpu")
        output = attend_in_blocks(*qkv, make_row("cpu"), None)
        assert output.dtype == dtype
        torch.testing.assert_close(output.double(), attend_one_by_one(*qkv), rtol=0, atol=error)

    @pytest.mark.parametrize("kernel", [VARLEN, SDPA_BLOCKS])
    def test_packed_attention_uses_chosen_kernel(
        self, kernel: AttentionKernel, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(packed_attention, "attention_kernel", lambda config: kernel)
        for name, value in (("attend_varlen", 1.0), ("attend_in_blocks", 2.0)):
            monkeypatch.setattr(packed_row, name, lambda q, *_, value=value: torch.full_like(q, value))
        row = PackedSequences.of(make_row("cpu"))
        output = PackedAttention(CONFIG, 1)(*heads(2, SINGLE, "cpu"), None, packed_seq_params=row)
        assert output.shape == (sum(LENGTHS), 64)
        assert (output == (1.0 if kernel is VARLEN else 2.0)).all()

    def test_attend_varlen_passes_boundaries_and_causal_window(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel is torch's, on the device "meta": its signature and shapes are those of a GPU."""
        import torch.nn.attention.varlen as varlen

        calls: list[tuple[Any, ...]] = []
        original = varlen.varlen_attn

        @wraps(original)
        def record(*arguments: Any, **options: Any) -> Any:
            calls.append((arguments, options))
            return original(*arguments, **options)

        monkeypatch.setattr(varlen, "varlen_attn", record)
        qkv = heads(2, BRAIN, "meta")
        assert attend_varlen(*qkv, make_row("cpu"), 0.5).shape == qkv[0].shape
        [((*_, bounds_q, bounds_k, longest_q, longest_k), options)] = calls
        assert bounds_q.dtype == bounds_k.dtype == torch.int32  # any other type is an error in the kernel
        assert bounds_q.tolist() == bounds_k.tolist() == np.cumsum([0, *LENGTHS]).tolist()
        assert longest_q == longest_k == max(LENGTHS)
        assert options == {"scale": 0.5, "window_size": (-1, 0), "enable_gqa": True}

    def test_attend_varlen_supports_torch_without_an_option_for_grouped_queries(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """In torch 2.11 grouped queries need no option."""
        import torch.nn.attention.varlen as varlen

        def of_torch_2_11(query: Tensor, *_: Any, scale: float | None, window_size: tuple[int, int]) -> Tensor:
            return torch.empty_like(query)

        monkeypatch.setattr(varlen, "varlen_attn", of_torch_2_11)
        qkv = heads(2, BRAIN, "meta")
        assert attend_varlen(*qkv, make_row("cpu"), 0.5).shape == qkv[0].shape


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
class TestOnGpu:
    @pytest.mark.parametrize("n_kv_heads", [4, 2, 1])
    def test_attend_varlen_and_in_blocks_equal_float64(self, n_kv_heads: int) -> None:
        for attend in (attend_varlen, attend_in_blocks):
            qkv = heads(n_kv_heads, BRAIN, "cuda")
            output, wanted = attend(*qkv, make_row("cuda"), None), attend_one_by_one(*qkv)
            torch.testing.assert_close(output.double(), wanted, rtol=0, atol=2e-2)
            slopes = torch.randn_like(wanted)
            gradients = torch.autograd.grad((output.double() * slopes).sum(), qkv)
            for gradient, exact in zip(gradients, torch.autograd.grad((wanted * slopes).sum(), qkv), strict=True):
                torch.testing.assert_close(gradient, exact, rtol=2e-2, atol=5e-2)

    @pytest.mark.parametrize("dtype", [SINGLE, BRAIN])
    def test_attend_stores_no_scores(self, dtype: torch.dtype) -> None:
        length, n_heads = 4096, 8
        row = make_row("cuda", [length])
        options: Any = {"dtype": dtype, "device": "cuda", "requires_grad": True}
        query, key, value = (torch.randn(length, n, 64, **options) for n in (n_heads, 2, 2))
        attend = attend_in_blocks if dtype == SINGLE else attend_varlen
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        attend(query, key, value, row, None).sum().backward()
        scores_bytes = n_heads * length * length * dtype.itemsize
        assert torch.cuda.max_memory_allocated() - before < scores_bytes / 2

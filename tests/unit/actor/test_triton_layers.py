"""The Triton kernels of the layers against PyTorch, in Triton's interpreter and on a GPU if there is one."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe_gkd.actor.megatron import gated_silu, rotary
from recipe_gkd.losses import kernel_backend
from tests._support.triton_compiler import TARGETS, KernelCompiler
from tests._support.triton_interpreter import Run
from tests._support.virtual_memory import little_memory_used, run_or_skip, sparse_tensor

pytest.importorskip("triton", reason="needs triton")
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
ROUNDING = {HALF: 2**-10, BRAIN: 2**-7, SINGLE: 2**-22}
"""Distance of neighboring numbers, relative to the largest entry. The interpreter truncates to bfloat16."""
STRIDE = 2**30 + 16
"""A distance in elements. Three times the distance exceeds 2^31."""


def check_gated_silu(rows: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    torch.manual_seed(0)
    values = 4 * torch.randn(rows, 1, 2 * width, dtype=SINGLE, device=device)
    values[0, 0, :2] = torch.tensor([-200.0, 200.0])  # exp overflows
    weight = torch.randn(rows, 1, width, dtype=SINGLE, device=device).to(dtype)
    compare(gated_silu._TritonGatedSilu.apply, gated_silu._GatedSilu.apply, values.to(dtype), weight)


def check_rotation(rows: int, n_heads: int, width: int, dtype: torch.dtype, device: str = "cpu") -> None:
    torch.manual_seed(0)
    heads = torch.randn(rows, 2 * n_heads, width, dtype=SINGLE, device=device).to(dtype)[:, ::2]
    angles = torch.randn(rows, 1, 1, width // 2, device=device).repeat(1, 1, 1, 2)
    table = torch.cat([angles.cos(), angles.sin()], dim=2).to(dtype)
    weight = torch.randn(rows, n_heads, width, device=device).to(dtype)
    compare(lambda x: rotary._TritonRotation.apply(x, table), partial(rotate_in_torch, table), heads, weight)


def check_large_offsets_of_gated_silu() -> None:
    """Check rows of more than 2^30 columns, of which the kernels visit the first block.

    The kernels are called directly: the wrapper is used for contiguous tensors only, and its grid visits all columns.
    """
    from recipe_gkd.actor.megatron import triton_kernels

    torch.manual_seed(0)
    rows, block = 3, 64
    with little_memory_used():
        gate_and_up = sparse_tensor((rows, 2, block), (2 * STRIDE, STRIDE, 1), BRAIN)
        gate_and_up.copy_(torch.randn(rows, 2, block))
        gradient, out = (sparse_tensor((rows, block), (STRIDE, 1), BRAIN) for _ in range(2))
        gradient.copy_(torch.randn(rows, block))
        together = gate_and_up.flatten(1).requires_grad_()
        expected = gated_silu._GatedSilu.apply(together * 1)
        (expected_gradient,) = torch.autograd.grad(expected, together, gradient.clone())
        triton_kernels.write_gated_silu[rows, 1](out, gate_and_up, STRIDE, BLOCK=block)
        triton_kernels.write_gated_silu_gradient[rows, 1](gate_and_up, gradient, STRIDE, BLOCK=block)
        assert_near(out, expected)
        assert_near(gate_and_up.flatten(1), expected_gradient)


def check_large_strides_of_rotation() -> None:
    """Check rows far apart and, as in a tensor whose first dimension is the heads, heads far apart."""
    torch.manual_seed(0)
    table = torch.randn(3, 1, 2, 64).to(BRAIN).repeat(1, 1, 1, 2)
    values = torch.randn(3, 4, 128).to(BRAIN)
    expected = rotate_in_torch(table, values)
    with little_memory_used():
        for strides in ((STRIDE, 128, 1), (128, STRIDE, 1)):
            heads = sparse_tensor(values.shape, strides, BRAIN).copy_(values)
            assert_near(rotary._TritonRotation.apply(heads, table), expected)


def check_large_offsets_of_rotation() -> None:
    """Check heads of 2^30 channels, of which the kernel, called directly, visits the first pairs."""
    from recipe_gkd.actor.megatron import triton_kernels

    torch.manual_seed(0)
    n_heads, block, n_pairs = 2, 64, STRIDE // 2
    table = torch.randn(3, 1, 2, block).to(BRAIN).repeat(1, 1, 1, 2)
    values = torch.randn(3, n_heads, 2 * block).to(BRAIN)
    with little_memory_used():
        shape, strides = (3, n_heads, 2, block), (n_heads * 2 * n_pairs, 2 * n_pairs, n_pairs, 1)
        heads, out = (sparse_tensor(shape, strides, BRAIN) for _ in range(2))
        heads.copy_(values.view(shape))
        large_table = sparse_tensor((3, 2, block), (4 * n_pairs, 2 * n_pairs, 1), BRAIN)
        large_table.copy_(table[:, 0, :, :block])
        triton_kernels.rotate_heads[3,](
            out, heads, large_table, *strides[:2], n_heads, n_pairs, SIGN=1, HEADS=n_heads, PAIRS=block
        )
        assert_near(out.flatten(2), rotate_in_torch(table, values))


def rotate_in_torch(table: Tensor, heads: Tensor) -> Tensor:
    """Return :func:`rotary.rotate` by PyTorch's operations, on any device."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rotary, "runs_triton", lambda _: False)
        return rotary.rotate(heads, table)


def compare(one: Callable[..., Tensor], other: Callable[..., Tensor], values: Tensor, weight: Tensor) -> None:
    """Compare results and gradients of two functions."""
    results = []
    for function in (one, other):
        x = values.clone().requires_grad_()
        output = function(x * 1)
        results.append((output, *torch.autograd.grad(output, x, weight)))
    for found, expected in zip(*results, strict=True):
        assert_near(found, expected)


def assert_near(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    atol = 2 * ROUNDING[found.dtype] * expected.abs().max().item()
    torch.testing.assert_close(found.float(), expected.float(), rtol=0, atol=atol)


@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
class TestInterpreted:
    def test_gated_silu_equals_torch(self, interpreted: Run, dtype: torch.dtype) -> None:
        for rows, width in ((3, 24), (2, 2049), (1, 1)):
            interpreted(check_gated_silu, rows, width, dtype)

    def test_rotation_equals_torch(self, interpreted: Run, dtype: torch.dtype) -> None:
        for n_heads, width in ((12, 128), (1, 64), (3, 12)):
            interpreted(check_rotation, 5, n_heads, width, dtype)


class TestLargeOffsets:
    @pytest.mark.parametrize(
        "check",
        [check_large_offsets_of_gated_silu, check_large_strides_of_rotation, check_large_offsets_of_rotation],
    )
    def test_offsets_beyond_2_31_equal_torch(self, interpreted: Run, check: Callable[[], None]) -> None:
        run_or_skip(interpreted, check)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
class TestOnGpu:
    def test_gated_silu_equals_torch(self, dtype: torch.dtype) -> None:
        for rows, width in ((300, 8960), (7, 100)):
            check_gated_silu(rows, width, dtype, "cuda")

    def test_rotation_equals_torch(self, dtype: torch.dtype) -> None:
        for n_heads, width in ((12, 128), (2, 64), (3, 12)):
            check_rotation(1000, n_heads, width, dtype, "cuda")

    def test_more_than_2_31_hidden_states_equal_small_batch(self, dtype: torch.dtype) -> None:
        if dtype == SINGLE:
            pytest.skip("needs 30 GB")
        one = torch.randn(1024, 2 * 1024, dtype=dtype, device="cuda")
        many = one.repeat(1025, 1).requires_grad_()  # 2^31 + 2^21 numbers
        small = one.clone().requires_grad_()
        expected = gated_silu._TritonGatedSilu.apply(small * 1)
        (gradient,) = torch.autograd.grad(expected.sum(), small)
        found = gated_silu._TritonGatedSilu.apply(many * 1)
        (gradients,) = torch.autograd.grad(found.sum(), many)
        assert torch.equal(found[-1024:], expected)
        assert torch.equal(gradients[-1024:], gradient)

    def test_gated_silu_writes_gradient_over_input_once(self, dtype: torch.dtype) -> None:
        x = torch.randn(3, 8, dtype=dtype, device="cuda", requires_grad=True)
        product = x * 1
        activated = gated_silu.GatedSilu()(product)
        (gradient,) = torch.autograd.grad(activated.sum(), product, retain_graph=True)
        assert gradient.data_ptr() == product.data_ptr()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            torch.autograd.grad(activated.sum(), product)


def test_kernel_backend_torch_is_also_for_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_backend, "_load_triton", lambda: kernel_backend)
    monkeypatch.setattr(kernel_backend, "_layers_use_triton", True)  # restored at the end
    on_gpu: Any = SimpleNamespace(is_cuda=True, dtype=BRAIN)
    for choice, expected in (("torch", False), ("auto", True), ("triton", True)):
        kernel_backend.choose_layer_kernels(choice)
        assert kernel_backend.runs_triton(on_gpu) is expected
    assert not kernel_backend.runs_triton(torch.zeros(1))


POINTERS = ("out", "gate_and_up", "gradient", "heads", "table")
KERNELS: list[tuple[str, dict[str, int], int]] = [
    ("write_gated_silu", {"BLOCK": 2048}, 8),
    ("write_gated_silu_gradient", {"BLOCK": 2048}, 8),
    ("rotate_heads", {"SIGN": 1, "HEADS": 16, "PAIRS": 64}, 4),
    ("rotate_heads", {"SIGN": -1, "HEADS": 16, "PAIRS": 64}, 4),
    ("rotate_heads", {"SIGN": 1, "HEADS": 1, "PAIRS": 64, "n_heads": 1}, 4),
]
"""Kernels with their constants and their number of warps. With one key head per rank, ``n_heads`` is a constant."""


@pytest.mark.parametrize(("capability", "dtype"), TARGETS)
@pytest.mark.parametrize(("name", "constants", "num_warps"), KERNELS)
def test_kernel_compiles_with_16_byte_accesses_and_without_spills(
    compiler: KernelCompiler, name: str, constants: dict[str, int], num_warps: int, capability: int, dtype: str
) -> None:
    from recipe_gkd.actor.megatron import triton_kernels

    kernel = getattr(triton_kernels, name)
    compiled = compiler.compile(
        kernel,
        dict.fromkeys(POINTERS, f"*{dtype}"),
        constants,
        capability,
        aligned=kernel.arg_names,
        num_warps=num_warps,
        enable_fp_fusion=name != "rotate_heads",
    )
    assert compiled.spilled_bytes == 0
    if constants.get("HEADS") != 1:
        assert compiled.reads(16)
        assert compiled.writes(16)

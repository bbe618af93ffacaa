"""Triton kernels of the gated activation, and of the rotary embedding without Transformer Engine.

Each intermediate result is rounded to the data type of the tensors, as by the operations of PyTorch that the kernels
replace. Row numbers are 64-bit, because a micro-batch can have more than 2^31 hidden states. Head numbers are too,
because the first dimension in memory can be the heads.

Shape suffixes: C columns of a block, H heads, P pairs of channels of a head.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: PLR0913  # a kernel takes pointers and numbers, not records
# No ``from __future__ import annotations`` here: Triton evaluates these annotations.

import triton
import triton.language as tl


@triton.jit
def write_gated_silu(out, gate_and_up, width, BLOCK: tl.constexpr):
    """Write ``silu(gate) * up``, [rows, width], of [rows, 2 width]. Grid: rows, blocks of columns."""
    row = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column_C = column_C < width
    gate_C = tl.load(gate_and_up + 2 * row * width + column_C, mask=is_column_C)
    up_C = tl.load(gate_and_up + (2 * row + 1) * width + column_C, mask=is_column_C)
    x_C = gate_C.to(tl.float32)
    silu_C = (x_C / (1 + tl.exp(-x_C))).to(gate_C.dtype)
    tl.store(out + row * width + column_C, silu_C.to(tl.float32) * up_C.to(tl.float32), mask=is_column_C)


@triton.jit
def write_gated_silu_gradient(gate_and_up, gradient, width, BLOCK: tl.constexpr):
    """Write the gradient of :func:`write_gated_silu` over its input. Grid: rows, blocks of columns."""
    row = tl.program_id(0).to(tl.int64)
    column_C = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column_C = column_C < width
    gate_pointer_C = gate_and_up + 2 * row * width + column_C
    up_pointer_C = gate_and_up + (2 * row + 1) * width + column_C
    gate_C = tl.load(gate_pointer_C, mask=is_column_C)
    up_C = tl.load(up_pointer_C, mask=is_column_C).to(tl.float32)
    gradient_C = tl.load(gradient + row * width + column_C, mask=is_column_C).to(tl.float32)
    x_C = gate_C.to(tl.float32)
    sigmoid_C = 1 / (1 + tl.exp(-x_C))
    silu_C = (x_C * sigmoid_C).to(gate_C.dtype).to(tl.float32)
    grad_silu_C = (gradient_C * up_C).to(gate_C.dtype).to(tl.float32)
    tl.store(up_pointer_C, gradient_C * silu_C, mask=is_column_C)
    tl.store(gate_pointer_C, grad_silu_C * sigmoid_C * (1 + x_C * (1 - sigmoid_C)), mask=is_column_C)


@triton.jit
def rotate_heads(
    out, heads, table, row_stride, head_stride, n_heads, n_pairs, SIGN: tl.constexpr, HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
):  # fmt: skip
    """Write the heads of a row, rotated by its angles times ``SIGN``, [rows, n_heads, 2 n_pairs]. Grid: rows.

    The table has the cosines and the sines of a row, each for all channels of a head. The values of channels i and
    i + n_pairs are equal.
    """
    row = tl.program_id(0).to(tl.int64)
    pair_P = tl.arange(0, PAIRS)
    head_H1 = tl.arange(0, HEADS)[:, None].to(tl.int64)
    cos_P = tl.load(table + 4 * row * n_pairs + pair_P, mask=pair_P < n_pairs)
    sin_P = tl.load(table + (4 * row + 2) * n_pairs + pair_P, mask=pair_P < n_pairs)
    cos_1P, sin_1P = cos_P.to(tl.float32)[None, :], SIGN * sin_P.to(tl.float32)[None, :]
    is_entry_HP = (head_H1 < n_heads) & (pair_P < n_pairs)[None, :]
    entry_HP = heads + row * row_stride + head_H1 * head_stride + pair_P[None, :]
    loaded_HP = tl.load(entry_HP, mask=is_entry_HP)
    first_HP = loaded_HP.to(tl.float32)
    second_HP = tl.load(entry_HP + n_pairs, mask=is_entry_HP).to(tl.float32)
    dtype = loaded_HP.dtype
    out_HP = out + (row * n_heads + head_H1) * 2 * n_pairs + pair_P[None, :]
    tl.store(out_HP, _sum(first_HP * cos_1P, -second_HP * sin_1P, dtype), mask=is_entry_HP)
    tl.store(out_HP + n_pairs, _sum(second_HP * cos_1P, first_HP * sin_1P, dtype), mask=is_entry_HP)


@triton.jit
def _sum(one, other, dtype: tl.constexpr):
    """Return the sum of two products that were rounded."""
    return one.to(dtype).to(tl.float32) + other.to(dtype).to(tl.float32)

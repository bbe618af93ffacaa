"""The kernels of :mod:`~recipe_gkd.losses.triton_backend`.

Axis names: R groups of L neighboring columns, which one thread reads at once; K support ids. Rows are 64-bit: a micro
batch can hold more than 2^31 logits. Matrices other than logits and gradient are contiguous.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# No ``from __future__ import annotations`` here: Triton reads these annotations.

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
FAR_BELOW = tl.constexpr(-1e30)
"""A finite stand-in for -inf, whose product with 0 would be nan."""
WORD = tl.constexpr(32)
"""Columns in a word of the bitmask of the support."""


@triton.jit
def mark_support(words, columns, own, n_words, n_support, BLOCK: tl.constexpr):
    """Set the bits of this rank's support ids. Grid: rows, blocks of K."""
    row = tl.program_id(0).to(tl.int64)
    entry_K = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own_K = tl.load(own + row * n_support + entry_K, mask=entry_K < n_support, other=0) != 0
    column_K = tl.load(columns + row * n_support + entry_K, mask=own_K, other=0)
    bit_K = tl.full([BLOCK], 1, tl.int32) << (column_K % WORD).to(tl.int32)
    tl.atomic_or(words + row * n_words + column_K // WORD, bit_K, mask=own_K, sem="relaxed")


@triton.jit
def sum_tails(
    parts,
    logits,
    words,
    row_stride,
    n_words,
    width,
    real_columns,
    columns_per_split,
    inverse_temperature,
    second_inverse_temperature,
    HEADS: tl.constexpr,
    SUPPORT: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """``parts`` [rows, splits, HEADS, 3]: max l, sum e and sum e (l - max l), with e = exp((l - max l) / temperature).
    Differences of logits l lose no digit, those of l / temperature would. Grid: rows, splits.

    Each group has sums of its own until the end, so that no thread waits for another inside of the loop.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    group_R = tl.arange(0, BLOCK // LANES)
    lane_L = tl.arange(0, LANES)
    m_R = tl.full([BLOCK // LANES], float("-inf"), tl.float32)
    sum_R = tl.zeros([BLOCK // LANES], tl.float32)
    weighted_R = tl.zeros([BLOCK // LANES], tl.float32)
    second_m_R, second_sum_R, second_weighted_R = m_R, sum_R, weighted_R
    rate = inverse_temperature * LOG2_E
    second_rate = second_inverse_temperature * LOG2_E

    first = split * columns_per_split
    for start in range(first, tl.minimum(first + columns_per_split, real_columns), BLOCK):
        column_R = start + group_R * LANES
        column_RL = column_R[:, None] + lane_L[None, :]
        logit_RL = tl.load(logits + row * row_stride + column_RL, mask=column_RL < width, other=float("-inf"))
        logit_RL = logit_RL.to(tl.float32)
        if start + BLOCK > real_columns:  # not in the mask of the load, which is faster in whole vectors
            logit_RL = tl.where(column_RL < real_columns, logit_RL, float("-inf"))
        tail_RL = logit_RL
        if SUPPORT:
            word_R = tl.load(words + row * n_words + column_R // WORD, mask=column_R < width, other=0)
            bit_RL = (word_R >> (column_R % WORD))[:, None] >> lane_L[None, :]
            tail_RL = tl.where((bit_RL & 1) != 0, float("-inf"), logit_RL)
        m_R, sum_R, weighted_R = _add_columns(m_R, sum_R, weighted_R, tail_RL, rate)
        if HEADS == 2:
            second_m_R, second_sum_R, second_weighted_R = _add_columns(
                second_m_R, second_sum_R, second_weighted_R, logit_RL, second_rate
            )

    part = parts + (row * tl.num_programs(1) + split) * (HEADS * 3)
    _store_sums(part, m_R, sum_R, weighted_R, rate, 1.0)
    if HEADS == 2:
        _store_sums(part + 3, second_m_R, second_sum_R, second_weighted_R, second_rate, 1.0)


@triton.jit
def merge_splits(
    sums, parts, n_splits, inverse_temperature, second_inverse_temperature, HEADS: tl.constexpr, SPLITS: tl.constexpr
):
    """``sums`` [rows, HEADS, 3]: max l, sum e, and sum e (l - max l) / temperature. Grid: rows, HEADS."""
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    inverse = inverse_temperature
    if head == 1:
        inverse = second_inverse_temperature
    split_S = tl.arange(0, SPLITS)
    part_S = parts + ((row * n_splits + split_S) * HEADS + head) * 3
    inside_S = split_S < n_splits
    m_S = tl.load(part_S, mask=inside_S, other=float("-inf"))
    sum_S = tl.load(part_S + 1, mask=inside_S, other=0.0)
    weighted_S = tl.load(part_S + 2, mask=inside_S, other=0.0)
    _store_sums(sums + (row * HEADS + head) * 3, m_S, sum_S, weighted_S, inverse * LOG2_E, inverse)


@triton.jit
def _add_columns(m_R, sum_R, weighted_R, logit_RL, rate):
    new_m_R = tl.maximum(m_R, tl.max(logit_RL, axis=1))
    base_R = tl.where(new_m_R > float("-inf"), new_m_R, 0.0)
    distance_RL = logit_RL - base_R[:, None]
    e_RL = tl.exp2(distance_RL * rate)
    lower_R = tl.maximum(m_R - base_R, FAR_BELOW)
    scale_R = tl.exp2(lower_R * rate)
    weighted_R = (weighted_R + sum_R * lower_R) * scale_R
    weighted_R += tl.sum(e_RL * tl.maximum(distance_RL, FAR_BELOW), axis=1)
    sum_R = sum_R * scale_R + tl.sum(e_RL, axis=1)
    return new_m_R, sum_R, weighted_R


@triton.jit
def _store_sums(where, m_X, sum_X, weighted_X, rate, unit):
    """Merge sums that each have a maximum of their own, and write the three numbers, the last times ``unit``.

    A maximum passes over nan, the sums do not: all three are nan then.
    """
    m = tl.max(m_X, axis=0)
    base = tl.where(m > float("-inf"), m, 0.0)
    lower_X = tl.maximum(m_X - base, FAR_BELOW)
    scale_X = tl.exp2(lower_X * rate)
    total = tl.sum(sum_X * scale_X, axis=0)
    tl.store(where, tl.where(total == total, m, total))
    tl.store(where + 1, total)
    tl.store(where + 2, tl.sum((weighted_X + sum_X * lower_X) * scale_X, axis=0) * unit)


@triton.jit
def write_tails(
    out,
    logits,
    top,
    grad_tail,
    out_stride,
    row_stride,
    width,
    real_columns,
    inverse_temperature,
    second_inverse_temperature,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient as if all columns were off the support: :func:`write_special` puts the others right. Grid: rows,
    blocks of columns. A column is read and written by one thread, so that ``out`` may be ``logits``.
    """
    row = tl.program_id(0).to(tl.int64)
    column_W = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside_W = column_W < width
    logit_W = tl.load(logits + row * row_stride + column_W, mask=inside_W, other=0.0).to(tl.float32)
    grad_W = _tail_gradient(logit_W, top + row * HEADS, grad_tail + row * HEADS, inverse_temperature)
    if HEADS == 2:
        grad_W += _tail_gradient(logit_W, top + row * 2 + 1, grad_tail + row * 2 + 1, second_inverse_temperature)
    grad_W = tl.where(column_W < real_columns, grad_W, 0.0)
    tl.store(out + row * out_stride + column_W, grad_W.to(out.dtype.element_ty), mask=inside_W)


@triton.jit
def find_special(
    values,
    logits,
    columns,
    own,
    grad_support,
    picked_columns,
    grad_picked,
    top,
    grad_tail,
    row_stride,
    n_support,
    real_columns,
    inverse_temperature,
    second_inverse_temperature,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``values`` [rows, K + 1]: the whole gradient at the support's columns and, last, at the picked one, from logits
    that may be overwritten next. A picked id in the support has the same value in both places. Grid: rows.
    """
    row = tl.program_id(0).to(tl.int64)
    picked = tl.load(picked_columns + row)
    picked_grad = tl.load(grad_picked + row)
    is_support = 0
    value_in_support = 0.0
    for start in range(0, n_support, BLOCK):
        entry_K = start + tl.arange(0, BLOCK)
        own_K = tl.load(own + row * n_support + entry_K, mask=entry_K < n_support, other=0) != 0
        column_K = tl.load(columns + row * n_support + entry_K, mask=own_K, other=0)
        value_K = tl.load(grad_support + row * n_support + entry_K, mask=own_K, other=0.0)
        is_picked_K = own_K & (column_K == picked)
        value_K += tl.where(is_picked_K, picked_grad, 0.0)
        if HEADS == 2:
            logit_K = tl.load(logits + row * row_stride + column_K, mask=own_K, other=0.0).to(tl.float32)
            value_K += _tail_gradient(logit_K, top + row * 2 + 1, grad_tail + row * 2 + 1, second_inverse_temperature)
        tl.store(values + row * (n_support + 1) + entry_K, value_K, mask=own_K)
        is_support = tl.maximum(is_support, tl.max(is_picked_K.to(tl.int32), axis=0))
        value_in_support += tl.sum(tl.where(is_picked_K, value_K, 0.0), axis=0)

    logit = tl.load(logits + row * row_stride + picked).to(tl.float32)
    value = picked_grad + _tail_gradient(logit, top + row * HEADS, grad_tail + row * HEADS, inverse_temperature)
    if HEADS == 2:
        value += _tail_gradient(logit, top + row * 2 + 1, grad_tail + row * 2 + 1, second_inverse_temperature)
    value = tl.where(is_support > 0, value_in_support, value)
    value = tl.where(picked < real_columns, value, 0.0)
    tl.store(values + row * (n_support + 1) + n_support, value)


@triton.jit
def write_special(out, values, columns, own, picked_columns, out_stride, n_support, BLOCK: tl.constexpr):
    """Grid: rows, blocks of K + 1."""
    row = tl.program_id(0).to(tl.int64)
    entry_K = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    own_K = tl.load(own + row * n_support + entry_K, mask=entry_K < n_support, other=0) != 0
    column_K = tl.load(columns + row * n_support + entry_K, mask=own_K, other=0)
    column_K = tl.where(entry_K == n_support, tl.load(picked_columns + row), column_K)
    written_K = own_K | (entry_K == n_support)
    value_K = tl.load(values + row * (n_support + 1) + entry_K, mask=written_K, other=0.0)
    tl.store(out + row * out_stride + column_K, value_K.to(out.dtype.element_ty), mask=written_K)


@triton.jit
def _tail_gradient(logit_X, top, grad_tail, inverse_temperature):
    return tl.exp((logit_X - tl.load(top)) * inverse_temperature) * (tl.load(grad_tail) * inverse_temperature)

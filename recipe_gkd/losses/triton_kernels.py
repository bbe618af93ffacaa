"""Kernels of :mod:`~recipe_gkd.losses.triton_backend`.

Shape suffixes: G groups of L neighboring columns, which one thread loads at once; W columns of a block; K support ids;
S splits of a row; X any shape. Row numbers are 64-bit, because a micro-batch can hold more than 2^31 logits. Matrices
other than the logits and the gradient are contiguous.
"""

# mypy: allow-untyped-defs, allow-untyped-calls
# ruff: noqa: PLR0913  # a kernel takes pointers and numbers, not records
# No ``from __future__ import annotations`` here: Triton evaluates these annotations.

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# Finite stand-in for -inf: the product of -inf and 0 would be nan.
MIN_LOG = tl.constexpr(-1e30)
WORD_BITS = tl.constexpr(32)


@triton.jit
def mark_support(words, columns, is_local, n_words, n_support, BLOCK: tl.constexpr):
    """Set the bits of this rank's support ids. Grid: rows, blocks of K."""
    row = tl.program_id(0).to(tl.int64)
    entry_K = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_local_K = tl.load(is_local + row * n_support + entry_K, mask=entry_K < n_support, other=0) != 0
    column_K = tl.load(columns + row * n_support + entry_K, mask=is_local_K, other=0)
    bit_K = tl.full([BLOCK], 1, tl.int32) << (column_K % WORD_BITS).to(tl.int32)
    tl.atomic_or(words + row * n_words + column_K // WORD_BITS, bit_K, mask=is_local_K, sem="relaxed")


@triton.jit
def sum_tails(
    partials,
    logits,
    words,
    row_stride,
    n_words,
    width,
    real_columns,
    columns_per_split,
    inverse_temperature,
    second_inverse_temperature,
    N_SOFTMAXES: tl.constexpr,
    HAS_SUPPORT: tl.constexpr,
    BLOCK: tl.constexpr,
    LANES: tl.constexpr,
):
    """Write the sums over one split of a row, [rows, splits, N_SOFTMAXES, 3]. Grid: rows, splits.

    They are m = max(l), sum(e) and sum(e * (l - m)) with e = exp((l - m) / temperature). Differences of logits l are
    exact; differences of l / temperature are not. Each group of columns keeps its own sums until the end, so that the
    loop contains no reduction across threads.
    """
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1)
    group_G = tl.arange(0, BLOCK // LANES)
    lane_L = tl.arange(0, LANES)
    m_G = tl.full([BLOCK // LANES], float("-inf"), tl.float32)
    sum_G = tl.zeros([BLOCK // LANES], tl.float32)
    weighted_G = tl.zeros([BLOCK // LANES], tl.float32)
    second_m_G, second_sum_G, second_weighted_G = m_G, sum_G, weighted_G
    rate = inverse_temperature * LOG2_E
    second_rate = second_inverse_temperature * LOG2_E

    first = split * columns_per_split
    for start in range(first, tl.minimum(first + columns_per_split, real_columns), BLOCK):
        column_G = start + group_G * LANES
        column_GL = column_G[:, None] + lane_L[None, :]
        logit_GL = tl.load(logits + row * row_stride + column_GL, mask=column_GL < width, other=float("-inf"))
        logit_GL = logit_GL.to(tl.float32)
        if start + BLOCK > real_columns:  # outside the mask of the load, which is faster in whole vectors
            logit_GL = tl.where(column_GL < real_columns, logit_GL, float("-inf"))
        tail_GL = logit_GL
        if HAS_SUPPORT:
            word_G = tl.load(words + row * n_words + column_G // WORD_BITS, mask=column_G < width, other=0)
            bit_GL = (word_G >> (column_G % WORD_BITS))[:, None] >> lane_L[None, :]
            tail_GL = tl.where((bit_GL & 1) != 0, float("-inf"), logit_GL)
        m_G, sum_G, weighted_G = _add_columns(m_G, sum_G, weighted_G, tail_GL, rate)
        if N_SOFTMAXES == 2:
            second_m_G, second_sum_G, second_weighted_G = _add_columns(
                second_m_G, second_sum_G, second_weighted_G, logit_GL, second_rate
            )

    partial = partials + (row * tl.num_programs(1) + split) * (N_SOFTMAXES * 3)
    _store_sums(partial, m_G, sum_G, weighted_G, rate, 1.0)
    if N_SOFTMAXES == 2:
        _store_sums(partial + 3, second_m_G, second_sum_G, second_weighted_G, second_rate, 1.0)


@triton.jit
def merge_splits(
    sums,
    partials,
    n_splits,
    inverse_temperature,
    second_inverse_temperature,
    N_SOFTMAXES: tl.constexpr,
    MAX_SPLITS: tl.constexpr,
):
    """Merge the sums of all splits, [rows, N_SOFTMAXES, 3]. Grid: rows, N_SOFTMAXES.

    The results are m = max(l), sum(e), and sum(e * (l - m)) / temperature.
    """
    row = tl.program_id(0).to(tl.int64)
    softmax = tl.program_id(1)
    inverse = inverse_temperature
    if softmax == 1:
        inverse = second_inverse_temperature
    split_S = tl.arange(0, MAX_SPLITS)
    partial_S = partials + ((row * n_splits + split_S) * N_SOFTMAXES + softmax) * 3
    exists_S = split_S < n_splits
    m_S = tl.load(partial_S, mask=exists_S, other=float("-inf"))
    sum_S = tl.load(partial_S + 1, mask=exists_S, other=0.0)
    weighted_S = tl.load(partial_S + 2, mask=exists_S, other=0.0)
    _store_sums(sums + (row * N_SOFTMAXES + softmax) * 3, m_S, sum_S, weighted_S, inverse * LOG2_E, inverse)


@triton.jit
def _add_columns(m_G, sum_G, weighted_G, logit_GL, rate):
    new_m_G = tl.maximum(m_G, tl.max(logit_GL, axis=1))
    base_G = tl.where(new_m_G > float("-inf"), new_m_G, 0.0)
    distance_GL = logit_GL - base_G[:, None]
    e_GL = tl.exp2(distance_GL * rate)
    shift_G = tl.maximum(m_G - base_G, MIN_LOG)
    scale_G = tl.exp2(shift_G * rate)
    weighted_G = (weighted_G + sum_G * shift_G) * scale_G
    weighted_G += tl.sum(e_GL * tl.maximum(distance_GL, MIN_LOG), axis=1)
    sum_G = sum_G * scale_G + tl.sum(e_GL, axis=1)
    return new_m_G, sum_G, weighted_G


@triton.jit
def _store_sums(target, m_X, sum_X, weighted_X, rate, unit):
    """Merge sums with different maxima and write the three numbers, the last times ``unit``.

    A maximum ignores nan, the sums do not. For a nan sum all three numbers are nan.
    """
    m = tl.max(m_X, axis=0)
    base = tl.where(m > float("-inf"), m, 0.0)
    shift_X = tl.maximum(m_X - base, MIN_LOG)
    scale_X = tl.exp2(shift_X * rate)
    total = tl.sum(sum_X * scale_X, axis=0)
    tl.store(target, tl.where(total == total, m, total))
    tl.store(target + 1, total)
    tl.store(target + 2, tl.sum((weighted_X + sum_X * shift_X) * scale_X, axis=0) * unit)


@triton.jit
def write_tails(
    out,
    logits,
    max_logit,
    grad_tail,
    grad_slope,
    out_stride,
    row_stride,
    width,
    real_columns,
    inverse_temperature,
    second_inverse_temperature,
    N_SOFTMAXES: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the gradient as if every column were outside the support. Grid: rows, blocks of W.

    :func:`write_id_gradients` overwrites the support and the sampled token. One thread reads and writes a column, so
    ``out`` may be ``logits``.
    """
    row = tl.program_id(0).to(tl.int64)
    column_W = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    exists_W = column_W < width
    logit_W = tl.load(logits + row * row_stride + column_W, mask=exists_W, other=0.0).to(tl.float32)
    tail = row * N_SOFTMAXES
    grad_W = _tail_gradient(logit_W, max_logit, grad_tail, grad_slope, tail, inverse_temperature, HAS_SLOPE)
    if N_SOFTMAXES == 2:
        grad_W += _tail_gradient(
            logit_W, max_logit, grad_tail, grad_slope, tail + 1, second_inverse_temperature, HAS_SLOPE
        )
    grad_W = tl.where(column_W < real_columns, grad_W, 0.0)
    tl.store(out + row * out_stride + column_W, grad_W.to(out.dtype.element_ty), mask=exists_W)


@triton.jit
def compute_id_gradients(
    values,
    logits,
    columns,
    is_local,
    sampled_columns,
    grad_support,
    grad_sampled,
    max_logit,
    grad_tail,
    grad_slope,
    row_stride,
    n_support,
    real_columns,
    inverse_temperature,
    second_inverse_temperature,
    N_SOFTMAXES: tl.constexpr,
    HAS_SLOPE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Write the complete gradient at the support ids and, last, at the sampled token, [rows, K + 1]. Grid: rows.

    It runs before the logits may be overwritten. A sampled token in the support gets the same value in both places.
    """
    row = tl.program_id(0).to(tl.int64)
    tail = row * N_SOFTMAXES
    sampled = tl.load(sampled_columns + row)
    sampled_grad = tl.load(grad_sampled + row)
    in_support = 0
    value_in_support = 0.0
    for start in range(0, n_support, BLOCK):
        entry_K = start + tl.arange(0, BLOCK)
        is_local_K = tl.load(is_local + row * n_support + entry_K, mask=entry_K < n_support, other=0) != 0
        column_K = tl.load(columns + row * n_support + entry_K, mask=is_local_K, other=0)
        value_K = tl.load(grad_support + row * n_support + entry_K, mask=is_local_K, other=0.0)
        is_sampled_K = is_local_K & (column_K == sampled)
        value_K += tl.where(is_sampled_K, sampled_grad, 0.0)
        if N_SOFTMAXES == 2:
            logit_K = tl.load(logits + row * row_stride + column_K, mask=is_local_K, other=0.0).to(tl.float32)
            value_K += _tail_gradient(
                logit_K, max_logit, grad_tail, grad_slope, tail + 1, second_inverse_temperature, HAS_SLOPE
            )
        tl.store(values + row * (n_support + 1) + entry_K, value_K, mask=is_local_K)
        in_support = tl.maximum(in_support, tl.max(is_sampled_K.to(tl.int32), axis=0))
        value_in_support += tl.sum(tl.where(is_sampled_K, value_K, 0.0), axis=0)

    logit = tl.load(logits + row * row_stride + sampled).to(tl.float32)
    value = sampled_grad
    value += _tail_gradient(logit, max_logit, grad_tail, grad_slope, tail, inverse_temperature, HAS_SLOPE)
    if N_SOFTMAXES == 2:
        value += _tail_gradient(
            logit, max_logit, grad_tail, grad_slope, tail + 1, second_inverse_temperature, HAS_SLOPE
        )
    value = tl.where(in_support > 0, value_in_support, value)
    value = tl.where(sampled < real_columns, value, 0.0)
    tl.store(values + row * (n_support + 1) + n_support, value)


@triton.jit
def write_id_gradients(out, values, columns, is_local, sampled_columns, out_stride, n_support, BLOCK: tl.constexpr):
    """Write the values of :func:`compute_id_gradients` to their columns. Grid: rows, blocks of K + 1."""
    row = tl.program_id(0).to(tl.int64)
    entry_K = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_local_K = tl.load(is_local + row * n_support + entry_K, mask=entry_K < n_support, other=0) != 0
    column_K = tl.load(columns + row * n_support + entry_K, mask=is_local_K, other=0)
    column_K = tl.where(entry_K == n_support, tl.load(sampled_columns + row), column_K)
    exists_K = is_local_K | (entry_K == n_support)
    value_K = tl.load(values + row * (n_support + 1) + entry_K, mask=exists_K, other=0.0)
    tl.store(out + row * out_stride + column_K, value_K.to(out.dtype.element_ty), mask=exists_K)


@triton.jit
def _tail_gradient(logit_X, max_logit, grad_tail, grad_slope, tail, inverse_temperature, HAS_SLOPE: tl.constexpr):
    """Return exp(x) (grad_tail + grad_slope x) / temperature with x = (logit - max_logit) / temperature."""
    x_X = (logit_X - tl.load(max_logit + tail)) * inverse_temperature
    if HAS_SLOPE:
        factor_X = tl.load(grad_tail + tail) + tl.load(grad_slope + tail) * tl.maximum(x_X, MIN_LOG)
        return tl.exp(x_X) * (factor_X * inverse_temperature)
    else:
        return tl.exp(x_X) * (tl.load(grad_tail + tail) * inverse_temperature)

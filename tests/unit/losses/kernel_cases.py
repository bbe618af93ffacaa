"""Chunks of logits with the expected sums and gradients in dense float64, and the checks of a kernel backend."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from recipe_gkd.losses.kernel_backend import KernelBackend, select_backend
from recipe_gkd.losses.logits_query import GradientSpec, SoftmaxSpec

KINDS = ("random", "all mass on the support", "+-1e4", "-inf among them", "all equal", "around 3e4")


@dataclass(frozen=True, kw_only=True)
class Case:
    """Parameters of a chunk.

    Attributes:
        has_slope: True if the gradient has the term of the entropy.
        kind: Kind of logits, one of ``KINDS``.
    """

    rows: int = 3
    width: int = 200
    real_columns: int = 193
    k: int = 17
    dtype: torch.dtype = torch.float32
    temperature: float = 1.0
    has_slope: bool = False
    kind: str = "random"
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Inputs of a kernel backend, and the expected sums.

    The first row samples an id of the support if there is one; the second row samples an id of another rank.

    Attributes:
        gradient: Coefficients of the gradient.
        sums_RH3: Expected sums, float64.
    """

    logits_RW: Tensor
    gradient: GradientSpec
    sums_RH3: Tensor = field(repr=False)

    @property
    def softmaxes(self) -> list[SoftmaxSpec]:
        return self.gradient.softmaxes


def make_chunk(case: Case, device: str = "cpu") -> Chunk:
    """Return a chunk. Every third support entry belongs to another rank, if some columns are outside the support."""
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    real_columns, whole = max(case.real_columns, 0), case.k == case.real_columns
    order_RW = normal(case.rows, max(real_columns, case.k)).argsort(1)
    is_local_RK = order_RW[:, : case.k] < real_columns
    if not whole:
        is_local_RK[:, 2::3] = False
    columns_RK = order_RW[:, : case.k].where(is_local_RK, 0)
    logits_RW = make_logits(case, normal(case.rows, case.width + 16), columns_RK, is_local_RK)
    softmaxes = [
        SoftmaxSpec(
            columns_TK=columns_RK,
            is_local_TK=is_local_RK,
            real_columns=case.real_columns,
            inverse_temperature=1 / case.temperature,
        )
    ]
    if case.temperature != 1:
        no_ids = {"columns_TK": columns_RK[:, :0], "is_local_TK": is_local_RK[:, :0]}
        softmaxes.append(replace(softmaxes[0], **no_ids, inverse_temperature=1.0))
    sums_RH3 = torch.stack([dense_sums(logits_RW, softmax) for softmax in softmaxes], dim=1)
    max_RH = sums_RH3[..., 0]
    sampled_R1 = (normal(case.rows, 1).abs() * real_columns).long() % max(real_columns, 1)
    grad_sampled_R1 = normal(case.rows, 1)
    if case.k and case.rows:
        sampled_R1[0] = columns_RK[0, 0]
    sampled_R1[1:2], grad_sampled_R1[1:2] = 0, 0
    if not real_columns:
        sampled_R1.zero_()
        grad_sampled_R1.zero_()
    grad_slope_RH = normal(case.rows, len(softmaxes)) if case.has_slope else None
    gradient = GradientSpec(
        softmaxes=softmaxes,
        max_TH=max_RH.where(max_RH > float("-inf"), 0).float(),
        grad_tail_TH=normal(case.rows, len(softmaxes)),
        grad_slope_TH=grad_slope_RH,
        grad_support_TK=normal(case.rows, case.k).where(is_local_RK, 0),
        sampled_columns_T1=sampled_R1,
        grad_sampled_T1=grad_sampled_R1,
    )
    return Chunk(logits_RW=logits_RW, gradient=gradient, sums_RH3=sums_RH3)


def make_logits(case: Case, noise_RX: Tensor, columns_RK: Tensor, is_local_RK: Tensor) -> Tensor:
    """Return logits of the case's kind. Their row stride is larger than their width, as in a slice of a vocabulary."""
    logits_RW = (noise_RX * 3)[:, : case.width]
    if case.kind == "all mass on the support":
        logits_RW.scatter_add_(1, columns_RK, is_local_RK * 1000.0)
    elif case.kind == "+-1e4":
        logits_RW.copy_(torch.where(logits_RW > 4, 1e4, torch.where(logits_RW < -2, -1e4, logits_RW)))
    elif case.kind == "-inf among them":
        logits_RW.masked_fill_(logits_RW < 0, float("-inf"))
    elif case.kind == "all equal":
        logits_RW.fill_(7.25)
    elif case.kind == "around 3e4":
        logits_RW += 3e4
    strided_RW = torch.empty(noise_RX.shape, dtype=case.dtype, device=noise_RX.device)[:, : case.width]
    return strided_RW.copy_(logits_RW)


def in_tail(width: int, softmax: SoftmaxSpec) -> Tensor:
    """Return the columns outside the support and the padding, bool [R, W]."""
    columns_W = torch.arange(width, device=softmax.is_local_TK.device)
    real_RW = columns_W.expand(len(softmax.is_local_TK), -1) < softmax.real_columns
    hits_RW = torch.zeros(real_RW.shape, dtype=torch.int64, device=real_RW.device)
    return real_RW & (hits_RW.scatter_add_(1, softmax.columns_TK, softmax.is_local_TK.long()) == 0)


def dense_sums(logits_RW: Tensor, softmax: SoftmaxSpec) -> Tensor:
    """Return maximum, sum(exp(x)) and sum(exp(x) x) of the tail, float64 [R, 3]."""
    tail_RW = logits_RW.double().where(in_tail(logits_RW.shape[1], softmax), float("-inf"))
    m_R = tail_RW.amax(1)
    x_RW = (tail_RW - m_R.where(m_R > float("-inf"), 0)[:, None]) * softmax.inverse_temperature
    e_RW = x_RW.exp()
    return torch.stack([m_R, e_RW.sum(1), (e_RW * x_RW.where(e_RW > 0, 0)).sum(1)], dim=1)


def dense_gradient(chunk: Chunk) -> Tensor:
    """Return the gradient, float64 [R, W]."""
    gradient = chunk.gradient
    grad_RW = torch.zeros(chunk.logits_RW.shape, dtype=torch.float64, device=chunk.logits_RW.device)
    for number, softmax in enumerate(gradient.softmaxes):
        x_RW = (chunk.logits_RW.double() - gradient.max_TH[:, number, None].double()) * softmax.inverse_temperature
        e_RW = x_RW.exp()
        factor_RW = gradient.grad_tail_TH[:, number, None].double().expand_as(x_RW)
        if gradient.grad_slope_TH is not None:
            factor_RW = factor_RW + gradient.grad_slope_TH[:, number, None].double() * x_RW.where(e_RW > 0, 0)
        tail_RW = in_tail(grad_RW.shape[1], softmax)
        grad_RW += (e_RW * factor_RW * softmax.inverse_temperature).where(tail_RW, 0)
    grad_RW.scatter_add_(1, gradient.softmaxes[0].columns_TK, gradient.grad_support_TK.double())
    return grad_RW.scatter_add_(1, gradient.sampled_columns_T1, gradient.grad_sampled_T1.double())


def check_kernels(case: Case, device: str = "cpu") -> None:
    """Check sums and gradients of the Triton kernels, on a GPU or in the interpreter."""
    chunk = make_chunk(case, device)
    backend = select_backend(chunk.logits_RW, "triton")
    check_sums(backend, chunk)
    grad_RW = check_gradient(backend, chunk)
    check_rounded_once(backend, chunk, grad_RW, truncates=device == "cpu")  # the interpreter truncates bfloat16


def check_sums(backend: KernelBackend, chunk: Chunk) -> None:
    before = chunk.logits_RW.clone()
    sums_RH3 = backend.tail_sums(chunk.logits_RW, chunk.softmaxes, torch.float32)
    torch.testing.assert_close(sums_RH3.double(), chunk.sums_RH3, rtol=5e-6, atol=1e-6)
    assert torch.equal(chunk.logits_RW, before)


def check_gradient(backend: KernelBackend, chunk: Chunk) -> Tensor:
    """Check the gradient in float32, from logits of any dtype, and return it."""
    out_RW = torch.full(chunk.logits_RW.shape, float("nan"), device=chunk.logits_RW.device)
    backend.write_gradient(out_RW, chunk.logits_RW, chunk.gradient)
    has_one_term = len(chunk.softmaxes) == 1 and chunk.gradient.grad_slope_TH is None
    atol = 1e-8 if has_one_term else 1e-6  # the sum of two terms can cancel
    torch.testing.assert_close(out_RW.double(), dense_gradient(chunk), rtol=1e-5, atol=atol)
    return out_RW


def check_rounded_once(backend: KernelBackend, chunk: Chunk, grad_RW: Tensor, *, truncates: bool) -> None:
    """Check the in-place gradient: the float32 gradient rounded once, and memory between the rows unchanged."""
    base = chunk.logits_RW._base
    assert base is not None
    base = base.clone()
    logits_RW = base[:, : chunk.logits_RW.shape[1]]
    gap = base[:, logits_RW.shape[1] :].clone()
    backend.write_gradient(logits_RW, logits_RW, chunk.gradient)
    expected = grad_RW.to(logits_RW.dtype)
    if truncates and logits_RW.dtype == torch.bfloat16:
        expected = (grad_RW.view(torch.int32) & -(1 << 16)).view(torch.float32).to(logits_RW.dtype)
    assert torch.equal(logits_RW, expected)
    assert torch.equal(base[:, logits_RW.shape[1] :].view(torch.uint8), gap.view(torch.uint8))

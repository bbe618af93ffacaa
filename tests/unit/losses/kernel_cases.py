"""Chunks of logits with the expected sums and gradients in dense float64, and the checks of a kernel backend."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from recipe_gkd.losses.kernel_backend import KernelBackend
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
        logits_CW: Logits.
        gradient: Coefficients of the gradient.
        sums_CH3: Expected sums, float64.
    """

    logits_CW: Tensor
    gradient: GradientSpec
    sums_CH3: Tensor = field(repr=False)

    @property
    def softmaxes(self) -> list[SoftmaxSpec]:
        return self.gradient.softmaxes


def make_chunk(case: Case, device: str = "cpu") -> Chunk:
    """Return a chunk. Every third support entry belongs to another rank, if some columns are outside the support."""
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    real_columns, whole = max(case.real_columns, 0), case.k == case.real_columns
    order_CW = normal(case.rows, max(real_columns, case.k)).argsort(1)
    is_local_CK = order_CW[:, : case.k] < real_columns
    if not whole:
        is_local_CK[:, 2::3] = False
    columns_CK = order_CW[:, : case.k].where(is_local_CK, 0)
    logits_CW = make_logits(case, normal(case.rows, case.width + 16), columns_CK, is_local_CK)
    softmaxes = [
        SoftmaxSpec(
            columns_TK=columns_CK,
            is_local_TK=is_local_CK,
            real_columns=case.real_columns,
            inverse_temperature=1 / case.temperature,
        )
    ]
    if case.temperature != 1:
        no_ids = {"columns_TK": columns_CK[:, :0], "is_local_TK": is_local_CK[:, :0]}
        softmaxes.append(replace(softmaxes[0], **no_ids, inverse_temperature=1.0))
    sums_CH3 = torch.stack([dense_sums(logits_CW, softmax) for softmax in softmaxes], dim=1)
    max_CH = sums_CH3[..., 0]
    sampled_C1 = (normal(case.rows, 1).abs() * 100).long() % max(real_columns, 1)
    grad_sampled_C1 = normal(case.rows, 1)
    if case.k and case.rows:
        sampled_C1[0] = columns_CK[0, 0]
    sampled_C1[1:2], grad_sampled_C1[1:2] = 0, 0
    if not real_columns:
        sampled_C1.zero_()
        grad_sampled_C1.zero_()
    grad_slope_CH = normal(case.rows, len(softmaxes)) if case.has_slope else None
    gradient = GradientSpec(
        softmaxes=softmaxes,
        max_TH=max_CH.where(max_CH > float("-inf"), 0).float(),
        grad_tail_TH=normal(case.rows, len(softmaxes)),
        grad_slope_TH=grad_slope_CH,
        grad_support_TK=normal(case.rows, case.k).where(is_local_CK, 0),
        sampled_columns_T1=sampled_C1,
        grad_sampled_T1=grad_sampled_C1,
    )
    return Chunk(logits_CW=logits_CW, gradient=gradient, sums_CH3=sums_CH3)


def make_logits(case: Case, noise_CX: Tensor, columns_CK: Tensor, is_local_CK: Tensor) -> Tensor:
    """Return logits of the case's kind. Their row stride is larger than their width, as in a slice of a vocabulary."""
    logits_CW = (noise_CX * 3)[:, : case.width]
    if case.kind == "all mass on the support":
        logits_CW.scatter_add_(1, columns_CK, is_local_CK * 1000.0)
    elif case.kind == "+-1e4":
        logits_CW.copy_(torch.where(logits_CW > 4, 1e4, torch.where(logits_CW < -2, -1e4, logits_CW)))
    elif case.kind == "-inf among them":
        logits_CW.masked_fill_(logits_CW < 0, float("-inf"))
    elif case.kind == "all equal":
        logits_CW.fill_(7.25)
    elif case.kind == "around 3e4":
        logits_CW += 3e4
    strided_CW = torch.empty(noise_CX.shape, dtype=case.dtype, device=noise_CX.device)[:, : case.width]
    return strided_CW.copy_(logits_CW)


def in_tail(width: int, softmax: SoftmaxSpec) -> Tensor:
    """Return the columns outside the support and the padding, bool [C, W]."""
    columns_W = torch.arange(width, device=softmax.is_local_TK.device)
    real_CW = columns_W.expand(len(softmax.is_local_TK), -1) < softmax.real_columns
    hits_CW = torch.zeros(real_CW.shape, dtype=torch.int64, device=real_CW.device)
    return real_CW & (hits_CW.scatter_add_(1, softmax.columns_TK, softmax.is_local_TK.long()) == 0)


def dense_sums(logits_CW: Tensor, softmax: SoftmaxSpec) -> Tensor:
    """Return maximum, sum(exp(x)) and sum(exp(x) x) of the tail, float64 [C, 3]."""
    tail_CW = logits_CW.double().where(in_tail(logits_CW.shape[1], softmax), float("-inf"))
    m_C = tail_CW.amax(1)
    x_CW = (tail_CW - m_C.where(m_C > float("-inf"), 0)[:, None]) * softmax.inverse_temperature
    e_CW = x_CW.exp()
    return torch.stack([m_C, e_CW.sum(1), (e_CW * x_CW.where(e_CW > 0, 0)).sum(1)], dim=1)


def dense_gradient(chunk: Chunk) -> Tensor:
    """Return the gradient, float64 [C, W]."""
    gradient = chunk.gradient
    grad_CW = torch.zeros(chunk.logits_CW.shape, dtype=torch.float64, device=chunk.logits_CW.device)
    for number, softmax in enumerate(gradient.softmaxes):
        x_CW = (chunk.logits_CW.double() - gradient.max_TH[:, number, None].double()) * softmax.inverse_temperature
        e_CW = x_CW.exp()
        factor_CW = gradient.grad_tail_TH[:, number, None].double().expand_as(x_CW)
        if gradient.grad_slope_TH is not None:
            factor_CW = factor_CW + gradient.grad_slope_TH[:, number, None].double() * x_CW.where(e_CW > 0, 0)
        tail_CW = in_tail(grad_CW.shape[1], softmax)
        grad_CW += (e_CW * factor_CW * softmax.inverse_temperature).where(tail_CW, 0)
    grad_CW.scatter_add_(1, gradient.softmaxes[0].columns_TK, gradient.grad_support_TK.double())
    return grad_CW.scatter_add_(1, gradient.sampled_columns_T1, gradient.grad_sampled_T1.double())


def check_sums(backend: KernelBackend, chunk: Chunk) -> None:
    before = chunk.logits_CW.clone()
    sums_CH3 = backend.tail_sums(chunk.logits_CW, chunk.softmaxes, torch.float32)
    torch.testing.assert_close(sums_CH3.double(), chunk.sums_CH3, rtol=5e-6, atol=1e-6)
    assert torch.equal(chunk.logits_CW, before)


def check_gradient(backend: KernelBackend, chunk: Chunk) -> Tensor:
    """Check the gradient in float32, from logits of any dtype, and return it."""
    out_CW = torch.full(chunk.logits_CW.shape, float("nan"), device=chunk.logits_CW.device)
    backend.write_gradient(out_CW, chunk.logits_CW, chunk.gradient)
    atol = 1e-8 if chunk.gradient.grad_slope_TH is None else 1e-6  # the sum of two terms can cancel
    torch.testing.assert_close(out_CW.double(), dense_gradient(chunk), rtol=1e-5, atol=atol)
    return out_CW


def check_rounded_once(backend: KernelBackend, chunk: Chunk, grad_CW: Tensor, *, truncates: bool) -> None:
    """Check the in-place gradient: the float32 gradient rounded once, and memory between the rows unchanged."""
    base = chunk.logits_CW._base
    assert base is not None
    base = base.clone()
    logits_CW = base[:, : chunk.logits_CW.shape[1]]
    gap = base[:, logits_CW.shape[1] :].clone()
    backend.write_gradient(logits_CW, logits_CW, chunk.gradient)
    expected = grad_CW.to(logits_CW.dtype)
    if truncates and logits_CW.dtype == torch.bfloat16:
        expected = (grad_CW.view(torch.int32) & -(1 << 16)).view(torch.float32).to(logits_CW.dtype)
    assert torch.equal(logits_CW, expected)
    assert torch.equal(base[:, logits_CW.shape[1] :].view(torch.uint8), gap.view(torch.uint8))

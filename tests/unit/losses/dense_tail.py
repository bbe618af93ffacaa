"""The sums and gradients of chunks of logits, densely in float64, and the checks of whoever computes them otherwise."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from recipe_gkd.losses.kernel_backend import KernelBackend
from recipe_gkd.losses.logits_query import Backward, SoftmaxSpec

KINDS = ("random", "all mass on the support", "+-1e4", "-inf among them", "all equal", "around 3e4")


@dataclass(frozen=True, kw_only=True)
class Case:
    rows: int = 3
    width: int = 200
    real_columns: int = 193
    k: int = 17
    dtype: torch.dtype = torch.float32
    temperature: float = 1.0
    kind: str = "random"
    seed: int = 0


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """All that the two functions take. The first row picks an id of the support, if there is one, the second row one
    that another rank has.
    """

    logits_CW: Tensor
    softmaxes: list[SoftmaxSpec]
    top_CH: Tensor
    grad_tail_CH: Tensor
    grad_support_CK: Tensor
    picked_columns_C1: Tensor
    grad_picked_C1: Tensor
    sums_CH3: Tensor = field(repr=False)
    """The expected ones, in float64."""

    @property
    def wanted(self) -> Backward:
        return Backward(
            softmaxes=self.softmaxes,
            top_TH=self.top_CH,
            grad_tail_TH=self.grad_tail_CH,
            grad_support_TK=self.grad_support_CK,
            picked_columns_T1=self.picked_columns_C1,
            grad_picked_T1=self.grad_picked_C1,
        )


def make(case: Case, device: str = "cpu") -> Chunk:
    """Every third support entry is another rank's, except where the support is to hold every column."""
    generator = torch.Generator(device).manual_seed(case.seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    real_columns, whole = max(case.real_columns, 0), case.k == case.real_columns
    order_CW = normal(case.rows, max(real_columns, case.k)).argsort(1)
    own_CK = order_CW[:, : case.k] < real_columns
    if not whole:
        own_CK[:, 2::3] = False
    columns_CK = order_CW[:, : case.k].where(own_CK, 0)
    # Rows further apart than they are long, as those of a slice of the vocabulary.
    logits_CW = (normal(case.rows, case.width + 16) * 3)[:, : case.width]
    if case.kind == "all mass on the support":
        logits_CW.scatter_add_(1, columns_CK, own_CK * 1000.0)
    elif case.kind == "+-1e4":
        logits_CW.copy_(torch.where(logits_CW > 4, 1e4, torch.where(logits_CW < -2, -1e4, logits_CW)))
    elif case.kind == "-inf among them":
        logits_CW.masked_fill_(logits_CW < 0, float("-inf"))
    elif case.kind == "all equal":
        logits_CW.fill_(7.25)
    elif case.kind == "around 3e4":
        logits_CW += 3e4
    strided = torch.empty(case.rows, case.width + 16, dtype=case.dtype, device=device)[:, : case.width]
    strided.copy_(logits_CW)

    softmaxes = [
        SoftmaxSpec(
            columns_TK=columns_CK,
            own_TK=own_CK,
            real_columns=case.real_columns,
            inverse_temperature=1 / case.temperature,
        )
    ]
    if case.temperature != 1:
        softmaxes.append(replace(softmaxes[0], columns_TK=columns_CK[:, :0], own_TK=own_CK[:, :0], inverse_temperature=1.0))
    sums_CH3 = torch.stack([dense_sums(strided, head) for head in softmaxes], dim=1)
    top_CH = sums_CH3[..., 0]
    picked_C1 = (normal(case.rows, 1).abs() * 100).long() % max(real_columns, 1)
    grad_picked_C1 = normal(case.rows, 1)
    if case.k and case.rows:
        picked_C1[0] = columns_CK[0, 0]
    picked_C1[1:2], grad_picked_C1[1:2] = 0, 0
    if not real_columns:
        picked_C1.zero_()
        grad_picked_C1.zero_()
    return Chunk(
        logits_CW=strided,
        softmaxes=softmaxes,
        top_CH=top_CH.where(top_CH > float("-inf"), 0).float(),
        grad_tail_CH=normal(case.rows, len(softmaxes)),
        grad_support_CK=normal(case.rows, case.k).where(own_CK, 0),
        picked_columns_C1=picked_C1,
        grad_picked_C1=grad_picked_C1,
        sums_CH3=sums_CH3,
    )


def in_tail(width: int, head: SoftmaxSpec) -> Tensor:
    """[C, W]"""
    tail_CW = torch.arange(width, device=head.own_TK.device).expand(len(head.own_TK), -1) < head.real_columns
    hits_CW = torch.zeros(tail_CW.shape, dtype=torch.int64, device=tail_CW.device)
    return tail_CW & (hits_CW.scatter_add_(1, head.columns_TK, head.own_TK.long()) == 0)


def dense_sums(logits_CW: Tensor, head: SoftmaxSpec) -> Tensor:
    """[C, 3]"""
    tail_CW = logits_CW.double().where(in_tail(logits_CW.shape[1], head), float("-inf"))
    m_C = tail_CW.amax(1)
    distance_CW = (tail_CW - m_C.where(m_C > float("-inf"), 0)[:, None]) * head.inverse_temperature
    e_CW = distance_CW.exp()
    return torch.stack([m_C, e_CW.sum(1), (e_CW * distance_CW.where(e_CW > 0, 0)).sum(1)], dim=1)


def dense_gradient(chunk: Chunk) -> Tensor:
    """[C, W]"""
    grad_CW = torch.zeros(chunk.logits_CW.shape, dtype=torch.float64, device=chunk.logits_CW.device)
    for number, head in enumerate(chunk.softmaxes):
        x_CW = (chunk.logits_CW.double() - chunk.top_CH[:, number, None].double()) * head.inverse_temperature
        share_CW = x_CW.exp() * head.inverse_temperature
        grad_CW += (share_CW * chunk.grad_tail_CH[:, number, None]).where(in_tail(grad_CW.shape[1], head), 0)
    grad_CW.scatter_add_(1, chunk.softmaxes[0].columns_TK, chunk.grad_support_CK.double())
    return grad_CW.scatter_add_(1, chunk.picked_columns_C1, chunk.grad_picked_C1.double())


def check_sums(backend: KernelBackend, chunk: Chunk) -> None:
    before = chunk.logits_CW.clone()
    sums_CH3 = backend.tail_sums(chunk.logits_CW, chunk.softmaxes, torch.float32)
    torch.testing.assert_close(sums_CH3.double(), chunk.sums_CH3, rtol=5e-6, atol=1e-6)
    assert torch.equal(chunk.logits_CW, before)


def check_gradient(backend: KernelBackend, chunk: Chunk) -> Tensor:
    """In float32, from logits of any dtype. Returns it."""
    out_CW = torch.full(chunk.logits_CW.shape, float("nan"), device=chunk.logits_CW.device)
    backend.write_gradient(out_CW, chunk.logits_CW, chunk.wanted)
    torch.testing.assert_close(out_CW.double(), dense_gradient(chunk), rtol=1e-5, atol=1e-8)
    return out_CW


def check_rounded_once(backend: KernelBackend, chunk: Chunk, grad_CW: Tensor, *, truncates: bool) -> None:
    """In place, in the dtype of the logits: the float32 gradient rounded once; memory between the rows is untouched."""
    base = chunk.logits_CW._base
    assert base is not None
    base = base.clone()
    logits_CW = base[:, : chunk.logits_CW.shape[1]]
    beyond = base[:, logits_CW.shape[1] :].clone()
    backend.write_gradient(logits_CW, logits_CW, chunk.wanted)
    expected = grad_CW.to(logits_CW.dtype)
    if truncates and logits_CW.dtype == torch.bfloat16:
        expected = (grad_CW.view(torch.int32) & -(1 << 16)).view(torch.float32).to(logits_CW.dtype)
    assert torch.equal(logits_CW, expected)
    assert torch.equal(base[:, logits_CW.shape[1] :].view(torch.uint8), beyond.view(torch.uint8))

"""Section ``losses``: forward and backward of the loss, beside plain PyTorch, ``torch.compile`` and Liger.

Liger has no divergence on a top-k. Its row is the cross-entropy with one target per position, which reads the logits as
often, but has neither a support nor a tail. It shows the cost of the output layer in another library.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from losses import Case, Inputs, analytic, buckets, fused_head, head, in_place, inputs_for, log_softmax, synchronize
from torch import Tensor

from recipe_gkd.losses import Divergence

_SIZES = {"cpu": (64, 4096, 64), "cuda": (4096, 151936, 1536)}
"""Positions, vocabulary and hidden size."""
_REPEATS = {"cpu": 2, "cuda": 20}
_TOP_K = 64
Method = Callable[..., tuple[Tensor, ...]]


def _loss(case: Case, given: Inputs, logits_TV: Tensor) -> Tensor:
    """Return the divergence in plain PyTorch."""
    log_q_TV = (logits_TV.float() / case.divergence.temperature).log_softmax(1)
    tail_T1 = log_q_TV.scatter(1, given.ids_TK, float("-inf")).logsumexp(1, keepdim=True)
    return case.divergence(buckets(case, given, torch.cat([log_q_TV.gather(1, given.ids_TK), tail_T1], 1))).sum()


def _loss_of_hidden(case: Case, given: Inputs, hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
    return _loss(case, given, hidden_TD @ weight_VD.T)


@cache
def _compiled(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return torch.compile(function)


def _gradients(function: Callable[..., Tensor], *, compiled: bool) -> Method:
    def method(case: Case, given: Inputs, *factors: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad((_compiled(function) if compiled else function)(case, given, *factors), factors)

    return method


def _liger_cross_entropy(case: Case, given: Inputs, hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, ...]:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    loss = LigerFusedLinearCrossEntropyLoss()(weight_VD, hidden_TD, given.ids_TK[:, 0])
    return torch.autograd.grad(loss, (hidden_TD, weight_VD))


FROM_LOGITS: dict[str, Method] = {
    "log_softmax": log_softmax,
    "plain": _gradients(_loss, compiled=False),
    "torch.compile": _gradients(_loss, compiled=True),
    "ours": analytic,
    "ours, in place": in_place,
}
FROM_HIDDEN: dict[str, Method] = {
    "plain": _gradients(_loss_of_hidden, compiled=False),
    "torch.compile": _gradients(_loss_of_hidden, compiled=True),
    "ours, head": head,
    "ours, fused head": fused_head,
    "liger cross-entropy": _liger_cross_entropy,
}


def measure(device: str, folder: Path) -> Iterator[dict[str, Any]]:
    """Yield a row for each method. A method that fails (too little memory, say) has its error in the row."""
    positions, vocabulary, hidden = _SIZES[device]
    case = Case(
        positions=positions, vocabulary=vocabulary, hidden=hidden, k=_TOP_K, dtype=torch.bfloat16, device=device,
        divergence=Divergence(kind="forward_kl", tail="bucket"),
    )  # fmt: skip
    given = inputs_for(case, ("log_softmax", "head"))
    for source, methods in (("logits", FROM_LOGITS), ("hidden states", FROM_HIDDEN)):
        factors = (given.logits_TV,) if source == "logits" else (given.hidden_TD, given.weight_VD)
        for name, method in methods.items():
            row: dict[str, Any] = {"from": source, "method": name}
            if name.startswith("liger") and (device == "cpu" or find_spec("liger_kernel") is None):
                yield row | {"error": "needs a GPU and the package liger-kernel"}
                continue
            try:
                yield row | _measure_method(method, case, given, factors)
            except Exception as error:  # noqa: BLE001 - another library may raise anything, and other rows must follow
                yield row | {"error": f"{type(error).__name__}: {error}".splitlines()[0][:200]}


def _measure_method(method: Method, case: Case, given: Inputs, factors: tuple[Tensor, ...]) -> dict[str, float | None]:
    on_gpu = case.device == "cuda"
    seconds, peak = [], None
    for number in range(_REPEATS[case.device] + 2):
        # Fresh copies: a method may write the gradient over the logits.
        inputs = [factor.detach().clone().requires_grad_() for factor in factors]
        synchronize(case.device)
        if on_gpu:
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        started = time.perf_counter()
        method(case, given, *inputs)
        synchronize(case.device)
        if number >= 2:  # the first rounds import and compile
            seconds.append(time.perf_counter() - started)
            peak = (torch.cuda.max_memory_allocated() - before) / 1e6 if on_gpu else None
    return {"ms": 1e3 * statistics.median(seconds), "peak_mb": peak}

"""Loss kernels and output layers against float64.

Shape suffixes: T positions, D hidden, V vocabulary, K support ids, B = K + 1 buckets.
"""

from __future__ import annotations

import torch
from torch import Tensor

from recipe_gkd.commands.gpu_smoke.outcome import Context
from recipe_gkd.commands.gpu_smoke.reference import dense_log_stats
from recipe_gkd.losses.float32_head import float32_logits
from recipe_gkd.losses.fused_head import compute_log_stats_from_hidden
from recipe_gkd.losses.log_stats import compute_log_stats
from recipe_gkd.losses.logits_query import LogitsQuery, StudentLogStats

_SHAPES = {"cpu": (6, 1000, 960), "cuda": (64, 152064, 151936)}
"""Positions, columns of the logits, and size of the vocabulary without padding."""
_HIDDEN = {"cpu": 64, "cuda": 1024}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_SUM_LIMIT = 1e-4
"""Accepted error of float32 log-probabilities over the vocabulary of a real model."""


def check_kernels(context: Context) -> str:
    """Compare sums and gradients of each kernel backend with float64."""
    backends = ["torch", "triton"] if context.device == "cuda" else ["torch"]
    n_cases = 0
    for backend in backends:
        for dtype in _DTYPES:
            for temperature, k in ((1.0, 1), (1.0, 64), (2.5, 17)):
                _check_case(context, backend, dtype, temperature, k)
                n_cases += 1
    _, width, _ = _SHAPES[context.device]
    return f"{n_cases} cases of {' and '.join(backends)}, {width} columns, float32, bfloat16 and float16"


def _check_case(context: Context, backend: str, dtype: torch.dtype, temperature: float, k: int) -> None:
    n_positions, width, vocab_size = _SHAPES[context.device]
    generator = torch.Generator(context.device).manual_seed(k)
    logits_TV = 3 * torch.randn(n_positions, width, generator=generator, device=context.device)
    logits_TV = logits_TV.to(dtype)
    query = _query(logits_TV, vocab_size, temperature, k)
    exact_TV, found_TV = (logits.detach().requires_grad_() for logits in (logits_TV.double(), logits_TV))
    exact = _stats(dense_log_stats(exact_TV, query))
    found = _stats(compute_log_stats(found_TV, query, kernel_backend=backend))
    _compare(context, f"{backend}/{str(dtype).removeprefix('torch.')}", found, exact, (found_TV,), (exact_TV,))


def _query(logits_TV: Tensor, vocab_size: int, temperature: float, k: int) -> LogitsQuery:
    ids_TK = logits_TV[:, :vocab_size].topk(k, dim=1).indices
    return LogitsQuery(
        ids_TK=ids_TK,
        valid_TK=torch.ones_like(ids_TK, dtype=torch.bool),
        sampled_T=torch.arange(len(logits_TV), device=logits_TV.device) * 13 % vocab_size,
        vocab_size=vocab_size,
        temperature=temperature,
        entropy_has_gradient=True,
    )


def _stats(stats: StudentLogStats) -> Tensor:
    """Return all statistics as columns, [T, B + 2]. Log masses are normalized, because they have a free constant."""
    columns = [stats.log_mass_TB.log_softmax(1), stats.sampled_logp_T[:, None], stats.entropy_T[:, None]]
    return torch.cat(columns, dim=1)


def _compare(
    context: Context,
    name: str,
    found: Tensor,
    exact: Tensor,
    found_inputs: tuple[Tensor, ...],
    exact_inputs: tuple[Tensor, ...],
    limit: float = _SUM_LIMIT,
) -> None:
    """Compare statistics, and the gradients of a fixed combination of them relative to the largest entry."""
    context.compare(f"{name}: log-probabilities", (found - exact).abs().max().item(), limit)
    weights = torch.linspace(-1, 1, exact.numel(), dtype=torch.float64, device=exact.device).view(exact.shape)
    found_grads = torch.autograd.grad((found * weights.float()).sum(), found_inputs)
    exact_grads = torch.autograd.grad((exact * weights).sum(), exact_inputs)
    rounding = 0.0 if found_inputs[0].dtype == torch.float32 else torch.finfo(found_inputs[0].dtype).eps
    for got, want in zip(found_grads, exact_grads, strict=True):
        error = (got.double() - want).abs().max() / want.abs().max()
        context.compare(f"{name}: gradient", error.item(), limit + 2 * rounding)


def check_output_layer(context: Context) -> str:
    """Compare float32 logits of 16-bit factors, and statistics of the fused output layer, with float64."""
    n_positions, width, vocab_size = _SHAPES[context.device]
    generator = torch.Generator(context.device).manual_seed(0)

    def random(rows: int, scale: float) -> Tensor:
        return scale * torch.randn(rows, _HIDDEN[context.device], generator=generator, device=context.device)

    hidden_TD, weight_VD = random(n_positions, 3.0), random(width, _HIDDEN[context.device] ** -0.5)
    for dtype in (torch.float32, torch.bfloat16):
        rounded = [factor.to(dtype) for factor in (hidden_TD, weight_VD)]
        exact, found, fused = (
            tuple(factor.to(kind).detach().requires_grad_() for factor in rounded)
            for kind in (torch.float64, dtype, dtype)
        )
        exact_TV = exact[0] @ exact[1].T
        query = _query(exact_TV.detach(), vocab_size, 1.0, 16)
        want, name = _stats(dense_log_stats(exact_TV, query)), str(dtype).removeprefix("torch.")
        got = _stats(compute_log_stats(float32_logits(found[0], found[1]), query))
        # Both layers round the gradient of the logits to the dtype of the weights before its matrix products.
        _compare(context, f"float32 head of {name}", got, want, found, exact)
        want = _stats(dense_log_stats(exact[0] @ exact[1].T, query))
        got = _stats(compute_log_stats_from_hidden(fused[0], fused[1], query))
        limit = _SUM_LIMIT if dtype == torch.float32 else 0.1  # 16-bit logits round to 1/16 at 16
        _compare(context, f"fused head, {name}", got, want, fused, exact, limit)
    return f"float32 logits and the fused output layer, {_HIDDEN[context.device]} x {width}, float32 and bfloat16"

"""Measure the cost of a divergence: time of forward and backward, and peak memory, against common alternatives.

    python benchmarks/losses.py [--quick] [--json FILE] [--kind reverse_kl] [--tail renormalize] [-k 64]

From logits [T, V], without a matrix product:

    log_softmax   log-softmax of the logits in their own dtype and its gradient
    autograd      the same divergence in plain PyTorch, float32: log-softmax, gather, masked logsumexp of the tail
    analytic      recipe_gkd.losses.topk_divergence
    in_place      the same, with the gradient written over the logits

From hidden states and the output layer, to the gradients of both:

    head          their product, then ``in_place``
    fused_head    recipe_gkd.losses.fused_head.compute_log_stats_from_hidden

Times are measured in one process that alternates between the methods. A ratio is the median of the ratios of the
repetitions, so that noise of the machine affects all methods alike. On a CPU ``autograd`` runs in the first repetition
only, because it is slow. Memory is measured in a fresh process for each method: the peak above the inputs (on a GPU the
peak of the allocator).

The file of ``--json`` has the ratios of each dtype (``analytic_over_log_softmax_float32``), the largest ratios over all
dtypes and devices (``time_over_log_softmax``), and all rows.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipe_gkd.losses import Divergence, topk_divergence
from recipe_gkd.losses.distributions import TAIL_MODES, BucketedDistributions, bucketed_distributions, valid_entries
from recipe_gkd.losses.fused_head import compute_log_stats_from_hidden
from recipe_gkd.losses.logits_query import LogitsQuery
from recipe_gkd.losses.registry import divergence_names
from teacher.common.proc_files import STATUS, read_bytes

TIMEOUT_S = 600
FROM_LOGITS = ("log_softmax", "autograd", "analytic", "in_place")
FROM_HIDDEN = ("head", "fused_head")
SLOW_METHODS = ("autograd",)
# Number of different rows. Random numbers for all rows would take longer than the measurement.
TILE_ROWS = 64


@dataclass(frozen=True, kw_only=True)
class Case:
    positions: int
    vocabulary: int
    hidden: int
    k: int
    dtype: torch.dtype
    device: str
    divergence: Divergence

    @property
    def logits_bytes(self) -> int:
        return self.positions * self.vocabulary * self.dtype.itemsize

    @property
    def gradients_of_head_bytes(self) -> int:
        return (self.positions + self.vocabulary) * self.hidden * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Inputs:
    logits_TV: Tensor
    hidden_TD: Tensor
    weight_VD: Tensor
    logps_TK: Tensor
    ids_TK: Tensor


def inputs_for(case: Case, methods: tuple[str, ...]) -> Inputs:
    """Return the inputs; logits or factors of the output layer that no method reads are empty."""
    torch.manual_seed(0)
    rows, device = min(TILE_ROWS, case.positions), case.device

    def tiled(tile: Tensor) -> Tensor:
        return tile.repeat(-(-case.positions // rows), 1)[: case.positions]

    def random(n: int, columns: int, wanted: bool) -> Tensor:
        tensor = torch.randn(n if wanted else 0, columns, device=device)
        return tensor.to(case.dtype)

    from_logits, from_hidden = bool({*methods} & {*FROM_LOGITS}), bool({*methods} & {*FROM_HIDDEN})
    teacher = (2 * torch.randn(rows, case.vocabulary, device=device)).log_softmax(1).topk(case.k, dim=1)
    return Inputs(
        logits_TV=tiled(random(rows, case.vocabulary, from_logits)),
        hidden_TD=tiled(random(rows, case.hidden, from_hidden)),
        weight_VD=random(case.vocabulary, case.hidden, from_hidden) * case.hidden**-0.5,
        logps_TK=tiled(teacher.values),
        ids_TK=tiled(teacher.indices),
    )


# ---- methods: each takes tensors with requires_grad, and returns their gradients


def log_softmax(case: Case, given: Inputs, logits_TV: Tensor) -> tuple[Tensor, ...]:
    log_q_TV = logits_TV.log_softmax(1)
    return torch.autograd.grad(log_q_TV, logits_TV, log_q_TV.detach())  # an incoming gradient without its own memory


def autograd(case: Case, given: Inputs, logits_TV: Tensor) -> tuple[Tensor, ...]:
    log_q_TV = (logits_TV.float() / case.divergence.temperature).log_softmax(1)
    tail_T1 = log_q_TV.scatter(1, given.ids_TK, float("-inf")).logsumexp(1, keepdim=True)
    log_mass_TB = torch.cat([log_q_TV.gather(1, given.ids_TK), tail_T1], dim=1)
    loss = case.divergence(buckets(case, given, log_mass_TB)).sum()
    return torch.autograd.grad(loss, logits_TV)


def analytic(case: Case, given: Inputs, logits_TV: Tensor, in_place: bool = False) -> tuple[Tensor, ...]:
    loss_T, _ = topk_divergence(
        logits_TV, given.logps_TK, given.ids_TK, case.divergence, vocab_size=case.vocabulary, in_place=in_place
    )
    return torch.autograd.grad(loss_T.sum(), logits_TV)


def in_place(case: Case, given: Inputs, logits_TV: Tensor) -> tuple[Tensor, ...]:
    return analytic(case, given, logits_TV, in_place=True)


def head(case: Case, given: Inputs, hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, ...]:
    loss_T, _ = topk_divergence(
        hidden_TD @ weight_VD.T,
        given.logps_TK,
        given.ids_TK,
        case.divergence,
        vocab_size=case.vocabulary,
        in_place=True,
    )
    return torch.autograd.grad(loss_T.sum(), (hidden_TD, weight_VD))


def fused_head(case: Case, given: Inputs, hidden_TD: Tensor, weight_VD: Tensor) -> tuple[Tensor, ...]:
    query = LogitsQuery(
        ids_TK=given.ids_TK,
        valid_TK=valid_entries(given.logps_TK, given.ids_TK, case.vocabulary),
        sampled_T=given.ids_TK[:, 0],
        vocab_size=case.vocabulary,
        temperature=case.divergence.temperature,
    )
    stats = compute_log_stats_from_hidden(hidden_TD, weight_VD, query)
    loss = case.divergence(buckets(case, given, stats.log_mass_TB)).sum()
    return torch.autograd.grad(loss, (hidden_TD, weight_VD))


def buckets(case: Case, given: Inputs, log_mass_TB: Tensor) -> BucketedDistributions:
    valid_TK = valid_entries(given.logps_TK, given.ids_TK, case.vocabulary)
    return bucketed_distributions(log_mass_TB, given.logps_TK, valid_TK, case.divergence.tail)


METHODS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "log_softmax": log_softmax,
    "autograd": autograd,
    "analytic": analytic,
    "in_place": in_place,
    "head": head,
    "fused_head": fused_head,
}


def tensors_of(method: str, given: Inputs) -> list[Tensor]:
    return [given.hidden_TD, given.weight_VD] if method in FROM_HIDDEN else [given.logits_TV]


def warm_up_case(case: Case, given: Inputs) -> tuple[Case, Inputs]:
    """Return two positions of a case, for a warm-up that imports and compiles all code."""
    small = replace(
        given,
        logits_TV=given.logits_TV[:2].clone(),
        hidden_TD=given.hidden_TD[:2],
        logps_TK=given.logps_TK[:2],
        ids_TK=given.ids_TK[:2],
    )
    return replace(case, positions=2), small


def run(method: str, case: Case, given: Inputs) -> None:
    METHODS[method](case, given, *(tensor.detach().requires_grad_() for tensor in tensors_of(method, given)))


# ---- time


def times(case: Case, methods: tuple[str, ...], repeats: int) -> dict[str, list[float]]:
    """Return the seconds of each repetition, by method."""
    given = inputs_for(case, methods)
    spare = replace(given, logits_TV=torch.empty_like(given.logits_TV))
    for method in methods:
        run(method, *warm_up_case(case, given))
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    for repetition in range(repeats):
        for method in methods:
            if repetition and method in SLOW_METHODS and case.device == "cpu":
                continue
            used = given
            if method == "in_place":
                spare.logits_TV.copy_(given.logits_TV)
                used = spare
            synchronize(case.device)
            started = time.perf_counter()
            run(method, case, used)
            synchronize(case.device)
            seconds[method].append(time.perf_counter() - started)
    return seconds


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- memory


def peak_in_fresh_process(method: str, case: Case, threads: int) -> int:
    """Return the peak memory above the inputs, in bytes."""
    context = multiprocessing.get_context("spawn" if case.device == "cuda" else "forkserver")
    if case.device != "cuda":
        context.set_forkserver_preload(["torch"])
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as process:
        return process.submit(peak, method, case, threads).result(timeout=TIMEOUT_S)


def peak(method: str, case: Case, threads: int) -> int:
    torch.set_num_threads(threads)
    given = inputs_for(case, (method,))
    run(method, *warm_up_case(case, given))
    synchronize(case.device)
    if case.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        run(method, case, given)
        synchronize(case.device)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the current size
    before = read_bytes(STATUS, "VmRSS")
    run(method, case, given)
    return read_bytes(STATUS, "VmHWM") - before


# ---- report


def measure(case: Case, *, repeats: int, threads: int) -> list[dict[str, Any]]:
    """Measure all methods and return a row for each."""
    rows = []
    for methods, reference in ((FROM_LOGITS, "log_softmax"), (FROM_HIDDEN, "head")):
        seconds = times(case, methods, repeats)
        for method in methods:
            extra = peak_in_fresh_process(method, case, threads)
            if method in FROM_HIDDEN:
                extra -= case.gradients_of_head_bytes
            ratios = (a / b for a, b in zip(seconds[method], seconds[reference], strict=False))
            rows.append(
                {
                    "device": case.device,
                    "dtype": str(case.dtype).removeprefix("torch."),
                    "way": method,
                    "median_s": statistics.median(seconds[method]),
                    f"time_over_{reference}": statistics.median(ratios),
                    "extra_bytes": extra,
                    "extra_over_logits": extra / case.logits_bytes,
                }
            )
            print(line(rows[-1]), flush=True)
    half = replace(case, positions=case.positions // 2)
    rows[-1]["extra_bytes_at_half_the_positions"] = (
        peak_in_fresh_process("fused_head", half, threads) - half.gradients_of_head_bytes
    )
    return rows


HEADER = f"{'device':>6} {'dtype':>9} {'':>11} | {'time':>10} {'ratio':>6}  {'to':<11} | {'memory':>9} {'/ logits':>8}"


def line(row: dict[str, Any]) -> str:
    to = "log_softmax" if row["way"] in FROM_LOGITS else "head"
    time_s, ratio, extra_mb = row["median_s"], row[f"time_over_{to}"], row["extra_bytes"] / 1e6
    return (
        f"{row['device']:>6} {row['dtype']:>9} {row['way']:>11} | {1000 * time_s:>8.1f}ms {ratio:>6.2f}  {to:<11} | "
        f"{extra_mb:>7.0f}MB {row['extra_over_logits']:>8.2f}"
    )


def summary(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return the largest ratios over all measured dtypes and devices, and the ratios of each dtype."""
    of = {method: [row for row in rows if row["way"] == method] for method in METHODS}

    def over_autograd(method: str) -> float:
        return max(a["extra_bytes"] / b["extra_bytes"] for a, b in zip(of[method], of["autograd"], strict=True))

    return {
        "time_over_log_softmax": max(row["time_over_log_softmax"] for row in of["analytic"]),
        "time_over_log_softmax_in_place": max(row["time_over_log_softmax"] for row in of["in_place"]),
        "extra_memory_over_autograd": over_autograd("analytic"),
        "extra_memory_over_autograd_in_place": over_autograd("in_place"),
        "fused_time_over_head": max(row["time_over_head"] for row in of["fused_head"]),
        "fused_peak_over_logits": max(row["extra_over_logits"] for row in of["fused_head"]),
        "fused_peak_over_that_of_half_the_positions": max(
            row["extra_bytes"] / row["extra_bytes_at_half_the_positions"] for row in of["fused_head"]
        ),
    } | ratios_by_dtype(rows)


def ratios_by_dtype(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Return time and memory of each method and dtype; a GPU's keys end in ``_cuda``."""
    found = {}
    for row in rows:
        method, reference = row["way"], "log_softmax" if row["way"] in FROM_LOGITS else "head"
        case = row["dtype"] if row["device"] == "cpu" else f"{row['dtype']}_{row['device']}"
        if method != reference:
            found[f"{method}_over_{reference}_{case}"] = row[f"time_over_{reference}"]
        found[f"{method}_memory_over_logits_{case}"] = row["extra_over_logits"]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=divergence_names(), default="forward_kl")
    parser.add_argument("--tail", choices=TAIL_MODES, default="bucket")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("-k", type=int, default=64, help="teacher ids at each position (default: 64)")
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=152064)
    parser.add_argument("--hidden", type=int, help="width of the hidden states (default: 128, on a GPU 2048)")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--devices", nargs="+", choices=["cpu", "cuda"], help="(default: all available)")
    parser.add_argument("--repeats", type=int, help="repetitions (default: 3, on a GPU 20)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--quick", action="store_true", help="small sizes, float32 on the CPU, as a smoke test")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args()
    if given.quick:
        given.positions, given.vocabulary, given.hidden, given.k = 64, 4096, 32, 16
        given.dtypes, given.devices = ["float32"], ["cpu"]
    torch.set_num_threads(given.threads)
    divergence = Divergence(kind=given.kind, tail=given.tail, temperature=given.temperature)
    rows = []
    print(f"T = {given.positions}, V = {given.vocabulary}, K = {given.k}, {divergence.kind}\n{HEADER}", flush=True)
    for device in given.devices or ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]:
        for dtype in given.dtypes:
            case = Case(
                positions=given.positions,
                vocabulary=given.vocabulary,
                hidden=given.hidden or (2048 if device == "cuda" else 128),
                k=given.k,
                dtype=getattr(torch, dtype),
                device=device,
                divergence=divergence,
            )
            rows += measure(case, repeats=given.repeats or (20 if device == "cuda" else 3), threads=given.threads)
    found = summary(rows)
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found | {"rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()

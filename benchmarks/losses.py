"""What a divergence costs: time of forward and backward, and peak memory, against what everybody has.

    python benchmarks/losses.py [--quick] [--json FILE] [--kind reverse_kl] [--tail renormalize] [-k 64]

From logits [T, V] (no product of matrices is measured):

    log_softmax   a log-softmax of the logits in their own dtype and its gradient, and nothing else
    autograd      the same divergence in plain PyTorch, float32: log-softmax, gather, a masked logsumexp for the tail
    analytic      recipe_gkd.losses.topk_divergence
    in_place      the same, its gradient written over the logits

From hidden states and the output layer, to the gradients of both:

    head          their product, then ``in_place``
    fused_head    recipe_gkd.losses.fused_head.compute_log_stats_from_hidden

Times are measured in one process, one way after the other, repetition by repetition, and a ratio is the median of the
repetitions' ratios, so that a noisy machine troubles all of them alike. (On a CPU autograd and the heads, which take
long, are in the first repetition only.) Memory is measured in a fresh process for each way: the high-water mark beyond
the inputs, which are there before (on a GPU that of the allocator).
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
from typing import Any, get_args

import torch
from torch import Tensor

from recipe_gkd.losses import Divergence, topk_divergence
from recipe_gkd.losses.distributions import BucketedDistributions, Tail, distributions, valid_entries
from recipe_gkd.losses.divergences import Kind
from recipe_gkd.losses.fused_head import compute_log_stats_from_hidden
from recipe_gkd.losses.logits_query import LogitsQuery

TIMEOUT_S = 600
FROM_LOGITS = ("log_softmax", "autograd", "analytic", "in_place")
FROM_HIDDEN = ("head", "fused_head")
LONG = ("autograd", *FROM_HIDDEN)
TILE = 64
"""Rows that differ: random numbers for all of them would take longer than what is measured."""


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


def inputs_for(case: Case, ways: tuple[str, ...]) -> Inputs:
    """Empty logits, or an empty head, for ways that do not read them."""
    torch.manual_seed(0)
    rows, device = min(TILE, case.positions), case.device

    def tiled(tile: Tensor) -> Tensor:
        return tile.repeat(-(-case.positions // rows), 1)[: case.positions]

    def random(n: int, columns: int, wanted: bool) -> Tensor:
        tensor = torch.randn(n if wanted else 0, columns, device=device)
        return tensor.to(case.dtype)

    from_logits, from_hidden = bool({*ways} & {*FROM_LOGITS}), bool({*ways} & {*FROM_HIDDEN})
    teacher = (2 * torch.randn(rows, case.vocabulary, device=device)).log_softmax(1).topk(case.k, dim=1)
    return Inputs(
        logits_TV=tiled(random(rows, case.vocabulary, from_logits)),
        hidden_TD=tiled(random(rows, case.hidden, from_hidden)),
        weight_VD=random(case.vocabulary, case.hidden, from_hidden) * case.hidden**-0.5,
        logps_TK=tiled(teacher.values),
        ids_TK=tiled(teacher.indices),
    )


# ---- the ways; each takes tensors that need a gradient, and returns the gradients


def log_softmax(case: Case, given: Inputs, logits_TV: Tensor) -> tuple[Tensor, ...]:
    log_q_TV = logits_TV.log_softmax(1)
    return torch.autograd.grad(log_q_TV, logits_TV, log_q_TV.detach())  # a gradient that costs no memory of its own


def autograd(case: Case, given: Inputs, logits_TV: Tensor) -> tuple[Tensor, ...]:
    log_q_TV = (logits_TV.float() / case.divergence.temperature).log_softmax(1)
    tail_T1 = log_q_TV.scatter(1, given.ids_TK, float("-inf")).logsumexp(1, keepdim=True)
    log_mass_TB = torch.cat([log_q_TV.gather(1, given.ids_TK), tail_T1], dim=1)
    loss = case.divergence.of(buckets(case, given, log_mass_TB)).sum()
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
    loss = case.divergence.of(buckets(case, given, stats.log_mass_TB)).sum()
    return torch.autograd.grad(loss, (hidden_TD, weight_VD))


def buckets(case: Case, given: Inputs, log_mass_TB: Tensor) -> BucketedDistributions:
    valid_TK = valid_entries(given.logps_TK, given.ids_TK, case.vocabulary)
    return distributions(log_mass_TB, given.logps_TK, valid_TK, case.divergence.tail)


WAYS: dict[str, Callable[..., tuple[Tensor, ...]]] = {
    "log_softmax": log_softmax,
    "autograd": autograd,
    "analytic": analytic,
    "in_place": in_place,
    "head": head,
    "fused_head": fused_head,
}


def tensors_of(way: str, given: Inputs) -> list[Tensor]:
    return [given.hidden_TD, given.weight_VD] if way in FROM_HIDDEN else [given.logits_TV]


def few(case: Case, given: Inputs) -> tuple[Case, Inputs]:
    """Some positions of a case, to load and to compile what is measured then."""
    small = replace(
        given,
        logits_TV=given.logits_TV[:2].clone(),
        hidden_TD=given.hidden_TD[:2],
        logps_TK=given.logps_TK[:2],
        ids_TK=given.ids_TK[:2],
    )
    return replace(case, positions=2), small


def go(way: str, case: Case, given: Inputs) -> None:
    WAYS[way](case, given, *(tensor.detach().requires_grad_() for tensor in tensors_of(way, given)))


# ---- time


def times(case: Case, ways: tuple[str, ...], repeats: int) -> dict[str, list[float]]:
    """Seconds of each repetition."""
    given = inputs_for(case, ways)
    spare = replace(given, logits_TV=torch.empty_like(given.logits_TV))
    for way in ways:
        go(way, *few(case, given))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for repetition in range(repeats):
        for way in ways:
            if repetition and way in LONG and case.device == "cpu":
                continue
            used = given
            if way == "in_place":
                spare.logits_TV.copy_(given.logits_TV)
                used = spare
            synchronize(case.device)
            started = time.perf_counter()
            go(way, case, used)
            synchronize(case.device)
            seconds[way].append(time.perf_counter() - started)
    return seconds


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


# ---- memory


def peak_in_fresh_process(way: str, case: Case, threads: int) -> int:
    """Bytes beyond the inputs."""
    context = multiprocessing.get_context("spawn" if case.device == "cuda" else "forkserver")
    if case.device != "cuda":
        context.set_forkserver_preload(["torch"])
    with ProcessPoolExecutor(max_workers=1, mp_context=context) as process:
        return process.submit(peak, way, case, threads).result(timeout=TIMEOUT_S)


def peak(way: str, case: Case, threads: int) -> int:
    torch.set_num_threads(threads)
    given = inputs_for(case, (way,))
    go(way, *few(case, given))
    synchronize(case.device)
    if case.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        go(way, case, given)
        synchronize(case.device)
        return torch.cuda.max_memory_allocated() - before
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark is now what there is
    before = status_bytes("VmRSS")
    go(way, case, given)
    return status_bytes("VmHWM") - before


def status_bytes(name: str) -> int:
    """Of this process, as Linux counts them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


# ---- the whole


def measure(case: Case, *, repeats: int, threads: int) -> list[dict[str, Any]]:
    """A row for each way."""
    rows = []
    for ways, reference in ((FROM_LOGITS, "log_softmax"), (FROM_HIDDEN, "head")):
        seconds = times(case, ways, repeats)
        for way in ways:
            extra = peak_in_fresh_process(way, case, threads)
            if way in FROM_HIDDEN:
                extra -= case.gradients_of_head_bytes
            ratios = (a / b for a, b in zip(seconds[way], seconds[reference], strict=False))
            rows.append(
                {
                    "device": case.device,
                    "dtype": str(case.dtype).removeprefix("torch."),
                    "way": way,
                    "median_s": statistics.median(seconds[way]),
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
    """The worst of all dtypes and devices that were measured."""
    of = {way: [row for row in rows if row["way"] == way] for way in WAYS}

    def over_autograd(way: str) -> float:
        return max(a["extra_bytes"] / b["extra_bytes"] for a, b in zip(of[way], of["autograd"], strict=True))

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
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", choices=get_args(Kind), default="forward_kl")
    parser.add_argument("--tail", choices=get_args(Tail), default="bucket")
    parser.add_argument("--temperature", type=float, default=1.0)
    parser.add_argument("-k", type=int, default=64, help="ids of the teacher at each position (default: 64)")
    parser.add_argument("--positions", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=152064)
    parser.add_argument("--hidden", type=int, help="width of the hidden states (default: 128, on a GPU 2048)")
    parser.add_argument("--dtypes", nargs="+", choices=["float32", "bfloat16"], default=["float32", "bfloat16"])
    parser.add_argument("--devices", nargs="+", choices=["cpu", "cuda"], help="(default: those that are there)")
    parser.add_argument("--repeats", type=int, help="(default: 3, on a GPU 20)")
    parser.add_argument("--threads", type=int, default=1, help="of a CPU (default: 1)")
    parser.add_argument("--quick", action="store_true", help="a small size, float32 on the CPU, to see that it works")
    parser.add_argument("--json", type=Path, help="write the figures there")
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

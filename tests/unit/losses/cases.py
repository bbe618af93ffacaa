"""The inputs of the test matrix. Each row of a case is a situation of its own; the names are in ``ROWS``."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args

import torch
from torch import Tensor

from recipe_gkd.losses import Divergence
from recipe_gkd.losses.distributions import Tail
from recipe_gkd.losses.divergences import Kind

VOCABULARY = 93
COLUMNS = 128
"""As tensor parallelism pads it: of 4 ranks with 32 columns, the third has some padding and the last nothing else."""
TEACHER_VOCABULARY = 140

KINDS: tuple[Kind, ...] = get_args(Kind)
TAILS: tuple[Tail, ...] = get_args(Tail)
SUPPORT_SIZES = (1, 2, 17, VOCABULARY)
TEMPERATURES = (0.5, 1.0, 2.0)

ROWS = (
    "ordinary",
    "ordinary, another",
    "student equals teacher",
    "far apart",
    "logits of size 1e4",
    "each logit 1e4 or -1e4",
    "student sure of one id",
    "teacher sure of one id",
    "both sure, of different ids",
    "entries missing, id -1",
    "entries missing, id 0",
    "no entry",
    "same columns on all ranks",
    "ids that the student does not have",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    logits_TW: Tensor
    """float32, but of numbers that bfloat16 has too, so that one reference serves for every dtype."""
    logps_TK: Tensor
    ids_TK: Tensor

    def rows(self, n: int) -> Case:
        return Case(logits_TW=self.logits_TW[:n], logps_TK=self.logps_TK[:n], ids_TK=self.ids_TK[:n])


def make_case(k: int, temperature: float, seed: int = 0) -> Case:
    """One row for each of ``ROWS``: the teacher's top k at the temperature."""
    generator = torch.Generator().manual_seed(seed)
    student = 2 * torch.randn(len(ROWS), COLUMNS, generator=generator)
    teacher = 2 * torch.randn(len(ROWS), TEACHER_VOCABULARY, generator=generator)
    at = {name: row for row, name in enumerate(ROWS)}

    student[at["far apart"]] *= 150
    student[at["logits of size 1e4"]] *= 5e3
    student[at["each logit 1e4 or -1e4"]] = 1e4 * student[at["each logit 1e4 or -1e4"]].sign()
    for name in ("student sure of one id", "both sure, of different ids"):
        student[at[name]] = -1e4
        student[at[name], 40] = 1e4
    student[:, VOCABULARY:] = 1e4 * student[:, VOCABULARY:].sign()
    student = student.bfloat16().float()

    foreign = at["ids that the student does not have"]
    teacher[:foreign, VOCABULARY:] = -torch.inf
    teacher[at["student equals teacher"], :VOCABULARY] = student[at["student equals teacher"], :VOCABULARY]
    teacher[at["same columns on all ranks"], [c + 32 * r for c in range(6) for r in range(3)]] += 15
    logps, ids = (teacher / temperature).log_softmax(1).topk(k, dim=1)

    for name in ("teacher sure of one id", "both sure, of different ids"):
        logps[at[name]] = torch.tensor([0.0, *[-torch.inf] * (k - 1)])
    ids[at["both sure, of different ids"]] = torch.arange(k)
    for name, filler in (("entries missing, id -1", -1), ("entries missing, id 0", 0)):
        ids[at[name]] = torch.arange(k)
        ids[at[name], (k + 1) // 2 :] = filler
        logps[at[name], (k + 1) // 2 :] = -torch.inf
    logps[at["no entry"]] = -torch.inf
    return Case(logits_TW=student, logps_TK=logps, ids_TK=ids)


def divergences(temperature: float = 1.0) -> list[Divergence]:
    """Every kind with every tail mode; the parameters are not the symmetric ones."""
    one = Divergence(temperature=temperature, beta=0.3, rkl_ratio=0.3, skew_alpha=0.2)
    return [replace(one, kind=kind, tail=tail) for kind in KINDS for tail in TAILS]


def matrix() -> list[tuple[int, Divergence]]:
    """Every support size with every divergence at every temperature."""
    return [(k, one) for k in SUPPORT_SIZES for temperature in TEMPERATURES for one in divergences(temperature)]


def row_weights(rows: int) -> Tensor:
    """Uneven, so that a gradient that forgets the incoming one is noticed."""
    return torch.linspace(0.5, 2, rows, dtype=torch.float64)

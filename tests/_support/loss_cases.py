"""Inputs of the loss tests. Each row of a case is one situation; ``ROWS`` names them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from recipe_gkd.losses import Divergence
from recipe_gkd.losses.distributions import TAIL_MODES
from recipe_gkd.losses.registry import divergence_names

VOCABULARY = 93
# Padded as for tensor parallelism: of 4 ranks with 32 columns the third has some padding, the last only padding.
COLUMNS = 128
TEACHER_VOCABULARY = 140

SUPPORT_SIZES = (1, 2, 17, VOCABULARY)
TEMPERATURES = (0.5, 1.0, 2.0)

ROWS = (
    "ordinary",
    "ordinary, second",
    "student equals teacher",
    "far apart",
    "logits of size 1e4",
    "each logit 1e4 or -1e4",
    "student certain of one id",
    "teacher certain of one id",
    "both certain, of different ids",
    "entries missing, id -1",
    "entries missing, id 0",
    "no entry",
    "same columns on all ranks",
    "ids outside the student's vocabulary",
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Student's logits and teacher's top-k.

    Attributes:
        logits_TW: float32 values that bfloat16 represents exactly, so that one reference serves for every dtype.
        logps_TK: Log-probabilities of the teacher's top-k.
        ids_TK: Ids of the teacher's top-k.
    """

    logits_TW: Tensor
    logps_TK: Tensor
    ids_TK: Tensor

    def rows(self, n: int) -> Case:
        """Return the first ``n`` rows."""
        return Case(logits_TW=self.logits_TW[:n], logps_TK=self.logps_TK[:n], ids_TK=self.ids_TK[:n])


def make_case(k: int, temperature: float, seed: int = 0) -> Case:
    """Return one row for each of ``ROWS``, with the teacher's top k at the temperature."""
    generator = torch.Generator().manual_seed(seed)
    student = 2 * torch.randn(len(ROWS), COLUMNS, generator=generator)
    teacher = 2 * torch.randn(len(ROWS), TEACHER_VOCABULARY, generator=generator)
    at = {name: row for row, name in enumerate(ROWS)}

    student[at["far apart"]] *= 150
    student[at["logits of size 1e4"]] *= 5e3
    student[at["each logit 1e4 or -1e4"]] = 1e4 * student[at["each logit 1e4 or -1e4"]].sign()
    for name in ("student certain of one id", "both certain, of different ids"):
        student[at[name]] = -1e4
        student[at[name], 40] = 1e4
    student[:, VOCABULARY:] = 1e4 * student[:, VOCABULARY:].sign()
    student = student.bfloat16().float()

    foreign = at["ids outside the student's vocabulary"]
    teacher[:foreign, VOCABULARY:] = -torch.inf
    teacher[at["student equals teacher"], :VOCABULARY] = student[at["student equals teacher"], :VOCABULARY]
    teacher[at["same columns on all ranks"], [c + 32 * r for c in range(6) for r in range(3)]] += 15
    logps, ids = (teacher / temperature).log_softmax(1).topk(k, dim=1)

    for name in ("teacher certain of one id", "both certain, of different ids"):
        logps[at[name]] = torch.tensor([0.0, *[-torch.inf] * (k - 1)])
    ids[at["both certain, of different ids"]] = torch.arange(k)
    for name, padding_id in (("entries missing, id -1", -1), ("entries missing, id 0", 0)):
        ids[at[name]] = torch.arange(k)
        ids[at[name], (k + 1) // 2 :] = padding_id
        logps[at[name], (k + 1) // 2 :] = -torch.inf
    logps[at["no entry"]] = -torch.inf
    return Case(logits_TW=student, logps_TK=logps, ids_TK=ids)


def divergences(temperature: float = 1.0) -> list[Divergence]:
    """Return every registered divergence with every tail mode, with parameters that are not symmetric."""
    base = Divergence(temperature=temperature, parameters={"beta": 0.3, "rkl_ratio": 0.3, "skew_alpha": 0.2})
    return [replace(base, kind=kind, tail=tail) for kind in divergence_names() for tail in TAIL_MODES]


def matrix() -> list[tuple[int, Divergence]]:
    """Return every support size with every divergence at every temperature."""
    return [
        (k, divergence)
        for k in SUPPORT_SIZES
        for temperature in TEMPERATURES
        for divergence in divergences(temperature)
    ]


def row_weights(n_rows: int) -> Tensor:
    """Return unequal weights, so that a backward pass that ignores the incoming gradient fails."""
    return torch.linspace(0.5, 2, n_rows, dtype=torch.float64)

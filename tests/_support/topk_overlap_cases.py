"""Inputs of the top-k overlap, and the overlap of Python sets."""

from __future__ import annotations

import math

import torch

from tests._support.loss_cases import VOCABULARY, Case, make_case

SIZES = (1, 2, 17, 50, VOCABULARY)


def overlap_case(k: int) -> Case:
    """Return a teacher and a student with ids in common. The padding has the largest logits."""
    case, generator = make_case(k, 1.0), torch.Generator().manual_seed(5)
    logits = torch.randn(case.logits_TW.shape, generator=generator)  # without ties
    logits.scatter_add_(1, case.ids_TK.clamp(0, VOCABULARY - 1), torch.rand(case.ids_TK.shape, generator=generator) * 2)
    logits[:, VOCABULARY:] = 50.0
    return Case(logits_TW=logits, logps_TK=case.logps_TK, ids_TK=case.ids_TK)


def overlap_of_sets(case: Case) -> list[float]:
    fractions = []
    for logits_V, logps_K, ids_K in zip(case.logits_TW[:, :VOCABULARY], case.logps_TK, case.ids_TK, strict=True):
        entries = zip(ids_K.tolist(), logps_K.tolist(), strict=True)
        teacher = {id for id, logp in entries if 0 <= id < VOCABULARY and logp > -math.inf}
        student = set(sorted(range(VOCABULARY), key=lambda id: -logits_V[id].item())[: len(teacher)])
        fractions.append(len(teacher & student) / len(teacher) if teacher else math.nan)
    return fractions

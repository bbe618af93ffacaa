"""What the student's last layer leaves for the losses: whole logits, or hidden states that become logits on the way."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.losses.fused_head import read_hidden
from recipe_gkd.losses.log_stats import read_logits
from recipe_gkd.losses.logits_query import Question, Reading


class Student(Protocol):
    """T positions. All ranks of a tensor-parallel group call the same methods in the same order."""

    def read(self, question: Question) -> Reading:
        """Once: differentiable."""

    def logits(self, rows_R: Tensor) -> Tensor:
        """This rank's columns ``[R, W]`` of the logits at some positions, detached."""


@dataclass(frozen=True, kw_only=True)
class Logits:
    """Their gradient is written over them; see :func:`~recipe_gkd.losses.log_stats.read_logits`."""

    logits_TW: Tensor
    tp_group: ProcessGroup | None
    chunk_tokens: int | None

    def read(self, question: Question) -> Reading:
        return read_logits(
            self.logits_TW, question, tp_group=self.tp_group, chunk_tokens=self.chunk_tokens, in_place=True
        )

    def logits(self, rows_R: Tensor) -> Tensor:
        return self.logits_TW.detach()[rows_R]


@dataclass(frozen=True, kw_only=True)
class HiddenStates:
    """See :func:`~recipe_gkd.losses.fused_head.read_hidden`."""

    hidden_TD: Tensor
    weight_WD: Tensor
    tp_group: ProcessGroup | None
    chunk_tokens: int | None

    def read(self, question: Question) -> Reading:
        return read_hidden(
            self.hidden_TD, self.weight_WD, question, tp_group=self.tp_group, chunk_tokens=self.chunk_tokens
        )

    @torch.no_grad()
    def logits(self, rows_R: Tensor) -> Tensor:
        return self.hidden_TD[rows_R] @ self.weight_WD.T

"""Attention with stored scores in 16 bits."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from recipe_gkd.actor.packed_row import PackedRow, window_mask
from recipe_gkd.actor.stored_scores import Scores, attend_with_scores

LENGTH, HEADS, WIDTH = 96, 2, 64


def weights_of(query: Tensor, key: Tensor, options: Scores) -> Tensor:
    """Return the attention weights in float64, [H, N, N]."""
    assert options.scale is not None
    scores = query.double().transpose(0, 1) @ key.double().permute(1, 2, 0) * options.scale
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~window_mask(LENGTH, options.window, scores.device), -torch.inf)
    if options.sinks_H is not None:
        scores = torch.cat([scores, options.sinks_H.double()[:, None, None].expand(HEADS, LENGTH, 1)], dim=-1)
    return scores.softmax(-1)[..., :LENGTH]


@pytest.mark.parametrize(
    "options",
    [
        Scores(scale=0.6, sinks_H=torch.tensor([1.0, -2.0]), window=30),
        Scores(scale=0.6, softcap=20.0),
    ],
    ids=["sinks", "softcap"],
)
def test_weights_in_16_bits_are_those_of_scores_that_are_not_rounded(options: Scores) -> None:
    """The fused kernels of an engine do not round them either. The scores have a standard deviation of 5."""
    torch.manual_seed(0)
    query, key = (torch.randn(LENGTH, HEADS, WIDTH).bfloat16() for _ in range(2))
    one_hot = torch.eye(LENGTH)[:, None].expand(LENGTH, HEADS, LENGTH).bfloat16()
    positions = torch.arange(LENGTH)
    row = PackedRow(
        boundaries=torch.tensor([0, LENGTH], dtype=torch.int32),
        max_length=LENGTH,
        position_ids_N=positions,
        uniform_length=LENGTH,
    )
    got = attend_with_scores(options, query, key, one_hot, row).transpose(0, 1)
    total_variation = (got.double() - weights_of(query, key, options)).abs().sum(-1) / 2
    assert total_variation.max() <= 2**-9

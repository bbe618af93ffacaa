"""Causal attention with scores that fused kernels do not have: bounded ones, and sinks.

The scores of some queries at a time are stored, and computed again in the backward pass.

Shape suffixes: N tokens of a packed row, H query heads, G key/value heads, D head width, R sequences of a block, S
length of a block.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recipe_gkd.actor.packed_row import PackedRow, apply_to_blocks, window_mask

MAX_SCORES = 1 << 26
"""Maximum number of scores that are stored at a time."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Computation of the scores of a query.

    Attributes:
        scale: Factor of the scores; None for 1 / sqrt(D).
        window: Number of last keys that a query attends to, its own included; None for all.
        softcap: Bound of the scores; None for none.
        sinks_H: Score of each head that belongs to no key, [H]; None for none.
    """

    scale: float | None
    window: int | None = None
    softcap: float | None = None
    sinks_H: Tensor | None = None


def attend_with_scores(options: Scores, query: Tensor, key: Tensor, value: Tensor, row: PackedRow) -> Tensor:
    """Return causal attention within whole sequences, [N, H, D], on any device and in any type.

    Args:
        options: Computation of the scores.
        query: Queries, [N, H, D].
        key: Keys, [N, G, D].
        value: Values, [N, G, D].
        row: Positions of the sequences.
    """
    return apply_to_blocks(partial(_attend_in_block, options), query, key, value, row)


def _attend_in_block(options: Scores, q_RSHD: Tensor, k_RSGD: Tensor, v_RSGD: Tensor) -> Tensor:
    """Return causal attention, [R * S, H, D]. It stores at most ``MAX_SCORES`` scores, or one position's."""
    copies = q_RSHD.size(2) // k_RSGD.size(2)
    q, k, v = (x.transpose(1, 2) for x in (q_RSHD, *(x.repeat_interleave(copies, 2) for x in (k_RSGD, v_RSGD))))
    n_sequences, n_heads, length, _ = q.shape
    step = max(1, MAX_SCORES // (n_sequences * n_heads * length))
    outputs = []
    for first in range(0, length, step):
        last = min(first + step, length)
        start = 0 if options.window is None else max(0, first - options.window + 1)
        compute = partial(_attend_rows, options, first - start)
        arguments = q[:, :, first:last], k[:, :, start:last], v[:, :, start:last]
        outputs.append(checkpoint(compute, *arguments, use_reentrant=False, preserve_rng_state=False))
    return torch.cat(outputs, dim=2).transpose(1, 2).flatten(0, 1)


def _attend_rows(options: Scores, first: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Return the output of consecutive queries, of which the first is at position ``first`` of the keys."""
    scale = 1 / math.sqrt(query.size(-1)) if options.scale is None else options.scale
    scores = (query.float() @ key.float().mT) * scale  # rounds no product to 16 bits, like fused kernels
    if options.softcap is not None:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~window_mask(key.size(2), options.window, key.device, first=first), -torch.inf)
    if (sinks_H := options.sinks_H) is not None:
        sinks = sinks_H.float()[None, :, None, None].expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, sinks], dim=-1).softmax(dim=-1)[..., :-1]
    else:
        weights = scores.softmax(dim=-1)
    return weights.to(value.dtype) @ value

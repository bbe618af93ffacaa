"""Attention function for the models of transformers on one packed row of sequences.

transformers calls it in each attention layer of a model whose attention implementation is ``PACKED_ATTENTION``.

Shape suffixes: N tokens of a packed row, H query heads, G key/value heads, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor

from recipe_gkd.actor.attention_kernels import AttentionKernel
from recipe_gkd.actor.packed_row import PackedRow, attend
from recipe_gkd.actor.stored_scores import Scores, attend_with_scores
from recipe_gkd.errors import ModelError

PACKED_ATTENTION = "recipe_gkd_packed"
"""Name of the attention function in transformers. It has no mask function, so a model creates no mask."""
RECORDED_ATTENTION = "recipe_gkd_packed_recorded"
"""Name of the same attention function with a mask function that records the requested masks."""
SCORE_OPTIONS = frozenset({"softcap", "s_aux"})
"""Supported options that change the scores. Fused kernels do not have them."""
_WITHOUT_EFFECT = frozenset({
    "dropout", "position_ids", "position_embeddings", "use_cache", "past_key_values", "cache_position",
    "output_attentions", "output_hidden_states", "output_router_logits", "return_dict", "logits_to_keep",
    "deterministic", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k",
})  # fmt: skip
"""Options that do not change the result: the model is in evaluation mode and has no cache."""
_FAR = 1 << 40
"""Distance between query and key that no window reaches."""


@dataclass
class AttentionUse:
    """Requirements of a model's attention layers, recorded during a forward pass.

    Attributes:
        head_dims: Widths of the heads of queries and keys.
        windows: Sliding windows that layers passed to the attention function.
        mask_windows: Sliding windows of the masks that the model requested.
        options: Names of the other options.
    """

    head_dims: set[int] = field(default_factory=set)
    windows: set[int] = field(default_factory=set)
    mask_windows: set[int] = field(default_factory=set)
    options: set[str] = field(default_factory=set)


@dataclass(frozen=True)
class _Current:
    row: PackedRow
    kernel: AttentionKernel
    use: AttentionUse | None


# Not a context variable: with gradient checkpointing, autograd calls the attention in a separate thread.
_current: list[_Current] = []


@contextmanager
def attending(row: PackedRow, kernel: AttentionKernel, use: AttentionUse | None = None) -> Iterator[None]:
    """Return the context of the forward and backward pass of a packed row. Without packed attention it has no effect.

    Args:
        row: Positions of the sequences.
        kernel: ``VARLEN`` or ``SDPA_BLOCKS``, with the indices in ``row`` that it reads. Options of
            ``SCORE_OPTIONS`` need the indices of ``SDPA_BLOCKS``.
        use: Receives the requirements of the layers.
    """
    _current.append(_Current(row, kernel, use))
    try:
        yield
    finally:
        _current.pop()


@cache
def register_packed_attention() -> None:
    """Register both attention functions in transformers."""
    from transformers import AttentionInterface
    from transformers.masking_utils import AttentionMaskInterface

    for name in (PACKED_ATTENTION, RECORDED_ATTENTION):
        AttentionInterface.register(name, packed_attention)
    AttentionMaskInterface.register(RECORDED_ATTENTION, _record_mask)


def packed_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **options: Any,
) -> tuple[Tensor, None]:
    """Return causal attention within the sequences of the current row, [1, N, H, D], and no attention weights.

    Args:
        module: Attention layer.
        query: Queries, [1, H, N, D].
        key: Keys, [1, G, N, D].
        value: Values, [1, G, N, D].
        attention_mask: None. A mask that the model computes itself is not supported.
        scaling: Factor of the scores; None for 1 / sqrt(D).
        options: ``sliding_window``, ``softcap`` (Gemma 2, arXiv:2408.00118: ``softcap * tanh(score / softcap)``),
            ``s_aux`` (one more score per head that takes probability, as in gpt-oss), and options without effect.

    Raises:
        ModelError: The layer passes an option that is not supported.
    """
    if not _current:
        raise RuntimeError("packed attention was called outside of its context `attending`")
    current = _current[-1]
    window, softcap, sinks_H = (options.get(name) for name in ("sliding_window", "softcap", "s_aux"))
    _check(module, query, key, {**options, "attention_mask": attention_mask}, current.use)
    if current.use is not None:
        current.use.head_dims.add(query.size(-1))
        current.use.windows |= set() if window is None else {window}
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [N, H or G, D]
    if softcap is None and sinks_H is None:
        return attend(current.kernel, query, key, value, current.row, scaling, window)[None], None
    scores = Scores(scale=scaling, window=window, softcap=softcap, sinks_H=sinks_H)
    return attend_with_scores(scores, query, key, value, current.row)[None], None


def _check(
    module: torch.nn.Module, query: Tensor, key: Tensor, options: dict[str, Any], use: AttentionUse | None
) -> None:
    """Record the options of a layer, and raise an error if one is not supported."""
    given = {name for name, value in options.items() if value is not None}
    given -= _WITHOUT_EFFECT | {"sliding_window", "is_causal"}
    is_causal = options.get("is_causal")
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    if not is_causal and query.size(2) > 1:  # models may pass False for one token
        given.add("is_causal=False")
    if use is not None:
        use.options |= given
    if unsupported := sorted(given - SCORE_OPTIONS):
        raise ModelError(
            f"{type(module).__name__} passes {', '.join(unsupported)} to its attention function; packed rows support "
            "causal attention with the options sliding_window, softcap and s_aux",
            names=tuple(unsupported),
        )
    if query.size(0) != 1 or key.shape[::2] != query.shape[::2]:
        raise ModelError(
            f"{type(module).__name__} attends from {list(query.shape)} to {list(key.shape)}; packed rows support "
            "self-attention in one row, without a cache"
        )


def _record_mask(
    *,
    mask_function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    device: torch.device | str = "cpu",
    **_: object,
) -> None:
    """Record the window of a mask that the model requests for a single sequence, and return no mask."""
    use = _current[-1].use if _current else None
    if use is None:
        return
    zero = torch.tensor(0, device=device)

    def attends(distance: int) -> bool:
        return bool(mask_function(zero, zero, zero + _FAR, zero + _FAR - distance))

    if not attends(0):
        return  # of a window of 0 tokens, which no layer uses: Qwen2-MoE also requests the mask without such layers
    if attends(-1):
        use.options.add("is_causal=False")
    if attends(_FAR):
        return
    near, far = 0, _FAR  # the window is in (near, far]
    while far - near > 1:
        middle = (near + far) // 2
        near, far = (middle, far) if attends(middle) else (near, middle)
    use.mask_windows.add(far)

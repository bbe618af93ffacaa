"""Number of floating-point operations of an update, from the dimensions of the model and the lengths of the sequences.

Model FLOPs as in PaLM (Chowdhery et al. 2022, arXiv:2204.02311, appendix B): the FLOPs of the matrix products that the
equations need, where a product of [m, k] and [k, n] has ``2 m k n``. The backward pass has twice the operations of the
forward pass: one product for the gradient of the input, one for the gradient of the weights. Not counted are norms,
rotary embedding, softmax, activation functions and biases (below 1 % together), the loss and the optimizer, and
everything that is computed twice to save memory: recomputed layers, and the logits of the fused head.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from recipe_gkd.actor.student_dims import StudentDims

BACKWARD_OVER_FORWARD = 2


def update_flops(dims: StudentDims, lengths: Sequence[int], n_logit_rows: int) -> int:
    """Return the FLOPs of the forward and backward pass over packed sequences.

    Args:
        dims: Dimensions of the model, whose ``flops_problem`` is None.
        lengths: Input tokens of each sequence.
        n_logit_rows: Number of rows for which the output layer computes logits: response tokens.
    """
    return (1 + BACKWARD_OVER_FORWARD) * forward_flops(dims, lengths, n_logit_rows)


def forward_flops(dims: StudentDims, lengths: Sequence[int], n_logit_rows: int) -> int:
    """Return the FLOPs of the forward pass over packed sequences; see :func:`update_flops`."""
    cost = sample_cost(dims)
    return sum(cost(length, 0) for length in lengths) + cost(0, n_logit_rows)


def sample_cost(dims: StudentDims) -> Callable[[int, int], int]:
    """Return a function that computes the FLOPs of the forward pass over a sample, in constant time.

    Args:
        dims: Dimensions of the model, whose ``flops_problem`` is None.

    Returns:
        Function of the numbers of input tokens and of response tokens.
    """
    of_token, of_pair = token_flops(dims), _pair_flops(dims)
    of_logits = 2 * dims.hidden * dims.vocab_size
    windows = Counter(dims.windows())

    def cost(n_tokens: int, n_response_tokens: int) -> int:
        n_pairs = sum(n_layers * _n_pairs(n_tokens, window) for window, n_layers in windows.items())
        return n_tokens * of_token + n_pairs * of_pair + n_response_tokens * of_logits

    return cost


def token_flops(dims: StudentDims) -> int:
    """Return the FLOPs of the linear layers of all transformer layers for one token."""
    return sum(_layer_flops_per_token(dims, layer) for layer in range(dims.layers))


def _n_pairs(n_tokens: int, window: int | None) -> int:
    """Return the number of pairs of a query and a key: each token attends to itself and to the tokens before it."""
    n_without_window = n_tokens * (n_tokens + 1) // 2
    n_far = max(0, n_tokens - window) if window is not None else 0
    return n_without_window - n_far * (n_far + 1) // 2


def _pair_flops(dims: StudentDims) -> int:
    """Return the FLOPs of a pair in one layer: its score, and its part of the weighted sum of the values."""
    if (latent := dims.latent) is not None:
        return 2 * dims.heads * (latent.query + latent.value)
    return 4 * dims.heads * dims.head_dim


def _projection_flops(dims: StudentDims) -> int:
    """Return the FLOPs of the projections of queries, keys, values and outputs for one token in one layer."""
    if (latent := dims.latent) is None:
        qkv_columns = (dims.heads + 2 * dims.kv_heads) * dims.head_dim
        return 2 * dims.hidden * (qkv_columns + dims.heads * dims.head_dim)
    queries, inputs = dims.heads * latent.query, latent.q_rank or dims.hidden
    n_weights = inputs * queries + (dims.hidden * latent.q_rank if latent.q_rank else 0)
    n_weights += dims.hidden * (latent.kv_rank + latent.rope)
    n_weights += latent.kv_rank * dims.heads * (latent.nope + latent.value)
    n_weights += dims.heads * latent.value * dims.hidden
    return 2 * n_weights


def _layer_flops_per_token(dims: StudentDims, layer: int) -> int:
    """Return the FLOPs of the linear layers of one transformer layer for one token."""
    projections, moe = _projection_flops(dims), dims.moe
    if moe is None or not moe.layers[layer]:
        return projections + _gated_mlp_flops(dims.hidden, dims.ffn)
    feed_forward = 2 * dims.hidden * moe.experts + moe.top_k * _gated_mlp_flops(dims.hidden, moe.ffn)  # router, experts
    if moe.shared_ffn is not None:
        feed_forward += _gated_mlp_flops(dims.hidden, moe.shared_ffn) + 2 * dims.hidden * moe.shared_gate
    return projections + feed_forward


def _gated_mlp_flops(hidden: int, ffn: int) -> int:
    return 3 * 2 * hidden * ffn  # gate, up and down projection

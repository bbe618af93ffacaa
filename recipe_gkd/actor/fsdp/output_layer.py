"""Restriction of the output layer to the rows that have a loss, and its data type.

Shape suffixes: B rows of the input, S length of them, T rows with a loss, D hidden size, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recipe_gkd.actor.fsdp.loading import model_name, resharded
from recipe_gkd.errors import ModelError
from recipe_gkd.losses.float32_head import float32_logits

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass
class OutputRows:
    """Result of the forward pass inside of :func:`select_rows`.

    Attributes:
        weight_VD: Weights of the output layer if it was skipped and the model returned hidden states; else None.
        hidden_1TD: Hidden states that the skipped layer returned; else None.
    """

    weight_VD: Tensor | None = None
    hidden_1TD: Tensor | None = None


@contextmanager
def select_rows(
    model: PreTrainedModel, rows_T: Tensor, *, skip: bool = False, float32_head: bool = False
) -> Iterator[OutputRows]:
    """Make the output layer compute only the given rows, inside of this context. The model then returns [1, T, V].

    The logits of the other rows would be the largest tensors of a step, and they are not used.

    Args:
        model: Model of transformers.
        rows_T: Indices into the flattened positions [B * S].
        skip: Skip the layer, so that the model returns the hidden states of these rows, [1, T, D].
        float32_head: Compute float32 logits from 16-bit weights; see :mod:`~recipe_gkd.losses.float32_head`.
    """
    result, layer = OutputRows(), model.get_output_embeddings()

    def select(_: torch.nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
        return (args[0].flatten(0, 1)[rows_T][None],)

    def keep_hidden(hidden_1TD: Tensor) -> Tensor:
        result.weight_VD, result.hidden_1TD = layer.weight, hidden_1TD
        return hidden_1TD

    def compute_float32(hidden_1TD: Tensor) -> Tensor:
        logits_TV = float32_logits(hidden_1TD[0], layer.weight)
        return (logits_TV if layer.bias is None else logits_TV + layer.bias.float())[None]

    hook = layer.register_forward_pre_hook(select)
    if skip:
        layer.forward = keep_hidden
    elif float32_head:
        layer.forward = compute_float32
    try:
        yield result
    finally:
        layer.__dict__.pop("forward", None)
        hook.remove()


def ensure_output_layer_is_last(model: PreTrainedModel, device: torch.device) -> None:
    """Check that the logits are a product of hidden states and the weights of the output layer. Collective.

    Args:
        model: Model of transformers.
        device: Device of the parameters.

    Raises:
        ModelError: The output layer has a bias, or the model changes its result, for example with a soft cap.
    """
    token_ids_1N = torch.zeros(1, 2, dtype=torch.int64, device=device)
    with torch.no_grad(), resharded(model), select_rows(model, torch.arange(2, device=device), skip=True) as rows:
        output = model(input_ids=token_ids_1N, use_cache=False).logits
    has_bias = getattr(model.get_output_embeddings(), "bias", None) is not None
    if has_bias or output is not rows.hidden_1TD:
        reason = "has a bias" if has_bias else "is followed by other operations, such as a soft cap"
        raise ModelError(
            f"gkd.fuse_lm_head=true cannot be used, because the output layer of {model_name(model)} {reason}",
            remedy="set gkd.fuse_lm_head=false",
            names=("bias",) if has_bias else (),
        )

"""Transformers causal language model whose logits are computed for selected positions, in chunks.

A model's ``forward`` applies the output layer to all positions, and some models scale or cap its result afterwards.
The argument ``logits_to_keep`` selects positions, but a call for each chunk would repeat all layers. Hooks on the
output layer separate the two parts for every architecture.

A 16-bit output layer returns float32 logits without rounding, see :mod:`recipe_gkd.losses.float32_head`.

Shape suffixes: R sequences of a padded batch, S its length, T positions of a chunk, D hidden size, V output layer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle

from recipe_gkd.losses.float32_head import matmul_float32
from teacher.errors import TeacherSetupError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class ChunkedModel:
    """A causal language model in two parts: hidden states of a batch, and logits of some of them.

    Lifecycle::

        chunked = ChunkedModel(AutoModelForCausalLM.from_pretrained(folder))
        hidden_RSD = chunked.hidden_states(ids_RS, mask_RS)
        logits_TV = chunked.logits(hidden_RSD[0, 10:20])
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Wrap a model.

        Args:
            model: Transformers model in evaluation mode.

        Raises:
            TeacherSetupError: The model has no output layer.
        """
        self._model = model
        self._output_layer = model.get_output_embeddings()
        if self._output_layer is None:
            raise _unsupported(model, "has no output layer")
        # Other classes and data types are quantized layers.
        is_linear = isinstance(self._output_layer, torch.nn.Linear)
        self._is_16_bit = is_linear and self._output_layer.weight.dtype in (torch.bfloat16, torch.float16)

    def hidden_states(self, ids_RS: Tensor, mask_RS: Tensor) -> Tensor:
        """Return the inputs of the output layer, [R, S, D].

        Args:
            ids_RS: Token ids, int64, padded on the right.
            mask_RS: 1 for tokens, 0 for padding, int64.

        Raises:
            TeacherSetupError: The model does not call its output layer exactly once.
        """
        inputs: list[Tensor] = []

        def keep_input(_: torch.nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            inputs.append(arguments[0])
            return (arguments[0][:1, :1], *arguments[1:])  # logits of one position, which are not used

        handle = self._output_layer.register_forward_pre_hook(keep_input)
        self._forward(handle, input_ids=ids_RS, attention_mask=mask_RS)
        if len(inputs) != 1:
            raise _unsupported(self._model, f"calls its output layer {len(inputs)} times, expected once")
        return inputs[0]

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Return the logits of positions, with the model's scale and cap, [T, V].

        All layers process one token. Only the output layer processes ``hidden_TD``.

        Args:
            hidden_TD: Rows of the result of :meth:`hidden_states`.
        """

        def replace_input(_: torch.nn.Module, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return (hidden_TD[None], *arguments[1:])

        def float32_output(layer: Any, arguments: tuple[Tensor, ...], output: Tensor) -> Tensor:
            logits_TV = matmul_float32(hidden_TD, layer.weight)
            return (logits_TV if layer.bias is None else logits_TV.add_(layer.bias))[None]

        one_token = torch.zeros((1, 1), dtype=torch.long, device=hidden_TD.device)
        if self._is_16_bit:
            handle = self._output_layer.register_forward_hook(float32_output)
        else:
            handle = self._output_layer.register_forward_pre_hook(replace_input)
        logits_1TV: Tensor = self._forward(handle, input_ids=one_token).logits
        return logits_1TV[0]

    def _forward(self, handle: RemovableHandle, **inputs: Tensor) -> Any:
        """Call the model once with a hook."""
        try:
            return self._model(**inputs, use_cache=False)
        finally:
            handle.remove()


def _unsupported(model: PreTrainedModel, problem: str) -> TeacherSetupError:
    return TeacherSetupError(
        f"the model class {type(model).__name__} {problem}",
        options=("actor_rollout_ref.teacher.backend",),
        remedy="use a teacher service",
    )

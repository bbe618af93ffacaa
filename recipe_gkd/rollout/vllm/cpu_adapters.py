"""Patch of vLLM's CPU build: one product for a step whose tokens all have the same adapter.

vLLM copies the factors of the adapter once for each token, which takes more time than all other layers. The requests of
a rollout engine have one adapter, the student's.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def compute_one_adapter_at_once() -> None:
    """Replace the products of adapters. The results are the same."""
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    for name in ("bgmv_expand", "bgmv_expand_slice", "bgmv_shrink"):
        replaced = _joined(getattr(lora_ops, name))
        for module in (lora_ops, punica_cpu):
            setattr(module, name, replaced)


def _joined(product: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(product)
    def compute(
        inputs: torch.Tensor, factors: torch.Tensor, outputs: torch.Tensor, adapters_T: torch.Tensor, *args: Any,
        **options: Any,
    ) -> None:  # fmt: skip
        if len(adapters_T) > 1 and bool((adapters_T == adapters_T[0]).all()):
            adapters_T = adapters_T[:1]  # its factors are broadcast
        product(inputs, factors, outputs, adapters_T, *args, **options)

    return compute

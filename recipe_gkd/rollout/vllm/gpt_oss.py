"""Reload of gpt-oss, of which vLLM's layerwise reload would lose tensors without an error.

During a reload, parameters have no memory until their ``weight_loader`` has received all their numbers. vLLM's loader
of gpt-oss copies joined experts and the attention sinks into the parameters itself (model_executor/models/gpt_oss.py
``_load_weights_other``), so the engine would go on with the old ones. It does call ``weight_loader`` for single
experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from recipe_gkd.rollout.vllm.compat import reload_meta

if TYPE_CHECKING:
    import torch

    from recipe_gkd.weight_sync.receiver import NamedTensors

_SINGLE_EXPERT = {
    "gate_up_proj": "w13_weight",
    "gate_up_proj_bias": "w13_bias",
    "down_proj": "w2_weight",
    "down_proj_bias": "w2_bias",
}
"""Name of a tensor of all experts -> name of an expert's part in vLLM."""


def keep_sinks_in_reloads() -> None:
    """Let attention sinks keep their memory in a reload, so that the loader's copies reach them."""
    for names in (reload_meta.SKIP_TENSORS, reload_meta.SKIP_LOAD_TENSORS):
        names.add("sinks")


def single_experts(model: torch.nn.Module, tensors: NamedTensors) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield tensors, with those of gpt-oss's experts divided into single experts.

    Args:
        model: The model that vLLM runs. The tensors of another one are returned as they are.
        tensors: Complete tensors under their Hugging Face names.
    """
    is_gpt_oss = type(model).__name__ == "GptOssForCausalLM"
    for name, tensor in tensors:
        prefix, _, last = name.rpartition(".")
        if is_gpt_oss and prefix.endswith(".mlp.experts") and last in _SINGLE_EXPERT:
            for expert, part in enumerate(tensor):
                yield f"{prefix}.{expert}.{_SINGLE_EXPERT[last]}", part
        else:
            yield name, tensor

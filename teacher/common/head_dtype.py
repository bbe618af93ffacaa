"""Choice of the data type in which an engine computes logits. The rollout engines and the actor use the same rule.

With 16-bit weights, a 16-bit output layer rounds logits between 16 and 32 to multiples of 1/8 (bfloat16). Each
log-probability is then wrong by up to 0.06. A float32 output layer multiplies the same 16-bit weights, but accumulates
and returns float32. This module imports neither vLLM nor torch.
"""

from __future__ import annotations

from typing import Literal, get_args

HeadDtype = Literal["auto", "float32", "model"]
HEAD_DTYPES: tuple[str, ...] = get_args(HeadDtype)


def wants_float32_head(setting: str, dtype: str, device: str) -> bool:
    """Return True if the output layer computes float32 logits from weights of another data type.

    Args:
        setting: ``"auto"`` for float32 on CUDA with 16-bit weights, ``"float32"`` for always, ``"model"`` for the data
            type of the model.
        dtype: Data type of the weights. ``"auto"`` counts as 16 bits, because vLLM then converts float32 checkpoints to
            16 bits. If a model has float32 weights nevertheless, a float32 output layer changes nothing.
        device: ``"cpu"`` or ``"cuda"``.
    """
    return setting == "float32" or (setting == "auto" and device == "cuda" and dtype != "float32")


def head_overrides(*, float32_head: bool) -> dict[str, str]:
    """Return vLLM's ``hf_overrides`` for the output layer; empty if the model's own configuration decides.

    vLLM reads ``head_dtype`` from the model's configuration (``ModelConfig.head_dtype``) and applies it in
    ``LogitsProcessor``, which computes the logits of both model runners, of tied output layers, and of each
    tensor-parallel rank before they are gathered and before the rows of padding are removed.
    """
    return {"head_dtype": "float32"} if float32_head else {}

"""Random models of any architecture of transformers, and folders of those that the Megatron actor refuses.

transformers is imported by the functions, because it takes a second.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tests._support.qwen2 import EOS, PAD, save_word_tokenizer

VOCABULARY = 300
POSITIONS = 512

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": POSITIONS, "initializer_range": 0.1, "bos_token_id": None, "eos_token_id": EOS,
    "pad_token_id": PAD,
}  # fmt: skip
ENGINE_MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _SIZES),
    "opt": ("OPTForCausalLM", _SIZES | {"ffn_dim": 96, "word_embed_proj_dim": 128, "init_std": 0.1}),
    "phi": ("PhiForCausalLM", _SIZES | {"intermediate_size": 96}),
}
"""Class and configuration of models with head widths that vLLM supports on a CPU."""


def random_causal_lm(class_name: str, options: dict[str, Any]) -> Any:
    """Return a model of transformers with random weights, biases included, in evaluation mode."""
    import transformers

    model_class = getattr(transformers, class_name)
    torch.manual_seed(0)
    model = model_class(model_class.config_class(**options)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:  # biases would be 0
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


def save_engine_model(folder: Path, name: str) -> Path:
    """Write a folder with a model of :data:`ENGINE_MODELS` and a tokenizer."""
    class_name, options = ENGINE_MODELS[name]
    model = random_causal_lm(class_name, options)
    model.save_pretrained(folder)
    if name == "gpt2":
        _rename_as_published(folder, model)
    save_word_tokenizer(folder, [f"word{index}" for index in range(VOCABULARY - 3)])
    return folder


def _rename_as_published(folder: Path, model: Any) -> None:
    """Name the weights as in the published GPT-2: without the name of the inner model, and with the causal mask."""
    from safetensors.torch import save_file

    mask = torch.ones(1, 1, POSITIONS, POSITIONS).tril()
    state: dict[str, Tensor] = dict(model.transformer.state_dict())
    save_file(state | {f"h.{layer}.attn.bias": mask.clone() for layer in range(2)}, folder / "model.safetensors")
    content = json.loads((folder / "config.json").read_text())
    content.pop("tie_word_embeddings", None)
    (folder / "config.json").write_text(json.dumps(content))

"""Shapes of models with random weights, and their folders."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from teacher_service import save_tokenizer
from transformers import Qwen2Config, Qwen2ForCausalLM

MAX_LENGTH = 4096
# The 1.5B shape is Qwen2.5-1.5B's. The 8B shape has the sizes of Llama-3-8B, with the layers of Qwen2.
SHAPES: dict[str, dict[str, Any]] = {
    "tiny": dict(
        vocab_size=512, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "1.5B": dict(
        vocab_size=151936, hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
        num_key_value_heads=2, tie_word_embeddings=True,
    ),
    "8B": dict(
        vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, tie_word_embeddings=False,
    ),
}  # fmt: skip


def write_model(folder: Path, shape: str, device: str) -> Path:
    """Save a model with random bfloat16 weights and a tokenizer of words; return ``folder``."""
    config = Qwen2Config(
        **SHAPES[shape], max_position_embeddings=MAX_LENGTH, eos_token_id=1, pad_token_id=0, bos_token_id=None,
        dtype="bfloat16",
    )  # fmt: skip
    with torch.device("meta"):
        model = Qwen2ForCausalLM(config)
    model = model.to(torch.bfloat16).to_empty(device=device)
    model.tie_weights()
    torch.manual_seed(0)
    std = config.hidden_size**-0.5  # the standard deviation of the logits is about 1
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.fill_(1.0)
            else:
                parameter.normal_(0, std)
    model.save_pretrained(folder)
    del model, parameter
    if device == "cuda":
        torch.cuda.empty_cache()  # other processes of the section need the memory
    save_tokenizer(folder, config.vocab_size)
    return folder

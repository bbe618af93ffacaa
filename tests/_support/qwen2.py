"""Random Qwen2 models and word tokenizers. transformers is imported by the functions, because it takes a second."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAD, EOS, UNKNOWN = 0, 1, 2
"""First ids of a vocabulary."""
_CONFIG: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "tie_word_embeddings": False,
    "initializer_range": 0.1,  # Distributions are not uniform, and float32 logits are exact to 1e-5.
    "pad_token_id": PAD,
    "eos_token_id": EOS,
    "bos_token_id": None,
}


def random_qwen2(seed: int, **config: Any) -> Any:
    """Return a float32 ``Qwen2ForCausalLM`` with random weights, in evaluation mode.

    Args:
        seed: Seed of the weights.
        **config: Fields of ``Qwen2Config``. They replace the defaults of this module; ``vocab_size`` and
            ``max_position_embeddings`` have none.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(seed)
    return Qwen2ForCausalLM(Qwen2Config(**(_CONFIG | config))).float().eval()


def save_word_tokenizer(folder: Path, words: list[str], *, characters: bool = False) -> None:
    """Save a tokenizer with the ids ``PAD``, ``EOS`` and ``UNKNOWN``, followed by ``words``.

    Args:
        words: Words without whitespace, or characters.
        characters: Split text into characters instead of words.
    """
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    vocabulary = {word: index for index, word in enumerate([*special.values(), *words])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    if characters:
        tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)

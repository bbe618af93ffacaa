"""Tiny random models in Hugging Face folders, and random samples for an update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recipe_gkd.data.samples import Prompt, Response, Sample, TeacherTopK

if TYPE_CHECKING:
    import torch
    from transformers import Qwen2ForCausalLM

VOCABULARY = 512
TOP_K = 8
MAX_LENGTH = 256


def write_model(folder: Path, *, seed: int, with_tokenizer: bool = False) -> Path:
    """Save a random Qwen2 of two layers, whose weights are bfloat16 numbers in float32.

    An engine in bfloat16 and a reference in float64 therefore have the same weights.

    Args:
        folder: Folder to create.
        seed: Seed of the weights.
        with_tokenizer: Save the quickstart's tokenizer, too; the vocabulary then has its 32 tokens.

    Returns:
        ``folder``.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from recipe_gkd.addition.tokenizer import build_tokenizer

    tokenizer = build_tokenizer() if with_tokenizer else None
    config = Qwen2Config(
        vocab_size=VOCABULARY if tokenizer is None else len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,  # of size 64, for which every attention kernel exists
        num_key_value_heads=2,
        max_position_embeddings=MAX_LENGTH,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=1 if tokenizer is None else tokenizer.eos_token_id,
        pad_token_id=0 if tokenizer is None else tokenizer.pad_token_id,
        dtype="float32",
    )
    torch.manual_seed(seed)
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn_like(parameter)
            parameter.copy_((1 + 0.1 * noise if "norm" in name else 0.1 * noise).bfloat16())
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    else:
        (folder / "tokenizer.json").write_text("{}")  # the actor copies it
    return folder


def read_model(folder: Path, dtype: torch.dtype) -> Qwen2ForCausalLM:
    """Return a model of :func:`write_model` on the CPU, for a reference."""
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def make_prompts(count: int, first_uid: int = 0) -> list[Prompt]:
    """Return random prompts of 4 to 23 tokens. A prompt depends on its uid only."""
    return [
        Prompt(uid=uid, ids=np.random.default_rng(uid).integers(2, VOCABULARY, 4 + uid % 20).astype(np.int32), row=uid)
        for uid in range(first_uid, first_uid + count)
    ]


def make_samples(lengths: Sequence[int], *, seed: int = 0) -> list[Sample]:
    """Return samples with the given response lengths and a random teacher's top-k."""
    rng = np.random.default_rng(seed)
    samples = []
    for prompt, length in zip(make_prompts(len(lengths)), lengths, strict=True):
        scores_TV = 1.5 * rng.normal(size=(length, VOCABULARY))
        logps_TV = scores_TV - np.log(np.exp(scores_TV).sum(1, keepdims=True))
        ids_TK = np.argsort(-logps_TV, axis=1)[:, :TOP_K]
        ids_T = rng.integers(0, VOCABULARY, length)
        samples.append(make_sample(prompt, ids_T, np.take_along_axis(logps_TV, ids_TK, 1), ids_TK))
    return samples


def make_sample(prompt: Prompt, ids_T: np.ndarray, logps_TK: np.ndarray, ids_TK: np.ndarray) -> Sample:
    """Return a sample of version 0 whose sampled log-probabilities are 0.

    Args:
        logps_TK: Log-probabilities of the teacher's top-k.
        ids_TK: Token ids of the teacher's top-k.
    """
    zeros_T = np.zeros(len(ids_T), np.float32)
    response = Response(
        uid=prompt.uid,
        ids=ids_T.astype(np.int32),
        logprobs=zeros_T,
        finish_reason="stop",
        weights_version=0,
        versions_T=np.zeros(len(ids_T), np.int32),
    )
    teacher = TeacherTopK(logps_TK=logps_TK.astype(np.float32), ids_TK=ids_TK.astype(np.int32), sampled_logps_T=zeros_T)
    return Sample(prompt=prompt, response=response, teacher=teacher)

"""Tiny random models in Hugging Face folders, and random samples for an update."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from recipe_gkd.data.samples import Prompt, Response, Sample, TeacherTopK

if TYPE_CHECKING:
    import torch
    from numpy.typing import ArrayLike
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


def engine_dtype(device: str) -> str:
    """Return the data type of engines and teachers: bfloat16 on a GPU, as in real runs, and an exact one on a CPU."""
    return "bfloat16" if device == "cuda" else "float32"


def read_model(folder: Path, dtype: torch.dtype) -> Qwen2ForCausalLM:
    """Return a model of :func:`write_model` on the CPU, for a reference."""
    from transformers import Qwen2ForCausalLM

    return Qwen2ForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def make_prompts(count: int, first_uid: int = 0, vocabulary: int = VOCABULARY) -> list[Prompt]:
    """Return random prompts of 4 to 23 tokens. A prompt depends on its uid and the vocabulary only."""
    return [
        Prompt(uid=uid, ids=np.random.default_rng(uid).integers(2, vocabulary, 4 + uid % 20).astype(np.int32), row=uid)
        for uid in range(first_uid, first_uid + count)
    ]


def make_samples(lengths: Sequence[int], *, seed: int = 0) -> list[Sample]:
    """Return samples with the given response lengths and a random teacher's top-k."""
    rng = np.random.default_rng(seed)
    samples = []
    for prompt, length in zip(make_prompts(len(lengths)), lengths, strict=True):
        top_k = random_top_k(rng, length, VOCABULARY, TOP_K)
        samples.append(make_sample(prompt.uid, prompt.ids, rng.integers(0, VOCABULARY, length), *top_k))
    return samples


def random_top_k(
    rng: np.random.Generator, length: int, vocabulary: int, k: int, sharpness: float = 1.5
) -> tuple[np.ndarray, np.ndarray]:
    """Return log-probabilities and ids of the ``k`` likeliest tokens of random distributions, [T, K] each.

    Args:
        length: Number of distributions.
        sharpness: Standard deviation of the logits.
    """
    scores_TV = sharpness * rng.normal(size=(length, vocabulary))
    logps_TV = scores_TV - np.log(np.exp(scores_TV).sum(1, keepdims=True))
    ids_TK = np.argsort(-logps_TV, axis=1)[:, :k]
    return np.take_along_axis(logps_TV, ids_TK, 1), ids_TK


def make_sample(uid: int, prompt: ArrayLike, response: ArrayLike, logps_TK: ArrayLike, ids_TK: ArrayLike) -> Sample:
    """Return a sample of version 0 whose sampled log-probabilities are 0.

    Args:
        prompt: Token ids of the prompt.
        response: Token ids of the response.
        logps_TK: Log-probabilities of the teacher's top-k.
        ids_TK: Token ids of the teacher's top-k.
    """
    ids_T = np.asarray(response, np.int32)
    zeros_T = np.zeros(len(ids_T), np.float32)
    return Sample(
        prompt=Prompt(uid=uid, ids=np.asarray(prompt, np.int32), row=uid),
        response=Response(
            uid=uid,
            ids=ids_T,
            logprobs=zeros_T,
            finish_reason="stop",
            weights_version=0,
            versions_T=np.zeros(len(ids_T), np.int32),
        ),
        teacher=TeacherTopK(
            logps_TK=np.asarray(logps_TK, np.float32), ids_TK=np.asarray(ids_TK, np.int32), sampled_logps_T=zeros_T
        ),
    )

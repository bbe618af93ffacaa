"""Job for the worker pool that measures the memory of an update, and models whose parts of it are known."""

from __future__ import annotations

import ctypes
import gc
from pathlib import Path

import numpy as np
import psutil

from recipe_gkd.commands.gpu_smoke.tiny_models import make_sample
from recipe_gkd.config import Config
from recipe_gkd.data.samples import Sample
from recipe_gkd.runtime.phase_memory import peak_bytes, reset_peak
from tests._support.ports import free_port
from tests._support.tiny_models import started, update
from tests.integration.actor.memory_jobs import M_MMAP_THRESHOLD

PROMPT_LENGTH = 2


def make_student(path: Path, *, hidden: int, ffn: int, layers: int, vocab: int) -> Path:
    """Write a Hugging Face folder of a Qwen2 model with heads of 64 columns, half of them for keys."""
    import transformers

    config = transformers.Qwen2Config(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=hidden // 64, num_key_value_heads=hidden // 128, max_position_embeddings=2048,
        tie_word_embeddings=False, dtype="float32",
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def make_full_batch(n_tokens: int, n_samples: int, *, vocab: int, top_k: int) -> list[Sample]:
    """Return samples that fill one micro-batch of ``n_tokens`` tokens, nearly all of them in responses."""
    rng = np.random.default_rng(0)
    n_response = n_tokens // n_samples - PROMPT_LENGTH + 1
    ids_TK = np.tile(np.arange(top_k, dtype=np.int32), (n_response, 1))
    logps_TK = np.full((n_response, top_k), np.log(0.5 / top_k), np.float32)
    return [
        make_sample(uid, rng.integers(0, vocab, PROMPT_LENGTH), rng.integers(0, vocab, n_response), logps_TK, ids_TK)
        for uid in range(n_samples)
    ]


def measure_update(
    rank: int, world_size: int, port: int, tiny: Config, tiny_batch: list[Sample], config: Config, batch: list[Sample]
) -> int:
    """Return the memory of an update with the states of its actor, in bytes.

    Args:
        world_size: Number of ranks; 1.
        port: Port of the rendezvous.
        tiny: Configuration of a tiny model, whose update loads all libraries.
        tiny_batch: Samples of that update.
        config: Configuration of the measured run.
        batch: Samples of one micro-batch.
    """
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 1 << 16)  # freed memory is returned at once
    with started(rank, world_size, port, tiny) as actor:
        update(actor, tiny_batch, 0)
    del actor
    gc.collect()
    before = psutil.Process().memory_info().rss
    with started(rank, world_size, free_port(), config) as actor:
        update(actor, batch, 0)  # allocates the optimizer state
        reset_peak("cpu")
        update(actor, batch, 1)
        return peak_bytes("cpu") - before

"""Jobs for the worker pool that train with a limited memory, and a model whose logits need most of it."""

from __future__ import annotations

import ctypes
import gc
import logging
import re
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from recipe_gkd.actor.objective.token_kl import TokenKl
from recipe_gkd.commands.gpu_smoke.tiny_actor import exported
from recipe_gkd.config import Config
from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import GkdError
from tests._support.tiny_models import started, update

VOCAB = 40_000
M_MMAP_THRESHOLD = -3
"""Option of the C library's ``mallopt``: smallest size of a block that is mapped separately, in bytes."""


class Outcome(NamedTuple):
    """Result of a training with a limited memory on one rank.

    Attributes:
        metrics: Metrics of each update that succeeded.
        errors: Error of each update that failed.
        weights: Exported weights at the end; empty on other ranks than 0.
        warnings: Messages of the updater.
    """

    metrics: list[dict[str, float]]
    errors: list[GkdError]
    weights: dict[str, Tensor]
    warnings: list[str]


def make_wide_folder(path: Path) -> Path:
    """Write a Hugging Face folder of a small model with :data:`VOCAB` token ids."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCAB, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=1024, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(path)
    (path / "tokenizer.json").write_text("{}")
    return path


def train_with_memory(
    rank: int, world_size: int, port: int, config: Config, batches: list[list[Sample]], megabytes: Mapping[int, int]
) -> Outcome:
    """Run an update on each batch.

    Args:
        world_size: Number of ranks.
        port: Port of the rendezvous.
        batches: Samples of each update.
        megabytes: Memory that a rank may allocate during an update, in addition to what it has; by rank.
    """
    outcome = Outcome([], [], {}, [])
    handler = logging.Handler()
    handler.emit = lambda record: outcome.warnings.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("recipe_gkd.actor.update")
    logger.addHandler(handler)
    try:
        with started(rank, world_size, port, config) as actor:
            for step, batch in enumerate(batches):
                try:
                    with limited_memory(megabytes[rank]) if rank in megabytes else nullcontext():
                        outcome.metrics.append(update(actor, batch, step))
                except GkdError as error:
                    assert error.__context__ is None, "the error must not keep the tensors of the attempt alive"
                    outcome.errors.append(error)
            return outcome._replace(weights=exported(actor))
    finally:
        logger.removeHandler(handler)


def measure_kl_with_memory(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample], megabytes: Mapping[int, int]
) -> tuple[TokenKl, dict[str, float]]:
    """Return the KL divergences of this rank's samples, and the metrics of an update after it.

    Args:
        world_size: Number of ranks.
        port: Port of the rendezvous.
        batch: Samples of all ranks.
        megabytes: Memory that a rank may allocate in addition to what it has; by rank.
    """
    with started(rank, world_size, port, config) as actor:
        with limited_memory(megabytes[rank]) if rank in megabytes else nullcontext():
            found = actor.token_kl(batch[rank::world_size], 0)
        return found, update(actor, batch, 0)


def score_with_memory(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample], megabytes: Mapping[int, int]
) -> tuple[list[list[float]], dict[str, float]]:
    """Return the log-probabilities of all responses, and the metrics of an update after it.

    The arguments are those of :func:`measure_kl_with_memory`.
    """
    with started(rank, world_size, port, config) as actor:
        with limited_memory(megabytes[rank]) if rank in megabytes else nullcontext():
            found = actor.log_probs(
                [(s.prompt.ids.tolist(), s.response.ids.tolist()) for s in batch if len(s.response.ids)]
            )
        return found, update(actor, batch, 0)


def train_with_fault(
    rank: int, world_size: int, port: int, config: Config, batches: list[list[Sample]], backward: bool
) -> Outcome:
    """Run an update on each batch. The last rank once runs out of memory, in the first layer's second micro-batch.

    Args:
        world_size: Number of ranks.
        port: Port of the rendezvous.
        batches: Samples of each update.
        backward: Fail in the backward pass of the layer, after those of later layers; else in its forward pass.
    """
    calls = 0

    def fail(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    def count(_: torch.nn.Module, __: object, output: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 2:
            if not backward:
                fail()
            (output[0] if isinstance(output, tuple) else output).register_hook(fail)

    with started(rank, world_size, port, config) as actor:
        if rank == world_size - 1:
            model = actor.backend.model
            root = model.chunks[0] if hasattr(model, "chunks") else model.module
            layer = next(each for each in root.modules() if type(each).__name__.endswith(("DecoderLayer", "merLayer")))
            layer.register_forward_hook(count)
        metrics = [update(actor, batch, step) for step, batch in enumerate(batches)]
        return Outcome(metrics, [], exported(actor), [])


def map_large_blocks(*_: int) -> None:
    """Let each large block have its own memory from now on.

    Otherwise a block could use what an earlier job freed, and would not count for :func:`limited_memory`.
    """
    ctypes.CDLL("libc.so.6").mallopt(M_MMAP_THRESHOLD, 1 << 20)


@contextmanager
def limited_memory(megabytes: int) -> Iterator[None]:
    """Let the allocations of this process fail that exceed the memory in use by more than ``megabytes``.

    :func:`map_large_blocks` must have been the first job of the process.
    """
    gc.collect()  # Objects of earlier jobs must not be freed below the limit.
    status = Path("/proc/self/status").read_text()
    match = re.search(r"VmData:\s+(\d+) kB", status)
    assert match is not None
    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (int(match[1]) * 1024 + megabytes * 2**20, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))

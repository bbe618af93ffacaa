"""Tiny Qwen2 models for rollout workers, their prompts, and an actor that exports one of them."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from recipe_gkd.commands.gpu_smoke.reference import response_logps, sampled_logps
from recipe_gkd.commands.gpu_smoke.tiny_engine import FixedWeights
from recipe_gkd.commands.gpu_smoke.tiny_models import make_prompts
from recipe_gkd.config import Config
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.collective import CollectiveTransport
from recipe_gkd.weight_sync.receiver import receive_weights
from recipe_gkd.weight_sync.sender_api import WeightSenderApi
from recipe_gkd.weight_sync.spec import TransportAddress
from recipe_gkd.weight_sync.stats import TransferStats
from recipe_gkd.weight_sync.store import join_store
from tests._support.base_config import base_config
from tests._support.qwen2 import random_qwen2
from tests._support.waiting import PATIENCE_S

VOCABULARY = 300
PADDED_VOCABULARY = 320
"""Rows of the embedding and of the output layer of an untied model, on disk and in the actor."""
TEACHER_EOS = 2


def make_model(seed: int, *, tied: bool, vocab_size: int = VOCABULARY) -> Any:
    """Return a Qwen2 model with random weights, without padding."""
    return random_qwen2(
        seed, vocab_size=vocab_size, hidden_size=128, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        max_position_embeddings=512, tie_word_embeddings=tied,
    )  # fmt: skip


def make_padded_model(seed: int, *, tied: bool) -> Any:
    """Return :func:`make_model`; if it is untied, with padding ids that are more likely than any token."""
    model = make_model(seed, tied=tied)
    if tied:
        return model
    state, more = model.state_dict(), PADDED_VOCABULARY - VOCABULARY
    for name, factor in (("model.embed_tokens.weight", 1), ("lm_head.weight", 30)):
        state[name] = torch.cat([state[name], factor * state[name][:more]])
    padded = make_model(seed, tied=tied, vocab_size=PADDED_VOCABULARY)
    padded.load_state_dict(state)
    return padded


def store_output_layer(folder: Path) -> None:
    """Store the output layer of a tied model, too. Many tools that merge or fine-tune models write such folders."""
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"].clone()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})


def config_for(folder: Path, *overrides: str) -> Config:
    """Return a configuration of a CPU rollout with short prompts and responses."""
    return base_config(
        f"actor_rollout_ref.model.path={folder}", "data.max_prompt_length=32", "data.max_response_length=48",
        "actor_rollout_ref.rollout.dtype=float32", "actor_rollout_ref.rollout.kv_cache_memory_megabytes=64",
        "actor_rollout_ref.nccl_timeout=60", "trainer.device=cpu", *overrides,
    )  # fmt: skip


def prompts(n: int, first_uid: int = 0) -> list[Prompt]:
    """Return ``n`` random prompts of 4 to 23 tokens; a prompt depends on its uid only."""
    return make_prompts(n, first_uid, VOCABULARY)


def reference_logps(model: Any, prompt: Prompt, response: Response) -> np.ndarray:
    """Return the log-probabilities of transformers at each response position, float32 [T, V]."""
    return response_logps(model, np.concatenate([prompt.ids, response.ids]), len(prompt.ids))


def reference_logprobs(model: Any, prompt: Prompt, response: Response) -> np.ndarray:
    """Return the log-probabilities of transformers of a response's tokens, float32 [T]."""
    return sampled_logps(model, np.concatenate([prompt.ids, response.ids]), len(prompt.ids))


class TinyActor(FixedWeights):
    """The methods of an actor worker that a weight sync needs. ``break_next_export`` makes an export fail."""

    def __init__(self, timeout_s: float) -> None:
        super().__init__()
        self._weights = WeightSenderApi(self, rank=0, device=torch.device("cpu"), timeout_s=timeout_s)
        self._break_after, self._stall_s = -1, 0.0

    def set_weights(self, seed: int, tied: bool) -> None:
        """Replace the weights, like a training step."""
        self.set(make_padded_model(seed, tied=tied).state_dict(), is_tied=tied)
        self._model = make_model(seed, tied=tied)

    def log_probs(self, continuations: list[tuple[list[int], list[int]]]) -> list[list[float]]:
        """Return the log-probability of each token of each continuation, by transformers."""
        return [
            sampled_logps(self._model, [*context, *continuation], len(context)).tolist()
            for context, continuation in continuations
        ]

    def break_next_export(self, after: int, stall_s: float) -> None:
        """Make the next export stall after ``after`` tensors, or raise there if ``stall_s`` is 0."""
        self._break_after, self._stall_s = after, stall_s

    def rename_weight(self, old: str, new: str) -> None:
        self._state = {new if name == old else name: tensor for name, tensor in self._state.items()}

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        after, self._break_after = self._break_after, -1
        for i, item in enumerate(super().export_weights()):
            if i == after:
                if not self._stall_s:
                    raise RuntimeError("the export failed")
                time.sleep(self._stall_s)  # the fault under test, not a wait
            yield item

    def open_weight_store(self) -> tuple[str, int]:
        return self._weights.open_store("127.0.0.1")

    def connect_weight_transport(self, address: TransportAddress) -> None:
        self._weights.connect(address)

    def send_weights(self, version: int, bucket_bytes: int) -> TransferStats | None:
        return self._weights.send(version, bucket_bytes)

    def shutdown(self) -> None:
        self._weights.close()


class DoomedWorker:
    """A rollout worker without an engine. Its process ends during the first update that it receives."""

    def setup(self) -> None:
        """Return when the process has started."""

    def open_weight_transport(self, address: TransportAddress, first_rank: int) -> None:
        store = join_store(address.host, address.port, PATIENCE_S)
        cpu = torch.device("cpu")
        self._transport = CollectiveTransport(
            store, rank=first_rank, labels=address.labels, device=cpu, timeout_s=PATIENCE_S
        )

    def begin_weight_update(self, version: int, meta: list[TensorMeta], inflight: bool) -> None:
        pass

    def receive_weights(self, version: int, meta: list[TensorMeta], bucket_bytes: int) -> Any:
        received: list[Any] = []

        def take(tensors: Any) -> None:
            received.append(tensors)
            if len(received) == 3:
                os._exit(1)

        return receive_weights(self._transport, version, meta, bucket_bytes, take)

    def drop_weights(self) -> None:
        pass

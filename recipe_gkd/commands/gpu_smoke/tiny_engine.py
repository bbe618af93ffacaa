"""A rollout engine on a tiny model in this process, and a process that sends weights to it."""

from __future__ import annotations

import queue
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

from recipe_gkd.commands.gpu_smoke.peer_process import Peer, select_device
from recipe_gkd.commands.gpu_smoke.tiny_models import MAX_LENGTH, engine_dtype, read_model
from recipe_gkd.config import Config, load_config
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.errors import GkdError
from recipe_gkd.rollout.engine import RolloutEngine
from recipe_gkd.rollout.engine_options import EngineOptions
from recipe_gkd.rollout.engine_report import EngineReport
from recipe_gkd.rollout.weight_updates import WeightUpdates
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.sender_api import WeightSenderApi
from recipe_gkd.weight_sync.spec import TransportAddress

CACHE_MIB = 64
TIMEOUT_S = 60.0
_BUCKET_BYTES = 100_000

Responses = dict[int, Response]
"""Responses by uid."""


def engine_config(folder: Path, device: str, tensor_parallel_size: int, *overrides: str) -> Config:
    """Return the configuration of an engine for the model in ``folder``."""
    rollout = "actor_rollout_ref.rollout"
    keys = [
        "data.train_files=unused", f"actor_rollout_ref.model.path={folder}", f"trainer.device={device}",
        f"data.max_prompt_length={MAX_LENGTH // 2}", f"data.max_response_length={MAX_LENGTH // 2}",
        f"{rollout}.dtype={engine_dtype(device)}", f"{rollout}.kv_cache_memory_megabytes={CACHE_MIB}",
        f"{rollout}.gpu_memory_utilization=0.2", f"{rollout}.max_num_seqs=16",
        f"{rollout}.tensor_model_parallel_size={tensor_parallel_size}",
        f"rollout.n_gpus_per_node={tensor_parallel_size}",
    ]  # fmt: skip
    return load_config("on_policy_distill_trainer", [*keys, *overrides])


@contextmanager
def running_engine(config: Config, *, timeout_s: float) -> Iterator[tuple[RolloutEngine, EngineReport]]:
    """Start an engine, whose weights get version 0, and close it at the end.

    Args:
        timeout_s: Deadline of the start.
    """
    engine = RolloutEngine(EngineOptions.from_config(config, config.trainer.device))
    try:
        report = engine.start().result(timeout=timeout_s)
        engine.run(lambda inner: inner.set_weight_version("0")).result(timeout=TIMEOUT_S)
        yield engine, report
    finally:
        engine.close()


def generate(
    engine: RolloutEngine, prompts: Sequence[Prompt], params: Sequence[dict[str, Any]], timeout_s: float = TIMEOUT_S
) -> Responses:
    """Return the responses to prompts.

    Args:
        params: Sampling parameters of each prompt.
        timeout_s: Deadline between two responses.
    """
    delivered = queue.SimpleQueue[list[Response] | GkdError]()
    _, accepted = engine.submit(prompts, params, delivered.put)
    accepted.result(timeout=timeout_s)
    return collect(delivered, len(prompts), timeout_s)


def collect(delivered: queue.SimpleQueue[list[Response] | GkdError], count: int, timeout_s: float) -> Responses:
    """Return the responses that an engine puts into a queue."""
    found: Responses = {}
    while len(found) < count:
        responses = delivered.get(timeout=timeout_s)
        if isinstance(responses, Exception):
            raise responses
        found |= {response.uid: response for response in responses}
    return found


# ---- weight syncs


def join_sender(engine: RolloutEngine, peer: Peer, transport: str, tensor_parallel_size: int) -> WeightUpdates:
    """Connect the engine with the process of :func:`serve_weights`."""
    updates = WeightUpdates("the rollout engine")
    labels = ("the sender", *(f"tensor rank {rank}" for rank in range(tensor_parallel_size)))
    address = TransportAddress("127.0.0.1", peer.receive(), transport, labels)
    peer.send(address)
    engine.run(lambda inner: updates.join(inner, address, 1, TIMEOUT_S)).result(timeout=2 * TIMEOUT_S)
    return updates


def sync_weights(engine: RolloutEngine, updates: WeightUpdates, peer: Peer, request: tuple[Path, int, bool]) -> None:
    """Load the weights of a folder as a version.

    Args:
        request: Folder, version, and True if the update is double-buffered, False if it is in place.
    """
    folder, version, double_buffered = request
    peer.send((folder, version))
    meta = peer.receive()
    engine.run(lambda inner: updates.receive(inner, version, meta, _BUCKET_BYTES, double_buffered)).result(
        timeout=2 * TIMEOUT_S
    )
    engine.run(lambda inner: updates.commit(inner, version)).result(timeout=2 * TIMEOUT_S)


def serve_weights(connection: Connection, device_type: str, index: int) -> None:
    """Process of the sender. Messages: port, address of the transport, then folder and version of each sync; None."""
    device, weights = select_device(device_type, index), FixedWeights()
    api = WeightSenderApi(weights, rank=0, device=device, timeout_s=TIMEOUT_S)
    _, port = api.open_store("127.0.0.1")
    connection.send(port)
    api.connect(connection.recv())
    while (request := connection.recv()) is not None:
        folder, version = request
        state = read_model(folder, getattr(torch, engine_dtype(device_type))).state_dict()
        weights.set({name: tensor.to(device) for name, tensor in state.items()}, is_tied=True)
        connection.send(weights.weights_meta())
        api.send(version, _BUCKET_BYTES)
    api.close()


class FixedWeights:
    """Weights of a model of transformers, in place of an actor."""

    def __init__(self) -> None:
        self._state: dict[str, torch.Tensor] = {}

    def set(self, state: dict[str, torch.Tensor], *, is_tied: bool) -> None:
        """Replace the weights. The output layer is left out if it is tied to the embedding."""
        self._state = {name: tensor for name, tensor in state.items() if not (is_tied and name == "lm_head.weight")}

    def weights_meta(self) -> list[TensorMeta]:
        """Return name, shape and dtype of each tensor."""
        return [(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in self._state.items()]

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors."""
        return iter(self._state.items())

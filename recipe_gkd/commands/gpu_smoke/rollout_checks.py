"""A rollout engine after weight syncs: it must generate like an engine that has loaded the same weights."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch

from recipe_gkd.commands.gpu_smoke.outcome import CheckFailed, Context
from recipe_gkd.commands.gpu_smoke.peer_process import Peer, running_peer
from recipe_gkd.commands.gpu_smoke.tiny_models import MAX_LENGTH, make_prompts, read_model, write_model
from recipe_gkd.config import load_config
from recipe_gkd.data.samples import Response
from recipe_gkd.errors import GkdError
from recipe_gkd.rollout.engine import RolloutEngine
from recipe_gkd.rollout.engine_options import EngineOptions
from recipe_gkd.rollout.engine_sleep import EngineSleep, SleepReport
from recipe_gkd.rollout.weight_updates import WeightUpdates
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from recipe_gkd.weight_sync.sender_api import WeightSenderApi
from recipe_gkd.weight_sync.spec import TransportAddress

if TYPE_CHECKING:
    from recipe_gkd.rollout.vllm.compat import LLMEngine

T = TypeVar("T")

_N_PROMPTS = 12
_RESPONSE_TOKENS = 24
_CACHE_MIB = 64
_BUCKET_BYTES = 100_000
_TIMEOUT_S = 60.0
_OLD, _NEW = 0, 1
"""Seeds of the two models."""
# Largest accepted difference of log-probabilities: between two engines with the same weights, and to transformers. An
# engine in bfloat16 rounds the outputs of its layers.
_LIMITS = {"float32": (1e-4, 1e-3), "bfloat16": (0.05, 0.1)}
_MAX_SAME = 0.5
"""Fraction of equal responses of two models above which the check would show nothing."""
_MIN_SAME = 0.9
"""Fraction of equal responses of two engines with the same weights. A near tie of two tokens can go either way."""

Responses = dict[int, Response]


def check_rollout(context: Context) -> str:
    """Check an engine on one device."""
    return _check_engine(context, tensor_parallel_size=1)


def check_rollout_tp2(context: Context) -> str:
    """Check an engine of two tensor-parallel ranks."""
    return _check_engine(context, tensor_parallel_size=2)


def _check_engine(context: Context, tensor_parallel_size: int) -> str:
    folders = {seed: write_model(context.folder / f"model-{seed}", seed=seed) for seed in (_OLD, _NEW)}
    # NCCL connects one process per GPU, so it needs a GPU that the engine does not use.
    collective = context.device == "cpu" or context.n_gpus > tensor_parallel_size
    transport, sender = ("collective", tensor_parallel_size) if collective else ("ipc", 0)
    # In its own process, because vLLM keeps state of its first engine.
    with running_peer(
        _generate_fresh, context, folders[_NEW], tensor_parallel_size, timeout_s=context.deadline_s
    ) as peer:
        fresh_new: Responses = peer.receive()
    with _running_engine(context, folders[_OLD], tensor_parallel_size) as engine:
        fresh_old = _generate(engine)
        if (same := _fraction_same(fresh_old, fresh_new)) > _MAX_SAME:
            raise CheckFailed(f"two models gave {same:.0%} equal responses, so a sync could not be noticed")
        timeout_s = 2 * _TIMEOUT_S
        with running_peer(_serve_weights, context.device, sender, timeout_s=timeout_s) as peer:
            updates = _join(engine, peer, transport, tensor_parallel_size)
            for version, (seed, double_buffered) in enumerate([(_NEW, True), (_OLD, False), (_NEW, False)], start=1):
                _sync(engine, updates, peer, (folders[seed], version, double_buffered))
                kind = "double-buffered" if double_buffered else "in place"
                expected = {_OLD: fresh_old, _NEW: fresh_new}[seed]
                _compare(context, f"v{version}, {kind}", _generate(engine), expected)
            peer.send(None)
    _compare_with_transformers(context, folders[_NEW], fresh_new)
    return f"{_N_PROMPTS} responses after each of 3 syncs over {transport} agree with freshly loaded engines"


def check_rollout_sleep(context: Context) -> str:
    """Check that an engine wakes from both sleep levels as it was, with a weight sync after level 2."""
    folder = write_model(context.folder / "model", seed=_NEW)
    hybrid = ("actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync")
    with (
        _running_engine(context, folder, 1, *hybrid) as engine,
        running_peer(_serve_weights, context.device, 0, timeout_s=2 * _TIMEOUT_S) as peer,
    ):
        fresh = _generate(engine)
        updates = _join(engine, peer, "ipc", 1)
        state = EngineSleep("the rollout engine", updates)

        def run(command: Callable[[LLMEngine], T]) -> T:
            return engine.run(command).result(timeout=2 * _TIMEOUT_S)

        for level in (1, 2):
            released = run(partial(_sleep, state, level)).released_bytes
            context.figures[f"level {level}: released MiB"] = released >> 20
            if released < 0.9 * (_CACHE_MIB << 20):
                raise CheckFailed(f"sleep level {level} released {released >> 20} MiB, expected about {_CACHE_MIB}")
            run(lambda inner: state.wake(inner, "weights"))
            if level == 2:
                _sync(engine, updates, peer, (folder, 1, True))
            run(lambda inner: state.wake(inner, "kv_cache"))
            _compare(context, f"after sleep level {level}", _generate(engine), fresh)
        peer.send(None)
    return f"{_N_PROMPTS} responses after sleep levels 1 and 2 agree with those before"


@contextmanager
def _running_engine(
    context: Context, folder: Path, tensor_parallel_size: int, *overrides: str
) -> Iterator[RolloutEngine]:
    rollout = "actor_rollout_ref.rollout"
    config = load_config(
        "on_policy_distill_trainer",
        [
            "data.train_files=unused", f"actor_rollout_ref.model.path={folder}", f"trainer.device={context.device}",
            f"data.max_prompt_length={MAX_LENGTH // 2}", f"data.max_response_length={MAX_LENGTH // 2}",
            f"{rollout}.dtype={_dtype(context)}", f"{rollout}.kv_cache_memory_megabytes={_CACHE_MIB}",
            f"{rollout}.gpu_memory_utilization=0.2", f"{rollout}.max_num_seqs=16",
            f"{rollout}.tensor_model_parallel_size={tensor_parallel_size}",
            f"rollout.n_gpus_per_node={tensor_parallel_size}", *overrides,
        ],
    )  # fmt: skip
    engine = RolloutEngine(EngineOptions.from_config(config, context.device))
    try:
        report = engine.start().result(timeout=context.deadline_s)
        context.figures.update(dtype=report.dtype, head_dtype=report.head_dtype)
        engine.run(lambda inner: inner.set_weight_version("0")).result(timeout=_TIMEOUT_S)
        yield engine
    finally:
        engine.close()


def _generate_fresh(connection: Connection, context: Context, folder: Path, tensor_parallel_size: int) -> None:
    """Process of a freshly loaded engine: send its responses."""
    with _running_engine(context, folder, tensor_parallel_size) as engine:
        connection.send(_generate(engine))


def _dtype(context: Context) -> str:
    return "bfloat16" if context.device == "cuda" else "float32"


def _generate(engine: RolloutEngine) -> Responses:
    """Return greedy responses to the prompts, by uid."""
    prompts, delivered = make_prompts(_N_PROMPTS), queue.SimpleQueue[list[Response] | GkdError]()
    params = [{"max_tokens": _RESPONSE_TOKENS, "temperature": 0.0}] * len(prompts)
    _, accepted = engine.submit(prompts, params, delivered.put)
    accepted.result(timeout=_TIMEOUT_S)
    found: Responses = {}
    while len(found) < len(prompts):
        responses = delivered.get(timeout=_TIMEOUT_S)
        if isinstance(responses, Exception):
            raise responses
        found |= {response.uid: response for response in responses}
    return found


# ---- weight syncs


def _join(engine: RolloutEngine, peer: Peer, transport: str, tensor_parallel_size: int) -> WeightUpdates:
    """Connect the engine with the sender's process."""
    updates = WeightUpdates("the rollout engine")
    labels = ("the sender", *(f"tensor rank {rank}" for rank in range(tensor_parallel_size)))
    address = TransportAddress("127.0.0.1", peer.receive(), transport, labels)
    peer.send(address)
    engine.run(lambda inner: updates.join(inner, address, 1, _TIMEOUT_S)).result(timeout=2 * _TIMEOUT_S)
    return updates


def _sync(engine: RolloutEngine, updates: WeightUpdates, peer: Peer, request: tuple[Path, int, bool]) -> None:
    """Load the weights of a folder as a version, double-buffered or in place."""
    folder, version, double_buffered = request
    peer.send((str(folder), version))
    meta = peer.receive()
    engine.run(lambda inner: updates.receive(inner, version, meta, _BUCKET_BYTES, double_buffered)).result(
        timeout=2 * _TIMEOUT_S
    )
    engine.run(lambda inner: updates.commit(inner, version)).result(timeout=2 * _TIMEOUT_S)


class _FolderWeights:
    """Weights of a Hugging Face folder on a device, in place of an actor."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._state = device, dict[str, torch.Tensor]()

    def load(self, folder: Path) -> None:
        """Read a folder. The output layer is left out, because it is tied to the embedding."""
        dtype = torch.float32 if self._device.type == "cpu" else torch.bfloat16
        state = read_model(folder, dtype).state_dict()
        self._state = {name: state[name].to(self._device) for name in state if name != "lm_head.weight"}

    def weights_meta(self) -> list[TensorMeta]:
        """Return name, shape and dtype of each tensor."""
        return [(name, tuple(t.shape), str(t.dtype).removeprefix("torch.")) for name, t in self._state.items()]

    def export_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Return the tensors."""
        return iter(self._state.items())


def _sleep(state: EngineSleep, level: int, engine: LLMEngine) -> SleepReport:
    return state.sleep(engine, level)


def _serve_weights(connection: Connection, device_type: str, index: int) -> None:
    """Process of the sender. Messages: port, address of the transport, then folder and version of each sync; None."""
    device = torch.device("cpu")
    if device_type == "cuda":
        torch.cuda.set_device(index)
        device = torch.device("cuda", index)
    weights = _FolderWeights(device)
    api = WeightSenderApi(weights, rank=0, device=device, timeout_s=_TIMEOUT_S)
    _, port = api.open_store("127.0.0.1")
    connection.send(port)
    api.connect(connection.recv())
    while (request := connection.recv()) is not None:
        folder, version = request
        weights.load(Path(folder))
        connection.send(weights.weights_meta())
        api.send(version, _BUCKET_BYTES)
    api.close()


# ---- comparison


def _fraction_same(found: Responses, expected: Responses) -> float:
    return sum(np.array_equal(found[uid].ids, expected[uid].ids) for uid in expected) / len(expected)


def _compare(context: Context, name: str, found: Responses, expected: Responses) -> None:
    """Compare responses: equal tokens, and log-probabilities up to the first token that differs."""
    limit, _ = _LIMITS[_dtype(context)]
    errors = [_error_of_common_tokens(found[uid], expected[uid]) for uid in expected]
    context.compare(f"{name}: log-probabilities", max(errors), limit)
    context.compare(f"{name}: fraction of other responses", 1 - _fraction_same(found, expected), 1 - _MIN_SAME)


def _error_of_common_tokens(found: Response, expected: Response) -> float:
    length = min(len(found.ids), len(expected.ids))
    different = np.flatnonzero(found.ids[:length] != expected.ids[:length])
    length = int(different[0]) if len(different) else length
    return float(np.abs(found.logprobs[:length] - expected.logprobs[:length]).max(initial=0.0))


def _compare_with_transformers(context: Context, folder: Path, responses: Responses) -> None:
    """Compare the log-probabilities of the engine with transformers in float32, as a mean over tokens."""
    model = read_model(folder, torch.float32)
    errors = []
    for prompt in make_prompts(_N_PROMPTS):
        response = responses[prompt.uid]
        ids = torch.from_numpy(np.concatenate([prompt.ids, response.ids])).long()
        with torch.no_grad():
            logps_TV = model(ids[None]).logits[0].log_softmax(-1)[len(prompt.ids) - 1 : -1].numpy()
        errors.append(np.abs(logps_TV[np.arange(len(response.ids)), response.ids] - response.logprobs))
    _, limit = _LIMITS[_dtype(context)]
    context.compare("log-probabilities, difference to transformers (mean)", float(np.concatenate(errors).mean()), limit)

"""Update a rollout engine while it generates: `rollout_script RESULT OLD NEW RANKS ASYNC_SCHEDULING KIND ...`.

ASYNC_SCHEDULING is the value of the key. There is one update per KIND, "double-buffered" or "in-place". Version v has
the weights of OLD if v is even, else of NEW. RESULT has the properties of the engine, and of each update its responses
and log-probabilities after it.
"""

from __future__ import annotations

import dataclasses
import json
import queue
import sys
import threading
from pathlib import Path
from typing import Any

from recipe_gkd.commands.gpu_smoke.peer_process import Peer, running_peer
from recipe_gkd.commands.gpu_smoke.tiny_engine import (
    collect,
    engine_config,
    join_sender,
    running_engine,
    serve_weights,
    sync_weights,
)
from recipe_gkd.commands.gpu_smoke.tiny_models import make_prompts
from recipe_gkd.data.samples import Prompt
from recipe_gkd.rollout import engine_factory
from recipe_gkd.rollout.engine import RolloutEngine
from recipe_gkd.rollout.engine_options import EngineOptions
from recipe_gkd.rollout.weight_updates import WeightUpdates
from tests.gpu_paths import v2_runner

STEP_TOKENS = 48
RESPONSE_TOKENS = 12
TOKENS_BEFORE_UPDATE = 3
_TIMEOUT_S = 90.0

v2_runner.add_triton_backend()


def prompts() -> list[Prompt]:
    """Return five prompts of 19 to 23 tokens. A step of ``STEP_TOKENS`` tokens splits the third one."""
    return make_prompts(5, first_uid=15)


def use_steps_of_a_gpu() -> None:
    """Bound the tokens of a step as on CUDA, where prompts are split into chunks."""
    step_budget = engine_factory.step_budget

    def of_cuda(options: EngineOptions, cuda_default: int) -> dict[str, Any]:
        return step_budget(dataclasses.replace(options, device="cuda"), cuda_default)

    vars(engine_factory)["step_budget"] = of_cuda


def update_in_flight(
    engine: RolloutEngine, updates: WeightUpdates, peer: Peer, request: tuple[Path, int, bool]
) -> dict[str, Any]:
    """Update the weights while responses are generated.

    Args:
        updates: Its updates, connected with the sender.
        peer: Process of the sender.
        request: Folder of the weights, their version, and True if the update is double-buffered.

    Returns:
        Responses by uid, the number of batches in flight when the engine was paused, and log-probabilities of the first
        prompt after the update.
    """
    delivered, version = queue.SimpleQueue[Any](), request[1]
    params = [
        {"max_tokens": RESPONSE_TOKENS, "ignore_eos": True, "temperature": 1.0, "seed": 1000 * version + prompt.uid}
        for prompt in prompts()
    ]
    paused = pause_in_flight(engine)
    _, accepted = engine.submit(prompts(), params, delivered.put)
    accepted.result(_TIMEOUT_S)
    assert paused.wait(_TIMEOUT_S), f"the responses did not have {TOKENS_BEFORE_UPDATE} tokens within {_TIMEOUT_S:g} s"
    in_flight = engine.run(v2_runner.batches_in_flight).result(_TIMEOUT_S)
    sync_weights(engine, updates, peer, request)
    engine.resume().result(_TIMEOUT_S)
    responses = {
        uid: {name: getattr(response, name).tolist() for name in ("ids", "logprobs", "versions_T")}
        for uid, response in collect(delivered, len(params), _TIMEOUT_S).items()
    }
    log_probs = engine.log_probs(prompts()[0].ids.tolist()).result(_TIMEOUT_S)
    return {"batches in flight": in_flight, "responses": responses, "log_probs": log_probs}


def pause_in_flight(engine: RolloutEngine) -> threading.Event:
    """Pause the engine after the step in which the last response gets its token number ``TOKENS_BEFORE_UPDATE``.

    Returns:
        Event that is set when the engine is paused.
    """
    paused = threading.Event()

    def replace_step(inner: Any) -> None:
        requests = inner.engine_core.engine_core.scheduler.requests

        def step() -> Any:
            outputs = type(inner).step(inner)
            if requests and min(each.num_output_tokens for each in requests.values()) >= TOKENS_BEFORE_UPDATE:
                del inner.step
                engine.pause().add_done_callback(lambda _: paused.set())
            return outputs

        inner.step = step

    engine.run(replace_step).result(_TIMEOUT_S)
    return paused


def main(result: str, old: str, new: str, n_ranks: str, async_scheduling: str, *kinds: str) -> None:
    v2_runner.keep_async_scheduling()
    use_steps_of_a_gpu()
    folders = Path(old), Path(new)
    keys = f"max_num_batched_tokens={STEP_TOKENS}", f"async_scheduling={async_scheduling}"
    config = engine_config(folders[0], "cpu", int(n_ranks), *(f"actor_rollout_ref.rollout.{key}" for key in keys))
    with (
        running_engine(config, timeout_s=_TIMEOUT_S) as (engine, _),
        running_peer(serve_weights, "cpu", 0, timeout_s=_TIMEOUT_S) as peer,
    ):
        found = {"engine": engine.run(v2_runner.describe).result(_TIMEOUT_S)}
        updates = join_sender(engine, peer, "ipc", int(n_ranks))
        for version, kind in enumerate(kinds, start=1):
            request = folders[version % 2], version, kind == "double-buffered"
            found[kind] = update_in_flight(engine, updates, peer, request)
        peer.send(None)
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Score sequences with several engine settings, in a separate process: `engine_script.py MODEL OUT`.

The .npz file OUT contains NAME/I/FIELD for each array of result I under each setting, NAME/preemptions, and NAME/error
for rejected settings and sequences.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from teacher.engines.base import EngineConfig
from teacher.engines.vllm_engine import VllmEngine
from teacher.errors import TeacherError
from teacher.records import TeacherSequence

VOCAB_SIZE, N_TOKENS = 100, 83
SMALLEST_KV_LEN = 895  # longest sequence in a KV cache of 1 MiB, with 1 KiB per token
SMALL: dict[str, Any] = dict(n_logprobs=8, dtype="float32", logits_mib=1, kv_cache_mib=1)


def sequences(lengths: list[int]) -> list[TeacherSequence]:
    rng = np.random.default_rng(0)
    return [TeacherSequence(rng.integers(0, N_TOKENS, n, dtype=np.int32), 1 + n // 3) for n in lengths]


SHORT = sequences([2, 3, 17, 40, 63])
DISCARDED = 2
REFUSED = 4  # index in LONG: vLLM rejects it at its admission, long after it was added
LONG = sequences([895, 895, 2, 895, 500, 895, 30, 894, 895, 895, 3])
TOO_LARGE = TeacherSequence(np.ones(1000, np.int32), 200)


def refuse(engine: VllmEngine, refused_key: int) -> None:
    add_request = engine._engine.add_request

    def add(key: str, *args: Any, **named: Any) -> None:
        if int(key) == refused_key:
            raise ValueError(f"no room for request {key}")
        add_request(key, *args, **named)

    engine._engine.add_request = add


def score(engine: VllmEngine, added: list[TeacherSequence]) -> dict[str, Any]:
    scheduler = engine._engine.engine_core.engine_core.scheduler
    preempt, n_preempted = scheduler._preempt_request, 0

    def count(*args: Any, **named: Any) -> None:
        nonlocal n_preempted
        n_preempted += 1
        preempt(*args, **named)

    scheduler._preempt_request = count
    for key, sequence in enumerate(added):
        engine.check(sequence, 1.0)
        engine.add(key, sequence)
    engine.discard([DISCARDED])
    found: dict[str, Any] = {}
    while engine.has_work():
        for key, result in engine.step():
            if isinstance(result, TeacherError):
                found[f"{key}/error"] = str(result)
            else:
                found |= {f"{key}/{name}": array for name, array in vars(result).items()}
    scheduler._preempt_request = preempt
    return found | {"preemptions": n_preempted}


def refusal(make: Any) -> str:
    try:
        make()
    except TeacherError as error:
        return str(error)
    return ""


def main(model: str, out: str) -> None:
    found: dict[str, Any] = {}

    def save(name: str, results: dict[str, Any]) -> None:
        found.update({f"{name}/{key}": value for key, value in results.items()})

    whole = VllmEngine(EngineConfig(model, N_TOKENS, dtype="float32", kv_cache_mib=4, max_result_mib=1))
    save("at 1", score(whole, SHORT))
    whole.set_temperature(0.5)
    save("at 0.5", score(whole, SHORT))
    found["padding/error"] = refusal(lambda: whole.check(TeacherSequence(np.array([1, N_TOKENS], np.int32), 1), 1.0))
    found["result/error"] = refusal(lambda: whole.check(TOO_LARGE, 1.0))
    found["n_tokens"] = whole.info.n_tokens
    smallest = VllmEngine(EngineConfig(model, **SMALL, max_model_len=SMALLEST_KV_LEN))
    refuse(smallest, REFUSED)
    save("smallest", score(smallest, LONG))
    found["smallest/has work"] = smallest.has_work()
    found["kv cache/error"] = refusal(
        lambda: VllmEngine(EngineConfig(model, **SMALL, max_model_len=1 + SMALLEST_KV_LEN))
    )
    found["k/error"] = refusal(lambda: VllmEngine(EngineConfig(model, N_TOKENS + 1)))
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Score sequences with several engine settings, in a separate process: `engine_script.py MODEL OUT [N_RANKS]`.

The .npz file OUT contains NAME/I/FIELD for each array of result I under each setting, NAME/preemptions, and NAME/error
for rejected settings and sequences. "head SETTING" are a bfloat16 engine's results, and the largest error of its
logits. "chunks" are the rows of logits that vLLM's V2 runner computes at a time.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import numpy as np

from teacher.common.vllm_worker import LogitsCalls
from teacher.engines import vllm_engine
from teacher.engines.base import EngineConfig
from teacher.engines.vllm_engine import VllmEngine
from teacher.errors import TeacherError
from teacher.records import LogitSettings, TeacherSequence

VOCAB_SIZE, N_TOKENS = 100, 83
SMALLEST_KV_LEN = 991  # longest sequence in a KV cache of 1 MiB, with 1 KiB per token
SMALL: dict[str, Any] = dict(n_logprobs=8, dtype="float32", logits_mib=1, kv_cache_mib=1)


def sequences(lengths: list[int]) -> list[TeacherSequence]:
    rng = np.random.default_rng(0)
    return [TeacherSequence(rng.integers(0, N_TOKENS, n, dtype=np.int32), 1 + n // 3) for n in lengths]


SHORT = sequences([2, 3, 17, 40, 63])
DISCARDED = 2
REFUSED = 4  # index in LONG: vLLM rejects it at its admission, long after it was added
LONG = sequences([991, 991, 2, 991, 500, 991, 30, 990, 991, 991, 3])
PROMPT = sequences([70])[0].token_ids
SHARED = [TeacherSequence(np.append(PROMPT, each.token_ids).astype(np.int32), len(PROMPT)) for each in SHORT]
SHARED.append(SHARED[-1])  # also its response is in the cache
SHARED.append(TeacherSequence(SHARED[-1].token_ids, len(PROMPT), scored_ranges=[[90, 97], [99, 120]]))
N_SUPPORT = 5


def with_support(key: int, sequence: TeacherSequence, n_support: int = N_SUPPORT) -> TeacherSequence:
    """Return a sequence with support ids in any order, the last one unused; every other one without the top k."""
    rng = np.random.default_rng(key)
    ids_TJ = np.array([rng.permutation(N_TOKENS)[:n_support] for _ in range(sequence.n_scored)], np.int32)
    ids_TJ[:, -1] = -1
    return TeacherSequence(
        sequence.token_ids,
        sequence.prompt_len,
        scored_ranges=sequence.scored_ranges,
        support_ids_TJ=ids_TJ,
        with_top_k=bool(key % 2),
    )


def with_ranges(key: int, sequence: TeacherSequence) -> TeacherSequence:
    """Return a sequence of which random ranges are scored, if it has several response tokens."""
    rng, first, n_tokens = np.random.default_rng(key), sequence.prompt_len, len(sequence.token_ids)
    n_bounds = 2 * min(3, (n_tokens - first + 1) // 4)
    if not n_bounds:
        return sequence
    bounds = np.sort(rng.permutation(np.arange(first, n_tokens + 1))[:n_bounds])
    return TeacherSequence(sequence.token_ids, first, scored_ranges=bounds.reshape(-1, 2).astype(np.int32))


SUPPORTED = [with_support(key, with_ranges(key, each)) for key, each in enumerate(LONG)]
PADDED = TeacherSequence(np.array([1, N_TOKENS], np.int32), 1)
N_FEW = 70
FEW = [TeacherSequence(each.token_ids % N_FEW, each.prompt_len) for each in SHORT[:REFUSED]]
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
        engine.check(sequence, LogitSettings())
        engine.add(key, sequence)
    engine.discard([DISCARDED])
    found: dict[str, Any] = {}
    while engine.has_work():
        for key, result in engine.step():
            if isinstance(result, TeacherError):
                found[f"{key}/error"] = as_json(result)
            else:
                found |= {f"{key}/{name}": array for name, array in vars(result).items() if array is not None}
    scheduler._preempt_request = preempt
    return found | {"preemptions": n_preempted}


def score_counting(engine: VllmEngine, added: list[TeacherSequence]) -> dict[str, Any]:
    """Score sequences. Return also the rows of logits, and the tokens that the model computed."""
    counts = {"rows": 0, "tokens": 0}

    def count(model: Any) -> None:
        compute_logits, forward = model.compute_logits, model.forward

        def counting(hidden_TH: Any, *args: Any, **named: Any) -> Any:
            counts["rows"] += len(hidden_TH)
            return compute_logits(hidden_TH, *args, **named)

        def forward_counting(*args: Any, **named: Any) -> Any:
            counts["tokens"] += len(named["positions"])
            return forward(*args, **named)

        model.compute_logits, model.forward = counting, forward_counting

    engine._engine.apply_model(count)
    return score(engine, added) | counts


def fail_check_of_shared_prompt(engine: VllmEngine) -> None:
    check = vllm_engine.check_unchanged

    def fail(*_: Any) -> None:
        raise RuntimeError("other scores")

    vars(vllm_engine)["check_unchanged"] = fail
    engine._check_shared_prompt()
    vars(vllm_engine)["check_unchanged"] = check


def head_precision(engine: VllmEngine) -> dict[str, Any]:
    """Return the data type of an engine's logits, and their largest error against the float64 product."""
    import torch

    def compare(model: Any) -> tuple[str, float]:
        weight_VH = model.lm_head.weight.detach()[:VOCAB_SIZE]
        hidden_TH = 30 * torch.randn(5, weight_VH.shape[1], generator=torch.Generator().manual_seed(0)).to(weight_VH)
        logits_TV = getattr(model.compute_logits, "of_model", model.compute_logits)(hidden_TH)
        exact_TV = hidden_TH.double() @ weight_VH.double().T
        return str(logits_TV.dtype), float((logits_TV.double() - exact_TV).abs().max())

    ((dtype, error),) = engine._engine.apply_model(compare)
    return {"dtype": dtype, "error": error, "engine": engine.info.engine}


def sleep_and_wake(engine: VllmEngine) -> dict[str, Any]:
    """Return results after a wake-up, and the errors of wake-ups of a wrong model.

    "uniform error": all logits are equal, while the weights are the same. "wake error": one weight differs. It is in
    the output layer, because vLLM on a CPU packs the weights of other layers into memory that is no parameter.
    """
    import psutil
    import torch

    def resident_bytes() -> int:
        return int(psutil.Process().memory_info().rss)

    awake = resident_bytes()
    engine.sleep()
    released = awake - resident_bytes()
    engine.wake()
    found = score(engine, SHORT) | {"released": released, "checksums": len(engine._sleep_mode._checksums[0])}

    def make_logits_equal(model: Any) -> None:
        of_model = model.compute_logits.of_model
        model.compute_logits = lambda *args, **named: torch.zeros_like(of_model(*args, **named))

    def change_one_weight(model: Any) -> None:
        with torch.no_grad():
            model.lm_head.weight[3, 5] += 1e-7

    engine.sleep()
    engine._engine.apply_model(make_logits_equal)
    found["uniform error"] = refusal(engine.wake)
    engine.sleep()
    engine._engine.apply_model(change_one_weight)
    return found | {"wake error": refusal(engine.wake)}


def chunks_of_v2_runner(n_rows: int, n_tokens: int) -> list[int]:
    """Return the rows of each call of vLLM's V2 runner for logits, after `set_logit_rows`."""
    import torch
    from vllm.v1.outputs import LogprobsTensors
    from vllm.v1.worker.gpu.sample import prompt_logprob

    rows: list[int] = []

    def compute_logits(hidden_TH: torch.Tensor) -> torch.Tensor:
        rows.append(len(hidden_TH))
        return hidden_TH

    def topk(logits_TV: torch.Tensor, k: int, ids_T: torch.Tensor, **_: Any) -> LogprobsTensors:  # Triton on a GPU
        values, ids = logits_TV.topk(k)
        return LogprobsTensors(ids, values, ids_T)

    vars(prompt_logprob)["compute_topk_scores"] = topk
    LogitsCalls().set_logit_rows(n_rows)
    prompt_logprob.compute_prompt_logprobs_with_chunking(
        torch.arange(n_tokens), torch.zeros(n_tokens, 3), compute_logits, 2
    )
    return rows


def refusal(make: Any) -> str:
    """Return the error of a call as JSON, an empty object if there is none."""
    try:
        make()
    except TeacherError as error:
        return as_json(error)
    return "{}"


def as_json(error: TeacherError) -> str:
    return json.dumps({"type": type(error).__name__, **vars(error)}, default=str)


def score_on_two_ranks(model: str, out: str) -> None:
    engine = VllmEngine(EngineConfig(model, **SMALL | {"kv_cache_mib": 8}, max_model_len=SMALLEST_KV_LEN, tp_size=2))
    results = score(engine, SUPPORTED)
    engine.close()
    np.savez(out, **{f"two ranks/{key}": value for key, value in results.items()})


def main(model: str, out: str, n_ranks: str = "1") -> None:
    if n_ranks == "2":
        score_on_two_ranks(model, out)
        return
    found: dict[str, Any] = {}

    def save(name: str, results: dict[str, Any]) -> None:
        found.update({f"{name}/{key}": value for key, value in results.items()})

    whole = VllmEngine(
        EngineConfig(model, N_TOKENS, dtype="float32", kv_cache_mib=64, max_result_mib=1, sleep_mode=True)
    )
    save("at 1", score(whole, SHORT))
    whole.set_logits(LogitSettings(0.5))
    save("at 0.5", score(whole, SHORT))
    found["padding/error"] = refusal(lambda: whole.check(PADDED, LogitSettings()))
    found["result/error"] = refusal(lambda: whole.check(TOO_LARGE, LogitSettings()))
    found["n_tokens"] = whole.info.n_tokens
    whole.set_logits(LogitSettings())
    save("shared", score_counting(whole, SHARED))
    fail_check_of_shared_prompt(whole)
    save("unshared", score_counting(whole, SHARED))
    whole.set_logits(LogitSettings())
    save("woken", sleep_and_wake(whole))
    smallest = VllmEngine(EngineConfig(model, **SMALL, max_model_len=SMALLEST_KV_LEN))
    refuse(smallest, REFUSED)
    save("smallest", score(smallest, LONG))
    found["smallest/has work"] = smallest.has_work()
    save("support", score(smallest, SUPPORTED))
    wide, padded = with_support(0, SHORT[0], SMALL["n_logprobs"] + 1), with_support(0, SHORT[0])
    assert padded.support_ids_TJ is not None
    padded.support_ids_TJ[0, 0] = N_TOKENS
    for name, sequence in {"wide": wide, "padded": padded}.items():
        found[f"{name}/error"] = refusal(lambda sequence=sequence: smallest.check(sequence, LogitSettings()))
    few = LogitSettings(n_ids=N_FEW)
    smallest.set_logits(few)
    save("few", score(smallest, FEW))
    found["few/error"] = refusal(lambda: smallest.check(TeacherSequence(np.array([1, N_FEW], np.int32), 1), few))
    found["too few/error"] = refusal(lambda: smallest.check(FEW[0], LogitSettings(n_ids=7)))
    heads = {  # both are kept: an engine that is deleted ends the process groups of the others
        head: VllmEngine(EngineConfig(model, N_TOKENS, dtype="bfloat16", head_dtype=head, kv_cache_mib=4))
        for head in ("model", "float32")
    }
    for head, engine in heads.items():
        save(f"head {head}", head_precision(engine) | score(engine, SHORT))
    found["chunks"] = chunks_of_v2_runner(7, 20)
    found["kv cache/error"] = refusal(
        lambda: VllmEngine(EngineConfig(model, **SMALL, max_model_len=1 + SMALLEST_KV_LEN))
    )
    found["k/error"] = refusal(lambda: VllmEngine(EngineConfig(model, N_TOKENS + 1)))
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])

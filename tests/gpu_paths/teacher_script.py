"""Score sequences with the steps that a teacher has on a GPU: `teacher_script RESULT MODEL ASYNC_SCHEDULING`.

RESULT has the properties of the engine, "scores" by temperature and key, and "rows": the rows of logits that vLLM
computed at a time. The sequences ``DISCARDED`` are discarded in the last run, "after discard".
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from teacher.engines import sizes, vllm_engine
from teacher.engines.base import EngineConfig
from teacher.engines.vllm_engine import VllmEngine
from teacher.engines.vllm_memory import TeacherCalls
from teacher.records import LogitSettings, ScoredSequence, TeacherSequence
from tests.gpu_paths import v2_runner

TOP_K, N_SUPPORT = 8, 5
STEP_TOKENS, LOGIT_ROWS = 48, 10
TEMPERATURES = (1.0, 2.0, 0.5)
DISCARDED, STEPS_BEFORE_DISCARD = (5, 7), 3
_LENGTHS = (2, 3, 11, 40, 63, 90, 150, 199)
_VOCABULARY = 32
_GIB = 2**30

v2_runner.add_triton_backend()


def sequences() -> list[TeacherSequence]:
    """Return the sequences, by key. Four of them are longer than a step. Of every third, two ranges are scored."""
    rng, found = np.random.default_rng(0), []
    for key, n in enumerate(_LENGTHS):
        ids_N, prompt_len = rng.integers(0, _VOCABULARY, n, dtype=np.int32), 1 + n // 3
        n_response = n - prompt_len
        ranges = [[prompt_len + 1, prompt_len + n_response // 2], [n - 2, n - 1]] if n_response > 6 else None
        found.append(TeacherSequence(ids_N, prompt_len, scored_ranges=ranges if key % 3 == 0 else None))
    return found


def with_support() -> list[TeacherSequence]:
    """Return the sequences with support ids, one of which is unused; every other one without the top k."""
    rng, found = np.random.default_rng(1), []
    for key, each in enumerate(sequences()):
        ids_TJ = np.array([rng.permutation(_VOCABULARY)[:N_SUPPORT] for _ in range(each.n_scored)], np.int32)
        ids_TJ[:, 1] = -1
        options = dict(scored_ranges=each.scored_ranges, support_ids_TJ=ids_TJ, with_top_k=bool(key % 2))
        found.append(TeacherSequence(each.token_ids, each.prompt_len, **options))
    return found


def use_steps_of_a_gpu() -> None:
    """Select the code and the sizes of CUDA. Steps are smaller than on CUDA, so that short sequences have several."""

    def device_memory(self: TeacherCalls) -> tuple[int, int]:  # called by its name
        return 60 * _GIB, 80 * _GIB

    vars(vllm_engine)["is_cpu_build"] = lambda: False
    vars(sizes).update(_MAX_TOKENS_CUDA=STEP_TOKENS, MAX_LOGIT_ROWS_V2=LOGIT_ROWS)
    TeacherCalls.device_memory = device_memory  # type: ignore[method-assign]


def record_rows() -> list[int]:
    """Return a list that gets the number of rows of each call of vLLM for log-probabilities of a prompt."""
    from vllm.v1.worker.gpu.sample import prompt_logprob

    rows: list[int] = []
    compute: Callable[..., Any] = prompt_logprob.compute_topk_scores

    def recorded(logits_RV: Any, *args: Any, **named: Any) -> Any:
        rows.append(len(logits_RV))
        return compute(logits_RV, *args, **named)

    vars(prompt_logprob)["compute_topk_scores"] = recorded
    return rows


def score(
    engine: VllmEngine,
    settings: LogitSettings,
    discarded: tuple[int, ...] = (),
    added: Sequence[TeacherSequence] | None = None,
) -> dict[int, dict[str, Any]]:
    """Return the scores of all sequences by key, as lists."""
    engine.set_logits(settings)
    for key, sequence in enumerate(added or sequences()):
        engine.check(sequence, settings)
        engine.add(key, sequence)
    found: dict[int, dict[str, Any]] = {}
    n_steps = 0
    while engine.has_work():
        for key, scored in engine.step():
            assert isinstance(scored, ScoredSequence), scored
            found[key] = {name: array.tolist() for name, array in vars(scored).items() if array is not None}
        n_steps += 1
        if n_steps == STEPS_BEFORE_DISCARD:
            engine.discard(list(discarded))
    return found


def main(result: str, model: str, async_scheduling: str) -> None:
    v2_runner.keep_async_scheduling()
    use_steps_of_a_gpu()
    config = EngineConfig(model, TOP_K, dtype="float32", kv_cache_mib=32, async_scheduling=async_scheduling)
    engine = VllmEngine(config)
    rows = record_rows()
    found: dict[str, Any] = {"engine": v2_runner.describe(engine._engine)}
    found["scores"] = {f"{each:g}": score(engine, LogitSettings(each)) for each in TEMPERATURES}
    found["after discard"] = score(engine, LogitSettings(), DISCARDED)
    found["rows"] = rows
    found["support"] = {f"{each:g}": score(engine, LogitSettings(each), added=with_support()) for each in TEMPERATURES}
    engine.close()
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])

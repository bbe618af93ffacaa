"""Score sequences with the teacher's engine, in a separate process: `teacher_script.py FOLDER OUT TP_SIZE`.

The .npz file OUT has the token ids of each sequence I, I/ids_T, and its scores, I/topk_ids_TK, I/topk_logps_TK and
I/sampled_logps_T.
"""

from __future__ import annotations

import sys

import numpy as np

from teacher.engines.base import EngineConfig
from teacher.engines.vllm_engine import VllmEngine
from teacher.records import ScoredSequence, TeacherSequence

PROMPT_TOKENS = 40
"""Length of the prompt that all sequences share, so that it is cached."""
RESPONSE_TOKENS = (5, 30, 60, 150, 17)
FIRST_ID, LAST_ID = 2, 200
FIELDS = ("topk_ids_TK", "topk_logps_TK", "sampled_logps_T")


def main(folder: str, out: str, tp_size: str) -> None:
    """Score the sequences of a folder, and write the file."""
    settings = EngineConfig(folder, n_logprobs=8, dtype="float32", logits_mib=1, kv_cache_mib=16, tp_size=int(tp_size))
    engine = VllmEngine(settings)
    rng = np.random.default_rng(0)
    prompt = rng.integers(FIRST_ID, LAST_ID, PROMPT_TOKENS, dtype=np.int32)
    arrays: dict[str, np.ndarray] = {}
    for key, n_tokens in enumerate(RESPONSE_TOKENS):
        arrays[f"{key}/ids_T"] = np.append(prompt, rng.integers(FIRST_ID, LAST_ID, n_tokens, dtype=np.int32))
        engine.add(key, TeacherSequence(arrays[f"{key}/ids_T"], PROMPT_TOKENS))
    while engine.has_work():
        for key, result in engine.step():
            assert isinstance(result, ScoredSequence), result
            arrays |= {f"{key}/{name}": getattr(result, name) for name in FIELDS}
    engine.close()
    np.savez(out, **arrays)


if __name__ == "__main__":
    main(*sys.argv[1:])

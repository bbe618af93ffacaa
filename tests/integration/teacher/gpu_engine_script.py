"""Score sequences with bfloat16 engines on a GPU, in a separate process: `gpu_engine_script.py MODEL OUT`.

The .npz file OUT contains HEAD/FIELD as `engine_script` describes them, for each setting of HEAD_DTYPE.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np

from teacher.engines.base import EngineConfig
from teacher.engines.vllm_engine import VllmEngine
from tests.integration.teacher.engine_script import N_TOKENS, head_precision, score, sequences

LONG = sequences([1000, 2, 700, 700, 1000])


def main(model: str, out: str) -> None:
    engines = {
        head: VllmEngine(
            EngineConfig(
                model, N_TOKENS, dtype="bfloat16", head_dtype=head, logits_mib=1, kv_cache_mib=64,
                gpu_memory_utilization=0.1,
            )
        )
        for head in ("model", "auto")
    }  # fmt: skip
    found: dict[str, Any] = {}
    for head, engine in engines.items():
        results = head_precision(engine) | score(engine, LONG)
        found |= {f"{head}/{name}": value for name, value in results.items()}
    np.savez(out, **found)


if __name__ == "__main__":
    main(*sys.argv[1:])

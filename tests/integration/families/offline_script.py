"""Generate with the engine of the command `evaluate`, in a separate process: `offline_script.py FOLDER OUT`.

The .npz file OUT has the token ids of each prompt I and its greedy response, I/ids, and the number of sampled
responses.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from recipe_gkd.rollout.cpu_engine import CPU_BATCHED_TOKENS
from recipe_gkd.rollout.offline_engine import OfflineEngineOptions, OfflineSampling, generate, vllm_engine
from tests._support.causal_models import VOCABULARY

PROMPT_TOKENS = 50
N_GREEDY, N_SAMPLED = 8, CPU_BATCHED_TOKENS // PROMPT_TOKENS + 2
"""Number of prompts. Those of sampled responses have more tokens than a step, whose limit is inside a prompt."""
FIRST_ID, LAST_ID = 2, 200


def main(folder: str, out: str) -> None:
    """Generate from a folder, and write the file."""
    prompts = np.random.default_rng(0).integers(FIRST_ID, LAST_ID, (N_SAMPLED, PROMPT_TOKENS), dtype=np.int32)
    options = OfflineEngineOptions(dtype="float32", max_model_len=80, cpu_cache_bytes=64 << 20)
    with vllm_engine(Path(folder), options, n_tokens=VOCABULARY) as engine:
        greedy = generate(engine, list(prompts[:N_GREEDY]), OfflineSampling(max_tokens=20))
        sampled = generate(engine, list(prompts), OfflineSampling(max_tokens=2, temperature=1.0))
    arrays = {f"{key}/ids": np.append(prompts[key], response.ids) for key, [response] in enumerate(greedy)}
    np.savez(out, n_sampled=len(sampled), **arrays)  # type: ignore[arg-type]


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Training on a sequence far beyond the positions of the pretraining, packed with short ones, in miniature."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recipe_gkd.commands.gpu_smoke.tiny_models import make_sample, random_top_k
from recipe_gkd.data.samples import Sample
from tests._support.families import BY_TYPE, VOCABULARY, make_family_folder
from tests._support.layouts import CP2, RECOMPUTE, SP, TP2
from tests._support.tiny_models import ACTOR, TOP_K, make_config
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs
from tests.integration.actor.reference import assert_metrics, assert_weights, reference_training

TRAINED, FACTOR = 64, 32.0
LONG = int(TRAINED * FACTOR)
YARN = {
    "rope_type": "yarn", "rope_theta": 1e4, "factor": FACTOR, "original_max_position_embeddings": TRAINED,
    "beta_fast": 32.0, "beta_slow": 1.0,
}  # fmt: skip
FSDP = [
    f"{ACTOR}.strategy=fsdp",
    f"{ACTOR}.fsdp_config.dtype=float32",
    f"{ACTOR}.fsdp_config.gradient_checkpointing=true",
]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "Megatron, context 2, recomputed": (2, [CP2, *RECOMPUTE]),
    "Megatron, context 2 x tensor 2, recomputed": (4, [CP2, TP2, SP, *RECOMPUTE]),
    "FSDP, recomputed": (2, FSDP),
}


def samples() -> list[Sample]:
    """Return a sequence of all positions, whose prompt is long too, and three short ones."""
    rng = np.random.default_rng(0)
    return [
        make_sample(
            uid,
            rng.integers(0, VOCABULARY, n_prompt),
            rng.integers(0, VOCABULARY, n),
            *random_top_k(rng, n, VOCABULARY, TOP_K),
        )
        for uid, (n_prompt, n) in enumerate([(600, LONG - 600), (7, 20), (90, 3), (1, 0)])
    ]


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_training_at_32_times_the_trained_length_equals_reference(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    changes = {"rope_parameters": YARN, "max_position_embeddings": LONG}
    folder = make_family_folder(tmp_path / "model", BY_TYPE["qwen3"], changes)
    ranks, overrides = LAYOUTS[name]
    want_metrics, want_weights = reference_training(folder, [samples()])
    config = make_config(folder, *overrides, f"{ACTOR}.max_token_len={LONG + 32}", "gkd.fuse_lm_head=true", ranks=ranks)
    [first, *_] = pool.run(ranks, jobs.train_any, config, [samples()])
    assert_metrics(first.metrics, want_metrics)
    assert_weights(first.weights, want_weights)

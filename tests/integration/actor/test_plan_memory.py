"""The memory that ``plan`` computes is within 15 % of the measured memory of an actor on a CPU."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import pytest

from recipe_gkd.commands.plan.estimate import estimate_run
from tests._support.tiny_models import ACTOR, make_config
from tests._support.worker_pool import WorkerPool
from tests.integration.actor.plan_jobs import make_full_batch, make_student, measure_update

pytestmark = pytest.mark.slow

TOKENS, SAMPLES = 2048, 4
LIMITS = (f"{ACTOR}.max_token_len={TOKENS}", "data.max_prompt_length=2", "data.max_response_length=512")
MEGATRON_RECOMPUTE = (
    f"{ACTOR}.megatron.override_transformer_config="
    "{recompute_granularity:full,recompute_method:uniform,recompute_num_layers:1}"
)
FSDP = (f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.dtype=float32")


class Student(NamedTuple):
    """Dimensions of a model."""

    hidden: int
    ffn: int
    layers: int
    vocab: int


DEEP, WIDE = Student(512, 1024, 8, 256), Student(128, 128, 1, 30_000)
LARGE = Student(1024, 2048, 6, 4000)


@pytest.mark.parametrize(
    ("student", "top_k", "overrides", "largest"),
    [
        pytest.param(DEEP, 8, [], "activations", id="activations"),
        pytest.param(WIDE, 8, [], "logits", id="logits"),
        pytest.param(WIDE, 256, ["gkd.fuse_lm_head=true"], "logits", id="fused-head-top-256"),
        pytest.param(LARGE, 8, [MEGATRON_RECOMPUTE], "optimizer state", id="recompute"),
        pytest.param(DEEP, 8, [*FSDP, f"{ACTOR}.fsdp_config.gradient_checkpointing=false"], "activations", id="fsdp"),
        pytest.param(WIDE, 8, list(FSDP), "logits", id="fsdp-logits"),
    ],
)
def test_estimate_is_within_15_percent_of_measured_memory(
    tmp_path: Path, student: Student, top_k: int, overrides: list[str], largest: str
) -> None:
    hidden, ffn, layers, vocab = student
    folder = make_student(tmp_path / "student", hidden=hidden, ffn=ffn, layers=layers, vocab=vocab)
    tiny = make_config(make_student(tmp_path / "tiny", hidden=128, ffn=64, layers=1, vocab=256), *LIMITS, *overrides)
    config = make_config(folder, *LIMITS, f"actor_rollout_ref.teacher.top_k={top_k}", *overrides)
    batch = make_full_batch(TOKENS, SAMPLES, vocab=vocab, top_k=top_k)
    pool = WorkerPool()  # a separate one, because earlier jobs leave memory that the measured one would use again
    try:
        tiny_batch = make_full_batch(64, 2, vocab=256, top_k=8)
        (measured,) = pool.run(1, measure_update, tiny, tiny_batch, config, batch)
    finally:
        pool.close()
    (parts,) = (dict(each.parts) for each in estimate_run(config, "cpu", None).pools if each.name == "actor")
    del parts["process"]
    assert max(parts, key=lambda name: parts[name]) == largest
    assert sum(parts.values()) == pytest.approx(measured, rel=0.15), (measured / 2**20, parts)

"""No operation of a micro-batch makes the host wait for a GPU, so that the host can launch the next micro-batch."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests._support.layouts import BF16, PP2, VPP2
from tests._support.tiny_models import ACTOR, make_config, make_samples
from tests._support.worker_pool import WorkerPool
from tests.integration.actor.host_sync_jobs import record_waits

FSDP = [f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.dtype=bfloat16"]
SETTINGS = {
    "Megatron": [BF16],
    "Megatron, temperature, fused head": [BF16, "gkd.distill_temperature=2.0", "gkd.fuse_lm_head=true"],
    "Megatron, sampled divergence": [BF16, "gkd.distill_loss_type=k1"],
    "Megatron, pipeline 2": [BF16, PP2],
    "Megatron, pipeline 2, interleaved": [BF16, PP2, VPP2],
    "FSDP": FSDP,
    "FSDP, temperature, fused head": [*FSDP, "gkd.distill_temperature=2.0", "gkd.fuse_lm_head=true"],
}


SLOW = {"Megatron, sampled divergence", "Megatron, pipeline 2", "FSDP"}
"""Settings whose paths the others take."""


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in SETTINGS])
def test_micro_batches_do_not_wait_for_the_device(name: str, pool: WorkerPool, folders: dict[str, Path]) -> None:
    ranks = 2 if PP2 in SETTINGS[name] else 1
    config = make_config(folders["qwen2"], *SETTINGS[name], f"{ACTOR}.max_token_len=32", ranks=ranks)
    for n_micro_batches, found in pool.run(ranks, record_waits, config, make_samples(12)):
        assert n_micro_batches > 2
        assert {line: count for line, count in found.items() if count >= n_micro_batches} == {}

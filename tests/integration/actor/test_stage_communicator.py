"""Stages of a pipeline exchange hidden states and gradients only, each with the shape that the receiver expects."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests._support.layouts import BF16, CP2, OVERRIDE, PP2, SP, TP2, VPP2
from tests._support.tiny_models import ACTOR, make_config, make_samples
from tests._support.worker_pool import WorkerPool
from tests.integration.actor.exchange_jobs import Exchanges, record_exchanges

BATCH = make_samples(14)
HIDDEN = 32
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "pipeline 2": (2, [PP2]),
    "pipeline 4": (4, [PP2.replace("=2", "=4")]),
    "pipeline 2 x tensor 2, sequence parallel": (4, [PP2, TP2, SP]),
    "pipeline 2 x context 2": (4, [PP2, CP2]),
    "pipeline 2, interleaved": (2, [PP2, VPP2]),
    "pipeline 2, interleaved in rounds of 4": (2, [PP2, VPP2, f"+{OVERRIDE}.microbatch_group_size_per_vp_stage=4"]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_stages_exchange_only_hidden_states_and_gradients(
    name: str, pool: WorkerPool, folders: dict[str, Path]
) -> None:
    ranks, overrides = LAYOUTS[name]
    config = make_config(folders["qwen2"], *overrides, BF16, f"{ACTOR}.max_token_len=32", ranks=ranks)
    results = pool.run(ranks, record_exchanges, config, BATCH)

    by_rank = [exchanges for _, exchanges in results]
    sent, received = _merged([each.sent for each in by_rank]), _merged([each.received for each in by_rank])
    assert sent == received, "a receiver expects another shape"
    tensors = [tensor for route in sent.values() for tensor in route]
    assert {(shape[1:], dtype) for shape, dtype in tensors} == {((1, HIDDEN), torch.bfloat16)}
    assert len({shape for shape, _ in tensors}) > 2, "the micro-batches have the same length"

    megatron = config.actor_rollout_ref.actor.megatron
    stages = megatron.pipeline_model_parallel_size * (megatron.virtual_pipeline_model_parallel_size or 1)
    replicas = ranks // megatron.pipeline_model_parallel_size
    n_micro_batches = int(results[0][0])
    # Training sends a hidden state and its gradient between neighboring stages, an evaluation the hidden state.
    assert len(tensors) == 3 * n_micro_batches * (stages - 1) * replicas


def _merged(routes: list[Exchanges]) -> Exchanges:
    return {route: tensors for exchanges in routes for route, tensors in exchanges.items()}

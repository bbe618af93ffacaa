"""A rollout engine on a GPU: defaults of its options, and log-probabilities of its responses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from recipe_gkd.commands.gpu_smoke.tiny_engine import generate, running_engine
from tests._support.rollout_models import config_for, make_model, prompts, reference_logprobs
from tests._support.waiting import PATIENCE_S

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def test_rollout_engine_on_gpu_samples_from_float32_logits(tmp_path: Path) -> None:
    model = make_model(0, tied=True)
    model.save_pretrained(tmp_path)
    config = config_for(
        tmp_path, "trainer.device=cuda", "actor_rollout_ref.rollout.dtype=bfloat16",
        "actor_rollout_ref.rollout.gpu_memory_utilization=0.2",
    )  # fmt: skip
    with running_engine(config, timeout_s=PATIENCE_S) as (engine, description):
        given = prompts(8)
        params = [{"max_tokens": 32, "temperature": 1.0, "seed": prompt.uid} for prompt in given]
        responses = generate(engine, given, params)
    assert (description.dtype, description.head_dtype) == ("bfloat16", "float32")
    assert description.max_num_batched_tokens in (8192, 16384)
    errors = [
        np.abs(responses[each.uid].logprobs - reference_logprobs(model, each, responses[each.uid])) for each in given
    ]
    assert np.concatenate(errors).mean() < 0.05, "expected the rounding errors of bfloat16 layers"

"""Limit of the tokens per micro-batch after running out of memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from recipe_gkd.actor.batch.packing import micro_batches
from recipe_gkd.actor.token_limit import TokenLimit, next_limit
from recipe_gkd.commands.gpu_smoke.tiny_models import make_sample
from recipe_gkd.data.samples import Sample
from tests._support.tiny_models import ACTOR, make_config


def sample(n_tokens: int) -> Sample:
    """Return a sample of ``n_tokens`` input tokens."""
    return make_sample(0, [1], np.ones(n_tokens), np.zeros((n_tokens, 1)), np.zeros((n_tokens, 1)))


class TestNextLimit:
    @pytest.mark.parametrize(
        ("lengths", "limit", "expected"),
        [
            ([30, 30], 64, 32),
            ([30, 30], 60, 30),
            ([30, 30], 4096, 32),  # 2048 to 64 would not change the micro-batches
            ([100, 20, 20], 64, 32),  # the sample of 100 tokens is alone
            ([100], 64, 0),
            ([30, 40], 64, 0),
            ([], 64, 0),
            ([1, 1], 2, 1),
        ],
    )
    def test_limit_is_halved_until_micro_batches_are_smaller(
        self, lengths: list[int], limit: int, expected: int
    ) -> None:
        samples = [sample(length) for length in lengths]
        groups = micro_batches(samples, micro_batch_size=1, max_token_len=limit)
        found = next_limit(groups, limit)
        assert found == expected
        if found:
            assert len(micro_batches(samples, micro_batch_size=1, max_token_len=found)) > len(groups)


def test_limit_lowers_the_configured_value_and_never_raises_it() -> None:
    config = make_config(Path("unused"), f"{ACTOR}.max_token_len=64").actor_rollout_ref.actor
    assert TokenLimit().applied_to(config) is config
    assert TokenLimit(lowered=128).applied_to(config) is config
    assert TokenLimit(lowered=32).applied_to(config).max_token_len == 32

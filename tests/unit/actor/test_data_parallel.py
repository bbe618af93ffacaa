"""Options of Megatron's DistributedDataParallel."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from recipe_gkd.actor.megatron.data_parallel import complete_weights, ddp_config, enable_overlap
from recipe_gkd.errors import ConfigError
from tests._support.errors import raises
from tests._support.layouts import OVERLAP, PLAIN_OPTIMIZER
from tests._support.tiny_models import MEGATRON, make_config

DDP = f"{MEGATRON}.override_ddp_config"


def options(*overrides: str, overlaps: bool = False) -> Any:
    """Return the options of a configuration."""
    return ddp_config(make_config(Path("none"), *overrides).actor_rollout_ref.actor.megatron, overlaps=overlaps)


class TestDdpConfig:
    @pytest.mark.parametrize("overlaps", [False, True])
    def test_default_overlaps_gradient_but_not_weights(self, overlaps: bool) -> None:
        found = options(overlaps=overlaps)
        assert found.overlap_grad_reduce is overlaps and found.overlap_param_gather is False
        assert found.grad_reduce_in_fp32 and found.use_distributed_optimizer

    def test_overrides_replace_defaults(self) -> None:
        found = options(*OVERLAP)
        assert found.overlap_grad_reduce and found.overlap_param_gather and found.bucket_size == 2000
        assert options(f"{DDP}.overlap_grad_reduce=false", overlaps=True).overlap_grad_reduce is False
        assert options(PLAIN_OPTIMIZER).use_distributed_optimizer is False

    @pytest.mark.parametrize(
        ("overrides", "name"),
        [
            (["overlap_grad_reduc=true"], "overlap_grad_reduc"),
            (["xyz=1"], "xyz"),
            (["use_distributed_optimizer=false"], "use_distributed_optimizer"),
            (["use_megatron_fsdp=true"], "use_megatron_fsdp"),
            (["overlap_grad_reduce=1"], "overlap_grad_reduce"),
            (["bucket_size=0", "overlap_grad_reduce=true"], "bucket_size"),
        ],
    )
    def test_override_that_cannot_work_raises(self, overrides: list[str], name: str) -> None:
        with raises(ConfigError, keys=(f"{DDP}.{name}",)):
            options(*(f"{DDP}.{override}" for override in overrides))

    def test_misspelled_override_names_the_closest_field(self) -> None:
        with raises(ConfigError, suggestions=(f"{DDP}.overlap_grad_reduce",)):
            options(f"{DDP}.overlap_grad_reduc=true")

    @pytest.mark.parametrize("overrides", [[f"{DDP}.overlap_param_gather=true"], [PLAIN_OPTIMIZER, *OVERLAP]])
    def test_weight_overlap_without_its_requirements_raises(self, overrides: list[str]) -> None:
        required = (f"{MEGATRON}.use_distributed_optimizer", f"{DDP}.overlap_grad_reduce")
        with raises(ConfigError, keys=(f"{DDP}.overlap_param_gather", *required)):
            options(*overrides)

    def test_bucket_size_without_effect_is_reported(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            options(f"{DDP}.bucket_size=2000", overlaps=True)
            assert not caplog.messages
            options(f"{DDP}.bucket_size=2000")
        assert "bucket_size has no effect without overlap_grad_reduce=true" in caplog.text


class TestEnableOverlap:
    @pytest.mark.parametrize("n_chunks", [1, 2])
    def test_schedule_gets_no_sync_of_each_chunk(self, n_chunks: int) -> None:
        ddp = SimpleNamespace(overlap_grad_reduce=True)
        chunks: Any = [SimpleNamespace(ddp_config=ddp, no_sync=object()) for _ in range(n_chunks)]
        config: Any = SimpleNamespace(no_sync_func=None)
        enable_overlap(config, chunks)
        assert config.no_sync_func == ([chunk.no_sync for chunk in chunks] if n_chunks > 1 else chunks[0].no_sync)

    def test_schedule_gets_nothing_without_overlap(self) -> None:
        config: Any = SimpleNamespace(no_sync_func=None)
        chunk: Any = SimpleNamespace(ddp_config=SimpleNamespace(overlap_grad_reduce=False))
        enable_overlap(config, [chunk])
        assert config.no_sync_func is None


class _Group:
    def __init__(self, *, dispatched: bool, handle: object = None) -> None:
        self.param_gather_dispatched, self.param_gather_handle = dispatched, handle
        self.n_syncs = 0

    def start_param_sync(self, *, force_sync: bool) -> None:
        assert force_sync
        self.n_syncs += 1


class TestCompleteWeights:
    @pytest.mark.parametrize("overlap", [True, False])
    def test_only_incomplete_buckets_are_gathered(self, overlap: bool) -> None:
        groups = [_Group(dispatched=False), _Group(dispatched=True, handle=object()), _Group(dispatched=True)]
        expert = _Group(dispatched=False)
        chunk: Any = SimpleNamespace(
            ddp_config=SimpleNamespace(overlap_param_gather=overlap),
            bucket_groups=groups,
            expert_parallel_bucket_groups=[expert],
        )
        complete_weights([chunk])
        assert [group.n_syncs for group in [*groups, expert]] == ([1, 1, 0, 1] if overlap else [0] * 4)

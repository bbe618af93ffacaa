"""Out of memory during an update: the limit of the process makes the allocator of torch fail."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from recipe_gkd.commands.gpu_smoke.tiny_models import make_sample
from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import SecondaryFailure, WorkerError
from recipe_gkd.runtime.out_of_memory import ADVICE
from tests._support.errors import check_error
from tests._support.tiny_models import ACTOR, MEGATRON, make_config, make_samples
from tests._support.worker_pool import WorkerPool
from tests.integration.actor.memory_jobs import (
    Outcome,
    make_wide_folder,
    map_large_blocks,
    measure_kl_with_memory,
    score_with_memory,
    train_with_fault,
    train_with_memory,
)
from tests.integration.actor.reference import assert_weights

STRATEGIES = {
    "megatron": [],
    "fsdp": [f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.dtype=float32", f"{ACTOR}.fsdp_config.fsdp_size=1"],
}
SPLIT, DDP = "trainer.oom=split", f"{MEGATRON}.override_ddp_config"
BATCHES = [make_samples(40, seed=seed) for seed in range(2)]
PAIR_BATCHES = [make_samples(160, seed=seed) for seed in range(2)]
"""Batches of two ranks."""
MAX_TOKEN_LEN = 4096
MEGABYTES, PAIR_MEGABYTES = 40, 80
"""Memory for an update of a rank. The logits of all its samples need more, those of its longest sample need less.

Two ranks have larger margins, because threads that gloo starts during an update take up to 20 MB from the memory.
"""


@pytest.fixture(scope="module")
def pool() -> Iterator[WorkerPool]:
    """Processes that have run no other job before large blocks have separate memory."""
    pool = WorkerPool()
    pool.run(2, map_large_blocks)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_wide_folder(tmp_path_factory.mktemp("wide") / "model")


def train(
    pool: WorkerPool,
    folder: Path,
    *overrides: str,
    batches: list[list[Sample]],
    ranks: int = 1,
    megabytes: dict[int, int] | None = None,
) -> list[Outcome]:
    config = make_config(folder, f"{ACTOR}.max_token_len={MAX_TOKEN_LEN}", *overrides, ranks=ranks)
    return pool.run(ranks, train_with_memory, config, batches, megabytes or {})


def assert_equal_training(split: Outcome, whole: Outcome) -> None:
    for one, other in zip(split.metrics, whole.metrics, strict=True):
        for name in ("actor/loss", "actor/kl_loss", "actor/grad_norm", "actor/n_tokens", "actor/entropy"):
            assert one[name] == pytest.approx(other[name], rel=1e-6), name
    if whole.weights:
        assert_weights(split.weights, whole.weights)


@pytest.fixture(scope="module")
def whole(pool: WorkerPool, folder: Path) -> dict[str, Outcome]:
    """Return the results without a limit of the memory, on one rank."""
    return {name: train(pool, folder, *overrides, batches=BATCHES)[0] for name, overrides in STRATEGIES.items()}


class TestSplit:
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_update_with_less_memory_equals_update_with_more(
        self, strategy: str, pool: WorkerPool, folder: Path, whole: dict[str, Outcome]
    ) -> None:
        [split] = train(pool, folder, *STRATEGIES[strategy], SPLIT, batches=BATCHES, megabytes={0: MEGABYTES})
        first, second = split.metrics
        assert first["actor/oom_splits"] == second["actor/oom_splits"] == len(split.warnings) > 0
        assert first["actor/max_token_len"] == second["actor/max_token_len"] < 400
        assert first["actor/micro_batches"] > 1 == whole[strategy].metrics[0]["actor/micro_batches"]
        assert f"{ACTOR}.max_token_len is lowered from {MAX_TOKEN_LEN} to 512" in split.warnings[0]
        assert f"Set {ACTOR}.max_token_len={first['actor/max_token_len']:.0f} in the next run" in split.warnings[-1]
        assert_equal_training(split, whole[strategy])

    @pytest.mark.parametrize("strategy", ["megatron", pytest.param("fsdp", marks=pytest.mark.slow)])
    def test_one_of_two_ranks_lacks_memory(self, strategy: str, pool: WorkerPool, folder: Path) -> None:
        self.check_second_rank(strategy, [], PAIR_BATCHES[:1], pool, folder)

    @pytest.mark.slow
    @pytest.mark.parametrize(
        "overrides",
        [
            [f"{DDP}.overlap_grad_reduce=true"],
            [f"{DDP}.overlap_grad_reduce=true", f"{DDP}.overlap_param_gather=true", f"{DDP}.bucket_size=2000"],
            [f"{MEGATRON}.use_distributed_optimizer=false"],
        ],
        ids=["gradients overlap", "gradients and weights overlap", "whole optimizer"],
    )
    def test_one_of_two_megatron_ranks_lacks_memory(self, overrides: list[str], pool: WorkerPool, folder: Path) -> None:
        self.check_second_rank("megatron", overrides, PAIR_BATCHES, pool, folder)

    def check_second_rank(
        self, strategy: str, overrides: list[str], batches: list[list[Sample]], pool: WorkerPool, folder: Path
    ) -> None:
        """Check that both ranks repeat the update, and that it equals the same one with more memory."""
        overrides = [*STRATEGIES[strategy], *overrides]
        want = train(pool, folder, *overrides, batches=batches, ranks=2)
        got = train(pool, folder, *overrides, SPLIT, batches=batches, ranks=2, megabytes={1: PAIR_MEGABYTES})
        n_splits = got[0].metrics[-1]["actor/oom_splits"]
        assert n_splits > 0 and not got[0].warnings and len(got[1].warnings) == n_splits
        for rank in range(2):
            assert "actor rank 1: out of memory" in got[1].warnings[0]
            assert got[rank].metrics[0].keys() == want[rank].metrics[0].keys() | {
                "actor/oom_splits",
                "actor/max_token_len",
            }
            assert_equal_training(got[rank], want[rank])

    @pytest.mark.slow
    @pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
    @pytest.mark.parametrize(
        ("strategy", "overrides"),
        [
            ("megatron", []),
            ("megatron", [f"{DDP}.overlap_grad_reduce=true", f"{DDP}.overlap_param_gather=true"]),
            ("fsdp", []),
            ("megatron", [f"{MEGATRON}.{state}_offload=true" for state in ("param", "grad", "optimizer")]),
            ("fsdp", [f"{ACTOR}.fsdp_config.gradient_checkpointing=true"]),
            ("fsdp", [f"{ACTOR}.fsdp_config.{state}_offload=true" for state in ("param", "optimizer")]),
        ],
        ids=["megatron", "megatron overlap", "fsdp", "megatron offload", "fsdp checkpointed", "fsdp offload"],
    )
    def test_failure_within_a_pass_leaves_nothing_behind(
        self,
        strategy: str,
        overrides: list[str],
        backward: bool,
        pool: WorkerPool,
        folders: dict[str, Path],
    ) -> None:
        """The gradient of the first micro-batch, and of the layers before the failure, must be discarded."""
        config = make_config(folders["qwen2_untied"], *STRATEGIES[strategy], *overrides, ranks=2)
        split = make_config(folders["qwen2_untied"], *STRATEGIES[strategy], *overrides, SPLIT, ranks=2)
        want = pool.run(2, train_with_memory, config, BATCHES, {})
        got = pool.run(2, train_with_fault, split, BATCHES, backward)
        for rank in range(2):
            assert [metrics["actor/oom_splits"] for metrics in got[rank].metrics] == [1, 1]
            assert [metrics["actor/max_token_len"] for metrics in got[rank].metrics] == [32, 32]
            assert_equal_training(got[rank], want[rank])

    @pytest.mark.slow
    @pytest.mark.parametrize("strategy", STRATEGIES)
    def test_sample_that_does_not_fit_fails_and_actor_remains_usable(
        self, strategy: str, pool: WorkerPool, folder: Path
    ) -> None:
        long = make_sample(100, [1], np.arange(900), np.full((900, 1), -1.0), np.zeros((900, 1)))
        batches = [[*BATCHES[0][:4], long], BATCHES[0][:4]]
        overrides = [*STRATEGIES[strategy], SPLIT]
        long_rank = 0  # the longest sample is assigned first
        got = train(pool, folder, *overrides, batches=batches, ranks=2, megabytes={long_rank: MEGABYTES})
        [failed], [other] = got[long_rank].errors, got[1 - long_rank].errors
        check_error(failed, WorkerError, phase="update 0", worker="actor rank 0")
        assert isinstance(failed, WorkerError) and {"data.max_response_length", "gkd.fuse_lm_head"} <= {*failed.keys}
        assert len(failed.details) == 3 and "trainer.oom" not in failed.keys
        check_error(other, SecondaryFailure, phase="update 0", origin="actor rank 0")
        for outcome in got:
            [metrics] = outcome.metrics
            assert metrics["actor/max_token_len"] == MAX_TOKEN_LEN, "an update that fails lowers no limit"
            assert metrics["actor/oom_splits"] == 0


def test_lack_of_memory_without_split_names_sizes_and_keys(pool: WorkerPool, folder: Path) -> None:
    batches = [BATCHES[0], BATCHES[0][:2]]
    [outcome] = train(pool, folder, batches=batches, megabytes={0: MEGABYTES})
    [error] = outcome.errors
    keys = (*ADVICE["actor", "update"].keys, "trainer.oom")
    check_error(error, WorkerError, phase="update 0", worker="actor rank 0", keys=keys)
    memory, sizes = error.details
    assert "resident memory of this process" in memory and "you tried to allocate" in error.what
    assert "parameters 2.5 MiB, gradients 2.5 MiB" in sizes
    assert f"logits of a full micro-batch ({MAX_TOKEN_LEN} tokens x 40000 ids) 625.0 MiB" in sizes
    assert outcome.metrics[0]["actor/n_tokens"] > 0, "the actor remains usable"


class TestValidationKl:
    @pytest.mark.parametrize(("strategy", "ranks"), [("megatron", 1), pytest.param("fsdp", 2, marks=pytest.mark.slow)])
    def test_kl_of_validation_has_the_limit_of_updates(
        self, strategy: str, ranks: int, pool: WorkerPool, folder: Path
    ) -> None:
        """The pass lowers the limit, which holds for the next update on all ranks."""
        overrides = (*STRATEGIES[strategy], SPLIT, f"{ACTOR}.max_token_len={MAX_TOKEN_LEN}")
        config = make_config(folder, *overrides, ranks=ranks)
        batch, megabytes = (BATCHES[0], MEGABYTES) if ranks == 1 else (PAIR_BATCHES[0], PAIR_MEGABYTES)
        want = pool.run(ranks, measure_kl_with_memory, config, batch, {})
        got = pool.run(ranks, measure_kl_with_memory, config, batch, {ranks - 1: megabytes})
        for rank in range(ranks):
            (tokens, metrics), (wanted, _) = got[rank], want[rank]
            assert metrics["actor/oom_splits"] > 0 and metrics["actor/max_token_len"] < MAX_TOKEN_LEN
            order, wanted_order = (np.lexsort((each.positions_T, each.uids_T)) for each in (tokens, wanted))
            np.testing.assert_array_equal(tokens.uids_T[order], wanted.uids_T[wanted_order])
            np.testing.assert_array_equal(tokens.positions_T[order], wanted.positions_T[wanted_order])
            np.testing.assert_allclose(tokens.kl_TD[order], wanted.kl_TD[wanted_order], rtol=1e-5, atol=1e-6)


def test_log_probs_have_the_limit_of_updates(pool: WorkerPool, folder: Path) -> None:
    """The comparison after a weight sync ends no run when memory runs out."""
    config = make_config(folder, SPLIT, f"{ACTOR}.max_token_len={MAX_TOKEN_LEN}")
    [[want, _]] = pool.run(1, score_with_memory, config, BATCHES[0], {})
    [[found, metrics]] = pool.run(1, score_with_memory, config, BATCHES[0], {0: MEGABYTES})
    assert metrics["actor/oom_splits"] > 0
    for got, expected in zip(found, want, strict=True):
        assert got == pytest.approx(expected, abs=1e-5)

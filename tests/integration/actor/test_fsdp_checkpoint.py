"""Checkpoints of the FSDP backend: exact on any number of ranks, and safe against faults, damage and other backends."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch

from recipe_gkd.errors import CheckpointError, CheckpointMismatch
from tests._support.errors import check_error
from tests._support.tiny_models import ACTOR, make_config, make_samples
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import fsdp_save_jobs, save_jobs
from tests.integration.actor.fsdp_save_jobs import State

FSDP = [f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.dtype=float32"]
ASYNC = f"{ACTOR}.checkpoint.async_save=true"
FIRST, SECOND = make_samples(6), make_samples(6, seed=1)


def assert_equal(found: State, want: State, *, with_random: bool) -> None:
    """Compare weights, moments and step counts bitwise, and the state of the random generator if requested."""
    assert found.keys() == want.keys()
    for name, tensor in want.items():
        assert torch.equal(found[name], tensor) or (name == "random" and not with_random), name


class TestResume:
    @pytest.mark.parametrize(
        "layouts",
        [
            pytest.param([(2, -1), (2, 1), (1, -1)], id="2 shards, 2 copies, 1 rank"),
            pytest.param([(3, -1), (1, -1)], id="3 unequal shards, 1 rank", marks=pytest.mark.slow),
        ],
    )
    def test_resume_in_any_layout_restores_exact_state(
        self, layouts: list[tuple[int, int]], pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        """A background save of 1 rank is loaded and saved again in each layout (ranks, ``fsdp_size``)."""
        config = make_config(folders["qwen2"], *FSDP, ASYNC)
        path = tmp_path / "saved"
        want, want_metrics, want_after = pool.run(1, fsdp_save_jobs.train_and_save, config, FIRST, SECOND, path)[0]
        assert "model.lm_head.weight" not in want, "a tied weight is saved once"
        for ranks, fsdp_size in layouts:
            config = make_config(folders["qwen2"], *FSDP, f"{ACTOR}.fsdp_config.fsdp_size={fsdp_size}", ranks=ranks)
            copy = tmp_path / f"{ranks} {fsdp_size}"
            step, state, metrics, after = pool.run(
                ranks, fsdp_save_jobs.load_and_save, config, path, SECOND, copy
            )[0]  # fmt: skip
            assert step == 1 and metrics["actor/lr"] == want_metrics["actor/lr"]
            assert_equal(state, want, with_random=False)
            assert metrics["actor/kl_loss"] == pytest.approx(want_metrics["actor/kl_loss"], rel=1e-5)
            path = copy
        assert_equal(after, want_after, with_random=False)
        assert metrics["actor/grad_norm"] == want_metrics["actor/grad_norm"]

    def test_resume_on_same_ranks_repeats_update_exactly(
        self, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        config = make_config(folders["llama"], *FSDP, ASYNC, ranks=2)
        path, copy = tmp_path / "saved", tmp_path / "copy"
        wanted = pool.run(2, fsdp_save_jobs.train_and_save, config, FIRST, SECOND, path)
        found = pool.run(2, fsdp_save_jobs.load_and_save, config, path, SECOND, copy)
        for (want, want_metrics, want_after), (_, state, metrics, after) in zip(wanted, found, strict=True):
            assert_equal(state, want, with_random=True)
            assert_equal(after, want_after, with_random=True)
            assert metrics["actor/kl_loss"] == want_metrics["actor/kl_loss"]

    @pytest.mark.gpu
    def test_resume_on_gpu_repeats_update(self, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path) -> None:
        """The update between the start and the end of the background save does not change the saved tensors."""
        if not torch.cuda.is_available():
            pytest.skip("needs a GPU")
        config = make_config(folders["qwen2"], *FSDP, ASYNC, "trainer.device=cuda")
        path, copy = tmp_path / "saved", tmp_path / "copy"
        want, want_metrics, _ = pool.run(
            1, fsdp_save_jobs.train_and_save, config, FIRST, SECOND, path
        )[0]  # fmt: skip
        _, state, metrics, _ = pool.run(
            1, fsdp_save_jobs.load_and_save, config, path, SECOND, copy
        )[0]  # fmt: skip
        assert_equal(state, want, with_random=True)
        assert metrics["actor/kl_loss"] == pytest.approx(want_metrics["actor/kl_loss"], rel=1e-5)


class TestFaults:
    @pytest.fixture(scope="class")
    def saves(
        self, pool: WorkerPool, folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
    ) -> tuple[Path, list[list[CheckpointError]]]:
        """Run two saves with faults and a good one; return their folder, and the errors of each rank."""
        path = tmp_path_factory.mktemp("saves")
        config = make_config(folders["qwen2"], *FSDP, ASYNC, ranks=2)
        faults = {"killed": 1, "metadata": 0}
        return path, pool.run(2, fsdp_save_jobs.save_with_faults, config, FIRST, path, faults)

    def test_save_with_writer_fault_raises_on_all_ranks(self, saves: tuple[Path, list[list[CheckpointError]]]) -> None:
        path, errors_by_rank = saves
        for killed, full in errors_by_rank:
            check_error(killed, CheckpointError, path=path / "killed", ranks=(1,))
            check_error(full, CheckpointError, path=path / "metadata", ranks=(0,))
            assert "SIGKILL" in killed.what and "No space left on device" in full.what
        assert not (path / "killed" / "metadata.json").exists() and not (path / "metadata" / "metadata.json").exists()
        assert json.loads((path / "good" / "metadata.json").read_text())["backend"] == "fsdp"

    def test_load_damaged_checkpoint_raises_on_all_ranks_and_next_load_succeeds(
        self, saves: tuple[Path, list[list[CheckpointError]]], pool: WorkerPool, folders: dict[str, Path]
    ) -> None:
        good = saves[0] / "good"

        def copy(name: str) -> Path:
            return Path(shutil.copytree(good, saves[0] / name))

        shard = copy("truncated") / "__1_0.distcp"
        shard.write_bytes(shard.read_bytes()[:-100])
        (copy("shard removed") / "__0_0.distcp").unlink()
        (copy("empty metadata") / ".metadata").write_bytes(b"")
        (copy("broken description") / "metadata.json").write_text("{")
        (copy("no step counts") / "metadata.json").write_text(
            (good / "metadata.json").read_text().replace("adam_steps", "steps")
        )
        shard = copy("wrong bytes") / "__1_0.distcp"
        shard.write_bytes(bytes(shard.stat().st_size))
        damaged = {
            "killed": "metadata.json",
            "truncated": "__1_0.distcp",
            "shard removed": "__0_0.distcp",
            "empty metadata": "",
            "broken description": "metadata.json",
            "no step counts": "metadata.json",
            "wrong bytes": "",  # found when the weights are restored
        }
        config = make_config(folders["qwen2"], *FSDP, ranks=2)
        paths = [saves[0] / name for name in damaged]
        for errors, unusable, *_ in pool.run(2, save_jobs.load_after_errors, config, paths, good, SECOND):
            for (name, file), error in zip(damaged.items(), errors, strict=True):
                ranks = () if name == "wrong bytes" else (0, 1)
                check_error(error, CheckpointError, path=saves[0] / name / file, ranks=ranks)
            check_error(unusable, CheckpointError, path=saves[0] / "wrong bytes")

    def test_load_checkpoint_of_other_backend_model_or_contents_raises_mismatch(
        self, saves: tuple[Path, list[list[CheckpointError]]], pool: WorkerPool, folders: dict[str, Path]
    ) -> None:
        megatron = saves[0] / "megatron"
        megatron.mkdir()
        (megatron / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
        without_optimizer = Path(shutil.copytree(saves[0] / "good", saves[0] / "without optimizer"))
        description = json.loads((without_optimizer / "metadata.json").read_text())
        (without_optimizer / "metadata.json").write_text(json.dumps(description | {"contents": ["model"]}))

        def check(kind: str, path: Path, *overrides: str, differing: set[str]) -> None:
            config = make_config(folders[kind], *overrides)
            [error] = pool.run(1, save_jobs.load_with_error, config, path)
            check_error(error, CheckpointMismatch, path=path)
            assert differing <= {*error.differing}

        check("qwen2", saves[0] / "good", differing={f"{ACTOR}.strategy"})
        check("qwen2", megatron, *FSDP, differing={f"{ACTOR}.strategy"})
        check("qwen3", saves[0] / "good", *FSDP, differing={"model_type"})
        check("qwen2", without_optimizer, *FSDP, differing={"optimizer", "extra"})

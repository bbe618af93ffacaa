"""Failed saves and damaged checkpoints: the error is the same on all ranks, and the actor remains usable."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from recipe_gkd.errors import CheckpointError
from tests._support.errors import check_error
from tests._support.layouts import PP2, TP2
from tests._support.tiny_models import ACTOR, make_config, make_samples
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import save_jobs

FIRST, SECOND = make_samples(6), make_samples(6, seed=1)
REASONS = {
    "file too large": "File too large",
    "killed": "SIGKILL",
    "hung": "within 3 s",
    "metadata": "No space left on device",
}
"""Fault -> text of the operating system, or the deadline."""


class TestSave:
    @pytest.mark.parametrize(
        ("asynchronous", "faulty_rank"), [("true", 1), pytest.param("false", 0, marks=pytest.mark.slow)]
    )
    def test_save_with_writer_fault_raises_on_all_ranks_and_next_save_succeeds(
        self, asynchronous: str, faulty_rank: int, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        faults = {fault: 0 if fault == "metadata" else faulty_rank for fault in REASONS}
        config = make_config(folders["qwen2"], TP2, f"{ACTOR}.checkpoint.async_save={asynchronous}", ranks=2)
        results = pool.run(2, save_jobs.save_with_faults, config, FIRST, tmp_path, faults)
        assert list(map(str, results[0])) == list(map(str, results[1])), "the error is the same on all ranks"
        for (fault, rank), error in zip(faults.items(), results[0], strict=True):
            check_error(error, CheckpointError, path=tmp_path / fault, ranks=(rank,))
            assert REASONS[fault] in error.what and bool(error.remedy) == (fault == "hung")
            assert not (tmp_path / fault / "metadata.json").exists()
        step, _, _ = pool.run(2, save_jobs.resume_and_train, config, tmp_path / "good", SECOND)[0]
        assert step == 1

    def test_save_to_impossible_folder_raises_on_all_ranks(
        self, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        (tmp_path / "file").write_text("")
        config = make_config(folders["qwen2"], ranks=2)
        path = tmp_path / "file" / "checkpoint"
        for error in pool.run(2, save_jobs.save_with_error, config, path):
            check_error(error, CheckpointError, path=path, ranks=(0,))
            assert "NotADirectoryError" in error.what

    @pytest.mark.slow
    def test_save_slower_than_collective_timeout_succeeds(
        self, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        config = make_config(folders["qwen2"], PP2, ranks=2)
        errors = pool.run(2, save_jobs.save_slowly, config, FIRST, tmp_path)
        assert "imed out" in errors[1], "a rank that does not reach a collective is still detected"
        assert (tmp_path / "checkpoint" / "metadata.json").is_file()
        assert (tmp_path / "folder" / "model.safetensors").is_file()


class TestSaveHf:
    def test_save_hf_with_writer_fault_raises_on_all_ranks_and_next_save_succeeds(
        self, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        config = make_config(folders["qwen2"], PP2, ranks=2)
        for full, hung in pool.run(2, save_jobs.save_hf_with_faults, config, tmp_path / "saved"):
            for fault, error in (("file too large", full), ("hung", hung)):
                check_error(error, CheckpointError, path=tmp_path / "saved", ranks=(0,))
                assert REASONS[fault] in error.what
        assert (tmp_path / "saved" / "model.safetensors").is_file()
        assert not list(tmp_path.glob("saved.*"))


class TestLoad:
    def test_load_damaged_checkpoint_raises_on_all_ranks_and_next_load_succeeds(
        self, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        config = make_config(folders["qwen2"], TP2, ranks=2)
        good = tmp_path / "good"
        want, want_weights = pool.run(2, save_jobs.train_and_save, config, FIRST, SECOND, good)[0]

        def copy(name: str) -> Path:
            return Path(shutil.copytree(good, tmp_path / name))

        file = copy("truncated") / "__1_0.distcp"
        file.write_bytes(file.read_bytes()[:-100])
        (copy("shard removed") / "__0_1.distcp").unlink()
        (copy("no metadata") / ".metadata").unlink()
        (copy("empty metadata") / ".metadata").write_bytes(b"")
        (copy("broken config") / "metadata.json").write_text("{")
        (copy("broken common") / "common.pt").write_bytes(b"no zip")
        file = copy("wrong bytes") / "__1_0.distcp"
        file.write_bytes(bytes(file.stat().st_size))
        damaged = {
            "nowhere": "metadata.json",
            "truncated": "__1_0.distcp",
            "shard removed": "__0_1.distcp",
            "no metadata": ".metadata",
            "empty metadata": "",
            "broken config": "metadata.json",
            "broken common": "",
            "wrong bytes": "",  # found when the weights are restored
        }
        paths = [tmp_path / name for name in damaged]
        results = pool.run(2, save_jobs.load_after_errors, config, paths, good, SECOND)
        for errors, *_ in results:
            for (name, file), error in zip(damaged.items(), errors, strict=True):
                # Megatron 0.16 lets both ranks fail, 0.19 the rank that reads the file.
                ranks = error.ranks if name == "wrong bytes" and 1 in error.ranks else (0, 1)
                check_error(error, CheckpointError, path=tmp_path / name / file, ranks=ranks)
        _, unusable, metrics, weights = results[0]
        check_error(unusable, CheckpointError, path=tmp_path / "wrong bytes")
        assert metrics["actor/kl_loss"] == want["actor/kl_loss"]
        assert all(torch.equal(tensor, want_weights[name]) for name, tensor in weights.items())

"""A save that fails on one rank fails on all, soon, and leaves an actor that trains and saves on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from tests._support.tiny_models import ACTOR, make_config, make_samples
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs
from tests.integration.actor.test_layouts import PP2, TP2

pytestmark = pytest.mark.timeout(150)

FIRST, SECOND = make_samples(6), make_samples(6, seed=1)
REASONS = {
    "file too large": r"File too large",
    "killed": "was killed by SIGKILL",
    "hung": "it has not finished within 3 s; look at the disk, or raise actor_rollout_ref.actor.timeout_s",
    "metadata": "No space left on device",
}


@pytest.mark.parametrize(("asynchronous", "faulty_rank"), [("true", 1), ("false", 0)])
def test_failed_save_is_an_error_on_all_ranks_and_the_next_one_is_complete(
    asynchronous: str, faulty_rank: int, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = make_config(folders["qwen2"], TP2, f"{ACTOR}.checkpoint.async_save={asynchronous}", ranks=2)
    results = pool.run(2, jobs.fail_to_save, config, FIRST, tmp_path, list(REASONS), faulty_rank)
    assert results[0] == results[1], "the error is the same on all ranks"
    for (fault, reason), message in zip(REASONS.items(), results[0], strict=True):
        rank = 0 if fault == "metadata" else faulty_rank
        assert message.startswith(f"the save of the checkpoint to {tmp_path / fault} failed: actor rank {rank}: ")
        assert reason in message
        assert not (tmp_path / fault / "metadata.json").exists()
    step, _, _ = pool.run(2, jobs.resume_and_train, config, tmp_path / "good", SECOND)[0]
    assert step == 1


def test_folder_that_cannot_be_made_is_an_error_on_all_ranks(
    pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    config = make_config(folders["qwen2"], ranks=2)
    for message in pool.run(2, jobs.save_fails, config, tmp_path / "file" / "checkpoint"):
        assert "failed: actor rank 0: NotADirectoryError" in message


def test_damaged_checkpoints_are_refused_on_all_ranks_and_another_can_be_loaded(
    pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = make_config(folders["qwen2"], TP2, ranks=2)
    good = tmp_path / "good"
    want, want_weights = pool.run(2, jobs.train_and_save, config, FIRST, SECOND, good)[0]

    def damaged(name: str) -> Path:
        return Path(shutil.copytree(good, tmp_path / name))

    file = damaged("truncated") / "__1_0.distcp"
    file.write_bytes(file.read_bytes()[:-100])
    (damaged("shard gone") / "__0_1.distcp").unlink()
    (damaged("no metadata") / ".metadata").unlink()
    (damaged("empty metadata") / ".metadata").write_bytes(b"")
    (damaged("broken config") / "metadata.json").write_text("{")
    (damaged("broken common") / "common.pt").write_bytes(b"no zip")
    file = damaged("wrong bytes") / "__1_0.distcp"
    file.write_bytes(bytes(file.stat().st_size))
    reasons = {
        "nowhere": "it has no metadata.json",
        "truncated": "__1_0.distcp has ",
        "shard gone": "__0_1.distcp",
        "no metadata": ".metadata",
        "empty metadata": "EOFError",
        "broken config": "is damaged",
        "broken common": "is damaged",
        "wrong bytes": "is damaged",
    }
    paths = [tmp_path / name for name in reasons]
    results = pool.run(2, jobs.resume_after_refusals, config, paths, good, SECOND)
    for messages, *_ in results:
        for (name, reason), message in zip(reasons.items(), messages, strict=True):
            assert message.startswith("CheckpointError: ") and reason in message, (name, message)
    _, unusable, metrics, weights = results[0]
    assert unusable.startswith("CheckpointError: the weights are partly those of")
    assert metrics["actor/kl_loss"] == want["actor/kl_loss"]
    assert all(torch.equal(tensor, want_weights[name]) for name, tensor in weights.items())


def test_failed_save_of_a_hugging_face_folder_is_an_error_on_all_ranks_and_the_next_one_is_complete(
    pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = make_config(folders["qwen2"], PP2, ranks=2)
    for full, hung in pool.run(2, jobs.fail_to_save_hf, config, tmp_path / "saved"):
        assert full.startswith(f"the save of the Hugging Face folder {tmp_path}/saved failed: actor rank 0: ")
        assert "File too large" in full
        assert "it has not finished within 3 s" in hung
    assert (tmp_path / "saved" / "model.safetensors").is_file()
    assert not list(tmp_path.glob("saved.*"))


def test_save_may_take_longer_than_a_collective(pool: WorkerPool, folders: dict[str, Path], tmp_path: Path) -> None:
    config = make_config(folders["qwen2"], PP2, ranks=2)
    errors = pool.run(2, jobs.save_slowly, config, FIRST, tmp_path)
    assert "imed out" in errors[1], "a training rank that does not come to a collective is still noticed"
    assert (tmp_path / "checkpoint" / "metadata.json").is_file()
    assert (tmp_path / "folder" / "model.safetensors").is_file()

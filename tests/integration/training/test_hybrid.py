"""Training with the hybrid engine, compared with the same training on separate pools."""

from __future__ import annotations

from pathlib import Path

import pytest
from safetensors import safe_open

from tests._support.training_command import FULL_OBJECTIVE, Run, StartRun

MEGATRON = "actor_rollout_ref.actor.megatron"
HYBRID = ("actor_rollout_ref.hybrid_engine=true", "trainer.scheduler=sync")
OFFLOAD = tuple(f"{MEGATRON}.{state}_offload=true" for state in ("param", "grad", "optimizer"))
REPRODUCIBLE = ("actor/", "response_seq_len/", "training/", "val/", "reward/")
MEMORY = [f"perf/memory_gb/{phase}" for phase in ("generate", "update", "sync")]


def weights(folder: Path) -> dict[str, bytes]:
    [path] = folder.glob("huggingface/*.safetensors")
    with safe_open(path, framework="np") as file:
        return {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118 - not a mapping


def assert_equal_runs(run: Run, reference: Run, n_steps: int) -> None:
    """Check that a run of some steps has metrics and weights that are bitwise equal to those of a reference."""
    assert run.status == 0, run.output
    assert reference.status == 0, reference.output
    for line, expected in zip(run.metrics, reference.metrics[:n_steps], strict=True):
        names = [name for name in expected if name.startswith(REPRODUCIBLE)]
        assert len(names) > 20
        assert {name: line[name] for name in names} == {name: expected[name] for name in names}
    assert weights(run.folder / f"global_step_{n_steps}") == weights(reference.folder / f"global_step_{n_steps}")


@pytest.mark.slow  # rollout/test_sleep.py, actor/test_offload.py and ray_cluster/test_nodes.py have the parts
@pytest.mark.parametrize("level", [2, 1, 0])
def test_hybrid_engine_with_offload_equals_separate_pools(
    start_run: StartRun, reference_run: Run, validation: list[str], level: int
) -> None:
    overrides = ("trainer.total_training_steps=4", "trainer.save_freq=2", *validation, *FULL_OBJECTIVE)
    sleep = f"actor_rollout_ref.rollout.sleep_level={level}"
    run = start_run(*overrides, *HYBRID, *OFFLOAD, sleep).finish()
    assert_equal_runs(run, reference_run, n_steps=4)
    for line in run.metrics:
        assert all(line[name] > 0 for name in MEMORY)
        assert ("weights/wake_log_prob_diff" in line) is (level > 0)
        assert line.get("weights/wake_log_prob_diff", 0) < 1e-4
    assert run.leftovers() == []


@pytest.mark.slow
def test_resumed_hybrid_run_continues_the_reference_run(
    start_run: StartRun, reference_run: Run, validation: list[str]
) -> None:
    assert reference_run.status == 0, reference_run.output
    checkpoint = f"trainer.resume_from_path={reference_run.folder}/global_step_4"
    overrides = ("trainer.total_epochs=2", *validation, *FULL_OBJECTIVE, "trainer.resume_mode=resume_path", checkpoint)
    run = start_run(*overrides, *HYBRID, *OFFLOAD).finish()
    assert run.status == 0, run.output
    assert [line["training/global_step"] for line in run.metrics] == [5, 6]
    for line, expected in zip(run.metrics, reference_run.metrics[4:], strict=True):
        for name in ("actor/kl_loss", "actor/pg_loss", "actor/grad_norm", "reward/mean"):
            assert line[name] == pytest.approx(expected[name], rel=1e-5, abs=1e-7)


@pytest.mark.slow
def test_ten_steps_equal_separate_pools(start_run: StartRun, tmp_path: Path) -> None:
    length = ("trainer.total_training_steps=10", "trainer.save_freq=10", "trainer.scheduler=sync")
    separate = start_run(*length, folder=tmp_path / "run" / "separate").finish()
    hybrid = start_run(*length, *HYBRID, *OFFLOAD, folder=tmp_path / "run" / "hybrid").finish()
    assert_equal_runs(hybrid, separate, n_steps=10)

"""Mistakes of a user: one readable error before the training starts, exit status 1, no remaining process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe_gkd.checkpoints.run_folder import check_outputs
from recipe_gkd.errors import ConfigError
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.ports import free_port
from tests._support.training_command import Run, StartRun, Teacher, running_teacher


def assert_refused(run: Run, message: str) -> None:
    """Check that the run fails with ``message`` and leaves no process and no folder."""
    run.finish()
    assert run.status == 1, run.output
    assert message in run.output and "Traceback" not in run.output, run.output
    assert run.leftovers() == []
    assert not run.folder.exists()


class TestFiles:
    @pytest.mark.slow  # tests/unit/test_preflight.py checks the message without a process.
    def test_missing_model_folder_is_refused(self, start_run: StartRun) -> None:
        run = start_run("actor_rollout_ref.model.path=nowhere/at/all")
        assert_refused(run, "nowhere/at/all does not exist; expected a Hugging Face")

    @pytest.mark.slow  # tests/unit/data checks the message without a process.
    def test_data_without_prompt_column_is_refused(self, start_run: StartRun, tmp_path: Path) -> None:
        pq.write_table(pa.table({"question": ["a"]}), tmp_path / "q.parquet")
        run = start_run(f"data.train_files={tmp_path}/q.parquet")
        assert_refused(run, "has no column 'prompt'; it has: question")

    @pytest.mark.parametrize("key", ["trainer.trace_file", "ray_init.timeline_json_file", "trainer.default_local_dir"])
    def test_check_outputs_unwritable_path_is_refused(self, key: str, tmp_path: Path) -> None:
        (tmp_path / "file").write_text("")
        with raises(ConfigError, keys=(key,)):
            check_outputs(base_config(f"{key}={tmp_path}/file/there"))


class TestTeacher:
    @pytest.fixture(scope="class")
    def other_vocabulary_teacher(self, tiny_qwen2: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teacher]:
        """Teacher service with a vocabulary of 96 characters. The student has 32."""
        yield from running_teacher(tiny_qwen2, tmp_path_factory.mktemp("other_vocabulary"))

    @pytest.mark.slow  # tests/unit/teachers checks the message without a run.
    def test_unreachable_teacher_is_refused(self, start_run: StartRun) -> None:
        port = free_port()
        assert_refused(start_run(f"actor_rollout_ref.teacher.server_port={port}"), f"127.0.0.1:{port}")

    @pytest.mark.slow
    def test_teacher_with_other_vocabulary_is_refused(
        self, start_run: StartRun, other_vocabulary_teacher: Teacher
    ) -> None:
        run = start_run(f"actor_rollout_ref.teacher.server_port={other_vocabulary_teacher.port}")
        assert_refused(run, "the teacher's vocabulary does not fit the student's")


class TestWorkers:
    @pytest.mark.slow  # tests/integration/ray_cluster/test_pools.py checks the message without a run.
    def test_too_many_slots_per_node_are_refused(self, start_run: StartRun) -> None:
        assert_refused(start_run("trainer.n_gpus_per_node=999"), "actor pool: 1 x 999 CPU slots")

    @pytest.mark.slow  # tests/unit/test_preflight.py checks the refusal without a run.
    def test_wrong_override_of_megatron_is_refused(self, start_run: StartRun) -> None:
        key = "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularty"
        run = start_run(f"{key}=full")
        assert_refused(run, "recompute_granularity")

    @pytest.mark.slow
    def test_cuda_without_gpu_is_refused(self, start_run: StartRun) -> None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU")
        assert_refused(start_run("trainer.device=cuda"), "the Ray cluster has no GPU")


class TestRewardFunction:
    @pytest.mark.slow
    @pytest.mark.parametrize(
        ("body", "message"),
        [
            ("raise ValueError('no score')", "ValueError: no score"),
            ("import time; time.sleep(3600)", "took longer than 2 s"),
            ("return 'good'", "expected a finite number"),
            ("import os; os._exit(3)", "ended its process (exit status 3)"),
        ],
    )
    def test_failed_reward_function_is_only_error(
        self, start_run: StartRun, tmp_path: Path, body: str, message: str
    ) -> None:
        """Neither the output nor the log has warnings of asyncio or Ray about unretrieved exceptions."""
        path = tmp_path / "my_reward.py"
        path.write_text(f"def compute_score(prompt, response, ground_truth, extra):\n    {body}\n")
        run = start_run(
            f"custom_reward_function.path={path}",
            "custom_reward_function.timeout_s=2",
            "custom_reward_function.on_failure=fail",
            "data.ground_truth_key=answer",
            "trainer.scheduler=one_step_off",
        ).finish()
        assert run.status == 1 and "gave no reward" in run.output and message in run.output, run.output
        text = run.output + (run.folder / "run.log").read_text()
        assert "never retrieved" not in text and "ray.exceptions" not in text, text
        assert run.leftovers() == []

    @pytest.mark.slow  # tests/unit/test_side_activities.py trains with such a function without workers
    def test_failed_reward_function_that_is_only_measured_ends_nothing(
        self, start_run: StartRun, tmp_path: Path
    ) -> None:
        path = tmp_path / "my_reward.py"
        path.write_text("import os\n\ndef compute_score(prompt, response, ground_truth, extra):\n    os._exit(3)\n")
        run = start_run(f"custom_reward_function.path={path}", "data.ground_truth_key=answer").finish()
        assert run.status == 0 and run.output.count("gave no reward") == 1, run.output
        assert run.metrics[-1]["reward/failures"] == 24 and "reward/mean" not in run.metrics[-1]
        assert run.leftovers() == []

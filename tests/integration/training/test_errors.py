"""What a user can get wrong: one readable error, soon, with exit status 1, and nothing left running."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe_gkd.checkpoints.run_folder import check_outputs
from recipe_gkd.config import load_config
from recipe_gkd.errors import ConfigError
from tests._support.ports import free_port
from tests._support.training_command import Run, Start, Teacher, running_teacher

pytestmark = pytest.mark.timeout(320)


def assert_refused(run: Run, says: str, within_s: float = 90) -> None:
    run.finish(timeout_s=2 * within_s)
    assert run.status == 1, run.output
    assert says in run.output and "Traceback" not in run.output, run.output
    assert run.seconds < within_s
    assert run.leftovers() == []
    assert not run.folder.exists()


def test_a_wrong_model_path(start: Start) -> None:
    assert_refused(
        start("actor_rollout_ref.model.path=nowhere/at/all"), "nowhere/at/all is not there; expected a Hugging Face"
    )


def test_a_teacher_that_is_down(start: Start) -> None:
    port = free_port()
    assert_refused(start(f"actor_rollout_ref.teacher.server_port={port}"), f"127.0.0.1:{port}")


@pytest.mark.slow  # the message: tests/test_data.py
def test_a_parquet_without_the_prompt_column(start: Start, tmp_path: Path) -> None:
    pq.write_table(pa.table({"question": ["a"]}), tmp_path / "q.parquet")
    assert_refused(start(f"data.train_files={tmp_path}/q.parquet"), "has no column 'prompt'; it has: question")


@pytest.mark.parametrize("key", ["trainer.trace_file", "ray_init.timeline_json_file", "trainer.default_local_dir"])
def test_a_place_that_cannot_be_written_to_is_told_before_anything_starts(key: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    needed = ["data.train_files=x", "actor_rollout_ref.model.path=x"]
    with pytest.raises(ConfigError, match=f"{key}: .*file/there.* cannot be written"):
        check_outputs(load_config("on_policy_distill_trainer", [*needed, f"{key}={tmp_path}/file/there"]))


@pytest.mark.slow  # the message: tests/test_pools.py
def test_more_slots_than_the_machine_has(start: Start) -> None:
    assert_refused(start("trainer.n_gpus_per_node=999"), "actor pool: 1 x 999 CPU slots")


def test_a_worker_that_fails_to_start(start: Start) -> None:
    field = "actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularty=full"
    assert_refused(start(field), "recompute_granularity", within_s=150)  # Ray, Megatron and vLLM are started first


@pytest.mark.slow
def test_cuda_on_a_machine_without(start: Start) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert_refused(start("trainer.device=cuda"), "the Ray cluster has no GPU")


@pytest.fixture(scope="module")
def other_teacher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Teacher]:
    """A teacher with another vocabulary of the same kind."""
    import torch
    import transformers
    from tokenizers import Tokenizer, models

    folder = tmp_path_factory.mktemp("other")
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=48,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=64,
    )
    transformers.Qwen2ForCausalLM(config).float().save_pretrained(folder)
    words = {"<unk>": 0, "<eos>": 1} | {chr(64 + i): i for i in range(2, 48)}
    transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="<unk>")), unk_token="<unk>", eos_token="<eos>"
    ).save_pretrained(folder)
    yield from running_teacher(folder, tmp_path_factory.mktemp("other_teacher"))


@pytest.mark.slow
def test_a_teacher_whose_vocabulary_does_not_fit(start: Start, other_teacher: Teacher) -> None:
    assert_refused(
        start(f"actor_rollout_ref.teacher.server_port={other_teacher.port}"),
        "the teacher's vocabulary does not fit the student's",
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("raise ValueError('no score')", "ValueError: no score"),
        ("import time; time.sleep(60)", "took longer than 2 s"),
        ("return 'good'", "expected a finite number"),
        ("import os; os._exit(3)", "ended its process (exit status 3)"),
    ],
)
def test_a_reward_function_that_fails_is_the_one_error(start: Start, tmp_path: Path, body: str, says: str) -> None:
    """No report of asyncio or Ray about tasks that nobody awaited follows it, nor stands in the log."""
    path = tmp_path / "my_reward.py"
    path.write_text(f"def compute_score(prompt, answer, ground_truth, extra):\n    {body}\n")
    keys = f"custom_reward_function.path={path}", "custom_reward_function.timeout_s=2", "data.ground_truth_key=answer"
    run = start(*keys, "trainer.scheduler=one_step_off").finish()
    assert run.status == 1 and "gave no reward" in run.output and says in run.output, run.output
    told = run.output + (run.folder / "run.log").read_text()
    assert "never retrieved" not in told and "ray.exceptions" not in told, told
    assert run.leftovers() == []

"""Conversations with a tool on real parts: the example in miniature, and exactness of every token."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from subprocess import PIPE, STDOUT

import pytest

from tests._support.ports import free_port
from tests._support.repository import REPO
from tests._support.waiting import PATIENCE_S

EXACT = (
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.test_freq=-1",
    "trainer.save_freq=-1",
    "trainer.scheduler=sync",
    "trainer.startup_timeout_s=600",
    "actor_rollout_ref.actor.optim.lr=1e-30",
    "data.train_batch_size=32",
    "actor_rollout_ref.teacher.backend=hf",
    "actor_rollout_ref.teacher.num_microbatches=2",
)


def run(command: list[str], folder: Path, **environment: str) -> str:
    variables = os.environ | {"CALCULATOR_DIR": str(folder), "OMP_NUM_THREADS": "1"} | environment
    with subprocess.Popen(command, cwd=REPO, env=variables, stdout=PIPE, stderr=STDOUT, text=True) as process:
        try:
            output, _ = process.communicate(timeout=2 * PATIENCE_S)
        finally:
            process.terminate()  # it ends what it has started
    assert process.returncode == 0, output[-6000:]
    return output


@pytest.fixture(scope="module")
def student(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a student that calls the calculator in many of its conversations."""
    folder = tmp_path_factory.mktemp("calculator")
    models = [sys.executable, "examples/calculator/models.py", str(folder)]
    run([*models, "--teacher-steps", "1", "--student-steps", "150"], folder)
    return folder


@pytest.mark.timeout(2 * PATIENCE_S)
# tests/unit/conversations has the division of rewritten conversations.
@pytest.mark.slow  # tests/unit/conversations has the stage, with the tokens of templates and the history
@pytest.mark.parametrize("history", ["refuse", "rewrite"])
def test_student_that_teaches_itself_has_no_loss_in_any_turn(student: Path, tmp_path: Path, history: str) -> None:
    """Rows of the teacher, log-probabilities of the engine and logits of the actor belong to the same tokens."""
    folder = shutil.copytree(student, tmp_path / history)
    if history == "rewrite":
        template = folder / "student/chat_template.jinja"
        # Calls of earlier turns are not shown.
        written = template.read_text()
        template.write_text(
            written.replace("message['tool_calls'] or []", "(message['tool_calls'] or [] if loop.last else [])")
        )
        assert template.read_text() != written
    teacher = f"actor_rollout_ref.teacher.model_path={folder}/student"
    command = [sys.executable, "-m", "recipe_gkd.main_gkd", "--config-path", "examples/calculator"]
    run([*command, "--config-name", "calculator", *EXACT, teacher, f"rollout.history={history}"], folder)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 2
    for metrics in lines:
        assert metrics["conversation/turns_mean"] > 1.2 and metrics["conversation/failures"] == 0
        if history == "rewrite":  # no turn follows from the tokens of the one before it
            assert metrics["conversation/sequences_mean"] == metrics["conversation/turns_mean"]
            assert metrics["training/samples"] == 32 * metrics["conversation/turns_mean"]
        else:
            assert metrics["conversation/sequences_mean"] == 1 and 0.5 < metrics["conversation/sampled_share"] < 1
        assert abs(metrics["actor/kl_loss"]) < 1e-5
        assert metrics["actor/rollout_probs_diff_max"] < 1e-4
        assert metrics["actor/n_tokens"] == pytest.approx(32 * metrics["response_seq_len/average"])


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
def test_rewards_of_turns_train(student: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(student, tmp_path / "turn_rewards")
    reward = tmp_path / "reward.py"
    # The second turn has a reward, so the advantages of both turns differ between the conversations of a group.
    reward.write_text(
        "def compute_score(response, extra):\n"
        "    n_turns = extra['conversation']['n_turns']\n"
        "    return {'turn_scores': [0.0, 1.0, 0.0][:n_turns], 'has_second': float(n_turns > 1)}\n"
    )
    overrides = (
        "gkd.use_rl_loss=true", "gkd.distill_loss_coef=0", "actor_rollout_ref.rollout.n=8", "data.train_batch_size=8",
        "actor_rollout_ref.actor.optim.lr=1e-3", "trainer.total_training_steps=4",
    )  # fmt: skip
    command = [sys.executable, "-m", "recipe_gkd.main_gkd", "--config-path", "examples/calculator"]
    teacher = f"actor_rollout_ref.teacher.model_path={folder}/student"
    settings = (*EXACT, teacher, f"custom_reward_function.path={reward}", *overrides)
    run([*command, "--config-name", "calculator", *settings], folder)
    lines = [json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()]
    assert len(lines) == 4
    for metrics in lines:
        assert 0 < metrics["reward/mean"] == pytest.approx(metrics["reward/has_second"])
        assert metrics["actor/grad_norm"] > 0 and metrics["conversation/failures"] == 0


@pytest.mark.slow
@pytest.mark.timeout(2 * PATIENCE_S)
def test_commands_sample_conversations(student: Path, tmp_path: Path) -> None:
    """``evaluate`` and ``data inspect --rollout`` execute the calls of the student."""
    keys = ["rollout.tools=[examples/calculator/tools.py:calculator]", "rollout.tool_parser=hermes"]
    lengths = ["data.max_prompt_length=16", "data.max_response_length=40", "data.ground_truth_key=ground_truth"]
    command = [sys.executable, "-m", "recipe_gkd"]
    data, responses = str(student / "held_out.parquet"), tmp_path / "responses.jsonl"
    files = ["--data", data, "--reward", "examples/calculator/reward.py", "--responses", str(responses)]
    small = ["--cpu-cache-gb", "0.1", "--dtype", "float32"]
    run([*command, "evaluate", str(student / "student"), *files, *small, *keys, *lengths], tmp_path)
    found = [json.loads(line) for line in responses.read_text().splitlines()]
    with_tool = [one for one in found if one["conversation"]["n_turns"] > 1]
    assert len(with_tool) > 0.2 * len(found)
    for one in with_tool:
        first, result, *_ = one["conversation"]["messages"]
        [call] = first["tool_calls"]
        if not result["content"].startswith("error"):
            expected = sum(map(int, call["function"]["arguments"]["expression"].split("+")))
            assert result["content"] == str(expected)
    model = f"actor_rollout_ref.model.path={student}/student"
    shown = run([*command, "data", "inspect", data, model, *keys, *lengths, "--row", "1", "--rollout", "8"], tmp_path)
    assert [f"response to row {row}: " in shown for row in range(10)] == [False, *[True] * 8, False]
    assert "  added" in shown and "<|tools|><|user|>" in shown


@pytest.mark.slow
@pytest.mark.timeout(3 * PATIENCE_S)
def test_student_learns_to_call_the_calculator(tmp_path: Path) -> None:
    ports = {"PROXY_FRONTEND_PORT": str(free_port()), "PROXY_BACKEND_PORT": str(free_port())}
    command = ["bash", "launch/example_calculator.sh", "trainer.total_training_steps=80", "trainer.test_freq=80"]
    output = run(command, tmp_path, **ports)
    lines = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    found = [line["val/calculator/compute_score"] for line in lines if "val/calculator/compute_score" in line]
    assert found[0] < 0.1 and found[-1] > 0.9, output[-3000:]
    responses = (tmp_path / "run/validation/step_80.jsonl").read_text().splitlines()
    messages = json.loads(responses[0])["conversation"]["messages"]
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant"]

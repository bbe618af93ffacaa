"""The training command on tiny models: Ray, both pools, a teacher service, weight syncs and a checkpoint."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

from recipe_gkd.addition.task import make_splits, write_parquet
from recipe_gkd.commands.gpu_smoke.isolation import last_lines
from recipe_gkd.commands.gpu_smoke.outcome import CheckFailed, Context
from recipe_gkd.commands.gpu_smoke.service import running_service
from recipe_gkd.commands.gpu_smoke.tiny_models import engine_dtype, write_model

_STEPS = 3
_TURNS = ("timing/engine_sleep", "timing/engine_wake", "timing/teacher_sleep", "timing/teacher_wake")
_BATCH_SIZE = 8


HYBRID = (
    "actor_rollout_ref.hybrid_engine=true",
    "actor_rollout_ref.teacher.sleep_between_batches=true",
    *(f"actor_rollout_ref.actor.megatron.{state}_offload=true" for state in ("param", "grad", "optimizer")),
)


def check_training(context: Context) -> str:
    """Run three steps on separate pools, and check metrics, checkpoint and the written model."""
    return _check_training(context)


def check_training_hybrid(context: Context) -> str:
    """Run three steps of actor, rollout engine and teacher that take turns on one device."""
    return _check_training(context, *HYBRID)


def _check_training(context: Context, *more: str) -> str:
    student = write_model(context.folder / "student", seed=1, with_tokenizer=True)
    model = write_model(context.folder / "teacher", seed=2, with_tokenizer=True)
    data = context.folder / "train.parquet"
    write_parquet(make_splits(0, n_train=_STEPS * _BATCH_SIZE, n_held_out=8, n_dev=8).train, data)
    run, service = context.folder / "run", context.folder / "service"
    timeout_s, sleep_mode = 0.4 * context.deadline_s, int(bool(more))
    with running_service(model, service, device=context.device, timeout_s=timeout_s, SLEEP_MODE=sleep_mode) as port:
        _train(context, [*overrides(context, student, data, run, port), *more])
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    if more:
        _check_turns(context, lines)
    return _check_run(context, lines, run)


def overrides(context: Context, student: Path, data: Path, run: Path, port: int) -> list[str]:
    """Return the keys of the run.

    Args:
        student: Folder of the student.
        data: File of the prompts.
        run: Run folder.
    """
    rollout, actor, dtype = "actor_rollout_ref.rollout", "actor_rollout_ref.actor", engine_dtype(context.device)
    return [
        f"data.train_files={data}", "data.max_prompt_length=16", "data.max_response_length=24",
        f"data.train_batch_size={_BATCH_SIZE}", f"actor_rollout_ref.model.path={student}",
        "actor_rollout_ref.nccl_timeout=120", f"{actor}.megatron.dtype={dtype}", f"{actor}.optim.lr=0.001",
        f"{rollout}.dtype={dtype}", f"{rollout}.kv_cache_memory_megabytes=64", f"{rollout}.max_num_seqs=16",
        f"{rollout}.gpu_memory_utilization=0.2",
        f"actor_rollout_ref.teacher.server_port={port}", f"trainer.device={context.device}",
        f"trainer.default_local_dir={run}", f"trainer.total_training_steps={_STEPS}",
        # Responses are then sampled with the weights of the last sync, so each step compares them with the actor's.
        "trainer.scheduler=sync",
        f"trainer.startup_timeout_s={0.4 * context.deadline_s:g}",
    ]  # fmt: skip


def _train(context: Context, keys: list[str]) -> None:
    log = context.folder / "training.log"
    command = [sys.executable, "-m", "recipe_gkd.main_gkd", "--config-name", "on_policy_distill_trainer", *keys]
    try:
        with log.open("wb") as output:
            done = subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, timeout=0.5 * context.deadline_s, check=False
            )
    except subprocess.TimeoutExpired as error:
        text = "\n".join(last_lines(log, 20))
        raise CheckFailed(f"the training command did not end within {error.timeout:g} s:\n{text}") from None
    if done.returncode:
        text = "\n".join(last_lines(log, 20))
        raise CheckFailed(f"the training command ended with exit status {done.returncode}:\n{text}")


def _check_turns(context: Context, lines: list[dict[str, float]]) -> None:
    """Check that engine and teacher slept in every step, and that the engine woke with the actor's weights."""
    for name in (*(f"perf/memory_gb/{phase}" for phase in ("generate", "update", "sync")), *_TURNS):
        context.figures[name] = [line.get(name, 0.0) for line in lines]
        if not all(context.figures[name]):
            raise CheckFailed(f"{name} is {context.figures[name]}, expected a positive number in each step")
    limit = 0.25 if engine_dtype(context.device) == "bfloat16" else 1e-3
    context.compare("weights/wake_log_prob_diff", max(line["weights/wake_log_prob_diff"] for line in lines), limit)


def _check_run(context: Context, lines: list[dict[str, float]], run: Path) -> str:
    if len(lines) != _STEPS:
        raise CheckFailed(f"metrics.jsonl has {len(lines)} lines, expected {_STEPS}")
    losses = [line["actor/kl_loss"] for line in lines]
    context.figures["actor/kl_loss"] = losses
    if not all(math.isfinite(loss) and loss > 0 for loss in losses):
        raise CheckFailed(f"actor/kl_loss is {losses}, expected positive numbers")
    # Log-probabilities of the rollout engine against the actor's, of the same tokens.
    limit = 0.05 if engine_dtype(context.device) == "bfloat16" else 1e-3
    context.compare(
        "actor/rollout_probs_diff_mean", max(line["actor/rollout_probs_diff_mean"] for line in lines), limit
    )
    if not list(run.glob(f"global_step_{_STEPS}/huggingface/*.safetensors")):
        raise CheckFailed(f"{run} has no model of step {_STEPS}")
    return f"{_STEPS} steps, loss {losses[0]:.3f} to {losses[-1]:.3f}, checkpoint and Hugging Face folder"

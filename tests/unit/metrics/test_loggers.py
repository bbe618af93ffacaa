"""Metrics arrive where the user looks for them."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest

from recipe_gkd.config import load_config
from recipe_gkd.metrics.loggers import Console, Jsonl, Loggers

METRICS = {"actor/kl_loss": 0.25, "timing/step": 1.5, "response_seq_len/average": 12.0}


def test_every_logger_gets_every_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    trainer = load_config(
        "on_policy_distill_trainer",
        [
            "data.train_files=x",
            "actor_rollout_ref.model.path=x",
            "trainer.logger=[console,jsonl,tensorboard]",
            f"trainer.default_local_dir={tmp_path}",
        ],
    ).trainer
    with Loggers(trainer, first_step=0, last_step=2) as loggers:
        for step in (1, 2):
            loggers.log(METRICS, step)
    assert [json.loads(line)["training/global_step"] for line in (tmp_path / "metrics.jsonl").open()] == [1, 2]
    events = EventAccumulator(str(tmp_path / "tensorboard" / "recipe_gkd" / "on_policy_distill")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("actor/kl_loss")] == [(1, 0.25), (2, 0.25)]
    assert "step 2/2  kl 0.2500" in capsys.readouterr().out


def test_a_resumed_run_keeps_the_lines_before_it_and_rewrites_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"training/global_step": step}) + "\n" for step in (1, 2, 3)) + '{"cut sho')
    logger = Jsonl(path, first_step=2)
    logger.log({}, 3)
    logger.close()
    assert [json.loads(line)["training/global_step"] for line in path.open()] == [1, 2, 3]


def test_what_is_validated_before_a_resumed_run_goes_into_the_line_of_the_step_before(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    for first_step in (0, 2, 2):
        logger = Jsonl(path, first_step)
        logger.log({"val/data/score": 0.5 + first_step, "timing/validate": 9.0}, first_step)
        for step in (first_step + 1, first_step + 2):
            logger.log({"timing/step": 1.0}, step)
        logger.close()
    assert [json.loads(line) for line in path.open()] == [
        {"training/global_step": 0, "val/data/score": 0.5, "timing/validate": 9.0},
        {"training/global_step": 1, "timing/step": 1.0},
        {"training/global_step": 2, "timing/step": 1.0, "val/data/score": 2.5},
        {"training/global_step": 3, "timing/step": 1.0},
        {"training/global_step": 4, "timing/step": 1.0},
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_the_console_shows_validation_in_a_line_of_its_own() -> None:
    stream, results = io.StringIO(), {"val/math/score": 0.5, "timing/validate": 2.0}
    console = Console(0, 10, stream)
    console.log(results, 0)
    console.log(METRICS | results, 7)
    assert stream.getvalue().splitlines() == [
        "val   0/10  math/score 0.5000  time 2.00s",
        "step  7/10  kl 0.2500  len 12.0  step 1.50s",
        "val   7/10  math/score 0.5000  time 2.00s",
    ]


def test_the_console_shows_what_there_is() -> None:
    stream = io.StringIO()
    Console(0, 10, stream).log(METRICS, 7)
    assert stream.getvalue() == "step  7/10  kl 0.2500  len 12.0  step 1.50s\n"

"""The training command in the folder of an earlier run, up to the start of Ray and the workers."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe_gkd import main_gkd
from recipe_gkd import run as run_module
from recipe_gkd.checkpoints.run_folder import RunFolder
from recipe_gkd.checkpoints.store import CheckpointFolderWriter
from recipe_gkd.restarts import TrainingPlan
from tests._support.repository import REPO
from tests._support.teacher_service import VOCAB_SIZE

N_STEPS = 2
Train = Callable[..., int]


async def train(_: Any, plan: TrainingPlan, __: Any, ___: Any, folder: RunFolder, *____: Any) -> None:
    """Write the checkpoint of the last step without training."""
    folder.accept()
    progress = replace(plan.progress, step=plan.last_step(plan.progress))
    writer = CheckpointFolderWriter(folder.path, progress)
    (writer.folder / "actor").mkdir()
    (writer.folder / "actor" / "metadata.json").write_text("{}")
    writer.complete()


@pytest.fixture
def start(
    tiny_qwen2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Callable[..., tuple[int, str]]]:
    """Function that runs the command with overrides, and returns its status and what it printed."""
    monkeypatch.setattr(logging, "raiseExceptions", True)  # main sets it
    monkeypatch.setattr(run_module, "train", train)
    monkeypatch.setattr(run_module, "connected_cluster", lambda _: nullcontext())
    monkeypatch.setattr(run_module, "choose_device", lambda _: "cpu")
    for module in (main_gkd, run_module):
        monkeypatch.setattr(module, "raise_on_signals", lambda: None)
    shutil.copytree(tiny_qwen2, tmp_path / "model")
    np.save(tmp_path / "model" / "counts.npy", np.arange(VOCAB_SIZE, dtype=np.float64))
    pq.write_table(pa.table({"prompt": ["1+1=", "2+2="]}), tmp_path / "train.parquet")
    common = (
        f"data.train_files={tmp_path}/train.parquet",
        "data.train_batch_size=2",
        "data.max_prompt_length=16",
        "data.max_response_length=16",
        f"actor_rollout_ref.model.path={tmp_path}/model",
        "actor_rollout_ref.teacher.top_k=4",
        f"actor_rollout_ref.teacher.backend={REPO}/docs/examples/custom_teacher.py:UnigramTeacher",
        f"actor_rollout_ref.teacher.model_path={tmp_path}/model",
        "trainer.device=cpu",
        f"trainer.total_training_steps={N_STEPS}",
        f"trainer.default_local_dir={tmp_path}/run",
    )

    def run(*overrides: str) -> tuple[int, str]:
        status = main_gkd.main([*common, *overrides])
        captured = capsys.readouterr()
        return status, captured.out + captured.err

    handlers = logging.getLogger().handlers[:]
    yield run
    logging.getLogger().handlers[:] = handlers


def test_same_model_in_another_folder_resumes(start: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    assert start()[0] == 0
    saved = json.loads((tmp_path / "run" / f"global_step_{N_STEPS}" / "trainer.json").read_text())
    assert saved["step"] == N_STEPS and saved["model"]["tokenizer"].startswith("sha256:")
    shutil.move(tmp_path / "model", tmp_path / "moved")
    moved = [
        f"{key}={tmp_path}/moved" for key in ("actor_rollout_ref.model.path", "actor_rollout_ref.teacher.model_path")
    ]
    status, printed = start(*moved)
    assert status == 0 and "nothing left to train" in printed
    status, printed = start(*moved, f"trainer.total_training_steps={N_STEPS + 1}")
    assert status == 0 and "steps 3 to 3" in printed


def test_another_model_is_an_error_and_the_message_leads_on(
    start: Callable[..., tuple[int, str]], tmp_path: Path
) -> None:
    assert start()[0] == 0
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.5}))
    status, printed = start()
    assert status == 1
    assert re.search(r"error: .*global_step_2 was made from another model .*rms_norm_eps: 1e-06 -> 0\.5", printed)
    chosen = re.findall(r"trainer\.resume_mode=resume_path trainer\.resume_from_path=\S+", printed)[0].split()
    more = f"trainer.total_training_steps={N_STEPS + 1}"
    status, printed = start(*chosen, more)
    assert status == 0 and "continues with its own weights: config.json: rms_norm_eps" in printed
    assert start()[0] == 0  # the checkpoint of step 3 is this model's
    assert start("trainer.resume_mode=disable")[0] == 0


def test_checkpoint_without_model_is_not_compared(start: Callable[..., tuple[int, str]], tmp_path: Path) -> None:
    assert start()[0] == 0
    file = tmp_path / "run" / f"global_step_{N_STEPS}" / "trainer.json"
    values = json.loads(file.read_text())
    del values["model"]
    file.write_text(json.dumps(values))
    config = tmp_path / "model" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rms_norm_eps": 0.5}))
    status, printed = start()
    assert status == 0 and "nothing left to train" in printed


def test_complete_run_with_changed_settings_ends_with_how_to_start_anew(start: Callable[..., tuple[int, str]]) -> None:
    """The training is complete, so the status is 0, but the settings of this command were not trained."""
    assert start()[0] == 0
    status, printed = start("trainer.total_training_steps=1", "gkd.distill_temperature=2")
    *_, last = printed.strip().splitlines()
    assert status == 0 and "step 2 is done, and there is nothing left to train" in printed
    assert "was trained with other settings" in last
    for change in ("trainer.total_training_steps: 2 -> 1", "gkd.distill_temperature: 1.0 -> 2"):
        assert change in last
    assert "trainer.experiment_name" in last and "trainer.resume_mode=disable" in last

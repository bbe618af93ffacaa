"""The configuration in the run folder."""

from __future__ import annotations

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe_gkd.config.load import read_config
from recipe_gkd.config.stored import changed_keys, report_changes, stored_config
from tests._support.base_config import CONFIG_NAME, REQUIRED


def test_stored_config_needs_no_variable_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("QUICKSTART_DIR", "/data/mine")
    monkeypatch.setenv("MY_TOKEN", "secret")
    loaded = read_config("quickstart", ["ray_init.env_vars.HF_TOKEN=${oc.env:MY_TOKEN}"])
    text = stored_config(loaded.composed)
    monkeypatch.delenv("QUICKSTART_DIR")
    stored = OmegaConf.create(text)
    assert stored.actor_rollout_ref.model.path == "/data/mine/student"
    assert stored.trainer.default_local_dir.startswith("/data/mine/runs/")
    assert "secret" not in text and stored.ray_init.env_vars.HF_TOKEN == "secret"


def test_trace_file_is_stored_with_the_folder_of_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for given, expected in (("traces/a.json", f"{tmp_path}/traces/a.json"), ("null", None)):
        loaded = read_config(CONFIG_NAME, [*REQUIRED, f"trainer.trace_file={given}"])
        assert OmegaConf.create(stored_config(loaded.composed)).trainer.trace_file == expected


def test_changed_keys_shows_both_values() -> None:
    before, now = (
        stored_config(read_config(CONFIG_NAME, [*REQUIRED, f"trainer.total_training_steps={n}"]).composed)
        for n in (30, 20)
    )
    assert changed_keys(before, now) == ["trainer.total_training_steps: 30 -> 20"]
    assert not changed_keys(now, now)


def test_changed_keys_has_no_key_of_a_later_version_and_null_is_a_value() -> None:
    now = stored_config(read_config(CONFIG_NAME, [*REQUIRED, "trainer.total_training_steps=20"]).composed)
    before = OmegaConf.create(now)
    before.trainer.total_training_steps = None
    del before.actor_rollout_ref.rollout.mismatch_bound
    assert changed_keys(OmegaConf.to_yaml(before), now) == ["trainer.total_training_steps: None -> 20"]


def test_report_changes_names_both_values_and_how_to_start_anew(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    before, now = (
        stored_config(read_config(CONFIG_NAME, [*REQUIRED, f"data.train_batch_size={n}"]).composed) for n in (4, 8)
    )
    (tmp_path / "config.yaml").write_text(before)
    for stored in (before, now):
        report_changes(tmp_path / "config.yaml", stored, "was trained so far")
    [message] = caplog.messages
    assert "data.train_batch_size: 4 -> 8" in message
    assert "trainer.experiment_name" in message and "trainer.resume_mode=disable" in message
    report_changes(tmp_path / "missing.yaml", now, "was trained")


def test_report_changes_of_a_torn_file_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A crash or a full disk can leave any beginning of the file, and no resume may fail because of it."""
    stored = stored_config(read_config(CONFIG_NAME, REQUIRED).composed)
    torn = [stored[:length].encode() for length in range(0, len(stored), len(stored) // 60)]
    for content in (*torn, b"\0" * 100, b"\xff", b"- 1"):
        (tmp_path / "config.yaml").write_bytes(content)
        report_changes(tmp_path / "config.yaml", stored, "was trained so far")
    assert any("config.yaml cannot be read" in message for message in caplog.messages)

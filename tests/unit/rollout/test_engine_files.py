"""Folder of the sockets of an engine, and its log."""

from __future__ import annotations

import logging
import os
import tempfile
from pathlib import Path

import pytest

SHORT, LONG = "/short", "/" + 80 * "l"


@pytest.mark.parametrize(
    ("folder", "given", "temporary", "expected"),
    [
        (SHORT, None, LONG, SHORT),
        (LONG, None, "/other", "/other"),
        (LONG, None, LONG, "/tmp"),
        (LONG, "/given", LONG, "/given"),
        (LONG, LONG, SHORT, "/tmp"),
    ],
)
def test_sockets_are_in_a_folder_with_a_short_path(
    folder: str, given: str | None, temporary: str, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from recipe_gkd.rollout.vllm import compat as vllm_compat

    monkeypatch.setattr(vllm_compat, "keep_file_store_in", lambda _: None)
    monkeypatch.setattr(tempfile, "tempdir", temporary)
    monkeypatch.delenv("VLLM_RPC_BASE_PATH", raising=False)
    if given is not None:
        monkeypatch.setenv("VLLM_RPC_BASE_PATH", given)
    vllm_compat.keep_files_in(Path(folder))
    assert os.environ["VLLM_RPC_BASE_PATH"] == expected


def test_warning_about_the_random_seed_is_not_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from recipe_gkd.rollout.vllm import compat as vllm_compat

    arg_utils = vllm_compat.inspect.getmodule(vllm_compat.EngineArgs)
    logger = logging.getLogger("vllm.engine.arg_utils")
    logger.addHandler(caplog.handler)
    monkeypatch.setattr(arg_utils, "ModelConfig", lambda **_: None)
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    try:
        vllm_compat.EngineArgs(model=str(tmp_path)).create_model_config()
        logger.error("another message")
    finally:
        logger.removeHandler(caplog.handler)
    assert set(caplog.messages) == {"another message"}

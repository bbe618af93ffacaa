"""Folder of the sockets of an engine."""

from __future__ import annotations

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

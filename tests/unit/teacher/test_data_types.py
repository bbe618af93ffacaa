"""Data types in which a device computes fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from teacher.common.data_types import _CPU_FLAGS, engine_dtype, fast_dtype, needs_bfloat16
from tests._support.cpu_flags import set_cpu_flags


def write_config(folder: Path, **values: Any) -> Path:
    (folder / "config.json").write_text(json.dumps(values))
    return folder


@pytest.mark.parametrize("flags", [("avx2",), ("avx512_bf16",), ("avx512_fp16", "amx_bf16"), ("bf16", "fp16_arith")])
def test_only_types_with_instructions_are_fast_on_a_cpu(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_cpu_flags(monkeypatch, *flags)
    for dtype, of_type in _CPU_FLAGS.items():
        assert fast_dtype(dtype, "cpu") == (dtype if {*flags} & {*of_type} else "float32")
        assert fast_dtype(dtype, "cuda") == dtype
    assert fast_dtype("float32", "cpu") == "float32"


def test_capabilities_of_this_torch_have_the_flags() -> None:
    found = torch.cpu.get_capabilities()
    if found["architecture"] == "x86_64":
        x86 = {flag for flags in _CPU_FLAGS.values() for flag in flags if flag.startswith(("avx", "amx"))}
        assert x86 <= set(found)


@pytest.mark.parametrize(
    ("values", "fast", "slow"),
    [
        ({"dtype": "float32"}, "bfloat16", "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16", "float32"),
        ({"dtype": "float16"}, "float16", "float32"),
        ({"text_config": {"dtype": "float16"}}, "float16", "float32"),
        ({}, "bfloat16", "float32"),
        ({"dtype": "float32", "linear_num_value_heads": 2}, "bfloat16", "bfloat16"),
    ],
)
def test_auto_is_the_type_of_the_weights_if_the_cpu_has_it(
    tmp_path: Path, values: dict[str, Any], fast: str, slow: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_config(tmp_path, **values)
    set_cpu_flags(monkeypatch, "avx512_bf16", "avx512_fp16")
    assert engine_dtype("auto", folder, "cpu") == fast
    set_cpu_flags(monkeypatch, "avx2")
    assert engine_dtype("auto", folder, "cpu") == slow
    assert engine_dtype("auto", folder, "cuda") == "auto"
    assert engine_dtype("float16", folder, "cpu") == "float16"


@pytest.mark.parametrize("content", [None, "{", "[]"])
def test_unreadable_folder_has_no_limits(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    assert not needs_bfloat16(tmp_path)

"""Data types of the student in the place of ``auto``, and what a run says about them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from omegaconf import OmegaConf

from recipe_gkd.config.data_types import conversion_warnings, slow_type_advice, with_data_types
from recipe_gkd.config.keys import DTYPES, FSDP, MEGATRON, ROLLOUT, STRATEGY
from recipe_gkd.config.stored import changed_keys, stored_types, with_chosen_types
from tests._support.base_config import base_config
from tests._support.cpu_flags import set_cpu_flags

FAST, SLOW = ("avx512_bf16",), ("avx2",)


@pytest.mark.parametrize(
    ("device", "flags", "expected"),
    [
        ("cuda", SLOW, "bfloat16"),
        ("cpu", SLOW, "float32"),
        ("cpu", FAST, "bfloat16"),
        ("cpu", ("amx_bf16",), "bfloat16"),
    ],
)
@pytest.mark.parametrize("strategy", ["megatron", "fsdp"])
def test_auto_is_the_fast_type_of_the_device_for_actor_and_engines(
    device: str, flags: tuple[str, ...], expected: str, strategy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_cpu_flags(monkeypatch, *flags)
    found = with_data_types(base_config(f"{STRATEGY}={strategy}"), device).actor_rollout_ref
    assert (found.actor.dtype, found.rollout.dtype) == (expected, expected)


def test_given_types_are_kept_and_auto_engines_follow_the_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cpu_flags(monkeypatch, *FAST)
    found = with_data_types(base_config(f"{MEGATRON}.dtype=float32"), "cpu").actor_rollout_ref
    assert (found.actor.dtype, found.rollout.dtype) == ("float32", "float32")
    found = with_data_types(base_config(f"{ROLLOUT}.dtype=float16"), "cuda").actor_rollout_ref
    assert (found.actor.dtype, found.rollout.dtype) == ("bfloat16", "float16")


def test_engines_with_gated_delta_nets_are_bfloat16_on_each_cpu(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_cpu_flags(monkeypatch, *SLOW)
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"linear_num_value_heads": 4}}))
    config = base_config(f"actor_rollout_ref.model.path={tmp_path}", f"{STRATEGY}=fsdp")
    found = with_data_types(config, "cpu").actor_rollout_ref
    assert (found.actor.dtype, found.rollout.dtype) == ("float32", "bfloat16")
    assert conversion_warnings(with_data_types(config, "cpu"))


def test_resumed_run_keeps_its_types_and_reports_no_change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_cpu_flags(monkeypatch, *FAST)
    config, composed = base_config(), OmegaConf.create()
    for key in DTYPES:
        OmegaConf.update(composed, key, "auto")
    stored, first = OmegaConf.to_yaml(composed), with_data_types(config, "cpu")
    file = tmp_path / "config.yaml"
    file.write_text(with_chosen_types(stored, first))
    assert set(stored_types(file).values()) == {"bfloat16"}
    set_cpu_flags(monkeypatch, *SLOW)  # the run moves to another machine
    assert with_data_types(config, "cpu", stored_types(file)).actor_rollout_ref.actor.dtype == "bfloat16"
    assert with_data_types(config, "cpu").actor_rollout_ref.actor.dtype == "float32"
    assert changed_keys(file.read_text(), stored) == []
    other = stored.replace("auto", "float32")
    assert len(changed_keys(file.read_text(), other)) == len(DTYPES)


@pytest.mark.parametrize("content", [None, "]", "a: 1", "- 1"])
def test_unreadable_configuration_of_a_run_has_no_types(tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "config.yaml").write_text(content)
    assert stored_types(tmp_path / "config.yaml") == {}


@pytest.mark.parametrize(("rollout", "n_warnings"), [("float16", 1), ("bfloat16", 1), ("float32", 0), ("auto", 0)])
def test_other_type_of_the_engines_is_a_warning(rollout: str, n_warnings: int) -> None:
    config = with_data_types(base_config(f"{ROLLOUT}.dtype={rollout}", f"{MEGATRON}.dtype=float32"), "cuda")
    warnings = conversion_warnings(config)
    assert len(warnings) == n_warnings
    for text in warnings:
        assert f"trains in float32, but the rollout engines compute in {rollout}" in text


@pytest.mark.parametrize(
    ("device", "actor", "rollout", "flags", "keys"),
    [
        ("cpu", "bfloat16", "bfloat16", SLOW, [f"{MEGATRON}.dtype", f"{ROLLOUT}.dtype"]),
        ("cpu", "bfloat16", "float32", ("avx512_fp16",), [f"{MEGATRON}.dtype"]),
        ("cpu", "float32", "float16", FAST, [f"{ROLLOUT}.dtype"]),
        ("cpu", "bfloat16", "bfloat16", FAST, []),
        ("cpu", "auto", "auto", SLOW, []),
        ("cpu", "float32", "float32", SLOW, []),
        ("cuda", "bfloat16", "bfloat16", SLOW, []),
    ],
)
def test_slow_types_of_a_cpu_are_named_with_their_keys(
    device: str, actor: str, rollout: str, flags: tuple[str, ...], keys: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    set_cpu_flags(monkeypatch, *flags)
    config = with_data_types(base_config(f"{MEGATRON}.dtype={actor}", f"{ROLLOUT}.dtype={rollout}"), device)
    advice = slow_type_advice(config, device)
    assert [word for word in advice.split() if word.startswith("actor_rollout_ref.")] == [
        f"{key}=float32" for key in keys
    ]


def test_section_of_the_actor_in_the_advice_is_that_of_its_strategy(monkeypatch: pytest.MonkeyPatch) -> None:
    set_cpu_flags(monkeypatch, *SLOW)
    config = with_data_types(base_config(f"{STRATEGY}=fsdp", f"{FSDP}.dtype=bfloat16"), "cpu")
    assert f"{FSDP}.dtype=float32" in slow_type_advice(config, "cpu")

"""Data type of the logits: the rule, the options of an engine, and the plan of its steps."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest

from teacher.__main__ import make_parser
from teacher.common.head_dtype import head_overrides, wants_float32_head
from teacher.engines.base import EngineConfig
from teacher.engines.vllm_internals import ASYNC_SCHEDULING, head_dtype_error, plan_engine
from teacher.errors import TeacherError

VOCABULARY = 152_064


class FakeEngineArgs:
    """vLLM's ``EngineArgs`` without a model."""

    uses_v2 = True
    use_v2_model_runner = property(lambda self: FakeEngineArgs.uses_v2)
    max_model_len = 4096
    use_mla = False

    def __init__(self, **options: Any) -> None:
        self.options = options

    def create_model_config(self) -> FakeEngineArgs:
        return self

    def create_engine_config(self) -> FakeEngineArgs:
        return self


@pytest.fixture(autouse=True)
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("vllm")
    module.EngineArgs = FakeEngineArgs  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", module)
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0")


class TestWantsFloat32Head:
    @pytest.mark.parametrize("dtype", ["auto", "bfloat16", "float16", "float32"])
    @pytest.mark.parametrize("device", ["cpu", "cuda"])
    def test_wants_float32_head_auto_is_for_16_bit_weights_on_cuda(self, dtype: str, device: str) -> None:
        assert wants_float32_head("auto", dtype, device) == (device == "cuda" and dtype != "float32")
        assert wants_float32_head("float32", dtype, device)
        assert not wants_float32_head("model", dtype, device)

    def test_head_overrides_are_those_of_vllm(self) -> None:
        assert head_overrides(float32_head=True) == {"head_dtype": "float32"}
        assert head_overrides(float32_head=False) == {}


class TestPlanEngine:
    @pytest.mark.parametrize(
        ("head_dtype", "dtype", "on_cpu", "expected"),
        [
            ("auto", "auto", False, {"head_dtype": "float32"}),
            ("auto", "bfloat16", True, {}),
            ("float32", "bfloat16", True, {"head_dtype": "float32"}),
            ("model", "bfloat16", False, {}),
        ],
    )
    def test_plan_engine_passes_head_dtype_to_vllm(
        self, head_dtype: str, dtype: str, on_cpu: bool, expected: dict[str, str]
    ) -> None:
        args, _, _ = plan_engine(EngineConfig("m", 256, head_dtype=head_dtype, dtype=dtype), VOCABULARY, on_cpu=on_cpu)
        assert args.options["hf_overrides"] == expected

    @pytest.mark.parametrize(("setting", "expected"), [("auto", None), ("on", True), ("off", False)])
    def test_plan_engine_passes_async_scheduling_to_vllm(self, setting: str, expected: bool | None) -> None:
        args, _, _ = plan_engine(EngineConfig("m", 256, async_scheduling=setting), VOCABULARY, on_cpu=False)
        assert args.options["async_scheduling"] is expected

    def test_plan_engine_step_is_sized_for_the_model_runner_of_vllm(self, monkeypatch: pytest.MonkeyPatch) -> None:
        config = EngineConfig("m", 256, tp_size=2)
        args, step, runner = plan_engine(config, VOCABULARY, on_cpu=False)
        assert runner == "cuda_v2" and args.options["max_num_batched_tokens"] == step.tokens == 8192
        monkeypatch.setattr(FakeEngineArgs, "uses_v2", False)
        args, step, runner = plan_engine(config, VOCABULARY, on_cpu=False)
        assert runner == "cuda_v1" and args.options["max_num_batched_tokens"] == step.tokens < 1024
        monkeypatch.setattr(FakeEngineArgs, "uses_v2", True)
        assert plan_engine(config, VOCABULARY, on_cpu=True)[2] == "cpu"


class TestHeadDtypeError:
    def test_head_dtype_error_of_quantized_head_names_the_remedy(self) -> None:
        message = "A head_dtype different from the model dtype is only supported for an unquantized lm_head."
        found = head_dtype_error(ValueError(message))
        assert found is not None and found.options == ("HEAD_DTYPE",)
        assert head_dtype_error(ValueError("No available memory for the cache blocks.")) is None


class TestCommand:
    def test_worker_command_accepts_settings_of_head_dtype(self, capsys: pytest.CaptureFixture[str]) -> None:
        parser = make_parser()
        assert parser.parse_args(["worker", "--ckpt-path", "m"]).head_dtype == "auto"
        assert parser.parse_args(["worker", "--ckpt-path", "m", "--head-dtype", "model"]).head_dtype == "model"
        with pytest.raises((SystemExit, TeacherError)):
            parser.parse_args(["worker", "--ckpt-path", "m", "--head-dtype", "bfloat16"])

    def test_worker_command_accepts_settings_of_async_scheduling(self) -> None:
        parser = make_parser()
        assert parser.parse_args(["worker", "--ckpt-path", "m"]).async_scheduling == "auto"
        for setting in ASYNC_SCHEDULING:
            arguments = ["worker", "--ckpt-path", "m", "--async-scheduling", setting]
            assert parser.parse_args(arguments).async_scheduling == setting

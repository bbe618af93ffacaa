"""Checks of the teachers and of the ids at which a response ends, before any process starts."""

from __future__ import annotations

import json
from concurrent.futures import Future
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.config import Config
from recipe_gkd.data.rows import read_data_set
from recipe_gkd.errors import ConfigError, DataError, ModelError
from recipe_gkd.model_files import Student, find_model
from recipe_gkd.preflight import (
    check_stop_ids,
    check_teachers,
    read_prompts,
    read_student,
)
from recipe_gkd.run import _stop_ids
from teacher.errors import TeacherRequestError
from teacher.records import TeacherInfo
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests._support.training_command import make_model

STUDENT = Student(Path("x"), 64, build_tokenizer(), "the same", n_tokens=60)
MATCHING = TeacherInfo(
    model_name="m",
    vocab_size=128,
    n_tokens=60,
    tokenizer_fingerprint="the same",
    max_model_len=1 << 20,
    n_logprobs=8,
    engine="none",
    eos_token_ids=(1,),
    protocol_version=4,
    n_workers=1,
)


def make_config(*overrides: str) -> Config:
    return base_config("data.val_files=x", *overrides)


class Teacher:
    """A client of a teacher that scores at temperature 1 only."""

    def __init__(self, **differences: Any) -> None:
        self.requests: list[tuple[list[int], float]] = []
        self.info = replace(MATCHING, **differences)

    def hello(self, timeout_s: float) -> TeacherInfo:
        return self.info

    def submit(self, sequences: Any, timeout_s: Any = None, *, temperature: float = 1.0) -> Future[Any]:
        self.requests.append(([len(sequence.token_ids) for sequence in sequences], temperature))
        future: Future[list[Any]] = Future()
        future.set_exception(TeacherRequestError("this teacher scores at temperature 1 only", sequence=0))
        return future


TOP_K, SUPPORT = "actor_rollout_ref.teacher.top_k", "actor_rollout_ref.teacher.support"
STUDENT_TOP_K = "actor_rollout_ref.teacher.student_top_k"


class TestCheckTeachers:
    def test_unsupported_temperature_refused(self) -> None:
        teacher = Teacher()
        check_teachers({"t": teacher}, STUDENT, make_config())
        assert teacher.requests == []
        with raises(TeacherRequestError, sequence=0):
            check_teachers({"t": teacher}, STUDENT, make_config("gkd.distill_temperature=2"))
        assert teacher.requests == [([2], 2.0)]

    def test_support_ids_are_tried_before_the_run(self) -> None:
        teacher = Teacher()
        with raises(TeacherRequestError, sequence=0):
            check_teachers({"t": teacher}, STUDENT, make_config(f"{SUPPORT}=student"))
        assert teacher.requests == [([2], 1.0)]

    def test_more_student_ids_than_the_vocabulary_are_refused(self) -> None:
        overrides = [f"{SUPPORT}=union", "actor_rollout_ref.teacher.student_top_k=61"]
        with raises(ConfigError, keys=("actor_rollout_ref.teacher.student_top_k",)):
            check_teachers({"t": Teacher()}, STUDENT, make_config(*overrides))

    def test_two_teachers_returns_union_of_eos_ids(self) -> None:
        """The padding of the output layers may differ."""
        teachers = {"a": Teacher(eos_token_ids=(3, 1)), "b": Teacher(eos_token_ids=(7,), vocab_size=60, n_logprobs=2)}
        assert check_teachers(teachers, STUDENT, make_config()) == (1, 3, 7)

    @pytest.mark.parametrize(
        ("differences", "overrides", "message"),
        [
            (
                {"tokenizer_fingerprint": "another"},
                [],
                r"not fit .*teacher b \(m\) has .*another\), student x .*the same\)",
            ),
            ({"n_tokens": 59}, [], r"teacher b \(m\) accepts the ids 0 to 58 .* ids up to 59"),
            ({"eos_token_ids": (60,)}, [], r"teacher b \(m\) ends a turn with the ids \[60\], .* only ids 0 to 59"),
        ],
    )
    def test_other_vocabulary_names_teacher(
        self, differences: dict[str, Any], overrides: list[str], message: str
    ) -> None:
        config = make_config("gkd.tail=renormalize", *(f"actor_rollout_ref.teacher.{key}" for key in overrides))
        with pytest.raises(ConfigError, match=message):
            check_teachers({"a": Teacher(), "b": Teacher(**differences)}, STUDENT, config)

    @pytest.mark.parametrize(
        ("differences", "overrides", "name", "keys"),
        [
            ({"n_logprobs": 4}, ["top_k=5"], "b", (TOP_K,)),
            ({"n_logprobs": 1}, [], "b", ("gkd.tail", TOP_K)),
            ({}, ["top_k=1"], "a", ("gkd.tail", TOP_K)),
            ({}, ["support=student", "student_top_k=1"], "a", ("gkd.tail", STUDENT_TOP_K)),
            ({"max_model_len": 100}, [], "b", ("data.max_prompt_length", "data.max_response_length")),
        ],
    )
    def test_exceeded_limit_names_teacher(
        self, differences: dict[str, Any], overrides: list[str], name: str, keys: tuple[str, ...]
    ) -> None:
        config = make_config("gkd.tail=renormalize", *(f"actor_rollout_ref.teacher.{key}" for key in overrides))
        with raises(ConfigError, worker=f"teacher {name} (m)", keys=keys):
            check_teachers({"a": Teacher(), "b": Teacher(**differences)}, STUDENT, config)

    @pytest.mark.parametrize(
        ("support", "student_top_k", "top_k", "key"), [("student", 1, 4, STUDENT_TOP_K), ("union", 2, 1, TOP_K)]
    )
    def test_one_renormalized_id_is_refused_for_sampled_and_reference_responses(
        self, support: str, student_top_k: int, top_k: int, key: str
    ) -> None:
        """Reference responses have the teacher's top k only, and sampled ones may have the student's only."""
        overrides = (f"{SUPPORT}={support}", f"{STUDENT_TOP_K}={student_top_k}", f"{TOP_K}={top_k}")
        references = ("gkd.sft_share=0.5", "gkd.sft_target=teacher")
        with raises(ConfigError, keys=("gkd.tail", key)):
            check_teachers({"a": Teacher()}, STUDENT, make_config("gkd.tail=renormalize", *overrides, *references))

    @pytest.mark.parametrize("has_conversations", [False, True])
    def test_loss_position_shortens_what_a_teacher_scores_except_in_conversations(
        self, has_conversations: bool
    ) -> None:
        """A position counts sampled tokens. The messages in between are sent to the teacher, too."""
        conversation = ("rollout.tools=[x.py:f]", "rollout.tool_parser=hermes") if has_conversations else ()
        config = make_config("gkd.max_loss_position=8", *conversation)
        lengths = config.data.max_prompt_length, config.data.max_response_length
        check_teachers({"a": Teacher(max_model_len=sum(lengths))}, STUDENT, config)
        short = {"a": Teacher(max_model_len=lengths[0] + 8)}
        if not has_conversations:
            check_teachers(short, STUDENT, config)
            return
        with raises(ConfigError, keys=("data.max_prompt_length", "data.max_response_length")):
            check_teachers(short, STUDENT, config)


def make_student(folder: Path, *, eos: object) -> Student:
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    return replace(STUDENT, path=folder)


EOS = STUDENT.tokenizer.eos_token_id
SHARE = "gkd.sft_share=0.5"


class TestCheckStopIds:
    @pytest.mark.parametrize(
        ("eos", "teacher_ids", "stop_ids"), [(EOS, (), {EOS}), ([EOS, 3], (7,), {EOS, 3, 7}), (None, (EOS,), {EOS})]
    )
    def test_matching_ids_returns_union(
        self, tmp_path: Path, eos: object, teacher_ids: tuple[int, ...], stop_ids: set[int]
    ) -> None:
        assert check_stop_ids(make_config(SHARE), make_student(tmp_path, eos=eos), teacher_ids) == stop_ids

    @pytest.mark.parametrize(
        ("eos", "overrides", "key"),
        [
            (None, [], "data.max_response_length"),
            ([60], [], "data.max_response_length"),
            (
                None,
                ["gkd.sft_share=1", *("trainer.test_freq=1", "custom_reward_function.path=x")],
                "data.max_response_length",
            ),
            ([3], [SHARE], "gkd.sft_share"),
            ([3], ["gkd.warmup_steps=5"], "gkd.warmup_steps"),
        ],
    )
    def test_endless_responses_refused(self, tmp_path: Path, eos: object, overrides: list[str], key: str) -> None:
        with raises(ConfigError, keys=(key,)):
            check_stop_ids(make_config(*overrides), make_student(tmp_path, eos=eos), ())

    def test_tokenizer_eos_missing_without_references_warns(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        assert check_stop_ids(make_config(), make_student(tmp_path, eos=3), ()) == {3}
        assert f"(id {EOS}), but sampled responses end at [3]" in caplog.text

    def test_ids_of_the_teachers_are_declared_and_logged(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO", "recipe_gkd")
        student = make_student(tmp_path, eos=3)
        assert _stop_ids(student, (3, 60)) == (3,) and not caplog.records
        assert _stop_ids(student, (3, 7, 60)) == (3, 7) and "teachers' ids [7]" in caplog.text

    @pytest.mark.parametrize(("eos", "stop_ids"), [(None, set()), (3, {3})])
    def test_nothing_sampled_is_silent(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture, eos: object, stop_ids: set[int]
    ) -> None:
        config = make_config("gkd.sft_share=1")
        assert check_stop_ids(config, make_student(tmp_path, eos=eos), ()) == stop_ids
        assert not caplog.records


class TestReadPrompts:
    @pytest.mark.parametrize("column", ["prompt", "answer"])
    def test_row_with_ids_beyond_the_output_layer_is_refused(self, tmp_path: Path, column: str) -> None:
        """A tokenizer may have more ids than the output layer has rows."""
        file, row = tmp_path / "data.jsonl", {"prompt": "1+1", "answer": "1"}
        largest = max(STUDENT.tokenizer("1+")["input_ids"])
        further = max("0123456789+= ", key=lambda character: STUDENT.tokenizer(character)["input_ids"][-1])
        assert STUDENT.tokenizer(further)["input_ids"][-1] > largest
        file.write_text("".join(json.dumps(each) + "\n" for each in (row, row | {column: further})))
        config = make_config("gkd.sft_share=1", "data.response_key=answer", f"data.train_files={file}")
        student = replace(STUDENT, n_tokens=largest + 1)
        data_set = read_data_set(config.data.train_files, config.data, "the data")
        assert len(read_prompts(config, data_set.take([0]), student, ())) == 1
        with pytest.raises(DataError, match=r"row 1 of the data .* go up to"):
            read_prompts(config, data_set, student, ())


class TestReadStudent:
    @pytest.mark.parametrize(("metric", "is_taken"), [("grad_norm", True), ("kl_loss_at/32", True), ("mine", False)])
    def test_custom_loss_metric_with_a_name_in_use_is_refused(
        self, tmp_path: Path, metric: str, is_taken: bool
    ) -> None:
        (tmp_path / "loss.py").write_text(
            "from recipe_gkd.losses import LossOutputs\n"
            "def f(inputs):\n"
            "    loss_T = -inputs.student_sampled_logps_T\n"
            f"    return LossOutputs(loss_T=loss_T, metrics={{{metric!r}: loss_T}})\n"
        )
        config = make_config(f"gkd.custom_loss.path={tmp_path}/loss.py", "gkd.custom_loss.name=f")
        if is_taken:
            with pytest.raises(ConfigError, match=f"metrics whose names are in use: actor/{metric}; rename them"):
                read_student(config)
        else:
            with raises(ModelError, path=Path("student")):
                read_student(config)


class TestMegatronOverrides:
    MEGATRON = "actor_rollout_ref.actor.megatron"

    @pytest.fixture(scope="class")
    def model(self, tmp_path_factory: pytest.TempPathFactory) -> Path:
        return make_model(tmp_path_factory.mktemp("models") / "student", seed=1)

    @pytest.mark.parametrize("device", ["cpu", "auto"])
    @pytest.mark.parametrize(
        ("overrides", "message"),
        [
            ("transformer_config={recompute_granularty: full}", r"recompute_granularty is unknown: did you mean recom"),
            ("transformer_config={recompute_granularity: whole}", "recompute_granularity=whole: expected 'full' or 's"),
            ("transformer_config={recompute_num_layers: many}", "recompute_num_layers=many: expected a valid integer"),
            ("transformer_config={recompute_num_layers: '2'}", "recompute_num_layers=2: expected an integer"),
            ("transformer_config={distribute_saved_activations: 1}", "activations=1: expected true or false"),
            ("transformer_config={init_method_std: true}", "init_method_std=True: expected a number"),
            ("transformer_config={recompute_granularity: full}", "Megatron refuses these values"),
            ("ddp_config={overlap_grad_reduc: true}", r"overlap_grad_reduc is unknown: did you mean overlap_grad_red"),
            ("ddp_config={bucket_size: large}", "bucket_size=large: expected a valid integer"),
        ],
    )
    def test_wrong_override_is_refused_before_a_worker_starts(
        self, model: Path, overrides: str, message: str, device: str
    ) -> None:
        key = f"{self.MEGATRON}.override_{overrides}"
        config = make_config(f"actor_rollout_ref.model.path={model}", f"trainer.device={device}", key)
        with pytest.raises(ConfigError, match=message) as caught:
            read_student(config)
        assert f"{self.MEGATRON}.override_" in str(caught.value)

    def test_adapter_of_no_layer_is_refused_before_a_worker_starts(self, model: Path) -> None:
        lora = "actor_rollout_ref.actor.lora"
        names = f"{lora}.target_modules=[q_proj,query]"
        with raises(ConfigError, keys=(f"{lora}.target_modules",)):
            read_student(make_config(f"actor_rollout_ref.model.path={model}", f"{lora}.rank=4", names))

    def test_heads_that_layers_with_adapters_cannot_exchange_are_refused(self, model: Path) -> None:
        """On GPUs, layers without adapters may be those of Transformer Engine, which need no exchange."""
        sizes = ("trainer.device=cuda", "trainer.n_gpus_per_node=8", f"{self.MEGATRON}.context_parallel_size=8")
        given = (f"actor_rollout_ref.model.path={model}", "data.max_prompt_length=8", "data.max_response_length=8")
        assert read_student(make_config(*given, *sizes)).vocab_size
        keys = tuple(f"{self.MEGATRON}.{name}_parallel_size" for name in ("context", "tensor_model"))
        with raises(ConfigError, keys=keys):
            read_student(make_config(*given, *sizes, "actor_rollout_ref.actor.lora.rank=4"))

    @pytest.mark.parametrize(
        "overrides",
        [
            "transformer_config={recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}",
            "transformer_config={init_method_std: 1, moe_router_dtype: null, recompute_modules: [core_attn]}",
            "ddp_config={bucket_size: 2000, overlap_param_gather: true}",
        ],
    )
    def test_right_override_is_accepted(self, model: Path, overrides: str) -> None:
        lengths = ("data.max_prompt_length=8", "data.max_response_length=8")
        key = f"{self.MEGATRON}.override_{overrides}"
        assert read_student(make_config(f"actor_rollout_ref.model.path={model}", *lengths, key)).vocab_size

    @pytest.mark.skipif(find_spec("transformer_engine") is not None, reason="needs a machine without the package")
    @pytest.mark.parametrize("overrides", ["{apply_rope_fusion: true}", "{symmetric_ar_type: two_shot}"])
    def test_package_that_only_the_workers_may_have_is_a_warning(
        self, model: Path, overrides: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        given = (
            f"actor_rollout_ref.model.path={model}", "data.max_prompt_length=8", "data.max_response_length=8",
            f"{self.MEGATRON}.override_transformer_config={overrides}",
        )  # fmt: skip
        assert read_student(make_config(*given, "trainer.device=auto")).vocab_size
        assert "the workers check it with theirs" in caplog.text
        with raises(ConfigError, keys=(f"{self.MEGATRON}.override_transformer_config",)):
            read_student(make_config(*given, "trainer.device=cpu"))


class TestFindModel:
    def test_missing_folder_is_named(self) -> None:
        with raises(ModelError, path=Path("nowhere/at/all"), names=()):
            find_model("nowhere/at/all")

    def test_folder_without_config_is_named(self, tmp_path: Path) -> None:
        with raises(ModelError, path=tmp_path, names=("config.json",)):
            find_model(str(tmp_path))

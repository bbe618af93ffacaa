"""Teachers that see another prompt than the student: settings, templates, tokens, scores and limits."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from copy import copy
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

from recipe_gkd.addition.task import Problem
from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.commands.gpu_smoke.reference import response_logps
from recipe_gkd.config import Config, load_config
from recipe_gkd.config.prompt_settings import PromptSettings, prompt_settings
from recipe_gkd.config.prompt_template import fill, template_fields, template_problem
from recipe_gkd.config.schema.teacher import TeacherEntry
from recipe_gkd.config.teachers import auth_dirs
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.samples import Response
from recipe_gkd.data.tokenization import ChatTemplate
from recipe_gkd.errors import ConfigError, DataError
from recipe_gkd.preflight import check_teacher_prompts
from recipe_gkd.quickstart.models import RECIPES, build_model
from recipe_gkd.teachers.hf_teacher import HfTeacher
from recipe_gkd.teachers.prompts import TeacherPrompts, make_teacher_prompts
from recipe_gkd.teachers.router import Teachers, open_teachers
from recipe_gkd.teachers.routes import Routes
from teacher.records import ScoredSequence, TeacherSequence
from tests._support.base_config import base_config
from tests._support.data_sets import data_set_of
from tests._support.errors import raises
from tests._support.fake_teachers import fake_scores

KEY = "actor_rollout_ref.teacher"
ONE, TWO = Routes(("default",)), Routes(("math", "code"), np.array([0, 1, 0]))
SOLVED = "{answer};{prompt}"
PROBLEMS = [Problem(123, 456), Problem(700, 299), Problem(501, 100)]
SHORT = ["data.max_prompt_length=48", "data.max_response_length=40"]


def configured(*overrides: str) -> Config:
    """Compose a configuration with keys of the teacher section."""
    return base_config(*SHORT, *(f"{KEY}.{override}" for override in overrides))


BASE = configured()


def with_teacher(*, prompt_key: str | None = None, **values: Any) -> Config:
    """Return :data:`BASE` with values of the teacher section, and ``data.teacher_prompt_key``."""
    settings = BASE.actor_rollout_ref
    entries = {name: TeacherEntry(**entry) for name, entry in values.pop("teachers", {}).items()}
    teacher = replace(settings.teacher, teachers=entries, **values)
    data = replace(BASE.data, teacher_prompt_key=prompt_key)
    return replace(BASE, data=data, actor_rollout_ref=replace(settings, teacher=teacher))


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer whose template writes system messages and, with ``enable_thinking=false``, ``;;``."""
    found = build_tokenizer()
    found.chat_template = (
        "{% for m in messages %}{{ '<|user|>' if m.role == 'user' else '' }}{{ m.content }}{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{{ ';;' if enable_thinking is false else '' }}{% endif %}"
    )
    return found


def table(**columns: list[Any]) -> dict[str, Any]:
    default = {
        "prompt": [problem.messages() for problem in PROBLEMS],
        "answer": [problem.answer for problem in PROBLEMS],
        "extra_info": [{"index": index, "steps": [1, index]} for index in range(3)],
    }
    return default | columns


def read(config: Config, tokenizer: Any, rows: dict[str, Any] | None = None) -> PromptData:
    return PromptData(data_set_of(table() if rows is None else rows, config.data), config.data, tokenizer)


def prompts_of(
    config: Config,
    tokenizer: Any,
    rows: dict[str, Any] | None = None,
    routes: Routes = ONE,
    student: ChatTemplate | None = None,
) -> TeacherPrompts | None:
    """Return the teachers' prompts. ``student`` has the settings of the student's chat template."""
    data = read(config, tokenizer, rows)
    data.template = student or data.template
    return make_teacher_prompts(data, routes, config, tokenizer)


def texts_of(*arguments: Any, **options: Any) -> list[str | None]:
    """Return the prompts of :func:`prompts_of` as text."""
    found = prompts_of(*arguments, **options)
    assert found is not None
    return [None if ids is None else arguments[1].decode(ids) for ids in found.ids]


def response(uid: int, ids: Sequence[int]) -> Response:
    ids_T = np.array(ids, np.int32)
    return Response(
        uid=uid,
        ids=ids_T,
        logprobs=np.zeros(len(ids), np.float32),
        finish_reason="stop",
        weights_version=0,
        versions_T=np.zeros(len(ids), np.int32),
    )


class Recorder:
    """Teacher backend that records its requests."""

    def __init__(self) -> None:
        self.sequences: list[TeacherSequence] = []

    def submit(
        self, sequences: Sequence[TeacherSequence], timeout_s: float | None = None, *, temperature: float = 1.0
    ) -> Future[list[ScoredSequence]]:
        self.sequences += sequences
        future: Future[list[ScoredSequence]] = Future()
        future.set_result([fake_scores(sequence, 0) for sequence in sequences])
        return future


class TestTemplate:
    @pytest.mark.parametrize(
        ("template", "problem"),
        [
            ("{prompt} {extra_info.answer} {{x}}", None),
            ("{prompt", "expected '}' before end of string"),
            ("{}", "got the field {}"),
            ("{0}", "got the field {0}"),
            ("{prompt!r}", "got the field {prompt!r}"),
            ("{prompt:>5}", "got the field {prompt:>5}"),
        ],
    )
    def test_problem_names_field_and_form(self, template: str, problem: str | None) -> None:
        found = template_problem(template)
        assert found is None if problem is None else found is not None and problem in found
        if problem:
            with raises(ConfigError, keys=(f"{KEY}.prompt_template",)):
                configured(f'prompt_template="{template}"')

    def test_fill_keeps_braces_of_values(self) -> None:
        template = "{b} {prompt} {{b}} {b}"
        assert template_fields(template) == ["b", "prompt"]
        assert fill(template, {"b": "{prompt}", "prompt": "{1}"}) == "{prompt} {1} {b} {prompt}"


class TestSettings:
    def test_no_key_means_the_student_prompts(self) -> None:
        config = configured()
        assert prompt_settings(config.actor_rollout_ref.teacher, config.data) == {"default": None}
        assert auth_dirs(config.actor_rollout_ref.teacher) == {"default": None}

    def test_teacher_entry_replaces_the_section(self) -> None:
        config = configured(
            "route_key=source",
            "auth_dir=keys",
            'prompt_template="S{prompt}"',
            "teachers.plain=host:1",
            'teachers.own={address: "host:2", auth_dir: other, prompt_template: "O{prompt}", system_prompt: be short}',
            "teachers.none.address=host:3",
            "teachers.none.auth_dir=''",
            "teachers.none.prompt_template=''",
            "teachers.kwargs={address: 'host:4', prompt_template: '', apply_chat_template_kwargs: {a: 1}}",
        )
        teacher = config.actor_rollout_ref.teacher
        assert auth_dirs(teacher) == {"plain": "keys", "own": "other", "none": None, "kwargs": "keys"}
        assert prompt_settings(teacher, config.data) == {
            "plain": PromptSettings(template="S{prompt}"),
            "own": PromptSettings(template="O{prompt}", system_prompt="be short"),
            "none": None,
            "kwargs": PromptSettings(kwargs={"a": 1}),
        }

    @pytest.mark.parametrize(
        ("override", "key"),
        [
            ("teachers.a={adress: 'x:1'}", "teachers.a"),
            ("teachers.a={auth_dir: x}", "teachers.a"),
            ("teachers.a=1", "teachers.a"),
            ("teachers.a={address: 'x'}", "teachers.a.address"),
            ("teachers.a={address: 'x:1', prompt_template: '{'}", "teachers.a.prompt_template"),
        ],
    )
    def test_invalid_entry_is_rejected_with_its_key(self, override: str, key: str) -> None:
        with raises(ConfigError, keys=(f"{KEY}.{key}",)):
            configured(override)

    def test_same_service_with_other_keys_has_its_own_client(self, monkeypatch: pytest.MonkeyPatch) -> None:
        opened: list[tuple[Any, ...]] = []

        class Client(Recorder):
            def __init__(self, host: str, port: int, **options: Any) -> None:
                opened.append((host, port, options["auth_dir"], options["n_connections"]))

            def close(self) -> None: ...

        monkeypatch.setattr("recipe_gkd.teachers.backends.TeacherClient", Client)
        config = configured(
            "route_key=source", "teachers.a=h:1", "teachers.b={address: 'h:1', auth_dir: k}", "teachers.c=h:1"
        )
        routes = Routes(("a", "b", "c"), np.array([0, 1, 2]))
        with open_teachers(config, routes) as teachers:
            assert teachers.clients["a"] is teachers.clients["c"] is not teachers.clients["b"]
        assert opened == [("h", 1, None, 1), ("h", 1, "k", 4)]


class TestPrompts:
    def test_template_replaces_the_last_user_message(self, tokenizer: Any) -> None:
        chat = [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}, *PROBLEMS[0].messages()]
        rows = table(prompt=[chat, *(problem.messages() for problem in PROBLEMS[1:])])
        texts = texts_of(with_teacher(prompt_template=SOLVED), tokenizer, rows)
        assert texts[0] == f"<|user|>12<|user|>{PROBLEMS[0].answer};123+456=<|assistant|>"
        assert texts[1] == f"<|user|>{PROBLEMS[1].answer};700+299=<|assistant|>"

    def test_template_replaces_text(self, tokenizer: Any) -> None:
        rows = table(prompt=["1+", "2+", "3+"])
        config = with_teacher(prompt_template="{extra_info.index}{extra_info.steps};{prompt}{prompt}")
        assert texts_of(config, tokenizer, rows)[2] == "2<|unk|>1<|unk|><|unk|>2<|unk|>;3+3+"

    def test_objects_in_a_template_have_the_fields_of_their_row_only(self, tokenizer: Any) -> None:
        """Arrow gives each object the fields of all others."""
        config = with_teacher(prompt_template="{steps}")
        seen: list[str] = []
        data = read(config, tokenizer, table(steps=[{"a": "1"}, {"b": "2"}, {"a": None, "b": "3"}]))
        original = tokenizer.apply_chat_template

        class Recording(type(tokenizer)):  # type: ignore[misc]
            def apply_chat_template(self, messages: Any, **options: Any) -> Any:
                seen.append(messages[-1]["content"])
                return original(messages, **options)

        recording = copy(tokenizer)
        recording.__class__ = Recording
        make_teacher_prompts(data, ONE, config, recording)
        assert {'{"a": "1"}', '{"b": "2"}', '{"b": "3"}'} <= set(seen) and not any("null" in text for text in seen)

    def test_column_replaces_the_prompt_and_null_keeps_it(self, tokenizer: Any) -> None:
        own = [{"role": "user", "content": "0"}]
        rows = table(hint=[own, None, [{"role": "user", "content": "1"}]])
        assert texts_of(with_teacher(prompt_key="hint"), tokenizer, rows) == [
            "<|user|>0<|assistant|>",
            "<|user|>700+299=<|assistant|>",
            "<|user|>1<|assistant|>",
        ]
        both = with_teacher(prompt_key="hint", prompt_template=SOLVED)
        assert texts_of(both, tokenizer, rows)[0] == f"<|user|>{PROBLEMS[0].answer};0<|assistant|>"

    def test_each_teacher_has_its_own_prompts(self, tokenizer: Any) -> None:
        config = with_teacher(
            teachers={"math": {"address": "h:1"}, "code": {"address": "h:1", "prompt_template": "{answer}"}}
        )
        answer = f"<|user|>{PROBLEMS[1].answer}<|assistant|>"
        assert texts_of(config, tokenizer, routes=TWO) == [None, answer, None]
        found = prompts_of(config, tokenizer, routes=TWO)
        assert found is not None and found.longest == {"code": len(PROBLEMS[1].answer) + 2}

    def test_teacher_of_no_row_needs_no_column(self, tokenizer: Any) -> None:
        config = with_teacher(
            teachers={"math": {"address": "h:1"}, "code": {"address": "h:1", "prompt_template": "{absent}"}}
        )
        assert prompts_of(config, tokenizer, routes=Routes(("math", "code"), np.zeros(3, np.int64))) is None

    @pytest.mark.parametrize(
        ("values", "columns", "row", "column"),
        [
            ({"prompt_template": "{prompt}{extra_info.solution}"}, {}, None, "extra_info.solution"),
            ({"prompt_template": "{answer}"}, {"answer": ["0", None, "1"]}, 1, "answer"),
            ({"prompt_template": "{answer}"}, {"prompt": [[{"role": "assistant", "content": "1"}]] * 3}, 0, ""),
            ({"prompt_key": "hint"}, {"hint": [5, 6, 7]}, 0, "hint"),
        ],
    )
    def test_unusable_row_or_field_raises(
        self, tokenizer: Any, values: dict[str, Any], columns: dict[str, list[Any]], row: int | None, column: str
    ) -> None:
        with raises(DataError, row=row, column=column):
            prompts_of(with_teacher(**values), tokenizer, table(**columns))

    def test_missing_column_of_prompts_raises(self, tokenizer: Any) -> None:
        with raises(DataError, row=None, column="hint"):
            prompts_of(with_teacher(prompt_key="hint"), tokenizer, table())

    def test_fingerprint_depends_on_prompts_only(self, tokenizer: Any) -> None:
        def fingerprint(**values: Any) -> str:
            found = prompts_of(with_teacher(**values), tokenizer)
            assert found is not None
            return found.fingerprint

        solved = fingerprint(prompt_template=SOLVED)
        assert solved == fingerprint(prompt_template=SOLVED, allow_prompt_mismatch=True, top_k=4)
        assert len({solved, fingerprint(prompt_template="{prompt};{answer}"), fingerprint(system_prompt="1")}) == 3


class TestGenerationPrompt:
    """The response must follow the same text in the prompts of both models."""

    THINKING: ClassVar[dict[str, Any]] = {"apply_chat_template_kwargs": {"enable_thinking": False}}

    def test_other_arguments_are_refused_with_both_texts(self, tokenizer: Any) -> None:
        with raises(DataError, row=0, column="") as refused:
            prompts_of(with_teacher(**self.THINKING), tokenizer)
        assert "follows '<|assistant|>', but the teacher would score it after '<|assistant|>;;'" in refused.value.what

    def test_text_beside_messages_is_refused_with_both_texts(self, tokenizer: Any) -> None:
        rows = table(hint=["0", "1", "2"])
        with raises(DataError, row=0, column="") as refused:
            prompts_of(with_teacher(prompt_key="hint"), tokenizer, rows)
        assert "follows '<|assistant|>', but the teacher would score it after ''" in refused.value.what

    def test_mismatch_is_accepted_with_the_key(self, tokenizer: Any) -> None:
        texts = texts_of(with_teacher(**self.THINKING, allow_prompt_mismatch=True), tokenizer)
        assert texts[0] == "<|user|>123+456=<|assistant|>;;"

    def test_equal_arguments_are_accepted(self, tokenizer: Any) -> None:
        student = ChatTemplate(kwargs={"enable_thinking": False})
        config = with_teacher(prompt_template=SOLVED)
        expected = f"<|user|>{PROBLEMS[0].answer};123+456=<|assistant|>;;"
        assert texts_of(config, tokenizer, student=student)[0] == expected

    @pytest.mark.parametrize(
        ("values", "expected"),
        [
            ({"system_prompt": "23"}, "23<|user|>123+456=<|assistant|>"),
            ({"system_prompt": ""}, "<|user|>123+456=<|assistant|>"),
            ({"prompt_template": "{prompt}4"}, "1<|user|>123+456=4<|assistant|>"),
        ],
    )
    def test_system_prompt_of_the_teacher_replaces_the_students(
        self, tokenizer: Any, values: dict[str, Any], expected: str
    ) -> None:
        assert texts_of(with_teacher(**values), tokenizer, student=ChatTemplate(system_prompt="1"))[0] == expected


class TestScores:
    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory: pytest.TempPathFactory, tokenizer: Any) -> Path:
        """Return the folder of a small model with random weights."""
        path = tmp_path_factory.mktemp("model")
        build_model(RECIPES["student"], tokenizer, seed=1).save_pretrained(path)
        tokenizer.save_pretrained(path)
        return path

    def test_rows_equal_transformers_after_the_teacher_prompt(self, tokenizer: Any, folder: Path) -> None:
        config = with_teacher(backend="hf", model_path=str(folder), top_k=8, prompt_template=SOLVED)
        data = read(config, tokenizer)
        prompts = make_teacher_prompts(data, ONE, config, tokenizer)
        assert prompts is not None
        data.set_teacher_prompts(prompts.ids, prompts.fingerprint)
        pairs = [(data.prompt(index, index), response(index, range(7, 9 + 4 * index))) for index in range(3)]
        with open_teachers(config, ONE) as teachers:
            samples = asyncio.run(teachers.score(pairs, 0))
        model = Qwen2ForCausalLM.from_pretrained(folder).eval()
        for problem, sample in zip(PROBLEMS, samples, strict=True):
            student, response_ids = sample.prompt.ids, sample.response.ids
            assert tokenizer.decode(student) == f"<|user|>{problem.question}<|assistant|>"
            text = f"<|user|>{problem.answer};{problem.question}<|assistant|>"
            prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
            logps_TV = response_logps(model, [*prompt, *response_ids.tolist()], len(prompt))
            top_TK = np.take_along_axis(logps_TV, sample.teacher.ids_TK.astype(np.int64), 1)
            np.testing.assert_allclose(sample.teacher.logps_TK, top_TK, atol=1e-5)
            np.testing.assert_allclose(top_TK, -np.sort(-logps_TV, 1)[:, :8], atol=1e-5)
            sampled_T = np.take_along_axis(logps_TV, response_ids[:, None].astype(np.int64), 1)[:, 0]
            np.testing.assert_allclose(sample.teacher.sampled_logps_T, sampled_T, atol=1e-5)
            assert np.array_equal(sample.token_ids, np.concatenate([student, response_ids]))

    def test_request_without_the_feature_is_the_student_sequence(self, tokenizer: Any) -> None:
        config = BASE
        data = read(config, tokenizer)
        assert make_teacher_prompts(data, ONE, config, tokenizer) is None
        assert data.teacher_prompts_fingerprint == ""
        prompts = [data.prompt(index, index) for index in range(3)]
        assert [prompt.teacher_ids for prompt in prompts] == [None] * 3
        backend: Any = Recorder()
        pairs = [(prompt, response(prompt.uid, [7, 8])) for prompt in prompts]
        asyncio.run(Teachers(config, ONE, {"default": backend}).score(pairs, 0))
        for prompt, sequence in zip(prompts, backend.sequences, strict=True):
            assert sequence.token_ids.tobytes() == np.concatenate([prompt.ids, np.array([7, 8], np.int32)]).tobytes()
            assert (sequence.token_ids.dtype, sequence.prompt_len) == (np.int32, len(prompt.ids))

    def test_longest_teacher_prompt_must_fit(self, folder: Path) -> None:
        config = with_teacher(prompt_template=SOLVED)
        teacher = HfTeacher(str(folder), device="cpu")
        try:
            check_teacher_prompts({"default": teacher}, {"default": 56}, config)
            keys = ("data.max_response_length", f"{KEY}.prompt_template", "data.teacher_prompt_key")
            with raises(ConfigError, keys=keys):
                check_teacher_prompts({"default": teacher}, {"default": 57}, config)
        finally:
            teacher.close()


def test_quickstart_template_equals_the_prompt_of_the_training() -> None:
    template = load_config("quickstart_self").actor_rollout_ref.teacher.prompt_template
    assert template is not None
    for problem in PROBLEMS:
        content = fill(template, {"answer": problem.answer, "prompt": problem.question})
        assert problem.messages(with_solution=True) == [{"role": "user", "content": content}]

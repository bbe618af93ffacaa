"""Periodic validation: its metrics, its steps in the training loop, and the selection of the best checkpoint."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.checkpoints.folders import steps_of
from recipe_gkd.checkpoints.resume import resume_points
from recipe_gkd.checkpoints.state import Progress, ResumeState
from recipe_gkd.checkpoints.store import forget_best, read_best
from recipe_gkd.cluster import Cluster
from recipe_gkd.config import Config
from recipe_gkd.data.batches import ReadyBatch
from recipe_gkd.data.prompts import PromptData, PromptLoader
from recipe_gkd.data.rows import read_data_set
from recipe_gkd.data.samples import Prompt, Response, Reward, Sample, TeacherTopK
from recipe_gkd.data.transcript import Transcript
from recipe_gkd.errors import CheckpointError, ConfigError, DataError, SavesFailed
from recipe_gkd.rewards import RewardItem
from recipe_gkd.rewards.items import decode_for_people
from recipe_gkd.runtime.stop_request import StopRequest
from recipe_gkd.teachers.router import Teachers
from recipe_gkd.teachers.routes import Routes
from recipe_gkd.trainer import RewardContext, Trainer
from recipe_gkd.validation import validation as validation_module
from recipe_gkd.validation.records import ScoredResponse, response_lines, table_of
from recipe_gkd.validation.validation import Validation, read_validation
from tests._support.base_config import base_config
from tests._support.errors import raises

TOKENIZER: Any = build_tokenizer()
ROWS: dict[str, list[Any]] = {
    "prompt": ["1+1=", "2+2=", "3+3=", "4+4="],
    "ground_truth": ["2", "4", "6", "8"],
    "data_source": ["easy", "hard", "easy", None],
}


def make_config(folder: Path, *overrides: str, rows: dict[str, list[Any]] = ROWS) -> Config:
    path = folder / "val.parquet"
    pq.write_table(pa.table(rows), path)
    return base_config(
        f"data.train_files={path}",
        f"data.val_files={path}",
        "data.train_batch_size=2",
        "custom_reward_function.path=x",
        "custom_reward_function.name=score",
        f"trainer.default_local_dir={folder}",
        "actor_rollout_ref.rollout.mismatch_bound=null",  # the fake workers have no log-probabilities
        "trainer.test_freq=2",
        "trainer.save_freq=-1",
        *overrides,
    )


def respond(prompt: Prompt, text: str, version: int = 0, truncated: bool = False) -> Response:
    ids = np.array(TOKENIZER(text, add_special_tokens=False)["input_ids"], np.int32)
    return Response(
        uid=prompt.uid,
        ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        finish_reason="length" if truncated else "stop",
        weights_version=version,
        versions_T=np.full(len(ids), version, np.int32),
    )


@cache
def byte_level_tokenizer() -> Any:
    """Return a tokenizer with one token per byte, such as byte-level BPE has for rare characters."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    core = Tokenizer(models.BPE({letter: index for index, letter in enumerate(letters)}, []))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=core, clean_up_tokenization_spaces=False)


class Scorer:
    """A scorer whose reward is ``scores[number]`` for a response that is a number. An empty response is 0."""

    failures = 0

    def __init__(self, scores: Sequence[float] = range(1000)) -> None:
        self.scores = scores

    async def score(self, items: Sequence[RewardItem]) -> list[Reward]:
        return [Reward(float(self.scores[int(item.response or 0)])) for item in items]


def report(validation: Validation, responses: list[Response], step: int = 4) -> dict[str, float]:
    return asyncio.run(validation.report(responses, Scorer(), step))  # type: ignore[arg-type]


SAMPLED = ("actor_rollout_ref.rollout.val_kwargs.n=2", "actor_rollout_ref.rollout.val_kwargs.temperature=1")


# The following tests run the trainer on fake workers. A response is the version of the weights.


class FakeCluster(Cluster):
    """Workers that answer at once."""

    capacity = None
    scoring = None
    actor_devices = ("cpu",)
    engine_dtype = "float32"

    def __init__(self) -> None:
        members: Any = self
        self.rollouts = self.actors = self.weights = members
        self.version = -1
        self.save_errors: list[Exception | None] = []  # outcomes of the next saves

    def __len__(self) -> int:
        return 1

    async def metrics(self) -> dict[str, float]:
        return {}

    async def actor_is_lost(self, error: BaseException) -> bool:
        return False

    async def stream(
        self, rank: int, method: object, prompts: list[Prompt], step: int, *_: Any, **__: Any
    ) -> AsyncIterator[list[Response]]:
        for prompt in prompts:
            await asyncio.sleep(0)
            yield [respond(prompt, str(self.version), self.version)]

    async def sync(self, version: int) -> dict[str, float]:
        self.version = version
        return {}

    async def replace_dead_rollouts(self, death: Exception) -> None:
        raise death

    async def call(self, method: Any, *args: Any, **_: Any) -> list[Any]:
        method = method.__name__
        if method == "save_checkpoint":
            Path(args[0]).mkdir()
            (Path(args[0]) / "metadata.json").write_text("{}")
        if method == "finish_saves" and self.save_errors and (error := self.save_errors.pop(0)):
            raise error
        return [True]


class NoTeacher(Teachers):
    async def score(self, group: Sequence[tuple[Prompt, Response]], step: int) -> list[Sample]:
        return [
            Sample(prompt=prompt, response=response, teacher=TeacherTopK.absent(len(response.ids)))
            for prompt, response in group
        ]


class Run(Trainer):
    """A trainer without updates.

    Attributes:
        stop: Request to end the run.
        stop_in_update: Step of the update during which it is made, counted from 0. None: never.
    """

    stop_in_update: int | None = None

    async def fake_update(self, batch: ReadyBatch) -> dict[str, float]:
        await asyncio.sleep(0.001)
        if batch.step == self.stop_in_update:
            assert self.stop.request("SIGTERM")
        return {}

    async def fit(self, stop: StopRequest | None = None) -> None:
        self.stop = stop or StopRequest()
        await super().fit(self.stop)


def train(
    config: Config,
    scores: Sequence[float] = range(9),
    *,
    crash_after: int | None = None,
    stop_in_update: int | None = None,
    cluster: Any = None,
) -> Run:
    """Train to the end, or until the save after step ``crash_after``. ``scores`` are rewards by weights version."""
    data = PromptData(read_data_set(config.data.train_files, config.data), config.data, TOKENIZER)
    loader = PromptLoader(data, config.data, n=1, epochs=9, max_steps=config.trainer.total_training_steps)
    progress = Progress(0, 0, len(data), config.data.seed, config.data.shuffle)
    checkpoint = None
    for point in resume_points(config, progress)[:1]:
        progress, checkpoint = point.progress, point.folder
    root, best = Path(config.trainer.default_local_dir), None
    if checkpoint is None:
        forget_best(root)
    else:
        best = read_best(root, config.trainer.best_metric, until=progress.step)
    scorer: Any = Scorer(scores)
    teachers = NoTeacher(config, Routes(("default",)), {})
    reward_context = RewardContext(scorer, validation=read_validation(config, TOKENIZER))
    start = ResumeState(progress, checkpoint, best)
    fake: Any = cluster or FakeCluster()
    fake.config = config
    trainer = Run(config, fake, teachers, loader, start, reward_context)
    fake.update = trainer.fake_update
    trainer.stop_in_update = stop_in_update
    if crash_after is not None:

        async def crash() -> None:
            if trainer.progress.step == crash_after:
                raise KeyboardInterrupt
            await Run.save(trainer)

        trainer.save = crash  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            asyncio.run(trainer.fit())
    else:
        asyncio.run(trainer.fit())
    return trainer


def lines(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").open()]


def bests(folder: Path) -> list[int]:
    return [best["step"] for best in json.loads((folder / "best.json").read_text())]


BEST = "trainer.best_metric=val/easy/score"


class TestMetrics:
    def test_report_averages_by_data_source(self, tmp_path: Path) -> None:
        validation = Validation(make_config(tmp_path, *SAMPLED), TOKENIZER)
        assert [prompt.row for prompt in validation.prompts] == [0, 0, 1, 1, 2, 2, 3, 3]
        assert [prompt.uid for prompt in validation.prompts] == list(range(8))
        texts = ["1", "3", "", "20", "5", "5", "7", "8"]
        responses = [
            respond(prompt, text, truncated=text == "20")
            for prompt, text in zip(validation.prompts, texts, strict=True)
        ]
        assert report(validation, responses) == {
            "val/easy/score": 3.5,
            "val/easy/score/best@2": 4.0,
            "val/easy/response_len": 1.0,
            "val/easy/truncated_fraction": 0.0,
            "val/easy/seq_rep_4": 0.0,
            "val/easy/looping_fraction": 0.0,
            "val/hard/score": 10.0,
            "val/hard/score/best@2": 20.0,
            "val/hard/response_len": 1.0,
            "val/hard/truncated_fraction": 0.5,
            "val/hard/seq_rep_4": 0.0,
            "val/hard/looping_fraction": 0.0,
            "val/data/score": 7.5,
            "val/data/score/best@2": 8.0,
            "val/data/response_len": 1.0,
            "val/data/truncated_fraction": 0.0,
            "val/data/seq_rep_4": 0.0,
            "val/data/looping_fraction": 0.0,
        }

    @pytest.mark.parametrize("limit", [1.0, 0.1])
    def test_response_without_reward_is_left_out_of_the_means(
        self, limit: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The mean is over the other responses, and best@n over the prompts whose responses all have a reward.

        Sources with a larger share of such responses than the limit have no reward.
        """
        monkeypatch.setattr(validation_module, "MAX_FAILED_SHARE", limit)
        validation = Validation(make_config(tmp_path, *SAMPLED), TOKENIZER)
        scores = iter([None, None, 1.0, 3.0, 5.0, None, 8.0, None])  # of two responses to rows 0 to 3

        class Failing(Scorer):
            async def score(self, items: Sequence[RewardItem]) -> list[Reward | None]:  # type: ignore[override]
                return [None if (score := next(scores)) is None else Reward(score, {"acc": score}) for _ in items]

        responses = [respond(prompt, "1") for prompt in validation.prompts]
        metrics = asyncio.run(validation.report(responses, Failing(), 4))  # type: ignore[arg-type]
        rewards = {name: value for name, value in metrics.items() if "score" in name or "acc" in name}
        assert {name: value for name, value in metrics.items() if "failures" in name} == {
            "val/easy/reward_failures": 3.0,
            "val/data/reward_failures": 1.0,
        }
        of_hard = {"val/hard/score": 2.0, "val/hard/score/best@2": 3.0, "val/hard/acc": 2.0}
        if limit < 1:
            assert rewards == of_hard
            return
        assert rewards == {
            "val/easy/score": 5.0,
            "val/easy/acc": 5.0,
            "val/hard/score": 2.0,
            "val/hard/score/best@2": 3.0,
            "val/hard/acc": 2.0,
            "val/data/score": 8.0,
            "val/data/acc": 8.0,
        }
        written = [json.loads(line) for line in (tmp_path / "validation" / "step_4.jsonl").open()]
        assert [line["reward"] for line in written] == [None, None, 1.0, 3.0, 5.0, None, 8.0, None]

    def test_conversation_that_is_left_out_is_in_no_mean(self, tmp_path: Path) -> None:
        """Its environment has failed, which says nothing about the student."""
        validation = Validation(make_config(tmp_path, *SAMPLED), TOKENIZER)
        left_out = Transcript(messages=[], n_turns=0, end="failure", failure="the environment is down")
        responses = [respond(prompt, "5") for prompt in validation.prompts]
        responses[2] = replace(respond(validation.prompts[2], "", truncated=True), transcript=left_out)
        assert responses[2].is_left_out
        scored: list[str] = []

        class Recording(Scorer):
            async def score(self, items: Sequence[RewardItem]) -> list[Reward]:
                scored.extend(item.response for item in items)
                return await super().score(items)

        metrics = asyncio.run(validation.report(responses, Recording(), 4))  # type: ignore[arg-type]
        assert scored == ["5"] * 7
        assert metrics["val/hard/reward_failures"] == 1 and "val/easy/reward_failures" not in metrics
        assert metrics["val/hard/response_len"] == 1.0 and metrics["val/hard/truncated_fraction"] == 0.0

    def test_failed_calls_of_a_validation_count_in_its_step(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Failures in the last validation are in the metrics of its step."""

        async def score(self: Scorer, items: Sequence[RewardItem]) -> list[None]:
            self.failures += len(items)
            return [None] * len(items)

        monkeypatch.setattr(Scorer, "score", score)
        trainer = train(make_config(tmp_path, "trainer.total_training_steps=2", "trainer.test_freq=2"))
        assert trainer.reward_context is not None and trainer.reward_context.scorer is not None
        assert lines(tmp_path)[-1]["reward/failures"] == trainer.reward_context.scorer.failures > 0

    def test_report_without_source_column_uses_one_source(self, tmp_path: Path) -> None:
        rows = {name: ROWS[name] for name in ("prompt", "ground_truth")}
        validation = Validation(make_config(tmp_path, rows=rows), TOKENIZER)
        metrics = report(validation, [respond(prompt, "1") for prompt in validation.prompts])
        names = ("score", "response_len", "truncated_fraction", "seq_rep_4", "looping_fraction")
        assert set(metrics) == {f"val/data/{name}" for name in names}

    def test_looping_responses_are_counted_by_source(self, tmp_path: Path) -> None:
        validation = Validation(make_config(tmp_path), TOKENIZER)
        texts = ["1" * 50 if prompt.row < 2 else "1" for prompt in validation.prompts]
        pairs = zip(validation.prompts, texts, strict=True)
        scorer: Any = Scorer({1: 0.0, int("1" * 50): 0.0})  # type: ignore[arg-type]
        responses = [respond(prompt, text, truncated=prompt.row == 1) for prompt, text in pairs]
        metrics = asyncio.run(validation.report(responses, scorer, 4))
        found = {name: value for name, value in metrics.items() if "seq_rep" in name or "looping" in name}
        assert found == {
            "val/easy/seq_rep_4": pytest.approx(0.5 * 46 / 47), "val/easy/looping_fraction": 0.0,
            "val/hard/seq_rep_4": pytest.approx(46 / 47), "val/hard/looping_fraction": 1.0,
            "val/data/seq_rep_4": 0.0, "val/data/looping_fraction": 0.0,
        }  # fmt: skip

    def test_report_writes_all_and_logs_a_few(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        validation = Validation(make_config(tmp_path, "trainer.log_val_generations=2"), TOKENIZER)
        with caplog.at_level(logging.INFO, "recipe_gkd"):
            report(validation, [respond(prompt, "2", truncated=prompt.row == 2) for prompt in validation.prompts])
        lines = [json.loads(line) for line in (tmp_path / "validation" / "step_4.jsonl").open()]
        assert lines[0] == {
            "data_source": "easy", "row": 0, "prompt": "1+1=", "answer": "2", "ground_truth": "2", "reward": 2.0,
            "response_len": 1, "finish_reason": "stop",
        }  # fmt: skip
        assert [line["row"] for line in lines] == [0, 1, 2, 3]
        assert caplog.messages[-1].splitlines() == [
            f"validation after step 4: 2 of 4 responses, all in {tmp_path}/validation/step_4.jsonl",
            "  easy, row 0",
            "    prompt        1+1=",
            "    response      2",
            "    ground truth  2",
            "    reward        2",
            "  easy, row 2",
            "    prompt        3+3=",
            "    response      2 (truncated)",
            "    ground truth  6",
            "    reward        2",
        ]
        assert sorted(path.name for path in (tmp_path / "validation").iterdir()) == ["step_4.jsonl"]

    def test_special_tokens_are_shown_to_people_only(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        validation = Validation(make_config(tmp_path, "trainer.log_val_generations=1"), TOKENIZER)
        with caplog.at_level(logging.INFO, "recipe_gkd"):
            report(validation, [respond(prompt, f"2{TOKENIZER.eos_token}") for prompt in validation.prompts])
        line = json.loads((tmp_path / "validation" / "step_4.jsonl").read_text().splitlines()[0])
        assert (line["answer"], line["raw_answer"]) == ("2", f"2{TOKENIZER.eos_token}")
        assert f"    response      2{TOKENIZER.eos_token}" in caplog.messages[-1].splitlines()


class TestTextOfAnyModel:
    """Responses of a byte-level tokenizer that are truncated at any token."""

    @given(st.text(), st.integers(0, 40))
    @example("👨‍👩‍👧 你好", 2)
    def test_truncated_text_is_logged_and_written(self, text: str, n_tokens: int) -> None:
        tokenizer = byte_level_tokenizer()
        prompt = Prompt(uid=0, ids=np.zeros(1, np.int32), row=0)
        ids = np.array(tokenizer(text)["input_ids"][:n_tokens], np.int32)
        response = replace(respond(prompt, "", truncated=True), ids=ids)
        raw = decode_for_people(response, tokenizer)
        is_complete = len(text.encode()) <= n_tokens
        assert raw == text if is_complete else text.startswith(raw.rstrip("\ufffd"))
        item = RewardItem(uid=0, where="", prompt=text, response=raw, ground_truth=None, extra={}, data_source=None)
        scored = ScoredResponse("\x1b[2J", prompt, response, item, raw=raw)
        (line,) = response_lines([scored]).decode().splitlines()
        assert json.loads(line)["answer"] == raw
        table = table_of([scored], 1, Path("x")).splitlines()
        assert len(table) == 4 and table[1] == "  \\x1b[2J, row 0" and table[3].endswith(" (truncated)")

    def test_halves_of_surrogate_pairs_become_replacement_characters(self) -> None:
        prompt = Prompt(uid=0, ids=np.zeros(1, np.int32), row=0)
        item = RewardItem(uid=0, where="", prompt="\ud83d", response="", ground_truth="", extra={}, data_source=None)
        scored = ScoredResponse("data", prompt, respond(prompt, ""), item)
        assert json.loads(response_lines([scored]))["prompt"] == "\ufffd"
        assert "    prompt        \\ud83d" in table_of([scored], 1, Path("x")).splitlines()


class TestValidationSettings:
    def test_special_tokens_reach_the_reward_function_with_the_key(self, tmp_path: Path) -> None:
        for skips, text in (("true", ""), ("false", TOKENIZER.eos_token)):
            key = f"custom_reward_function.skip_special_tokens={skips}"
            validation = Validation(make_config(tmp_path, key), TOKENIZER)
            seen: list[str] = []

            class Recorder:
                async def score(self, items: Sequence[RewardItem], seen: list[str] = seen) -> list[Reward]:
                    seen += [item.response for item in items]
                    return [Reward(0.0)] * len(items)

            end = np.array([TOKENIZER.eos_token_id], np.int32)
            responses = [
                replace(respond(prompt, "1"), ids=end, logprobs=np.zeros(1, np.float32), versions_T=end)
                for prompt in validation.prompts
            ]
            asyncio.run(validation.report(responses, Recorder(), 4))  # type: ignore[arg-type]
            assert seen == [text] * 4

    def test_number_of_rows_is_limited_by_the_key(self, tmp_path: Path) -> None:
        config = make_config(tmp_path, "data.val_max_samples=2", "data.shuffle=false")
        assert [prompt.row for prompt in Validation(config, TOKENIZER).prompts] == [0, 1]

    def test_timeout_grows_with_number_of_responses(self, tmp_path: Path) -> None:
        timeout = "actor_rollout_ref.rollout.timeout_s=10"
        assert Validation(make_config(tmp_path, timeout), TOKENIZER).timeout_s == 20
        assert Validation(make_config(tmp_path, timeout, "data.train_batch_size=99"), TOKENIZER).timeout_s == 10

    def test_disabled_validation_reads_no_files(self, tmp_path: Path) -> None:
        assert read_validation(make_config(tmp_path, "trainer.test_freq=-1", "data.val_files=nowhere"), None) is None

    @pytest.mark.parametrize(
        ("rows", "row", "column", "existing"),
        [
            ({"question": ["a"]}, None, "prompt", ("question",)),
            ({"prompt": ["1+1="]}, None, "ground_truth", ("prompt",)),
            ({"prompt": ["1+1=", "2+2="], "ground_truth": ["2", None]}, 1, "ground_truth", None),
            ({"prompt": [3], "ground_truth": ["a"]}, 0, "prompt", None),
        ],
    )
    def test_unusable_data_refused(
        self,
        tmp_path: Path,
        rows: dict[str, list[Any]],
        row: int | None,
        column: str,
        existing: tuple[str, ...] | None,
    ) -> None:
        with raises(DataError, phase="data.val_files", row=row, column=column, existing=existing):
            Validation(make_config(tmp_path, rows=rows), TOKENIZER)

    @pytest.mark.parametrize("name", ["acc", "response_len", "truncated_fraction"])
    def test_best_metric_other_than_reward_refused(self, tmp_path: Path, name: str) -> None:
        with raises(ConfigError, keys=("trainer.best_metric",)):
            Validation(make_config(tmp_path, f"trainer.best_metric=val/easy/{name}"), TOKENIZER)
        Validation(make_config(tmp_path, "trainer.best_metric=val/easy/score"), TOKENIZER)

    def test_reward_with_name_of_other_metric_refused(self, tmp_path: Path) -> None:
        with raises(ConfigError, keys=("custom_reward_function.name",)):
            Validation(make_config(tmp_path, "custom_reward_function.name=response_len"), TOKENIZER)


class TestTrainerValidation:
    @pytest.mark.parametrize("scheduler", ["sync", "one_step_off", "two_step_off"])
    def test_validates_at_due_steps_with_current_weights(self, tmp_path: Path, scheduler: str) -> None:
        config = make_config(
            tmp_path,
            "trainer.total_training_steps=5",
            "trainer.val_before_train=true",
            f"trainer.scheduler={scheduler}",
        )
        train(config)
        assert [line["training/global_step"] for line in lines(tmp_path)] == [0, 1, 2, 3, 4, 5]
        validated = {line["training/global_step"]: line for line in lines(tmp_path) if "val/easy/score" in line}
        assert {step: line["val/easy/score"] for step, line in validated.items()} == {0: 0, 2: 2, 4: 4, 5: 5}
        assert all("timing/validate" in line for line in validated.values())
        assert {path.name for path in (tmp_path / "validation").iterdir()} == {f"step_{n}.jsonl" for n in (0, 2, 4, 5)}
        assert not list(tmp_path.glob("global_step_*")) and not (tmp_path / "best.json").exists()
        for line in lines(tmp_path)[1:]:
            parts = ("wait_sync", "wait_prev_gen", "wait_prev_teacher", "wait_prev_prev_teacher")
            did = ("update_actor", "validate", "log", "other")
            assert sum(line.get(f"timing/{name}", 0) for name in (*parts, *did)) == pytest.approx(line["timing/step"])


class TestBestCheckpoint:
    def test_best_is_saved_at_once_and_linked(self, tmp_path: Path) -> None:
        train(make_config(tmp_path, "trainer.total_training_steps=8", BEST), scores=[9, 0, 2, 0, 5, 0, 5, 0, 1])
        assert sorted(path.name for path in tmp_path.glob("global_step_*")) == ["global_step_2", "global_step_4"]
        assert (tmp_path / "best").resolve() == tmp_path / "global_step_4"
        assert bests(tmp_path) == [2, 4]
        by_name = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/best"]
        for overrides in ([], by_name):
            point = resume_points(make_config(tmp_path, *overrides), Progress(0, 0, 4, 1, True))[0]
            assert point.folder.resolve() == tmp_path / "global_step_4" and point.progress.step == 4

    def test_resumed_run_keeps_best_and_steps(self, tmp_path: Path) -> None:
        overrides = [BEST, "trainer.val_before_train=true", "trainer.save_freq=6"]
        scores = [0, 0, 5, 0, 3, 0, 4, 0, 9]
        train(make_config(tmp_path, *overrides, "trainer.total_training_steps=6"), scores)
        before = lines(tmp_path)
        trainer = train(make_config(tmp_path, *overrides, "trainer.total_training_steps=7"), scores)
        assert trainer.best.current is not None and trainer.best.current.step == 2
        assert [line["training/global_step"] for line in lines(tmp_path)] == list(range(8))
        assert lines(tmp_path)[:7] == before  # validation after step 6 was repeated with the same results
        train(make_config(tmp_path, *overrides, "trainer.total_training_steps=8"), scores)
        assert (tmp_path / "best").resolve() == tmp_path / "global_step_8" and bests(tmp_path) == [0, 2, 8]

    def test_best_of_repeated_steps_is_dropped(self, tmp_path: Path) -> None:
        train(make_config(tmp_path, "trainer.total_training_steps=8", BEST), scores=[0, 0, 2, 0, 5, 0, 6, 0, 1])
        assert bests(tmp_path) == [2, 4, 6]
        back = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={tmp_path}/global_step_4"]
        trainer = train(make_config(tmp_path, *back, "trainer.total_training_steps=6", BEST), scores=[1] * 9)
        assert trainer.best.current is not None and trainer.best.current.step == 4 and bests(tmp_path) == [2, 4]
        assert (tmp_path / "best").resolve() == tmp_path / "global_step_4"
        new_run = make_config(
            tmp_path, "trainer.resume_mode=disable", "trainer.total_training_steps=1", "trainer.test_freq=-1"
        )
        train(new_run)
        assert bests(tmp_path) == [] and not (tmp_path / "best").is_symlink()

    def test_crash_before_save_keeps_previous_best(self, tmp_path: Path) -> None:
        config = make_config(tmp_path, "trainer.total_training_steps=8", BEST)
        scores = [0, 0, 2, 0, 5, 0, 4, 0, 4]
        train(config, scores, crash_after=4)
        assert (tmp_path / "best").resolve() == tmp_path / "global_step_2" and bests(tmp_path) == [2]
        train(config, scores)
        assert (tmp_path / "best").resolve() == tmp_path / "global_step_4" and bests(tmp_path) == [2, 4]
        assert [line["training/global_step"] for line in lines(tmp_path)] == list(range(1, 9))

    def test_resumed_checkpoint_of_same_run_can_be_best(self, tmp_path: Path) -> None:
        scores = [0, 0, 2, 0, 5, 0, 0, 0, 0]
        train(make_config(tmp_path, "trainer.save_freq=4", "trainer.total_training_steps=4"), scores)  # no best
        resumed = [BEST, "trainer.val_before_train=true", "trainer.total_training_steps=8"]
        trainer = train(make_config(tmp_path, *resumed), scores)
        assert trainer.best.current is not None and trainer.best.current.step == 4 and bests(tmp_path) == [4]
        assert (tmp_path / "best").resolve() == tmp_path / "global_step_4"
        assert [path.name for path in tmp_path.glob("global_step_*")] == ["global_step_4"]
        there = [f"trainer.default_local_dir={tmp_path}/other", "trainer.resume_mode=resume_path"]
        elsewhere = make_config(tmp_path, *resumed, *there, f"trainer.resume_from_path={tmp_path}/best")
        train(elsewhere, scores)  # the initial weights are better than those of all steps
        assert bests(tmp_path / "other") == [4] and not (tmp_path / "other" / "best").exists()
        train(elsewhere, [*scores[:6], 6, 0, 0])
        assert bests(tmp_path / "other") == [4, 6]
        assert (tmp_path / "other" / "best").resolve() == tmp_path / "other" / "global_step_6"

    def test_best_must_exceed_initial_weights(self, tmp_path: Path) -> None:
        first = [BEST, "trainer.val_before_train=true", "trainer.save_freq=2"]
        train(make_config(tmp_path, *first, "trainer.total_training_steps=4"), scores=[3, 0, 1, 0, 2, 0, 0, 0, 0])
        assert bests(tmp_path) == [0] and not (tmp_path / "best").exists()
        train(make_config(tmp_path, *first, "trainer.total_training_steps=8"), scores=[3, 0, 1, 0, 2, 0, 4, 0, 3])
        assert bests(tmp_path) == [0, 6] and (tmp_path / "best").resolve() == tmp_path / "global_step_6"
        new_run = [*first, "trainer.total_training_steps=2", "trainer.resume_mode=disable"]
        train(make_config(tmp_path, *new_run), scores=[0, 0, 1, 0, 0, 0, 0, 0, 0])
        assert bests(tmp_path) == [0, 2] and (tmp_path / "best").resolve() == tmp_path / "global_step_2"


class TestTrainerSaves:
    @pytest.mark.parametrize("async_save", [False, True])
    def test_failed_saves_are_counted_up_to_limit(self, tmp_path: Path, async_save: bool) -> None:
        cluster = FakeCluster()
        cluster.save_errors = [None, CheckpointError("disk full"), None, CheckpointError("disk full")]
        saves = f"actor_rollout_ref.actor.checkpoint.async_save={str(async_save).lower()}"
        config = make_config(
            tmp_path, "trainer.save_freq=2", "trainer.total_training_steps=10", "trainer.test_freq=-1", saves
        )
        with raises(SavesFailed, count=2, newest=tmp_path / "global_step_6"):
            train(config, cluster=cluster)
        counted = [line["checkpoint/failed_saves"] for line in lines(tmp_path) if "checkpoint/failed_saves" in line]
        assert counted == ([0, 0, 0, 1, 1, 1, 1] if async_save else [0, 1, 1])
        assert sorted(path.name for path in tmp_path.glob("*global_step_*")) == ["global_step_2", "global_step_6"]
        assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "6\n"

    @pytest.mark.parametrize("async_save", [False, True])
    def test_failed_completion_names_cause_and_leaves_no_folder(self, tmp_path: Path, async_save: bool) -> None:
        (tmp_path / "best").mkdir()
        saves = f"actor_rollout_ref.actor.checkpoint.async_save={str(async_save).lower()}"
        with pytest.raises(
            CheckpointError, match=r"best cannot be written: .*Is a directory.* nothing else of that name"
        ):
            train(make_config(tmp_path, "trainer.total_training_steps=5", BEST, saves))
        assert not list(tmp_path.glob(".writing_*"))


class TestTrainerStop:
    LENGTH = ("trainer.total_training_steps=6", "trainer.save_freq=4")

    @pytest.mark.parametrize("async_save", [False, True])
    @pytest.mark.parametrize("scheduler", ["sync", "two_step_off"])
    def test_stop_saves_after_the_update_and_resumed_run_completes(
        self, tmp_path: Path, scheduler: str, async_save: bool
    ) -> None:
        save = f"actor_rollout_ref.actor.checkpoint.async_save={async_save}"
        config = make_config(tmp_path, *self.LENGTH, save, f"trainer.scheduler={scheduler}")
        stopped = train(config, stop_in_update=1)
        assert (stopped.progress.step, stopped.stop.reason, steps_of(tmp_path)) == (2, "SIGTERM", [2])
        resumed = train(config)
        assert (resumed.progress.step, resumed.stop.reason, steps_of(tmp_path)) == (6, None, [2, 4, 6])
        assert [line["training/global_step"] for line in lines(tmp_path)] == [1, 2, 3, 4, 5, 6]

    def test_stop_in_last_update_is_the_end_of_the_run(self, tmp_path: Path) -> None:
        trainer = train(make_config(tmp_path, *self.LENGTH), stop_in_update=5)
        assert (trainer.progress.step, trainer.stop.reason, steps_of(tmp_path)) == (6, None, [4, 6])

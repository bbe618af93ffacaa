"""KL divergence of validation: assignment to samples and sources, bounded memory, and the best checkpoint."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipe_gkd.actor.objective.token_kl import TokenKl
from recipe_gkd.checkpoints.best import BestTracker
from recipe_gkd.data.parts import parts_of
from recipe_gkd.data.samples import Prompt, Response, Rewrite, Sample, TeacherTopK
from recipe_gkd.errors import ConfigError
from recipe_gkd.teachers.router import Teachers
from recipe_gkd.teachers.routes import Routes
from recipe_gkd.validation.kl import KlStages, measure_kl
from recipe_gkd.validation.validation import Validation
from tests._support.base_config import base_config
from tests._support.errors import raises
from tests.unit.validation.test_validation import TOKENIZER, make_config, respond

PROMPTS = [Prompt(uid=uid, ids=np.zeros(1, np.int32), row=uid) for uid in range(7)]
PAIRS = [(prompt, respond(prompt, "1" * prompt.uid)) for prompt in PROMPTS]  # sample u has u tokens
SOURCES = np.array(["a", "b", "a", "b", "a", "b", "c"])
SKIPPED = 6


class Workers:
    """Teacher and two actor ranks that compute every second token. The divergence of a token is its uid."""

    def __init__(self) -> None:
        self.requests: list[int] = []
        self.chunks: list[list[int]] = []

    async def score(self, group: Sequence[tuple[Prompt, Response]]) -> list[Sample]:
        self.requests.append(len(group))
        await asyncio.sleep(0.001 * (7 - len(self.requests)))  # the last request is completed first
        return [
            Sample(prompt=prompt, response=response, teacher=scores(len(response.ids), prompt.uid != SKIPPED))
            for prompt, response in group
        ]

    async def token_kl(self, samples: Sequence[Sample]) -> list[TokenKl]:
        self.chunks.append([sample.prompt.uid for sample in samples])
        tokens = [
            (sample.prompt.uid, sample.response.start + position)
            for sample in reversed(samples)
            for position in range(len(sample.response.ids))
            if sample.prompt.uid != SKIPPED
        ]
        return [as_token_kl(tokens[rank::2]) for rank in range(2)]


def as_token_kl(tokens: list[tuple[int, int]]) -> TokenKl:
    uids_T, positions_T = np.array(tokens, np.int64).reshape(-1, 2).T
    return TokenKl(uids_T, positions_T, np.stack([uids_T, 10 * uids_T + positions_T], axis=1).astype(np.float32))


def scores(n_tokens: int, is_scored: bool) -> TeacherTopK:
    if not is_scored:
        return TeacherTopK.absent(n_tokens)
    zeros_TK = np.zeros((n_tokens, 1))
    return TeacherTopK(logps_TK=zeros_TK, ids_TK=zeros_TK.astype(np.int32), sampled_logps_T=zeros_TK[:, 0])


@pytest.mark.parametrize(("group_size", "chunk_size"), [(2, 4), (3, 7), (1, 1), (8, 100)])
def test_kl_is_mean_over_scored_tokens_of_a_source(group_size: int, chunk_size: int) -> None:
    workers = Workers()
    stages = KlStages(score=workers.score, token_kl=workers.token_kl)
    kl = asyncio.run(measure_kl(PAIRS, stages, group_size=group_size, chunk_size=chunk_size))
    assert max(workers.requests) <= group_size and max(map(len, workers.chunks)) <= chunk_size
    assert [uid for chunk in workers.chunks for uid in chunk] == list(range(7))
    mean_a, mean_b = (2 * 2 + 4 * 4) / (2 + 4), (1 * 1 + 3 * 3 + 5 * 5) / (1 + 3 + 5)
    assert kl.metrics(SOURCES) == pytest.approx(
        {
            "val/a/kl": mean_a, "val/a/reverse_kl": 10 * mean_a + (0 + 1 + 0 + 1 + 2 + 3) / 6,
            "val/b/kl": mean_b, "val/b/reverse_kl": 10 * mean_b + (0 + 0 + 1 + 2 + 0 + 1 + 2 + 3 + 4) / 9,
        }
    )  # fmt: skip
    assert kl.forward_per_response() == [None, 1, 2, 3, 4, 5, None]
    for uid, kl_T in enumerate(kl.forward_per_token()):
        np.testing.assert_array_equal(kl_T, np.full(uid, np.nan if uid == SKIPPED else uid))


def test_parts_of_a_conversation_are_one_response() -> None:
    """Each token of its sequences has its place in the response, wherever it was measured."""

    def with_rewrite(pair: tuple[Prompt, Response]) -> tuple[Prompt, Response]:
        prompt, response = pair
        return prompt, replace(
            response, rewrites=(Rewrite(before=2, context_ids=np.zeros(3, np.int32)),) if prompt.uid > 2 else ()
        )

    class Dividing(Workers):
        async def score(self, group: Sequence[tuple[Prompt, Response]]) -> list[Sample]:
            return await super().score([part for pair in group for part in parts_of(*with_rewrite(pair))])

    whole, divided = (
        asyncio.run(measure_kl(PAIRS, KlStages(score=w.score, token_kl=w.token_kl), group_size=2, chunk_size=4))
        for w in (Workers(), Dividing())
    )
    for field in ("kl_TD", "is_scored_T"):
        for found, expected in zip(getattr(divided, field), getattr(whole, field), strict=True):
            np.testing.assert_array_equal(found, expected)


def test_failed_request_ends_the_measurement() -> None:
    failure, sizes = ConfigError("refused"), []

    async def fail(group: Sequence[tuple[Prompt, Response]]) -> list[Sample]:
        sizes.append(len(group))
        raise failure

    with raises(ConfigError) as caught:
        stages = KlStages(score=fail, token_kl=Workers().token_kl)
        asyncio.run(measure_kl(PAIRS, stages, group_size=2, chunk_size=4))
    assert caught.value is failure and sizes[0] == 2


def test_lowest_divergence_is_the_best() -> None:
    best = BestTracker("val/a/kl", None, lower_is_better=True)
    for step, value in enumerate([0.5, 0.7, 0.3, 0.3]):
        best.observe({"val/a/kl": value}, step)
    best.observe({}, 4)
    assert best.current is not None and (best.current.step, best.current.value) == (2, 0.3)


def test_validation_without_reward_function_needs_no_ground_truth(tmp_path: Path) -> None:
    no_reward = ("custom_reward_function.path=null", "trainer.best_metric=val/data/reverse_kl")
    validation = Validation(make_config(tmp_path, *no_reward, rows={"prompt": ["1+1=", "2+2="]}), TOKENIZER)
    responses = [respond(prompt, "2") for prompt in validation.prompts]
    workers = Workers()
    stages = KlStages(score=workers.score, token_kl=workers.token_kl)
    kl = asyncio.run(measure_kl(validation.pairs(responses), stages, group_size=1, chunk_size=1))
    metrics = asyncio.run(validation.report(responses, None, 3, kl))
    assert metrics == {
        "val/data/kl": 0.5, "val/data/reverse_kl": 5.0, "val/data/response_len": 1.0,
        "val/data/truncated_fraction": 0.0,
        "val/data/seq_rep_4": 0.0, "val/data/looping_fraction": 0.0,
    }  # fmt: skip
    lines = (tmp_path / "validation" / "step_3.jsonl").read_text().splitlines()
    assert '"reward": null, "kl": 0.0, ' in lines[0]
    assert json.loads(lines[1])["tokens"] == {"texts": ["2"], "kl": [1.0], "turns": [0]}


def test_reward_named_like_the_divergence_is_refused(tmp_path: Path) -> None:
    overrides = ("custom_reward_function.name=kl", "trainer.val_kl=true")
    with raises(ConfigError, keys=("custom_reward_function.name",)):
        Validation(make_config(tmp_path, *overrides), TOKENIZER)
    Validation(make_config(tmp_path, overrides[0]), TOKENIZER)


def test_validation_rows_of_teacher_without_training_rows_are_refused() -> None:
    teachers = [f"actor_rollout_ref.teacher.teachers.{name}=host:1" for name in ("math", "code")]
    config = base_config(*teachers, "actor_rollout_ref.teacher.route_key=teacher")
    connected = Teachers(config, Routes(("math", "code"), np.array([0, 0])), {"math": object()})  # type: ignore[dict-item]
    connected.for_data(Routes(("math", "code"), np.array([0])))
    with pytest.raises(ConfigError, match=r"are for teacher code, but no row of the training data is"):
        connected.for_data(Routes(("math", "code"), np.array([0, 1])))

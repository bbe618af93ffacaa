"""Validation in the loop: held-out prompts, answered with the weights of now, scored by the reward function.

::

    <default_local_dir>/validation/step_40.jsonl      every answer after step 40, an object a line

Metrics, each of a data source (the column ``data.data_source_key``; ``data`` where there is none)::

    val/<data_source>/<reward>          mean over the prompts of the mean over their val_kwargs.n answers
    val/<data_source>/<reward>/best@n   mean over the prompts of the best of them, if n > 1
    val/<data_source>/response_len      tokens of an answer
    val/<data_source>/truncated_fraction         answers that were cut at data.max_response_length
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.config import Config
from recipe_gkd.config.validate import validates
from recipe_gkd.data.prompts import PromptData, read_table
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.errors import ConfigError, DataError
from recipe_gkd.rewards import RewardItem, RewardItems, RewardScorer
from recipe_gkd.runtime.threads import in_thread

log = logging.getLogger(__name__)

LENGTH, CUT = "response_len", "truncated_fraction"
NO_SOURCE = "data"
SHOWN_CHARS = 200
"""Of each text in the log; the file has all."""


class Validation:
    """The prompts of ``data.val_files``, tokenized once, and what is made of the answers to them.

    Raises :class:`DataError` for files that cannot be used, and :class:`ConfigError` for a ``trainer.best_metric`` that
    this validation does not produce. The same prompts are answered each time, with the same seeds.
    """

    def __init__(self, config: Config, tokenizer: Any) -> None:
        self.n = config.actor_rollout_ref.rollout.val_kwargs.n
        self._reward = config.custom_reward_function.name
        self._shown = config.trainer.log_val_generations
        self._folder = folder_of(config.trainer) / "validation"
        try:
            table = read_table(config.data.val_files, config.data.prompt_key)
            data = PromptData(table, config.data, tokenizer, name="the validation data")
            self._items = RewardItems(data, config.data, tokenizer, must_have_truth=True)
        except DataError as error:
            raise DataError(f"data.val_files: {error}") from error
        self.prompts = [data.prompt(index, index * self.n + k) for index in range(len(data)) for k in range(self.n)]
        """Each ``n`` times, one after the other."""
        sources = sources_of(table, config.data.data_source_key)
        self._sources = np.array([sources[row] for row in data.rows])
        training = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        self.timeout_s = config.actor_rollout_ref.rollout.timeout_s * math.ceil(len(self.prompts) / training)
        """For all answers: ``rollout.timeout_s`` for as many as a training batch has."""
        self._check_names(config.trainer.best_metric)

    @property
    def metric_names(self) -> list[str]:
        """Those that a checkpoint can be the best by: of answers it is not said whether longer ones are better."""
        rewards = [self._reward, *([f"{self._reward}/best@{self.n}"] if self.n > 1 else [])]
        return [f"val/{source}/{name}" for source in np.unique(self._sources) for name in rewards]

    def _check_names(self, best_metric: str | None) -> None:
        if self._reward in (LENGTH, CUT):
            raise ConfigError(
                f"custom_reward_function.name={self._reward} is the name of another metric of validation; "
                "give the function another one"
            )
        if best_metric is not None and best_metric not in self.metric_names:
            raise ConfigError(
                f"trainer.best_metric={best_metric}: no metric of validation that can be the best by; there are: "
                f"{', '.join(self.metric_names)}. Choose one of them, or null"
            )

    async def report(self, responses: Sequence[Response], scorer: RewardScorer, step: int) -> dict[str, float]:
        """Score the answers to ``prompts``; write all, log some, and return the metrics. ``step``: updates done."""
        judged = await self._judge(responses, scorer)
        path = self._folder / f"step_{step}.jsonl"
        await in_thread(write_responses, path, judged)
        if self._shown:
            log.info("validation after step %d: %s", step, table_of(judged, self._shown, path))
        return self._metrics(judged)

    async def _judge(self, responses: Sequence[Response], scorer: RewardScorer) -> list[ScoredResponse]:
        pairs = list(zip(self.prompts, responses, strict=True))
        items = await in_thread(lambda: [self._items.of(prompt, response) for prompt, response in pairs])
        rewards = await scorer.score(items)
        return [
            ScoredResponse(str(self._sources[number // self.n]), prompt, response, item, reward)
            for number, ((prompt, response), item, reward) in enumerate(zip(pairs, items, rewards, strict=True))
        ]

    def _metrics(self, judged: list[ScoredResponse]) -> dict[str, float]:
        rewards_PN = np.array([one.reward for one in judged], np.float64).reshape(-1, self.n)
        lengths_PN = np.array([len(one.response.ids) for one in judged]).reshape(-1, self.n)
        cut_PN = np.array([one.response.finish_reason == "length" for one in judged]).reshape(-1, self.n)
        metrics = {}
        for source in np.unique(self._sources):
            of, reward = self._sources == source, f"val/{source}/{self._reward}"
            metrics[reward] = float(rewards_PN[of].mean())
            if self.n > 1:
                metrics[f"{reward}/best@{self.n}"] = float(rewards_PN[of].max(axis=1).mean())
            metrics[f"val/{source}/{LENGTH}"] = float(lengths_PN[of].mean())
            metrics[f"val/{source}/{CUT}"] = float(cut_PN[of].mean())
        return metrics


def read_validation(config: Config, tokenizer: Any) -> Validation | None:
    """Return the validation of a run, None if the run does not validate."""
    return Validation(config, tokenizer) if validates(config) else None


@dataclass(frozen=True)
class ScoredResponse:
    """One answer, and what it is worth."""

    data_source: str
    prompt: Prompt
    response: Response
    item: RewardItem
    reward: float


def sources_of(table: pa.Table, key: str) -> list[str]:
    """Of each row where it comes from."""
    if key not in table.column_names:
        return [NO_SOURCE] * table.num_rows
    return [NO_SOURCE if name is None else str(name) for name in table.column(key).to_pylist()]


def write_responses(path: Path, judged: Sequence[ScoredResponse]) -> None:
    """An object a line; a file that is there is whole."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".writing")
    with draft.open("w", encoding="utf-8") as file:
        for one in judged:
            line = {
                "data_source": one.data_source,
                "row": one.prompt.row,
                "prompt": one.item.prompt,
                "answer": one.item.response,
                "ground_truth": one.item.ground_truth,
                "reward": one.reward,
                LENGTH: len(one.response.ids),
                "finish_reason": one.response.finish_reason,
            }
            file.write(json.dumps(line, ensure_ascii=False, default=str) + "\n")
    draft.replace(path)


def table_of(judged: Sequence[ScoredResponse], n: int, path: Path) -> str:
    """Some of the answers, evenly spread and the same ones each time, as a person wants to read them."""
    n = min(n, len(judged))
    lines = [f"{n} of {len(judged)} answers, all in {path}"]
    for one in (judged[i * len(judged) // n] for i in range(n)):
        lines += [
            f"  {one.data_source}, row {one.prompt.row}",
            f"    prompt        {_shown(one.item.prompt)}",
            f"    answer        {_shown(one.item.response)}{' (cut)' if one.response.finish_reason == 'length' else ''}",
            f"    ground truth  {_shown(one.item.ground_truth)}",
            f"    reward        {one.reward:g}",
        ]
    return "\n".join(lines)


def _shown(value: Any) -> str:
    """On one line: its beginning and its end."""
    if isinstance(value, list) and value and all(isinstance(message, dict) for message in value):
        value = " | ".join(f"{message.get('role')}: {message.get('content')}" for message in value)
    text = str(value).replace("\n", "\\n")
    half = SHOWN_CHARS // 2
    return text if len(text) <= SHOWN_CHARS else f"{text[:half]} ... {text[-half:]}"

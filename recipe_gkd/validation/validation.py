"""Periodic validation: responses to held-out prompts with the current weights, scored by reward function and teacher.

Output::

    <default_local_dir>/validation/step_40.jsonl      responses after step 40, one JSON object per line

Metrics for each data source (the column ``data.data_source_key``; ``data`` for rows without it)::

    val/<data_source>/<reward>            mean over the prompts of the mean over their val_kwargs.n responses
    val/<data_source>/<reward>/best@n     mean over the prompts of the maximum over their responses, if n > 1
                                          (custom_reward_function.on_failure=skip: responses without a reward are left
                                          out of the mean, and prompts with such a response out of best@n)
    val/<data_source>/<name>              mean of another number that the reward function returns; score of one of
                                          several functions
    val/<data_source>/response_len        mean number of tokens of a response
    val/<data_source>/truncated_fraction  fraction of responses truncated at data.max_response_length
    val/<data_source>/seq_rep_4           mean share of repeated 4-grams of tokens in a response
    val/<data_source>/looping_fraction    fraction of truncated responses that mostly repeat themselves

and the metrics of :mod:`recipe_gkd.validation.kl` with ``trainer.val_kl``. Without a reward function there are no
rewards. Conversations that ``rollout.on_environment_failure=skip`` leaves out have no reward, and are in no mean.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Sequence
from contextlib import suppress
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.config import Config
from recipe_gkd.config.conditions import has_reward, runs_validation, validates_kl
from recipe_gkd.config.reward_functions import reward_name
from recipe_gkd.config.timeouts import ROLLOUT_TIMEOUT
from recipe_gkd.data.parts import as_sampled
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import VALIDATION, DataSet, read_data_set
from recipe_gkd.data.samples import Prompt, Response, Reward
from recipe_gkd.data.tools import Tools
from recipe_gkd.errors import ConfigError, DataError
from recipe_gkd.metrics.conversations import validation_metrics
from recipe_gkd.metrics.repetition import LOOPING, REPETITION, repetition_metrics
from recipe_gkd.rewards import RewardItems, RewardScorer
from recipe_gkd.rewards.items import TruthUse, decode_for_people
from recipe_gkd.rewards.reporting import mean_numbers, scores_PN
from recipe_gkd.runtime.keyed_timeout import KeyedTimeout
from recipe_gkd.runtime.pending_files import PendingFiles
from recipe_gkd.runtime.threads import in_thread
from recipe_gkd.teachers.routes import read_routes
from recipe_gkd.validation.kl import FORWARD, REVERSE, ResponseKl
from recipe_gkd.validation.records import LENGTH, ScoredResponse, response_lines, table_of
from recipe_gkd.validation.tokens import token_fields

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

log = logging.getLogger(__name__)

TRUNCATED = "truncated_fraction"
FAILURES = "reward_failures"
MAX_FAILED_SHARE = 0.1
"""Largest share of a data source's responses without a reward with which the reward is a metric."""
DEFAULT_SOURCE = "data"
"""Data source of rows without one."""
WRITE_TIMEOUT_S = 60.0
"""Deadline of the file of a validation's responses. A disk that takes longer does not hold up the training."""
CLOSE_TIMEOUT_S = 5.0


class Validation:
    """Validation data, and the metrics of the responses to its prompts.

    The same prompts are used each time, with the same seeds.

    Attributes:
        data: Tokenized prompts. Prompts of teachers must be set before :attr:`prompts` is read.
        n: Number of responses per prompt.
        routes: Teacher of each row. None if validation reports no KL divergence.
        timeout_s: Deadline for all responses: ``rollout.timeout_s`` for every training batch of the same size.
    """

    def __init__(
        self,
        config: Config,
        tokenizer: PreTrainedTokenizerBase,
        *,
        truth_use: TruthUse = "required",
        tools: Tools | None = None,
    ) -> None:
        """Read and tokenize the prompts of ``data.val_files``.

        Args:
            truth_use: Use of the ground truth by the reward functions.
            tools: Tools of rows that have none.

        Raises:
            DataError: A file cannot be used.
            ConfigError: This validation has no metric ``trainer.best_metric``, or two metrics have the same name.
        """
        self.n = config.actor_rollout_ref.rollout.val_kwargs.n
        section = config.custom_reward_function
        self._reward = reward_name(section) if has_reward(config) else None
        self._labels = list(section.functions)
        self._n_logged = config.trainer.log_val_generations
        self._folder = folder_of(config.trainer) / "validation"
        self._files = PendingFiles()
        try:
            data_set = read_data_set(config.data.val_files, config.data, VALIDATION, config.data.val_max_samples)
            data_set.default_tools = tools
            data = PromptData(data_set, config.data, tokenizer)
            self._items = RewardItems(
                data,
                config.data,
                tokenizer,
                require_truth=True,
                truth_use="unused" if self._reward is None else truth_use,
                skip_special_tokens=section.skip_special_tokens,
            )
            self.routes = read_routes(data_set, config) if validates_kl(config) else None
        except DataError as error:
            raise error.located(phase="data.val_files") from error
        self.data, self._tokenizer = data, tokenizer
        self._sources = np.array(read_sources(data_set, data.rows))
        batch_size = config.data.train_batch_size * config.actor_rollout_ref.rollout.n
        n_batches = math.ceil(len(data) * self.n / batch_size)
        self.timeout_s = KeyedTimeout(config.actor_rollout_ref.rollout.timeout_s, ROLLOUT_TIMEOUT, factor=n_batches)
        self._check_names(config.trainer.best_metric)

    @cached_property
    def prompts(self) -> list[Prompt]:
        """Prompts of the data set, each ``n`` times in a row."""
        return [self.data.prompt(index, index * self.n + k) for index in range(len(self.data)) for k in range(self.n)]

    @property
    def metric_names(self) -> list[str]:
        """Metrics that may select the best checkpoint. Length metrics are excluded."""
        rewards = [] if self._reward is None else [self._reward]
        rewards += [f"{reward}/best@{self.n}" for reward in rewards if self.n > 1]
        rewards += self._labels
        return [f"val/{source}/{name}" for source in np.unique(self._sources) for name in rewards] + self.kl_names

    @property
    def kl_names(self) -> list[str]:
        """Metrics of the KL divergence, of which the lowest value is the best."""
        names = (FORWARD, REVERSE) if self.routes is not None else ()
        return [f"val/{source}/{name}" for source in np.unique(self._sources) for name in names]

    def _check_names(self, best_metric: str | None) -> None:
        if self._reward in (
            LENGTH,
            TRUNCATED,
            REPETITION,
            LOOPING,
            *((FORWARD, REVERSE) if self.routes is not None else ()),
        ):
            raise ConfigError(
                f"custom_reward_function.name={self._reward} is the name of another metric of validation",
                remedy="rename the function",
                keys=("custom_reward_function.name",),
            )
        if best_metric is not None and best_metric not in self.metric_names:
            raise ConfigError(
                f"trainer.best_metric={best_metric}: expected one of the metrics that may select the best checkpoint: "
                f"{', '.join(self.metric_names)}",
                remedy="choose one of them, or null",
                keys=("trainer.best_metric",),
            )

    def pairs(self, responses: Sequence[Response]) -> list[tuple[Prompt, Response]]:
        """Return the prompts with their responses. An environment may have replaced a prompt."""
        return [
            (as_sampled(prompt, response), response) for prompt, response in zip(self.prompts, responses, strict=True)
        ]

    async def report(
        self,
        responses: Sequence[Response],
        scorer: RewardScorer | None,
        step: int,
        kl: ResponseKl | None = None,
    ) -> dict[str, float]:
        """Score the responses, write all of them to a file, log a few, and return the metrics.

        Args:
            responses: Responses to ``prompts``, in the same order.
            scorer: Processes that call the reward function. None without one.
            step: Number of optimizer steps of the weights.
            kl: KL divergences of the responses, in the same order. None if they are not reported.
        """
        scored = await self._score(responses, scorer, kl)
        path = self._folder / f"step_{step}.jsonl"
        try:
            async with asyncio.timeout(WRITE_TIMEOUT_S):
                await in_thread(lambda: self._files.write(path, response_lines(scored)))
        except TimeoutError:
            log.warning("%s was not written within %g s; check the disk", path, WRITE_TIMEOUT_S)
        if self._n_logged:
            log.info("validation after step %d: %s", step, table_of(scored, self._n_logged, path))
        metrics = await in_thread(self._metrics, scored)
        metrics |= validation_metrics(responses)
        return metrics | (kl.metrics(self._sources.repeat(self.n)) if kl is not None else {})

    async def close(self) -> None:
        """Write the files that wait for the disk."""
        with suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                await in_thread(self._files.close)

    async def _score(
        self, responses: Sequence[Response], scorer: RewardScorer | None, kl: ResponseKl | None
    ) -> list[ScoredResponse]:
        pairs = self.pairs(responses)
        items = await in_thread(lambda: [self._items.build_item(prompt, response) for prompt, response in pairs])
        raw = await in_thread(lambda: [decode_for_people(response, self._tokenizer) for response in responses])
        rewards: list[Reward | None] = [None] * len(items)
        if scorer is not None:
            kept = [index for index, response in enumerate(responses) if not response.is_left_out]
            for index, reward in zip(kept, await scorer.score([items[index] for index in kept]), strict=True):
                rewards[index] = reward
        kls = [None] * len(items) if kl is None else kl.forward_per_response()
        tokens: list[dict[str, Any] | None] = [None] * len(items)
        if kl is not None:
            tokens = await in_thread(token_fields, responses, kl.forward_per_token(), self._tokenizer)
        return [
            ScoredResponse(str(self._sources[index // self.n]), *values)
            for index, values in enumerate(zip(self.prompts, responses, items, rewards, kls, raw, tokens, strict=True))
        ]

    def _metrics(self, scored: list[ScoredResponse]) -> dict[str, float]:
        metrics: dict[str, float] = {}
        for source in np.unique(self._sources):
            of_source = [one for one in scored if one.data_source == source]
            if self._reward is not None:
                metrics |= self._reward_metrics(str(source), [one.reward for one in of_source])
            kept = [one for one in of_source if not one.response.is_left_out]
            if kept:
                metrics[f"val/{source}/{LENGTH}"] = float(np.mean([len(one.response.ids) for one in kept]))
                metrics[f"val/{source}/{TRUNCATED}"] = float(np.mean([one.is_truncated for one in kept]))
                metrics |= repetition_metrics([one.response for one in kept], f"val/{source}/")
        return metrics

    def _reward_metrics(self, source: str, rewards: Sequence[Reward | None]) -> dict[str, float]:
        """Return the metrics of the rewards of a data source. A response without a reward is None.

        A mean over few responses would depend on which calls failed, and could select the best checkpoint.
        """
        found = [reward for reward in rewards if reward is not None]
        of_PN = scores_PN(rewards, self.n)
        has_score_PN = ~np.isnan(of_PN)
        name = f"val/{source}/{self._reward}"
        metrics: dict[str, float] = {}
        if n_failed := len(rewards) - len(found):
            metrics[f"val/{source}/{FAILURES}"] = float(n_failed)
        if n_failed > MAX_FAILED_SHARE * len(rewards):
            log.warning(
                "validation: %d of %d responses of data source %s have no reward, so %s is left out of the metrics",
                n_failed, len(rewards), source, name,
            )  # fmt: skip
            return metrics
        if has_score_PN.any():
            metrics[name] = float(np.nanmean(of_PN[has_score_PN.any(axis=1)], axis=1).mean())
        if self.n > 1 and has_score_PN.all(axis=1).any():
            metrics[f"{name}/best@{self.n}"] = float(of_PN[has_score_PN.all(axis=1)].max(axis=1).mean())
        return metrics | mean_numbers([reward.numbers for reward in found], f"val/{source}/")


def read_validation(
    config: Config,
    tokenizer: PreTrainedTokenizerBase,
    *,
    truth_use: TruthUse = "required",
    tools: Tools | None = None,
) -> Validation | None:
    """Return the validation of a run, None if the run does not validate; see :class:`Validation`."""
    return Validation(config, tokenizer, truth_use=truth_use, tools=tools) if runs_validation(config) else None


def read_sources(data_set: DataSet, rows: Sequence[int]) -> list[str]:
    """Return the data source of each of some rows, ``data`` for rows without one."""
    sources = data_set.take(rows).data_sources()
    return [DEFAULT_SOURCE if source is None else str(source) for source in sources]

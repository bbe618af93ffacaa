"""Checks of the reward functions: they are imported, their parameters are accepted, and they return a number."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from recipe_gkd.commands.doctor.data_checks import MAX_ROWS
from recipe_gkd.commands.doctor.findings import Finding, findings_of
from recipe_gkd.config import Config
from recipe_gkd.config.conditions import has_conversations, needs_rewards, trains_on_rewards
from recipe_gkd.config.keys import TRAIN_FILES, VAL_FILES
from recipe_gkd.config.reward_functions import reward_functions
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import DataSet
from recipe_gkd.data.samples import Response
from recipe_gkd.data.transcript import Transcript
from recipe_gkd.rewards import RewardItems, RewardScorer
from recipe_gkd.rewards.items import TruthUse
from teacher.common.display_text import shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHECK, CALL = "reward function", "reward call"
_RESPONSE_TOKENS = 16
_SHOWN_CHARS = 60


def reward_findings(config: Config) -> tuple[TruthUse, list[Finding]]:
    """Load the reward functions in separate processes, and call none of them.

    Returns:
        Use of the ground truth, and the findings; none if the run computes no rewards.
    """
    if not needs_rewards(config):
        return "unused", []
    section = config.custom_reward_function
    truth_use: TruthUse = "required"

    def load() -> list[Finding]:
        nonlocal truth_use
        with RewardScorer(replace(section, num_workers=1)) as scorer:
            truth_use = scorer.truth_use
        names = ", ".join(function.description for function in reward_functions(section))
        return [Finding(CHECK, "ok", names + ("" if truth_use == "required" else "; no ground truth is needed"))]

    found = list(findings_of(CHECK, load))
    return truth_use, found


def reward_call_findings(
    config: Config, data_sets: Mapping[str, DataSet], tokenizer: PreTrainedTokenizerBase, truth_use: TruthUse
) -> Iterator[Finding]:
    """Call the reward functions once, on the first row that they would score, and report what they return.

    Args:
        data_sets: Rows of the files, by their config keys.
        truth_use: Use of the ground truth by the functions.
    """
    key = TRAIN_FILES if trains_on_rewards(config) else VAL_FILES
    if key in data_sets:
        yield from findings_of(CALL, partial(_call, config, data_sets[key], tokenizer, truth_use))


def _call(
    config: Config, data_set: DataSet, tokenizer: PreTrainedTokenizerBase, truth_use: TruthUse
) -> Iterator[Finding]:
    relaxed = replace(config.data, filter_overlong_prompts=True)
    data = PromptData(data_set[:MAX_ROWS], relaxed, tokenizer)
    prompt = data.prompt(0, 0)
    ids_T = prompt.ids[:_RESPONSE_TOKENS]  # any text that the tokenizer can decode
    zeros_T = np.zeros(len(ids_T), np.float32)
    response = Response(
        uid=0, ids=ids_T, logprobs=zeros_T, finish_reason="stop", weights_version=0, versions_T=zeros_T.astype(np.int32)
    )
    if has_conversations(config):
        text = tokenizer.decode(ids_T.tolist())
        transcript = Transcript(
            messages=[{"role": "assistant", "content": text}], n_turns=1, end="stop", step_rewards=(0.0,)
        )
        response = replace(response, transcript=transcript)
    section = replace(config.custom_reward_function, num_workers=1, on_failure="fail")
    skip = section.skip_special_tokens
    items = RewardItems(data, config.data, tokenizer, truth_use=truth_use, skip_special_tokens=skip)
    item = items.build_item(prompt, response)
    with RewardScorer(section) as scorer:
        [reward] = asyncio.run(scorer.score([item]))
    assert reward is not None  # a failure is an error
    yield Finding(CALL, "ok", f"returns {reward.score:g} for the response {shorten(item.response, _SHOWN_CHARS)!r}")

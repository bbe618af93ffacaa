"""Checks of the data files, and of their prompts with the chat template. At most 256 rows are tokenized."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from recipe_gkd.commands.doctor.findings import Finding, findings_of
from recipe_gkd.config import Config
from recipe_gkd.config.conditions import runs_validation, trains_on_references, trains_on_rewards, weights_column
from recipe_gkd.config.keys import TRAIN_FILES, VAL_FILES
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import DataSet, read_data_set
from recipe_gkd.data.weights import read_weights
from recipe_gkd.rewards import RewardItems
from recipe_gkd.rewards.items import TruthUse

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MAX_ROWS = 256
_MANY = 0.5
"""Smallest fraction of overlong prompts that is reported."""


def read_data_sets(config: Config) -> tuple[dict[str, DataSet], list[Finding]]:
    """Read the data files of the run.

    Returns:
        Config key -> rows of its files, without files that cannot be read, and the findings.
    """
    files = {TRAIN_FILES: (config.data.train_files, config.data.train_max_samples)}
    if runs_validation(config):
        files[VAL_FILES] = (config.data.val_files, config.data.val_max_samples)
    data_sets: dict[str, DataSet] = {}

    def read(key: str) -> list[Finding]:
        names, max_samples = files[key]
        data_sets[key] = read_data_set(names, config.data, key, max_samples)
        return [Finding(key, "ok", f"{len(data_sets[key])} rows: {', '.join(data_sets[key].columns)}")]

    found = [finding for key in files for finding in findings_of(key, partial(read, key))]
    return data_sets, found


def data_findings(
    config: Config, key: str, data_set: DataSet, tokenizer: PreTrainedTokenizerBase, *, truth_use: TruthUse
) -> Iterator[Finding]:
    """Check the columns that the run needs, and tokenize evenly spaced rows.

    Args:
        key: Config key of the files.
        data_set: Rows of the files.
        truth_use: Use of the ground truth by the reward functions.
    """
    for setting, name, purpose in _needed_columns(config, key):
        data_set.find(name, setting=setting, purpose=purpose)
    rows = np.linspace(0, len(data_set) - 1, min(MAX_ROWS, len(data_set))).astype(int)
    some = data_set.take(rows.tolist())
    n_texts = sum(isinstance(row.prompt, str) for row in some)
    template = getattr(tokenizer, "chat_template", None)
    if n_texts < len(some) and not template:
        yield Finding(
            "chat template", "problem",
            f"{config.data.prompt_key} of {key} has chat messages, but the student's tokenizer has no chat template; "
            "use a model with one, put chat_template.jinja into its folder, or use prompts that are strings",
        )  # fmt: skip
        return
    with_references = trains_on_references(config.gkd) and key == TRAIN_FILES
    relaxed = replace(config.data, filter_overlong_prompts=True) if config.data.truncation != "error" else config.data
    data = PromptData(some, relaxed, tokenizer, with_references=with_references)
    if key == TRAIN_FILES and (column := weights_column(config.gkd)) is not None:
        read_weights(some, data.rows, column)
    if key == VAL_FILES or trains_on_rewards(config):
        RewardItems(data, config.data, tokenizer, truth_use=truth_use)  # raises an error without a ground truth
    if n_texts and template:
        yield Finding(
            "chat template", "warning",
            f"{n_texts} of {len(some)} prompts of {key} are strings, which get no chat template, but the tokenizer "
            "has one; if the model was trained with it, use [{'role': 'user', 'content': ...}]",
        )  # fmt: skip
    elif template:
        yield Finding("chat template", "ok", f"renders {len(some)} prompts of {key}")
    lengths = [len(ids) for ids in data.ids]
    n_overlong = len(some) - len(lengths)
    text = f"{min(lengths)} to {max(lengths)} prompt tokens, {n_overlong} of {len(some)} prompts are overlong"
    if n_overlong > _MANY * len(some):
        yield Finding(key, "warning", f"{text}; raise data.max_prompt_length={config.data.max_prompt_length}")
    else:
        yield Finding(key, "ok", text)


def _needed_columns(config: Config, key: str) -> Iterator[tuple[str, str, str]]:
    """Yield config key, column and its purpose."""
    data, teacher = config.data, config.actor_rollout_ref.teacher
    if key == TRAIN_FILES and trains_on_references(config.gkd):
        yield "data.response_key", data.response_key, "with the reference responses"
    if key == TRAIN_FILES and (column := weights_column(config.gkd)) is not None:
        yield "gkd.position_weights_key", column, "with the weights of response tokens"
    if key == TRAIN_FILES and teacher.route_key is not None:
        yield "actor_rollout_ref.teacher.route_key", teacher.route_key, "that names each prompt's teacher"

"""Section ``data``."""

from __future__ import annotations

from typing import Any, Literal

from pydantic.dataclasses import dataclass

from recipe_gkd.config.limits import MAX_BATCH, MAX_INT32, MAX_SEED, MAX_TOKENS
from recipe_gkd.config.schema.fields import STRICT, Files, key
from recipe_gkd.config.schema.unused import (
    NO_REFERENCE_RESPONSES,
    NO_REWARD,
    NO_SOURCES,
    NO_TEACHER,
    NO_VALIDATION,
    needs,
)

Truncation = Literal["error", "left", "right", "middle"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class DataConfig:
    """Training and validation prompts, section ``data``."""

    train_files: Files = key(
        "Files with the training prompts (parquet, arrow, feather, jsonl, json, csv; the last three also with .gz), or "
        "folders of these. A single path is accepted, and paths separated by commas in quotes."
    )
    val_files: Files = key(
        "Files with held-out prompts for validation, like `train_files`. May be empty.", unused=[NO_VALIDATION]
    )
    train_max_samples: int = key(
        "Number of training rows to use: random ones by `seed` if `shuffle` is true, else the first. -1 or 0: all.",
        ge=-1, le=MAX_INT32,
    )  # fmt: skip
    val_max_samples: int = key(
        "Number of validation rows to use, like `train_max_samples`.", unused=[NO_VALIDATION], ge=-1, le=MAX_INT32
    )
    prompt_key: str = key(
        "Column with the prompt: a list of {role, content} messages, their JSON text, or a string. Rows without it may "
        "have `messages` or ShareGPT's `conversations`, whose final assistant message is the reference response."
    )
    apply_chat_template_kwargs: dict[str, Any] = key(
        "Arguments of the tokenizer's chat template, such as `enable_thinking=false`. Command line: "
        "`data.apply_chat_template_kwargs.enable_thinking=false`."
    )
    system_prompt: str | None = key("System message of chats that have none. null: none.")
    tools_key: str | None = key(
        "Column with the tools that the chat template describes: a list of JSON schemas of functions, or its JSON "
        "text. Dots select a field of a structure. In a row without a value, and with null: no tools."
    )
    teacher_prompt_key: str | None = key(
        "Column with the prompt that the teacher sees: messages or a string, like `prompt_key`. Dots select a field of "
        "a structure. In a row without a value, and with null, it is the student's prompt.",
        unused=[NO_TEACHER],
    )
    response_key: str = key(
        "Column with the reference response: a string, or a list of one assistant message. Data without it may have "
        "TRL's `completion`. Used if `gkd.sft_share` or `gkd.warmup_steps` is above 0.",
        unused=[NO_REFERENCE_RESPONSES],
    )
    ground_truth_key: str = key(
        "Column with the ground truth that the reward function receives. Dots select a field of a structure, such as "
        "`reward_model.ground_truth`.",
        unused=[NO_REWARD],
    )
    data_source_key: str = key(
        "Column with the name of the data source. Validation metrics are reported per source, and reward functions "
        "receive the name as `data_source`.",
        unused=[NO_SOURCES],
    )
    max_prompt_length: int = key("Maximum prompt length in tokens, after the chat template.", ge=1, le=MAX_TOKENS)
    max_response_length: int = key(
        "Maximum response length in tokens. Longer responses are truncated.", ge=1, le=MAX_TOKENS
    )
    train_batch_size: int = key("Number of prompts per training step.", ge=1, le=MAX_BATCH)
    shuffle: bool = key("Shuffle the prompts in each epoch. The order depends on `seed` and the epoch only.")
    seed: int = key("Seed of the data order and of sampling.", ge=0, le=MAX_SEED)
    filter_overlong_prompts: bool = key(
        "Drop prompts longer than `max_prompt_length`. The number of dropped prompts is logged."
    )
    truncation: Truncation = key(
        "Treatment of overlong prompts that were not filtered. `error`: the run ends; `left`, `right`, "
        "`middle`: tokens are removed from the start, the end or the middle.",
        unused=[needs(lambda config: config.data.filter_overlong_prompts, False)],
    )

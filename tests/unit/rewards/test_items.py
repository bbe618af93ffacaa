from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe_gkd.addition.task import Problem, write_parquet
from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.config.schema import DataConfig
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import read_data_set
from recipe_gkd.data.samples import Response
from recipe_gkd.data.transcript import Transcript
from recipe_gkd.errors import DataError
from recipe_gkd.quickstart.reward import compute_score
from recipe_gkd.rewards import RewardItem, RewardItems
from tests._support.base_config import base_config
from tests._support.errors import raises


def settings(files: list[Path], **values: Any) -> DataConfig:
    overrides = [f"data.{key}={value}" for key, value in values.items()]
    return base_config(f"data.train_files={[str(file) for file in files]}", *overrides).data


def loaded(files: list[Path], **values: Any) -> tuple[PromptData, DataConfig, Any]:
    tokenizer, config = build_tokenizer(), settings(files, **values)
    return PromptData(read_data_set(config.train_files, config), config, tokenizer), config, tokenizer


def build_item(files: list[Path], index: int, text: str, **values: Any) -> RewardItem:
    """Return the item of prompt ``index`` with the response ``text``."""
    data, config, tokenizer = loaded(files, **values)
    ids = np.array([*tokenizer(text)["input_ids"], tokenizer.eos_token_id], np.int32)
    response = Response(
        uid=9,
        ids=ids,
        logprobs=np.zeros(len(ids), np.float32),
        finish_reason="stop",
        weights_version=0,
        versions_T=np.zeros(len(ids), np.int32),
    )
    return RewardItems(data, config, tokenizer).build_item(data.prompt(index, uid=9), response)


def test_prompt_of_the_environment_replaces_the_prompt_of_the_row(tmp_path: Path) -> None:
    data, config, tokenizer = loaded(table(tmp_path))
    ids = np.array([tokenizer.eos_token_id], np.int32)
    prompt = replace(data.prompt(0, 0), reference_ids=ids)
    messages = [{"role": "user", "content": "7+7="}]
    for own, expected in ((messages, messages), (None, data.data_set[0].prompt)):
        transcript = Transcript(messages=[], n_turns=1, end="stop", prompt=own)
        response = replace(data.reference_response(prompt, 0), transcript=transcript)
        items = RewardItems(data, config, tokenizer, truth_use="unused")
        assert items.build_item(prompt, response).prompt == expected


def test_special_tokens_are_part_of_the_response_if_they_are_not_skipped(tmp_path: Path) -> None:
    data, config, tokenizer = loaded(table(tmp_path))
    ids = np.array([*tokenizer("2")["input_ids"], tokenizer.eos_token_id], np.int32)
    response = data.reference_response(replace(data.prompt(0, 0), reference_ids=ids), 0)
    found = [
        RewardItems(data, config, tokenizer, truth_use="unused", skip_special_tokens=skips)
        .build_item(data.prompt(0, 0), response)
        .response
        for skips in (True, False)
    ]
    assert found == ["2", f"2{tokenizer.eos_token}"]


def table(folder: Path, **columns: list[Any]) -> list[Path]:
    pq.write_table(pa.table({"prompt": ["1+1=", "2+2="], **columns}), folder / "data.parquet")
    return [folder / "data.parquet"]


def test_quickstart_reward_is_one_for_an_exact_answer(tmp_path: Path) -> None:
    problems = [Problem(123, 456), Problem(111, 222)]
    write_parquet(problems, tmp_path / "data.parquet")
    for text, reward in [(problems[1].answer, 1.0), (problems[0].answer, 0.0), ("12", 0.0)]:
        item = build_item([tmp_path / "data.parquet"], 1, text, ground_truth_key="answer")
        assert item.prompt == [{"role": "user", "content": "111+222="}] and item.response == text
        assert item.extra.keys() == {"data_source", "prompt_with_solution"}
        assert item.data_source == "quickstart/addition"
        assert compute_score(item.prompt, item.response, item.ground_truth, item.extra) == reward


def test_dotted_key_reads_a_nested_field_and_keeps_its_column_in_extra(tmp_path: Path) -> None:
    model = [{"style": "rule", "inner": {"truth": "2"}}, None]
    files = table(tmp_path, reward_model=model, level=[1, 2])
    item = build_item(files, 0, "2", ground_truth_key="reward_model.inner.truth")
    assert item == RewardItem(
        uid=9,
        where=f"row 0 of the training data ({files[0]}, row 0)",
        prompt="1+1=",
        response="2",
        ground_truth="2",
        extra={"reward_model": model[0], "level": 1},
        data_source=None,
    )
    second = build_item(files, 1, "2", ground_truth_key="reward_model.inner.truth", data_source_key="level")
    assert second.ground_truth is None and second.data_source == 2


def test_verl_file_needs_no_key(tmp_path: Path) -> None:
    """The columns are those that verl's script for GSM8K writes."""
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": f"{number}+1="}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": str(number + 1)},
            "extra_info": {"split": "train", "index": number, "answer": "...", "question": "..."},
        }
        for number in range(2)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "train.parquet")
    item = build_item([tmp_path / "train.parquet"], 1, "2")
    assert (item.prompt, item.ground_truth, item.data_source) == (rows[1]["prompt"], "2", "openai/gsm8k")
    assert item.extra["extra_info"] == rows[1]["extra_info"]


def test_column_name_with_dots_is_read(tmp_path: Path) -> None:
    item = build_item(table(tmp_path, **{"a.b": ["2", "4"]}), 1, "4", ground_truth_key="a.b")
    assert item.ground_truth == "4" and item.extra == {}


@pytest.mark.parametrize(
    ("key", "row"),
    [("truth", 1), ("model.inner.truth", 0)],
)
def test_missing_truth_raises_if_each_row_must_have_one(tmp_path: Path, key: str, row: int) -> None:
    prompts = ["1+1=", "2+2=", "1+" * 99, "3+3="]  # The third prompt is too long and is dropped.
    model = [{"inner": None}, None, {"inner": {"truth": None}}, {"inner": {"truth": "6"}}]
    pq.write_table(
        pa.table({"prompt": prompts, "truth": ["2", None, None, "6"], "model": model}), tmp_path / "a.parquet"
    )
    pq.write_table(pa.table({"prompt": ["4+4="]}), tmp_path / "b.parquet")
    files = [tmp_path / "a.parquet", tmp_path / "b.parquet"]
    data, config, tokenizer = loaded(files, ground_truth_key=key, max_prompt_length=20, filter_overlong_prompts="true")
    with raises(DataError, file=files[0], row=row, column=key):
        RewardItems(data, config, tokenizer, require_truth=True)
    RewardItems(data, config, tokenizer)  # A validation only measures rewards.


def test_truth_in_every_row_is_accepted(tmp_path: Path) -> None:
    files = table(tmp_path, truth=["2", "4"], model=[{"truth": 2}, {"truth": 4}])
    for key in ("truth", "model.truth"):
        RewardItems(*loaded(files, ground_truth_key=key), require_truth=True)


@pytest.mark.parametrize(
    ("key", "existing"),
    [
        ("truth", ("prompt", "model", "level")),
        ("model.truth", ("answer",)),
        ("model.answer.truth", ()),
        ("level.truth", ()),
    ],
)
def test_missing_column_raises_with_the_existing_ones(tmp_path: Path, key: str, existing: tuple[str, ...]) -> None:
    files = table(tmp_path, model=[{"answer": "2"}, {"answer": "4"}], level=[1, 2])
    with raises(DataError, column=key, existing=existing):
        build_item(files, 0, "2", ground_truth_key=key)

"""Prompts: what a file may hold, what is refused, and that every prompt comes once an epoch from any position."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe_gkd.config import load_config
from recipe_gkd.config.schema import DataConfig
from recipe_gkd.data.prompts import PromptData, PromptLoader, read_table
from recipe_gkd.errors import DataError


class Bytes:
    """A tokenizer: UTF-8 bytes; a chat is its contents with a 1 before each message, and a 2 to answer. 3 ends it."""

    eos_token_id: int | None = 3
    bos_token_id: int | None = None

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        bos = [] if self.bos_token_id is None or not add_special_tokens else [self.bos_token_id]
        return {"input_ids": [*bos, *text.encode()]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        if messages[0]["role"] == "nobody":
            raise ValueError("roles are user and assistant")
        return [token for message in messages for token in [1, *message["content"].encode()]] + [2]


def settings(**values: Any) -> DataConfig:
    return load_config(
        "on_policy_distill_trainer",
        [
            "data.train_files=x",
            "actor_rollout_ref.model.path=x",
            "data.max_prompt_length=8",
            "data.filter_overlong_prompts=false",
            *(f"data.{key}={value}" for key, value in values.items()),
        ],
    ).data


def parquet(folder: Path, rows: dict[str, list[Any]], name: str = "data.parquet") -> list[str]:
    pq.write_table(pa.table(rows), folder / name)
    return [str(folder / name)]


def load(files: list[str], given_answers: bool = False, **values: Any) -> PromptData:
    config = settings(**values)
    return PromptData(read_table(files, config.prompt_key), config, Bytes(), given_answers=given_answers)


def test_chats_strings_and_other_alphabets_are_tokenized(tmp_path: Path) -> None:
    chats = parquet(tmp_path, {"prompt": [[{"role": "user", "content": "ab"}], [{"role": "user", "content": "я"}]]})
    assert [ids.tolist() for ids in load(chats).ids] == [[1, 97, 98, 2], [1, 0xD1, 0x8F, 2]]
    assert [ids.tolist() for ids in load(parquet(tmp_path, {"prompt": ["é"]})).ids] == [[0xC3, 0xA9]]


def test_several_files_are_one_data_set(tmp_path: Path) -> None:
    files = parquet(tmp_path, {"prompt": ["a"], "source": ["one"]}) + parquet(
        tmp_path, {"prompt": ["b", "c"]}, "b.parquet"
    )
    data = load(files)
    assert [data.table["source"][data.prompt(i, uid=i).row].as_py() for i in range(3)] == ["one", None, None]


CHAT = pa.array([[{"role": "user", "content": "b"}]])


@pytest.mark.parametrize(
    ("column", "other"),
    [
        (pa.array([1], pa.int32()), pa.array([1], pa.int64())),
        (pa.array(["1"]), pa.array(["1"], pa.large_string())),
        (pa.array([["1"]]), pa.array([["1"]], pa.large_list(pa.large_string()))),
        (pa.array([{"a": 1}], pa.struct({"a": pa.int32()})), pa.array([{"a": 1}], pa.struct({"a": pa.int64()}))),
        (pa.array([1], pa.int64()), pa.array([1.0])),
    ],
)
def test_files_whose_types_differ_only_in_width_fit_together(tmp_path: Path, column: pa.Array, other: pa.Array) -> None:
    a = parquet(tmp_path, {"prompt": ["a"], "column": column}, "a.parquet")
    b = parquet(tmp_path, {"prompt": pa.array(["b"], pa.large_string()), "column": other}, "b.parquet")
    for files in (a + b, b + a):
        data = load(files)
        assert len(data) == 2 and len({repr(value) for value in data.table["column"].to_pylist()}) == 1


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        (
            {"prompt": CHAT},
            "Field prompt has incompatible types: string vs list.*. Give a column one type in all files",
        ),
        ({"prompt": ["b"], "level": ["high"]}, "Field level has incompatible types: int64 vs string"),
        ({"prompt": ["b"], "level": [0.5]}, "Integer value .* not in range"),
    ],
)
def test_files_whose_types_do_not_fit_together_are_named(tmp_path: Path, rows: dict[str, Any], says: str) -> None:
    files = parquet(tmp_path, {"prompt": ["a"], "level": [2**60 + 1]}) + parquet(tmp_path, rows, "b.parquet")
    with pytest.raises(DataError, match=rf"(?s)data\.parquet, .*b\.parquet do not fit together: .*{says}"):
        load(files)


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    pq.write_table(pa.table([pa.array(["a"])] * 3, names=["prompt", "x", "x"]), tmp_path / "twice.parquet")
    with pytest.raises(DataError, match=r"twice\.parquet: two columns are named x; rename"):
        load([str(tmp_path / "twice.parquet")])


@pytest.mark.parametrize(("truncation", "kept"), [("left", "23456789"), ("right", "01234567"), ("middle", "01236789")])
def test_an_overlong_prompt_is_cut_as_configured(tmp_path: Path, truncation: str, kept: str) -> None:
    data = load(parquet(tmp_path, {"prompt": ["0123456789"]}), truncation=truncation)
    assert bytes(data.ids[0].tolist()).decode() == kept


def test_overlong_prompts_are_filtered_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    data = load(parquet(tmp_path, {"prompt": ["0123456789", "ok"]}), filter_overlong_prompts="true")
    assert data.rows == [1]
    assert "1 of 2 prompts are longer" in caplog.text


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"question": ["a"]}, "no column 'prompt'; it has: question"),
        ({"prompt": pa.array([], pa.string())}, "has no rows"),
        ({"prompt": [3]}, "row 0 .* expected a string"),
        ({"prompt": ["", "a"]}, "row 0 .* has no tokens"),
        ({"prompt": [[]]}, "list of .* that is not empty"),
        ({"prompt": [[{"role": "nobody", "content": "a"}]]}, "chat template refused .* roles are user and assistant"),
        ({"prompt": ["a", "0123456789"]}, "row 1 has 10 tokens, more than data.max_prompt_length=8"),
    ],
)
def test_a_row_or_column_that_cannot_be_used_is_named(tmp_path: Path, rows: dict[str, Any], says: str) -> None:
    with pytest.raises(DataError, match=says):
        load(parquet(tmp_path, rows))


def test_a_missing_file_and_a_file_that_is_no_parquet_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"nowhere\.parquet does not exist"):
        load([str(tmp_path / "nowhere.parquet")])
    (tmp_path / "text.parquet").write_text("hello")
    with pytest.raises(DataError, match="cannot be read as parquet"):
        load([str(tmp_path / "text.parquet")])


def loader(
    tmp_path: Path, rows: int, *, n: int = 1, epochs: int = 1, max_steps: int | None = None, **values: Any
) -> PromptLoader:
    data = load(parquet(tmp_path, {"prompt": [f"{i:03}" for i in range(rows)]}), **values)
    return PromptLoader(data, settings(**values), n=n, epochs=epochs, max_steps=max_steps)


@pytest.mark.parametrize("batch", [1, 2, 3, 7, 10, 100])
def test_every_prompt_comes_once_an_epoch_at_any_batch_size(tmp_path: Path, batch: int) -> None:
    batches = list(loader(tmp_path, 10, epochs=3, train_batch_size=batch).batches(0, first_step=0))
    rows = [prompt.row for one in batches for prompt in one.prompts]
    assert [sorted(rows[i : i + 10]) for i in (0, 10, 20)] == [list(range(10))] * 3
    assert rows[:10] != rows[10:20]  # each epoch is shuffled anew
    assert {len(one.prompts) for one in batches[:-1]} <= {batch}
    assert [one.step for one in batches] == list(range(len(batches)))
    assert batches[-1].epoch == 3.0


@pytest.mark.parametrize("position", [0, 4, 12, 28])
def test_a_restored_position_goes_on_where_the_run_would_have(tmp_path: Path, position: int) -> None:
    prompts = loader(tmp_path, 10, epochs=3, train_batch_size=4)
    whole = list(prompts.batches(0, first_step=0))
    rest = list(prompts.batches(position, first_step=position // 4))
    assert [[p.uid for p in b.prompts] for b in rest] == [[p.uid for p in b.prompts] for b in whole[position // 4 :]]
    assert prompts.last_step(position, position // 4) == len(whole)


def test_each_of_n_answers_has_a_number_of_its_own(tmp_path: Path) -> None:
    batch = next(loader(tmp_path, 4, n=3, train_batch_size=2).batches(0, first_step=0))
    assert [prompt.uid for prompt in batch.prompts] == [0, 1, 2, 3, 4, 5]
    assert len({prompt.row for prompt in batch.prompts}) == 2


def test_total_training_steps_stops_before_the_epochs_do(tmp_path: Path) -> None:
    prompts = loader(tmp_path, 10, epochs=5, max_steps=3, train_batch_size=4)
    assert len(list(prompts.batches(0, first_step=0))) == prompts.last_step(0, 0) == 3


def test_total_training_steps_goes_over_as_many_epochs_as_it_takes(tmp_path: Path) -> None:
    prompts = loader(tmp_path, 10, epochs=1, max_steps=9, train_batch_size=4)
    batches = list(prompts.batches(0, first_step=0))
    assert len(batches) == prompts.last_step(0, 0) == 9
    assert {len(batch.prompts) for batch in batches} == {4}
    rows = [prompt.row for batch in batches for prompt in batch.prompts]
    assert [sorted(rows[i : i + 10]) for i in (0, 10, 20)] == [list(range(10))] * 3
    assert batches[-1].epoch == 3.6
    assert prompts.last_step(36, step=9) == 9  # a run that is resumed at its end
    rest = list(prompts.batches(20, first_step=5))
    assert [[p.uid for p in b.prompts] for b in rest] == [[p.uid for p in b.prompts] for b in batches[5:]]


def test_the_order_depends_on_the_seed_and_not_on_the_process(tmp_path: Path) -> None:
    def rows(**values: Any) -> list[int]:
        return [p.row for b in loader(tmp_path, 50, **values).batches(0, first_step=0) for p in b.prompts]

    assert rows(seed=1) == rows(seed=1) != rows(seed=2)
    assert rows(shuffle="false") == list(range(50))
    assert np.array_equal(np.sort(rows(seed=3)), np.arange(50))


@pytest.mark.parametrize(("batch", "steps_left"), [(4, 2), (8, 2), (2, 2)])
def test_a_limit_of_steps_counts_steps_even_if_the_batch_size_changes_on_resume(
    tmp_path: Path, batch: int, steps_left: int
) -> None:
    prompts = loader(tmp_path, 10, epochs=9, max_steps=5, train_batch_size=batch)  # 3 steps of 4 are done
    assert len(list(prompts.batches(12, first_step=3))) == steps_left
    assert prompts.last_step(12, step=3) == 5


def given_loader(tmp_path: Path, rows: int, share: float, *, n: int = 2, **values: Any) -> PromptLoader:
    columns = {"prompt": [f"{i:03}" for i in range(rows)], "response": [f"answer {i}" for i in range(rows)]}
    data = load(parquet(tmp_path, columns), given_answers=True, **values)
    return PromptLoader(data, settings(**values), n=n, epochs=2, max_steps=None, sft_share=share)


def is_given_by_place(prompts: PromptLoader, position: int = 0) -> list[bool]:
    """Of each prompt of the stream, once."""
    batches = prompts.batches(position, first_step=position // prompts.config.train_batch_size)
    by_place: dict[int, list[bool]] = {}
    for batch in batches:
        for prompt in batch.prompts:
            by_place.setdefault(prompt.uid // prompts.n, []).append(prompt.reference_ids is not None)
    assert all(given in ([True], [False] * prompts.n) for given in by_place.values())  # once, or n times
    assert prompts.total_prompts is not None
    assert list(by_place) == list(range(position, prompts.total_prompts))
    return [given[0] for given in by_place.values()]


@pytest.mark.parametrize("share", [0.0, 0.01, 0.1, 0.29, 1 / 3, 0.5, 0.9, 1.0])
def test_a_share_of_the_prompts_comes_once_with_its_given_answer_evenly_in_any_window(
    tmp_path: Path, share: float
) -> None:
    given = np.cumsum([0, *is_given_by_place(given_loader(tmp_path, 100, share, train_batch_size=7))])
    assert given[100] == int(share * 100 + 1e-9)
    for width in (1, 7, 30, 100):
        assert (np.abs(given[width:] - given[:-width] - share * width) < 1 + 1e-3).all()


def test_given_answers_are_at_the_same_places_after_a_restart(tmp_path: Path) -> None:
    prompts = given_loader(tmp_path, 50, 0.3, train_batch_size=4)
    assert is_given_by_place(prompts, position=36) == is_given_by_place(prompts)[36:]


def test_a_given_answer_ends_with_the_end_of_sequence_unless_it_is_cut(tmp_path: Path) -> None:
    rows = {"prompt": ["a"] * 3, "solution": ["12345", "1234", "123456789"]}
    data = load(parquet(tmp_path, rows), given_answers=True, response_key="solution", max_response_length=5)
    responses = [data.reference_response(data.prompt(i, uid=7, given=True), version=4) for i in range(3)]
    assert [bytes(response.ids.tolist()) for response in responses] == [b"12345", b"1234\x03", b"12345"]
    assert [response.finish_reason for response in responses] == ["length", "stop", "length"]
    assert responses[1].uid == 7 and responses[1].weights_version == 4 and responses[1].versions_T.tolist() == [4] * 5
    assert responses[1].logprobs.tolist() == [0.0] * 5


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"answer": ["b"]}, "no column data.response_key=response; it has: prompt, answer. Set data.response_key"),
        ({"response": [""]}, "row 0 .* the answer in column 'response' is ''; expected a string that is not empty"),
        ({"response": pa.array([None], pa.string())}, "row 0 .* is None"),
        ({"response": [["b"]]}, r"row 0 .* is \['b'\]; expected a string"),
    ],
)
def test_a_given_answer_that_cannot_be_used_is_named(tmp_path: Path, rows: dict[str, Any], says: str) -> None:
    files = parquet(tmp_path, {"prompt": ["a"], **rows})
    with pytest.raises(DataError, match=says):
        load(files, given_answers=True)
    load(files)  # as long as nobody needs it


def test_a_given_answer_that_brings_its_end_gets_no_second_one(tmp_path: Path) -> None:
    """Neither the tokenizer's, nor another at which a sampled answer ends."""
    rows = {"prompt": ["a"] * 4, "response": ["ab\x03", "ab\x04", "ab", "abcdefgh\x03"]}
    config = settings(max_response_length=6)
    table = read_table(parquet(tmp_path, rows), "prompt")
    data = PromptData(table, config, Bytes(), given_answers=True, stop_token_ids=(4,))
    assert [ids.tolist() for ids in data.reference_ids] == [[97, 98, 3], [97, 98, 4], [97, 98, 3], list(b"abcdef")]
    responses = [data.reference_response(data.prompt(i, uid=i, given=True), version=0) for i in range(4)]
    assert [response.finish_reason for response in responses] == ["stop", "stop", "stop", "length"]


def test_a_string_prompt_has_one_begin_of_sequence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bytes, "bos_token_id", 5)
    data = load(parquet(tmp_path, {"prompt": ["ab", "\x05ab", "a\x05\x05"]}))
    assert [ids.tolist() for ids in data.ids] == [[5, 97, 98], [5, 97, 98], [5, 97, 5, 5]]


def test_a_message_without_content_is_refused_unless_it_calls_tools(tmp_path: Path) -> None:
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    files = parquet(tmp_path, {"prompt": [[{"role": "user", "content": "a"}, call]]})
    assert load(files).ids[0].tolist() == [1, 97, 1, 2]
    files = parquet(tmp_path, {"prompt": [[{"role": "user", "content": "a"}], [{"role": "user", "content": None}]]})
    with pytest.raises(DataError, match=r"row 1 .* content of message 0 \(role 'user'\) is null; expected a string"):
        load(files)


def test_fields_that_a_message_does_not_have_are_not_shown_to_the_template(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All messages of a column have the same fields: templates ask if `tool_calls` is there."""
    shown: list[dict[str, str]] = []
    monkeypatch.setattr(Bytes, "apply_chat_template", lambda _, messages, **__: shown.extend(messages) or [1])
    call = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}
    load(parquet(tmp_path, {"prompt": [[{"role": "user", "content": "a"}, call]]}))
    assert shown == [{"role": "user", "content": "a"}, call | {"content": ""}]


def test_given_answers_need_an_end_of_sequence_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Bytes, "eos_token_id", None)
    with pytest.raises(DataError, match="no end-of-sequence token"):
        load(parquet(tmp_path, {"prompt": ["a"], "response": ["b"]}), given_answers=True)


def test_fingerprint_depends_on_the_prompts_and_their_order_and_not_on_the_day(tmp_path: Path) -> None:
    class Dated(Bytes):
        """Chats begin with a date, as with ``strftime_now`` in the template of Llama 3.2."""

        def __init__(self, day: int) -> None:
            self.day = day

        def apply_chat_template(self, messages: list[dict[str, str]], **options: Any) -> list[int]:
            return [self.day, *super().apply_chat_template(messages, **options)]

    def of(*texts: str, day: int = 1, **values: Any) -> str:
        files = parquet(tmp_path, {"prompt": [[{"role": "user", "content": text}] for text in texts]})
        return PromptData(read_table(files, "prompt"), settings(**values), Dated(day)).fingerprint

    assert of("ab", "c") == of("ab", "c", day=2)
    assert len({of("ab", "c"), of("c", "ab"), of("a", "bc"), of("abc"), of("ab", "d"), of("ab", "c", "d")}) == 6
    assert of("ab", "much too long", "c", filter_overlong_prompts="true") == of("ab", "c")


def test_reference_responses_have_a_fingerprint_of_their_own_if_they_are_trained_on(tmp_path: Path) -> None:
    def of(*texts: str, given_answers: bool = True) -> tuple[str, str]:
        files = parquet(tmp_path, {"prompt": ["a", "much too long", "b"], "response": list(texts)})
        data = load(files, given_answers=given_answers, filter_overlong_prompts="true")
        return data.fingerprint, data.answers_fingerprint

    assert of("x", "y", "z") == of("x", "of a row that is not used", "z") != of("x", "y", "other")
    assert of("x", "y", "z")[0] == of("x", "y", "other")[0] == of("x", "y", "z", given_answers=False)[0]
    assert of("x", "y", "z", given_answers=False)[1] == "" and len(of("x", "y", "z")[1]) == 32

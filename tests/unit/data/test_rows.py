"""Rows of a data set: the same in all formats, and errors that name file, row and column."""

from __future__ import annotations

import csv
import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings

from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.data.files import FORMATS, SUFFIXES
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import DataSet, read_data_set
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.errors import DataError
from recipe_gkd.rewards import RewardItems
from tests._support.base_config import base_config
from tests._support.errors import raises

CONFIG = base_config("data.tools_key=tools", "data.max_prompt_length=100000").data
TOKENIZER = build_tokenizer()
TOKENIZER.chat_template = (
    "{% for tool in tools or [] %}{{ tool | tojson(sort_keys=true) }}{% endfor %}"
    "{% for m in messages %}{{ m.role }}{{ m.content }}"
    "{{ m.tool_calls | tojson(sort_keys=true) if m.tool_calls else '' }}{% endfor %}"
)
"""A column of Arrow has one order of fields, so a template that prints them in the order of the file gives others."""
Values = dict[str, Any]


def write_jsonl(path: Path, rows: list[Values]) -> None:
    path.write_text("\n".join(map(json.dumps, rows)))


def write_jsonl_gz(path: Path, rows: list[Values]) -> None:
    path.write_bytes(gzip.compress("\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()))


def write_json(path: Path, rows: list[Values]) -> None:
    path.write_text(json.dumps(rows, indent=1, ensure_ascii=False), encoding="utf-8")


def write_parquet(path: Path, rows: list[Values]) -> None:
    pq.write_table(pa.Table.from_pylist(rows), path)


def write_feather(path: Path, rows: list[Values]) -> None:
    feather.write_feather(pa.Table.from_pylist(rows), str(path))


def write_arrow_file(path: Path, rows: list[Values]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def write_arrow_stream(path: Path, rows: list[Values]) -> None:
    table = pa.Table.from_pylist(rows)
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_stream(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def as_text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def write_csv(path: Path, rows: list[Values]) -> None:
    """Write objects and lists as JSON text, and other values as text."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(rows[0])
        writer.writerows([as_text(row[name]) for name in rows[0]] for row in rows)


WRITERS: dict[str, Callable[[Path, list[Values]], None]] = {
    "a.jsonl": write_jsonl,
    "a.jsonl.gz": write_jsonl_gz,
    "a.json": write_json,
    "a.parquet": write_parquet,
    "a.feather": write_feather,
    "file.arrow": write_arrow_file,
    "stream.arrow": write_arrow_stream,
}

TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
ARGUMENTS = st.dictionaries(st.just("city"), TEXT, min_size=1) | st.fixed_dictionaries(
    {"expression": TEXT}, optional={"digits": st.integers(0, 9), "names": st.lists(TEXT, min_size=1, max_size=2)}
)
CALL = st.fixed_dictionaries({"name": TEXT, "arguments": ARGUMENTS})
TOOL = st.fixed_dictionaries({"name": TEXT, "parameters": ARGUMENTS})
MESSAGE = st.fixed_dictionaries({"role": st.sampled_from(["user", "system", "tool"]), "content": TEXT}) | (
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": TEXT, "tool_calls": st.lists(CALL, min_size=1, max_size=2)}
    )
)
CHAT = st.lists(MESSAGE, min_size=1, max_size=3)
ROW = st.fixed_dictionaries(
    {
        "prompt": CHAT,
        "response": TEXT,
        "tools": st.none() | st.lists(TOOL, min_size=1, max_size=2),
        "ground_truth": st.none() | TEXT,
        "data_source": TEXT,
        "extra_info": st.fixed_dictionaries({"index": st.integers(0, 9), "note": st.none() | TEXT}),
        "level": st.none() | st.integers(-(2**62), 2**62),
    }
)


def as_parts(messages: list[Values]) -> list[Values]:
    """Return messages whose contents are lists of parts, cut at each character."""
    return [
        message | {"content": [{"type": "text", "text": character} for character in message["content"]]}
        for message in messages
    ]


def as_sharegpt(messages: list[Values]) -> list[Values]:
    names = {"user": "human", "assistant": "gpt", "system": "system", "tool": "observation"}
    return [
        {"from": names[m["role"]], "value": m["content"], **{k: v for k, v in m.items() if k == "tool_calls"}}
        for m in messages
    ]


FORMS: dict[str, Callable[[list[Values]], Any]] = {
    "messages": lambda messages: messages,
    "parts": as_parts,
    "ShareGPT": as_sharegpt,
    "JSON text": json.dumps,
    "JSON text of parts": lambda messages: json.dumps(as_parts(messages)),
}


def read(path: Path, *overrides: str) -> DataSet:
    return read_data_set([str(path)], base_config(*overrides).data if overrides else CONFIG)


def parts_of(data_set: DataSet) -> list[tuple[Any, ...]]:
    return [(row.prompt, row.response, row.tools, row.ground_truth, row.data_source) for row in data_set]


def reward_arguments(data_set: DataSet, data: PromptData) -> list[dict[str, Any]]:
    items = RewardItems(data, CONFIG, TOKENIZER, truth_use="optional")
    ids = np.zeros(0, np.int32)
    response = Response(
        uid=0, ids=ids, logprobs=np.zeros(0, np.float32), finish_reason="stop", weights_version=0, versions_T=ids
    )
    return [items.build_item(Prompt(uid=0, ids=ids, row=row), response).arguments for row in range(len(data_set))]


@settings(max_examples=30, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ROW, min_size=1, max_size=4), form=st.sampled_from(list(FORMS)))
def test_rows_are_equal_in_all_formats(tmp_path: Path, rows: list[Values], form: str) -> None:
    written = [row | {"prompt": FORMS[form](row["prompt"])} for row in rows]
    expected = [
        tuple(row[name] for name in ("prompt", "response", "tools", "ground_truth", "data_source")) for row in rows
    ]
    expected_extra = [{k: v for k, v in row.items() if k not in ("prompt", "ground_truth")} for row in rows]
    fingerprints, ids = set(), set()
    for name, write in WRITERS.items():
        write(tmp_path / name, written)
        data_set = read(tmp_path / name)
        data = PromptData(data_set, CONFIG, TOKENIZER)
        assert parts_of(data_set) == expected, name
        arguments = reward_arguments(data_set, data)
        assert [one["extra"] for one in arguments] == expected_extra, name
        assert [one["prompt"] for one in arguments] == [row["prompt"] for row in rows], name
        assert [one["ground_truth"] for one in arguments] == [row["ground_truth"] for row in rows], name
        fingerprints.add(data.fingerprint)
        ids.add(str([each.tolist() for each in data.ids]))
    assert len(fingerprints) == len(ids) == 1


@settings(max_examples=10, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.lists(ROW, min_size=1, max_size=4))
def test_rows_of_csv_are_those_of_other_formats(tmp_path: Path, rows: list[Values]) -> None:
    """A csv file has text only: objects are JSON text, and there is no null."""
    rows = [row | {"ground_truth": row["ground_truth"] or ""} for row in rows]
    write_csv(tmp_path / "a.csv", rows)
    assert parts_of(read(tmp_path / "a.csv")) == [
        tuple(row[name] for name in ("prompt", "response", "tools", "ground_truth", "data_source")) for row in rows
    ]


TWO = [{"role": "user", "content": "1"}]
BAD_MESSAGES: list[Any] = [
    [{"role": "user", "content": [{"type": "image", "text": None}]}],
    [{"role": "user", "content": None}],
    [{"role": None, "content": "1"}],
    [{"from": "someone", "value": "1"}],
    [],
    str(TWO),
]


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("bad", BAD_MESSAGES)
def test_malformed_prompt_names_file_row_and_column(tmp_path: Path, name: str, bad: Any) -> None:
    good = "1" if isinstance(bad, str) else as_parts(TWO) if bad and isinstance(bad[0].get("content"), list) else TWO
    WRITERS[name](tmp_path / name, [{"prompt": good}, {"prompt": bad}])
    line = 2 if "jsonl" in name else None
    data_set = read(tmp_path / name, "data.tools_key=null")
    assert data_set[0].prompt == ("1" if isinstance(bad, str) else TWO)
    with raises(DataError, file=tmp_path / name, row=1, line=line, column="prompt"):
        _ = data_set[1].prompt


@pytest.mark.parametrize("content", [5, {"a": 1}, [{"type": "text", "text": 5}], [5]])
def test_content_that_is_no_text_is_refused(tmp_path: Path, content: Any) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": [{"role": "user", "content": content}]}])
    with raises(DataError, row=0, line=1, column="prompt"):
        _ = read(tmp_path / "a.jsonl", "data.tools_key=null")[0].prompt


def test_text_that_begins_like_messages_stays_text(tmp_path: Path) -> None:
    texts = [
        '[{"role": "user", "content": "1"}] Continue this chat.',
        '[{"a": 1}]',
        "[{x}]",
        '[{"role": 1}, {"b": 2}]',
        "[" * 2000 + "{" + "]" * 2000,
    ]
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": text} for text in texts])
    assert [row.prompt for row in read(tmp_path / "a.jsonl", "data.tools_key=null")] == texts


def test_tool_calls_in_json_text_are_recognized(tmp_path: Path) -> None:
    calls = [{"type": "function", "function": {"name": "f", "arguments": {"x": None}}}]
    chat = [{"role": "assistant", "tool_calls": json.dumps(calls)}, *TWO]
    for name in ("a.jsonl", "a.parquet"):
        WRITERS[name](tmp_path / name, [{"prompt": chat}])
    [row] = read(tmp_path / "a.jsonl", "data.tools_key=null")
    assert row.prompt == [{"role": "assistant", "content": "", "tool_calls": calls}, *TWO]
    write_jsonl(tmp_path / "a.jsonl", [{"prompt": [{"role": "assistant", "tool_calls": "f"}]}])
    with raises(DataError, row=0, line=1, column="prompt"):
        _ = read(tmp_path / "a.jsonl", "data.tools_key=null")[0].prompt


@pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
def test_arguments_in_json_text_are_parsed(tmp_path: Path, name: str) -> None:
    """A template that prints ``arguments | tojson`` would print JSON text as a text."""
    text, parsed = '{"x": null, "y": [1]}', {"x": None, "y": [1]}
    functions = [{"name": "f", "arguments": arguments} for arguments in (text, "[1]", "x")]
    calls = [{"function": function} for function in functions]
    for found, expected in ((calls, {"function": functions[0] | {"arguments": parsed}}), (functions, None)):
        WRITERS[name](tmp_path / name, [{"prompt": [{"role": "assistant", "tool_calls": found}, *TWO]}])
        prompt = read(tmp_path / name, "data.tools_key=null")[0].prompt
        assert isinstance(prompt, list)
        assert prompt[0]["tool_calls"] == [expected or functions[0] | {"arguments": parsed}, *found[1:]]


class TestConversations:
    USER, ASSISTANT = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}

    @pytest.mark.parametrize("column", ["messages", "conversations"])
    @pytest.mark.parametrize("form", list(FORMS))
    @pytest.mark.parametrize("key", [None, "own"])
    @pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
    def test_final_assistant_message_is_the_response(
        self, tmp_path: Path, column: str, form: str, key: str | None, name: str
    ) -> None:
        chats = [[self.USER, self.ASSISTANT], [self.USER, self.ASSISTANT, self.USER]]
        WRITERS[name](tmp_path / name, [{column: FORMS[form](chat), "x": 1} for chat in chats])
        overrides = [] if key is None else [f"data.prompt_key={column}"]
        found = read(tmp_path / name, "data.tools_key=null", *overrides)
        assert [(row.prompt, row.response) for row in found] == [(chats[0][:1], "2"), (chats[1], None)]
        assert [row.extra for row in found] == [{"x": 1, "response": "2"}, {"x": 1, "response": None}]

    @pytest.mark.parametrize("completion", [[ASSISTANT], as_parts([ASSISTANT]), "2"])
    @pytest.mark.parametrize("key", ["response", "completion"])
    def test_completion_of_trl_is_the_response(self, tmp_path: Path, completion: Any, key: str) -> None:
        for name, write in WRITERS.items():
            write(tmp_path / name, [{"prompt": [self.USER], "completion": completion}])
            config = base_config(f"data.response_key={key}").data
            data_set = read_data_set([str(tmp_path / name)], config)
            assert [(row.prompt, row.response) for row in data_set] == [([self.USER], "2")]
            data = PromptData(data_set, config, TOKENIZER, with_references=True)
            assert data.reference_ids[0].tolist() == [*TOKENIZER("2")["input_ids"], TOKENIZER.eos_token_id]

    @pytest.mark.parametrize("name", ["a.jsonl", "a.parquet"])
    @pytest.mark.parametrize("column", ["messages", "completion"])
    def test_response_with_a_tool_call_is_refused_if_it_is_read(self, tmp_path: Path, name: str, column: str) -> None:
        call = {"role": "assistant", "content": "Let me see.", "tool_calls": [{"name": "f"}]}
        row = {"messages": [self.USER, call]} if column == "messages" else {"prompt": "1", "completion": [call]}
        WRITERS[name](tmp_path / name, [row])
        config = base_config().data
        data_set = read_data_set([str(tmp_path / name)], config)
        PromptData(data_set, config, TOKENIZER)
        assert data_set[0].extra.get("response") is None
        with raises(DataError, row=0, column=column):
            PromptData(data_set, config, TOKENIZER, with_references=True)

    def test_completion_of_several_messages_is_refused(self, tmp_path: Path) -> None:
        completion = [self.ASSISTANT, self.USER, self.ASSISTANT]
        write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1", "completion": completion}])
        with raises(DataError, row=0, line=1, column="completion"):
            _ = read(tmp_path / "a.jsonl", "data.tools_key=null")[0].response


class TestUnreadColumns:
    """A column that is not read cannot stop a run."""

    def test_mixed_types_and_large_numbers_keep_their_values(self, tmp_path: Path) -> None:
        values = ["0", 1, 2.5, None, [1], {"z": [1]}, {"z": "1"}, 10**30, True]
        write_jsonl(tmp_path / "a.jsonl", [{"prompt": "1", "extra_info": value} for value in values])
        found = read(tmp_path / "a.jsonl", "data.tools_key=null")
        assert [row.extra["extra_info"] for row in found] == values
        assert found.describe("extra_info") == ("text or int or float or list or object or bool", 1)

    def test_unreadable_value_is_an_error_only_if_it_is_read(
        self, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        far = pa.array([2**30, 0], pa.int32()).cast(pa.date32())  # a year after 9999
        broken = pa.StringArray.from_buffers(2, pa.py_buffer(np.array([0, 1, 2], np.int32)), pa.py_buffer(b"\xffa"))
        path = tmp_path / "a.parquet"
        pq.write_table(pa.table({"prompt": ["1", "2"], "when": far, "note": broken}), path)
        found = read(path, "data.tools_key=null")
        PromptData(found, CONFIG, TOKENIZER)
        assert found[0].extra["when"] is None and found[1].extra["note"] == "a"
        assert f"{path}: column when has values that cannot be read" in caplog.text
        truth = read(path, "data.ground_truth_key=when")
        with raises(DataError, file=path, row=0, column="when"):
            _ = truth[0].ground_truth

    def test_deep_value_is_an_error_only_if_it_is_read(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        deep = "[" * 300 + "]" * 300
        (tmp_path / "a.jsonl").write_text(f'{{"prompt": "1", "x": {deep}}}\n{{"prompt": {deep}}}')
        found = read(tmp_path / "a.jsonl", "data.tools_key=null")
        assert found[0].prompt == "1" and found[0].extra == {"x": None}
        assert "2 rows have" in caplog.text
        with raises(DataError, row=1, line=2, column="prompt"):
            _ = found[1].prompt

    def test_half_of_a_character_is_replaced(self, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
        text = '{"prompt": "1\\ud83d", "x": ["\\ud83d"]}\n{"prompt": "\\ud83d\\ude00"}\n{"prompt": "\\\\ud83d"}'
        (tmp_path / "a.jsonl").write_text(text)
        found = read(tmp_path / "a.jsonl", "data.tools_key=null")
        assert [row.prompt for row in found] == ["1\ufffd", "\U0001f600", "\\ud83d"]
        assert found[0].extra == {"x": ["\ufffd"]}
        assert "1 rows have halves of surrogate pairs" in caplog.text and "the first is line 1" in caplog.text


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "text", "row", "line"),
        [
            ("a.jsonl", '{"prompt": "1"}\n\n{"prompt": "2"}\n{"prompt" "3"}\n', None, 4),
            ("a.jsonl", '{"prompt": "1"}\n[1]', None, 2),
            ("a.jsonl", '{"prompt": "1"}\n{"x": ' + "[" * 2000 + "]" * 2000 + "}", None, 2),
            ("a.json", '[\n{"prompt": "1"},\n{"prompt": 2 3}]', 1, 3),
            ("a.json", '[{"prompt": "1"}, [' + "[" * 2000, 1, None),
            ("a.json", '[{"prompt": "1"}, 5]', 1, None),
            ("a.json", '[{"prompt": "1"}] 5', 1, 1),
            ("a.csv", 'prompt,x\n1,2\n"a\nb",4\n5\n', None, 5),
            ("a.csv", 'prompt,x\n1,"2\n', None, 2),
            ("a.arrow", "hello", None, None),
            ("a.jsonl.gz", "hello", None, None),
            ("a.txt", "hello", None, None),
        ],
    )
    def test_broken_file_names_the_line(
        self, tmp_path: Path, name: str, text: str, row: int | None, line: int | None
    ) -> None:
        (tmp_path / name).write_text(text)
        with raises(DataError, file=tmp_path / name, row=row, line=line):
            read(tmp_path / name)

    def test_unknown_suffix_is_an_error_with_the_formats(self, tmp_path: Path) -> None:
        (tmp_path / "a.txt").write_text("hello")
        with raises(DataError, details=(f"its suffix is none of the formats: {FORMATS}",)):
            read(tmp_path / "a.txt")

    @pytest.mark.parametrize(
        ("name", "content", "line"),
        [
            ("a.jsonl", b'{"prompt": "1"}\n{"prompt": "\xff"}', 2),
            ("a.json", b'[{"prompt": "1"},\n{"prompt": "\xff"}]', 2),
            ("a.csv", b"prompt\n1\n\xff\n", 1),
        ],
    )
    def test_other_encoding_names_the_line(self, tmp_path: Path, name: str, content: bytes, line: int) -> None:
        (tmp_path / name).write_bytes(content)
        with raises(DataError, file=tmp_path / name, line=line) as caught:
            read(tmp_path / name)
        assert isinstance(caught.value.__cause__, UnicodeDecodeError)

    def test_files_of_all_formats_are_one_data_set(self, tmp_path: Path) -> None:
        """Also of a folder, and of paths that are separated by commas."""
        for number, (name, write) in enumerate(WRITERS.items()):
            write(tmp_path / name, [{"prompt": [{"role": "user", "content": name}], name: number}])
        (tmp_path / "dataset_info.json").write_text("{}")  # of save_to_disk
        found = read(tmp_path, "data.tools_key=null")
        assert [row.prompt[0]["content"] for row in found] == sorted(WRITERS)  # type: ignore[index]
        assert sorted(found.columns) == sorted(["prompt", *WRITERS])
        paths = [str(tmp_path / name) for name in WRITERS]
        [joined] = [read_data_set([", ".join(paths)], base_config().data)]
        assert [row.prompt[0]["content"] for row in joined] == list(WRITERS)  # type: ignore[index]
        assert {"." + name.split(".", 1)[1] for name in WRITERS} <= set(SUFFIXES)

    def test_path_with_a_comma_is_one_file(self, tmp_path: Path) -> None:
        write_jsonl(tmp_path / "a,b.jsonl", [{"prompt": "1"}])
        assert len(read(tmp_path / "a,b.jsonl", "data.tools_key=null")) == 1

    def test_batches_of_nested_text_are_small(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Arrow refuses more than 2 GiB of nested text at a time; here the limit of a batch is 1 KiB."""
        monkeypatch.setattr("recipe_gkd.data.arrow_rows._BATCH_BYTES", 1024)
        rows = [{"prompt": [{"role": "user", "content": f"{number} {'x' * 300}"}]} for number in range(20)]
        pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet", use_dictionary=False)
        sizes: list[int] = []
        original = pq.ParquetFile.iter_batches

        def iter_batches(file: Any, batch_size: int) -> Any:
            sizes.append(batch_size)
            if batch_size > 1:
                raise pa.ArrowNotImplementedError("Nested data conversions not implemented for chunked array outputs")
            return original(file, batch_size)

        monkeypatch.setattr(pq.ParquetFile, "iter_batches", iter_batches)
        found = read(tmp_path / "a.parquet", "data.tools_key=null")
        assert [row.prompt for row in found] == [row["prompt"] for row in rows]
        assert sizes[0] <= 4 and sizes[-1] == 1


class TestMaxSamples:
    def prompts(self, tmp_path: Path, *overrides: str) -> list[Any]:
        write_jsonl(tmp_path / "a.jsonl", [{"prompt": str(number)} for number in range(100)])
        config = base_config(f"data.train_files={tmp_path / 'a.jsonl'}", *overrides).data
        found = read_data_set(config.train_files, config, max_samples=config.train_max_samples)
        assert [row.index for row in found] == list(range(len(found)))
        assert all(f"line {int(row.prompt) + 1})" in row.where for row in found)  # type: ignore[arg-type]
        return [int(row.prompt) for row in found]  # type: ignore[arg-type]

    def test_first_rows_without_shuffle_and_random_ones_with_it(self, tmp_path: Path) -> None:
        ten = "data.train_max_samples=10"
        assert self.prompts(tmp_path, ten, "data.shuffle=false") == list(range(10))
        chosen = self.prompts(tmp_path, ten, "data.seed=3")
        assert len(set(chosen)) == 10 and chosen == sorted(chosen) != list(range(10))
        assert chosen == self.prompts(tmp_path, ten, "data.seed=3") != self.prompts(tmp_path, ten, "data.seed=4")
        for all_rows in ("-1", "100", "1000"):
            assert self.prompts(tmp_path, f"data.train_max_samples={all_rows}") == list(range(100))


class TestMemory:
    """Rows need little more memory than their file, because they become Python objects one at a time."""

    @pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.csv"])
    def test_rows_need_at_most_twice_the_size_of_their_text(self, tmp_path: Path, name: str) -> None:
        rows = [
            {"prompt": [{"role": "user", "content": f"{n} " + "x" * 200}], "extra_info": {"n": n}} for n in range(5000)
        ]
        (WRITERS | {"a.csv": write_csv})[name](tmp_path / name, rows)
        size = max(sum(len(json.dumps(row)) for row in rows), (tmp_path / name).stat().st_size)
        arrow_before = pa.total_allocated_bytes()
        tracemalloc.start()
        found = read(tmp_path / name, "data.tools_key=null")
        for row in found:
            assert row.prompt
        stored, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        arrow = pa.total_allocated_bytes() - arrow_before
        assert stored + arrow < 2 * size and peak + arrow < 5 * size

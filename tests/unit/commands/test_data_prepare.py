"""``data prepare``: conversion, held-out rows and errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from recipe_gkd.commands.data import main, prepare
from recipe_gkd.commands.data.prepare import ANSWER_HINT
from recipe_gkd.data.rows import read_data_set
from tests._support.base_config import base_config


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


def rows_of(path: Path) -> list[dict[str, Any]]:
    return pq.read_table(path).to_pylist()


def test_gsm8k_has_messages_solution_and_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train = write(
        tmp_path / "train.jsonl", [{"question": "How many? ", "answer": "6*3=<<6*3=18>>18 eggs.\n#### 1,018"}]
    )
    held_out = write(tmp_path / "test.jsonl", [{"question": "2?", "answer": "#### -2"}])
    output = tmp_path / "out"
    assert main(["prepare", "gsm8k", train, "--val", held_out, "--output", str(output)]) == 0
    assert rows_of(output / "train.parquet") == [
        {
            "prompt": [{"role": "user", "content": f"How many? {ANSWER_HINT}"}],
            "response": "6*3=18 eggs.\n#### 1,018",
            "ground_truth": "1018",
            "data_source": "gsm8k",
        }
    ]
    [row] = rows_of(output / "val.parquet")
    assert (row["ground_truth"], row["response"]) == ("-2", "#### -2")
    out = capsys.readouterr().out
    assert f"data.train_files={output}/train.parquet data.val_files={output}/val.parquet" in out
    assert main(["inspect", str(output / "train.parquet")]) == 0


def test_csv_columns_are_renamed_and_others_kept(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("question,answer,level\n1+1,2,easy\n,3,easy\n2+2,4,hard\n")
    columns = ["--prompt-column", "question", "--response-column", "answer", "--ground-truth-column", "answer"]
    fixed = ["--data-source", "sums", "--system", "Be brief."]
    assert main(["prepare", "csv", str(tmp_path / "a.csv"), *columns, *fixed, "--output", str(tmp_path)]) == 0
    rows = rows_of(tmp_path / "train.parquet")
    system = {"role": "system", "content": "Be brief."}
    assert [row["prompt"] for row in rows] == [[system, {"role": "user", "content": text}] for text in ("1+1", "2+2")]
    assert [(r["response"], r["ground_truth"], r["level"], r["data_source"]) for r in rows] == [
        ("2", "2", "easy", "sums"),
        ("4", "4", "hard", "sums"),
    ]
    assert not (tmp_path / "val.parquet").exists()


def test_held_out_rows_depend_on_the_seed_and_share_no_prompt(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": str(n % 90), "n": n} for n in range(100)])

    def split(name: str, seed: int) -> tuple[list[int], list[int]]:
        arguments = ["--val-fraction", "0.2", "--seed", str(seed), "--output", str(tmp_path / name)]
        assert main(["prepare", "csv", file, *arguments]) == 0
        return tuple([row["n"] for row in rows_of(tmp_path / name / f"{part}.parquet")] for part in ("train", "val"))  # type: ignore[return-value]

    train, held_out = split("a", seed=1)
    assert len(held_out) == 20 and not {n % 90 for n in train} & {n % 90 for n in held_out}
    assert f"dropped {80 - len(train)} training rows whose prompt is in the validation data" in capsys.readouterr().out
    assert split("b", seed=1) == (train, held_out) and split("c", seed=2)[1] != held_out


@pytest.mark.parametrize(
    ("name", "row", "arguments", "message"),
    [
        ("gsm8k", {"question": "1?", "answer": "18"}, [], "row 0 of .*'18' does not end with '#### <number>'"),
        ("gsm8k", {"question": "1?", "solution": "18"}, [], "there is no column 'answer'; the files have: question"),
        ("csv", {"question": "1?"}, [], "has no column 'prompt'; it has: question; name it with --prompt-column"),
        ("csv", {"prompt": "1?"}, ["--response-column", "answer"], "there is no column 'answer'.*--response-column"),
        ("csv", {"prompt": "1?"}, ["--val-fraction", "1"], "--val-fraction 1: expected a fraction from 0"),
        ("csv", {"prompt": " "}, [], "no row of the files has a prompt; correct the files"),
        ("gsm8k", {"question": "1?", "answer": 18}, [], "row 0 of .*line 1.*'18' does not end with '#### <number>'"),
        (
            "gsm8k",
            {"question": ["1?"], "answer": "#### 1"},
            [],
            r"line 1\): the question is \['1\?'\]; expected a text",
        ),
        ("csv", {"prompt": "1", "x": [1, "a"]}, [], "the values of column x cannot be written as parquet"),
        ("csv", {"prompt": {"a": 1}}, [], r"line 1\), column prompt: the prompt is {'a': 1}; expected a string"),
    ],
)
def test_unusable_input_is_refused_and_writes_nothing(
    tmp_path: Path,
    name: str,
    row: dict[str, Any],
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    file = write(tmp_path / "a.jsonl", [row])
    assert main(["prepare", name, file, *arguments, "--output", str(tmp_path / "out")]) == 1
    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert not (tmp_path / "out").exists()


def test_existing_output_is_kept_without_overwrite_and_if_the_write_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise OSError("no space")

    file = write(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": "2"}])
    command = ["prepare", "csv", file, "--output", str(tmp_path)]
    assert main([*command, "--val-fraction", "0.5"]) == 0
    assert main(command) == 1
    assert "train.parquet exists; choose another --output, or replace it with --overwrite" in capsys.readouterr().err
    assert len(rows_of(tmp_path / "train.parquet")) == 1
    monkeypatch.setattr(prepare.pq, "write_table", fail)
    assert main([*command, "--overwrite"]) == 1
    assert "no space" in capsys.readouterr().err and len(rows_of(tmp_path / "train.parquet")) == 1
    monkeypatch.undo()
    assert main([*command, "--overwrite"]) == 0
    assert "removed" in capsys.readouterr().out
    assert len(rows_of(tmp_path / "train.parquet")) == 2 and not (tmp_path / "val.parquet").exists()


@pytest.mark.parametrize("arguments", [[], ["--prompt-column", "messages"]])
def test_final_message_of_a_conversation_is_the_response(tmp_path: Path, arguments: list[str]) -> None:
    user, final = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
    call = final | {"tool_calls": [{"name": "f"}]}
    chats = [[user, final], [user], [user, call]]
    file = write(tmp_path / "a.jsonl", [{"messages": chat} for chat in chats])
    assert main(["prepare", "csv", file, *arguments, "--output", str(tmp_path)]) == 0
    found = read_data_set([str(tmp_path / "train.parquet")], base_config().data)
    assert [(row.prompt, row.response) for row in found] == [([user], "2"), ([user], None), ([user], None)]


def test_column_with_the_name_of_an_output_column_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    row = {"question": "1+1", "answer": 2, "prompt": "a", "ground_truth": "b", "data_source": "c", "response": "d"}
    file = write(tmp_path / "a.jsonl", [row])
    columns = ["--prompt-column", "question", "--response-column", "answer", "--data-source", "sums"]
    assert main(["prepare", "csv", file, *columns, "--output", str(tmp_path)]) == 0
    assert rows_of(tmp_path / "train.parquet") == [
        {
            "prompt": [{"role": "user", "content": "1+1"}],
            "response": "2",
            "data_source": "sums",
            "original_prompt": "a",
            "original_data_source": "c",
            "original_response": "d",
            "ground_truth": "b",
        }
    ]
    assert "the column prompt of the files is kept as original_prompt" in capsys.readouterr().out
    file = write(tmp_path / "b.jsonl", [row | {"original_prompt": "e"}])
    assert main(["prepare", "csv", file, *columns, "--output", str(tmp_path), "--overwrite"]) == 1
    assert "has the columns prompt and original_prompt" in capsys.readouterr().err


def test_numbers_and_messages_become_prompts(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": [{"type": "text", "text": "2?"}]}]
    file = write(tmp_path / "a.jsonl", [{"prompt": 1}, {"prompt": chat}, {"prompt": None}, {}])
    assert main(["prepare", "csv", file, "--output", str(tmp_path), "--system", "s"]) == 0
    system = {"role": "system", "content": "s"}
    assert [row["prompt"] for row in rows_of(tmp_path / "train.parquet")] == [
        [system, {"role": "user", "content": text}] for text in ("1", "2?")
    ]
    file = write(tmp_path / "g.jsonl", [{"question": 5, "answer": "#### 5"}])
    assert main(["prepare", "gsm8k", file, "--output", str(tmp_path / "g")]) == 0
    assert rows_of(tmp_path / "g" / "train.parquet")[0]["prompt"][0]["content"] == f"5 {ANSWER_HINT}"


def test_small_fraction_holds_out_one_row(tmp_path: Path) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": "1"}, {"prompt": "2"}])
    assert main(["prepare", "csv", file, "--val-fraction", "0.1", "--output", str(tmp_path)]) == 0
    assert len(rows_of(tmp_path / "train.parquet")) == len(rows_of(tmp_path / "val.parquet")) == 1


@pytest.mark.parametrize(("n_rows", "n_held_out"), [(2, 1), (3, 2), (1, 0)])
def test_large_fraction_leaves_a_training_row(tmp_path: Path, n_rows: int, n_held_out: int) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": str(number)} for number in range(n_rows)])
    assert main(["prepare", "csv", file, "--val-fraction", "0.9", "--output", str(tmp_path)]) == 0
    assert len(rows_of(tmp_path / "train.parquet")) == n_rows - n_held_out
    assert (tmp_path / "val.parquet").exists() == (n_held_out > 0)


def test_training_prompts_that_are_all_held_out_are_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = write(tmp_path / "a.jsonl", [{"prompt": "1"}])
    assert main(["prepare", "csv", file, "--val", file, "--output", str(tmp_path)]) == 1
    assert "the prompts of all 1 are held out; give files with other prompts" in capsys.readouterr().err


def test_home_folder_is_expanded_in_all_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "a.jsonl", [{"prompt": "1"}])
    write(tmp_path / "b.jsonl", [{"prompt": "2"}])
    assert main(["prepare", "csv", "~/a.jsonl", "--val", "~/b.jsonl", "--output", "~/out"]) == 0
    assert len(rows_of(tmp_path / "out" / "val.parquet")) == 1


def test_gsm8k_row_without_question_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    chat = {"answer": "#### 2", "messages": [{"role": "user", "content": "x"}]}
    file = write(tmp_path / "a.jsonl", [{"question": "q", "answer": "#### 2"}, chat])
    assert main(["prepare", "gsm8k", file, "--output", str(tmp_path)]) == 1
    message = capsys.readouterr().err
    assert "the question is None; expected a text; correct or remove the row" in message and "bug" not in message

"""Formats of data files, conversations, and ``data inspect``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from recipe_gkd.addition.tokenizer import build_tokenizer
from recipe_gkd.commands.data import main
from recipe_gkd.commands.data.inspect import describe_prompts
from recipe_gkd.data.rows import DataSet, read_data_set
from recipe_gkd.errors import DataError
from tests._support.base_config import base_config
from tests._support.data_sets import data_set_of
from tests._support.errors import raises

ROWS = [{"prompt": "1", "answer": "007"}, {"prompt": "2", "answer": "2020-01-01"}]


def read(path: Path, **keys: str) -> DataSet:
    return read_data_set([str(path)], base_config(*(f"data.{key}={value}" for key, value in keys.items())).data)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.jsonl", "\n".join(map(json.dumps, ROWS)) + "\n"),
        ("a.json", json.dumps(ROWS)),
        ("a.csv", "prompt,answer\n1,007\n2,2020-01-01\n"),
    ],
)
def test_text_files_and_folders_keep_text(tmp_path: Path, name: str, text: str) -> None:
    (tmp_path / "train").mkdir()
    (tmp_path / "train" / name).write_text(text)
    for path in (tmp_path / "train" / name, tmp_path):
        assert [{"prompt": row.prompt, **row.extra} for row in read(path)] == ROWS


@pytest.mark.parametrize("key", ["prompt", "messages"])
def test_final_assistant_message_is_the_response(tmp_path: Path, key: str) -> None:
    user, assistant = {"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}
    (tmp_path / "a.json").write_text(json.dumps([{"messages": [user, assistant]}, {"messages": [user]}]))
    rows = read(tmp_path / "a.json", prompt_key=key, response_key="reply")
    assert [(row.prompt, row.response) for row in rows] == [([user], "2"), ([user], None)]
    assert [row.extra for row in rows] == [{"reply": "2"}, {"reply": None}]


@pytest.mark.parametrize(
    ("name", "text", "fields"),
    [
        ("a.jsonl", "{", {"line": 1}),
        ("a.json", "[1]", {"row": 0, "line": None}),
        ("a.csv", "prompt,prompt\n1,2\n", {"column": "prompt", "existing": None}),
        ("a.csv", "", {"line": 1}),
        ("a.json", '{\n "data": []}', {"line": 1}),
        ("a.jsonl", '{"n": 99999999999999999999}', {"column": "prompt", "existing": ("n",)}),
        ("a.json", "[]", {"column": "prompt", "existing": ()}),
    ],
)
def test_unusable_file_is_named(tmp_path: Path, name: str, text: str, fields: dict[str, Any]) -> None:
    (tmp_path / name).write_text(text)
    with raises(DataError, file=tmp_path / name, **fields):
        read(tmp_path / name)


def test_folder_without_data_is_refused(tmp_path: Path) -> None:
    with raises(DataError, file=tmp_path):
        read(tmp_path)


class TestInspect:
    def test_inspect_shows_columns_lengths_and_dropped_rows(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        build_tokenizer().save_pretrained(tmp_path / "model")
        (tmp_path / "model/config.json").write_text("{}")
        file = tmp_path / "a, b.jsonl"
        file.write_text("\n".join(json.dumps({"prompt": "1" * n, "answer": n}) for n in (1, 2, 3)))
        model = f"actor_rollout_ref.model.path={tmp_path / 'model'}"
        assert main(["inspect", str(file), model, "data.max_prompt_length=2", "--row", "1"]) == 0
        out = capsys.readouterr().out
        assert "3 rows" in out
        assert "no ground truth: there is no column data.ground_truth_key=ground_truth" in out
        assert "prompt tokens: min 1, median 2" in out
        assert "1 of 3 are longer than data.max_prompt_length=2 and are dropped" in out
        assert "prompt of row 1, 2 tokens:\n  | 11\ntokens: ['1', '1']" in out

    def test_inspect_without_model_shows_columns_only(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "a.csv").write_text("prompt,answer\n1,2\n")
        assert main(["inspect", str(tmp_path / "a.csv")]) == 0
        assert "add actor_rollout_ref.model.path=FOLDER" in capsys.readouterr().out

    def test_inspect_uses_the_model_of_the_config_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        build_tokenizer().save_pretrained(tmp_path / "model")
        (tmp_path / "model/config.json").write_text("{}")
        model = f"actor_rollout_ref: {{model: {{path: {tmp_path / 'model'}}}}}"
        (tmp_path / "mine.yaml").write_text(f"defaults: [on_policy_distill_trainer, _self_]\n{model}\n")
        (tmp_path / "a.csv").write_text("prompt\n11\n")
        own = ["--config-path", str(tmp_path), "--config-name", "mine"]
        assert main(["inspect", *own, str(tmp_path / "a.csv")]) == 0
        assert "prompt tokens: min 2" in capsys.readouterr().out
        missing = f"actor_rollout_ref.model.path={tmp_path / 'none'}"
        assert main(["inspect", *own, str(tmp_path / "a.csv"), missing]) == 1
        assert f"{missing}: {tmp_path / 'none'} does not exist" in capsys.readouterr().err

    @pytest.mark.parametrize("command", [["data", "inspect", "FILE"], ["--help"]])
    def test_command_whose_output_is_closed_ends_without_error(self, tmp_path: Path, command: list[str]) -> None:
        """``head`` closes the pipe when it has seen enough."""
        (tmp_path / "FILE").with_suffix(".csv").write_text("prompt\n" + "1\n" * 9)
        arguments = [str(tmp_path / "FILE.csv") if part == "FILE" else part for part in command]
        reader, writer = os.pipe()
        os.close(reader)
        done = subprocess.run(
            [sys.executable, "-m", "recipe_gkd", *arguments],
            stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60, check=False,
        )  # fmt: skip
        os.close(writer)
        assert (done.returncode, done.stderr) == (0, "")

    def test_inspect_reads_as_many_rows_as_a_run(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "a.csv").write_text("prompt\n1\n2\n3\n")
        assert main(["inspect", str(tmp_path / "a.csv"), "data.train_max_samples=2"]) == 0
        assert capsys.readouterr().out.startswith("2 rows\n")

    def test_inspect_names_unusable_reference_responses(self, tmp_path: Path) -> None:
        columns = {"prompt": ["1", "2"], "response": [["x"], ["y"]]}
        data_set = data_set_of(columns)
        lines = list(describe_prompts(data_set, base_config().data, build_tokenizer(), 0))
        assert any(line.startswith("2 reference responses cannot be used; the first: row 0 of") for line in lines)

    def test_inspect_unknown_action_is_refused(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["show"]) == main([]) == 2
        assert "expected: data inspect FILE" in capsys.readouterr().err
        assert main(["inspect"]) == 1
        assert "no file was given; expected: data inspect FILE" in capsys.readouterr().err
        with pytest.raises(SystemExit):
            main(["--help"])
        out = capsys.readouterr().out
        assert "--row" in out and "--val-fraction" in out


def test_folder_skips_hidden_files_and_long_csv_cells_are_read(tmp_path: Path) -> None:
    long = "x" * (3 << 20)
    (tmp_path / "a.csv").write_text(f"prompt,answer\n{long},1\n2,3\n")
    (tmp_path / ".ipynb_checkpoints").mkdir()
    for name in (".hidden.jsonl", ".ipynb_checkpoints/b.jsonl"):
        (tmp_path / name).write_text('{"prompt": "hidden"}\n')
    assert [row.prompt for row in read(tmp_path)] == [long, "2"]


def test_message_without_text_and_large_lists_are_split(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "1"}, {"role": "assistant", "name": "f"}]
    column = pa.array([messages], pa.large_list(pa.struct([(n, pa.string()) for n in ("role", "content", "name")])))
    pq.write_table(pa.table({"messages": column}), tmp_path / "a.parquet")
    [row] = read(tmp_path / "a.parquet")
    assert row.prompt == [{"role": "user", "content": "1"}] and row.response is None

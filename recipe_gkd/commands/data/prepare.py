"""Command ``data prepare``: convert raw files to the training format of ``docs/data.md``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recipe_gkd.config import load_config
from recipe_gkd.config.schema.fields import expand_home
from recipe_gkd.data.files import FORMATS
from recipe_gkd.data.rows import CONVERSATIONS, DataSet, Row, read_data_set
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import DataError

DESCRIPTION = f"""Convert raw files to chat messages, and divide them into training and validation data.

python -m recipe_gkd data prepare gsm8k train.jsonl --val test.jsonl --output data/gsm8k
python -m recipe_gkd data prepare csv faq.csv --prompt-column question --response-column answer --val-fraction 0.1 \\
    --output data/faq

gsm8k reads the files of the data set of this name: questions, and solutions that end with "#### <number>".
csv reads files of all formats with one column per text: {FORMATS}.
All other columns are kept. One whose name the output needs for another becomes original_NAME.
"""
ANSWER_HINT = 'Reason step by step, and write the final number after "####".'
"""Instruction after each question of GSM8K, in the format of its solutions."""
CALCULATION = re.compile(r"<<[^>]*>>")
"""Annotation in the solutions of GSM8K for a calculator that a model could call."""
TRAIN, VALIDATION = "train.parquet", "val.parquet"

OutputRow = dict[str, Any]


@dataclass
class Converted:
    """Rows of files in the training format.

    Attributes:
        n_empty: Number of rows without a prompt, which were dropped.
        renamed: Columns with the name of an output column, which became ``original_NAME``.
    """

    rows: list[OutputRow] = field(default_factory=list)
    n_empty: int = 0
    renamed: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Split:
    """Rows of the output.

    Attributes:
        validation: Held-out rows, which may be empty.
        n_empty: Number of rows without a prompt, which were dropped.
        n_shared: Number of training rows whose prompt is held out, which were dropped.
        renamed: Columns with the name of an output column, and their names in the output.
    """

    train: list[OutputRow]
    validation: list[OutputRow]
    n_empty: int
    n_shared: int
    renamed: dict[str, str]


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
        Exit status: 0 if the files are written, 1 after an error.
    """
    arguments = make_parser().parse_args(argv)
    try:
        print("\n".join(prepare(arguments)))
    except Exception as error:  # noqa: BLE001 - the command prints one error instead of a traceback
        print(f"error: {as_known_error(error, 'data prepare')}", file=sys.stderr)
        return 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe_gkd data prepare",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("format", choices=["gsm8k", "csv"], help="format of the files")
    parser.add_argument(
        "files", nargs="+", type=expand_home, metavar="FILE", help="files or folders with the training rows"
    )
    parser.add_argument("--output", type=_path, required=True, help=f"folder for {TRAIN} and {VALIDATION}")
    parser.add_argument(
        "--val", nargs="+", type=expand_home, default=[], metavar="FILE", help="files with the validation rows"
    )
    parser.add_argument(
        "--val-fraction",
        type=float,
        default=0.0,
        help="fraction of the rows that is held out: at least one row, and not all",
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of held-out rows")
    parser.add_argument("--prompt-column", default="prompt", help="csv: column with the user's text (default: prompt)")
    parser.add_argument("--response-column", help="csv: column with the reference response")
    parser.add_argument("--ground-truth-column", help="csv: column that a reward function compares responses with")
    parser.add_argument("--data-source", help="name of the data in metrics (default: gsm8k, or none)")
    parser.add_argument("--system", help="system message of each prompt")
    parser.add_argument("--overwrite", action="store_true", help="replace existing output files")
    return parser


def _path(value: str) -> Path:
    return Path(expand_home(value))


def prepare(arguments: argparse.Namespace) -> Iterator[str]:
    """Convert the files, write the output, and yield lines that describe it.

    Raises:
        DataError: A file or a row cannot be used, or an output file exists.
    """
    paths = arguments.output / TRAIN, arguments.output / VALIDATION
    if not arguments.overwrite and (existing := [path for path in paths if path.exists()]):
        remedy = "choose another --output, or replace it with --overwrite"
        raise DataError(f"{existing[0]} exists", remedy=remedy, file=existing[0])
    split = _split(arguments)
    columns = [
        name
        for name in ("prompt", "response", "ground_truth", "data_source")
        if any(name in row for row in split.train)
    ]
    for path, rows in zip(paths, (split.train, split.validation), strict=True):
        if rows:
            write_rows(rows, path)
            yield f"wrote {path}: {len(rows)} rows with {', '.join(columns)}"
        elif path.exists():  # the validation rows of an earlier call
            path.unlink()
            yield f"removed {path}, because no rows are held out"
    for name, other in split.renamed.items():
        yield f"the column {name} of the files is kept as {other}"
    if split.n_empty:
        yield f"dropped {split.n_empty} rows without a prompt"
    if split.n_shared:
        yield f"dropped {split.n_shared} training rows whose prompt is in the validation data"
    model = "actor_rollout_ref.model.path=FOLDER"
    validation = f" data.val_files={paths[1]}" if split.validation else ""
    yield f"inspect: python -m recipe_gkd data inspect {paths[0]} {model}"
    yield f"train:   python -m recipe_gkd.main_gkd data.train_files={paths[0]}{validation} {model} ..."


def _split(arguments: argparse.Namespace) -> Split:
    fraction = arguments.val_fraction
    if not 0 <= fraction < 1 or (fraction and arguments.val):
        raise DataError(
            f"--val-fraction {fraction:g}{' with --val' if arguments.val else ''}: expected a fraction from 0 to less "
            "than 1, or the files of --val instead",
            remedy="correct it",
        )
    found = read_rows(arguments.files, arguments)
    train, n_empty, renamed = found.rows, found.n_empty, found.renamed
    validation: list[OutputRow] = []
    if arguments.val:
        held_out_rows = read_rows(arguments.val, arguments)
        validation, n_empty = held_out_rows.rows, n_empty + held_out_rows.n_empty
        renamed = renamed | held_out_rows.renamed
    elif fraction and train:
        order = np.random.default_rng(arguments.seed).permutation(len(train))
        n_held_out = min(max(1, round(fraction * len(train))), len(train) - 1)  # one row remains for training
        held_out = set(order[:n_held_out].tolist())
        validation = [row for index, row in enumerate(train) if index in held_out]
        train = [row for index, row in enumerate(train) if index not in held_out]
    held_out_prompts = {str(row["prompt"]) for row in validation}
    kept = [row for row in train if str(row["prompt"]) not in held_out_prompts]
    if not kept:
        reason = f"the prompts of all {len(train)} are held out" if train else "no row of the files has a prompt"
        remedy = (
            "give files with other prompts, or leave out --val and --val-fraction" if train else "correct the files"
        )
        raise DataError(f"no training row is left: {reason}", remedy=remedy)
    return Split(kept, validation, n_empty, len(train) - len(kept), renamed)


def read_rows(files: Sequence[str], arguments: argparse.Namespace) -> Converted:
    """Return the converted rows of files."""
    is_gsm8k = arguments.format == "gsm8k"
    prompt_column = "question" if is_gsm8k else arguments.prompt_column
    needed = ["answer"] if is_gsm8k else [arguments.response_column, arguments.ground_truth_column]
    data_set = _read_columns(files, prompt_column, [name for name in needed if name is not None], arguments.format)
    source = arguments.data_source or ("gsm8k" if is_gsm8k else None)
    fixed = {} if source is None else {"data_source": source}
    found = Converted()
    for row in data_set:
        prompt = _text(row.values.get(prompt_column))
        is_chat = prompt is None and any(row.values.get(name) for name in CONVERSATIONS)
        if (prompt is None and not is_chat) or (isinstance(prompt, str) and not prompt.strip()):
            found.n_empty += 1
            continue
        with row.locate_errors():
            made = (convert_gsm8k(row) if is_gsm8k else convert_columns(row, arguments)) | fixed
            made["prompt"] = _messages(made["prompt"], arguments.system)
            others = {} if is_gsm8k else _other_columns(row, data_set.columns, arguments)
            found.rows.append(_without_collisions(others, made, row.where, found.renamed) | made)
    return found


def _read_columns(files: Sequence[str], prompt_column: str, needed: Sequence[str], file_format: str) -> DataSet:
    unset = ["data.train_files=none", "actor_rollout_ref.model.path=none"]
    config = replace(load_config("on_policy_distill_trainer", unset).data, prompt_key=prompt_column)
    try:
        data_set = read_data_set(files, config, "the files")
    except DataError as error:
        if error.existing is None:
            raise
        remedy = "name it with --prompt-column" if file_format == "csv" else f"{file_format} needs this column"
        raise error.replaced(remedy=remedy) from error
    if absent := [name for name in needed if name not in data_set.columns]:
        raise DataError(
            f"{', '.join(files)}: there is no column {absent[0]!r}; the files have: {', '.join(data_set.columns)}",
            remedy="name the columns with --prompt-column, --response-column and --ground-truth-column",
            column=absent[0],
            existing=tuple(data_set.columns),
        )
    return data_set


def _text(value: object) -> object:
    """Return a number as text, and other values as they are."""
    return str(value) if isinstance(value, int | float) else value


def _messages(prompt: str | list[dict[str, Any]], system: str | None) -> list[dict[str, Any]]:
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    has_system = any(message["role"] == "system" for message in messages)
    return messages if system is None or has_system else [{"role": "system", "content": system}, *messages]


def convert_gsm8k(row: Row) -> OutputRow:
    """Return a row of GSM8K (Cobbe et al. 2021, arXiv:2110.14168) in the training format, with a text as prompt.

    Raises:
        DataError: The question is no text, or the solution has no final number.
    """
    question, answer = _text(row.values.get("question")), _text(row.values.get("answer"))
    if not isinstance(question, str):
        what = f"{row.where}: the question is {question!r:.200}; expected a text"
        raise DataError(what, remedy="correct or remove the row", column="question")
    solution, separator, number = answer.rpartition("####") if isinstance(answer, str) else ("", "", "")
    if not separator or not number.strip():
        what = f"{row.where}: the answer {answer!r:.200} does not end with '#### <number>'"
        raise DataError(what, remedy="correct or remove it", column="answer")
    return {
        "prompt": f"{question.strip()} {ANSWER_HINT}",
        "response": f"{CALCULATION.sub('', solution).strip()}\n#### {number.strip()}".lstrip(),
        "ground_truth": number.strip().replace(",", ""),
    }


def convert_columns(row: Row, arguments: argparse.Namespace) -> OutputRow:
    """Return the columns that have a name in the training format. The prompt is a text or messages.

    The final assistant message of a conversation is the response, if no column is.
    """
    value = row.values.get(arguments.prompt_column)
    found: OutputRow = {"prompt": str(value) if isinstance(value, int | float) else row.prompt}
    if arguments.response_column is not None:
        found["response"] = _text(row.values.get(arguments.response_column))
    elif row.has_final_response and "response" not in row.columns.names:
        with suppress(DataError):  # matters only if it is trained on
            found["response"] = row.response
    if arguments.ground_truth_column is not None:
        found["ground_truth"] = row.values.get(arguments.ground_truth_column)
    return found


def _other_columns(row: Row, columns: Sequence[str], arguments: argparse.Namespace) -> OutputRow:
    used = {arguments.prompt_column, arguments.response_column, arguments.ground_truth_column}
    return {name: row.value((name,)) for name in columns if name not in used}


def _without_collisions(others: OutputRow, made: OutputRow, where: str, renamed: dict[str, str]) -> OutputRow:
    """Return other columns, with another name for any that has the name of an output column."""
    found = {}
    for name, value in others.items():
        if name in made:
            renamed[name] = f"original_{name}"
            if renamed[name] in others:
                raise DataError(
                    f"{where}: the file has the columns {name} and {renamed[name]}, and {name} is also a column of the "
                    "output",
                    remedy="rename one of them",
                    column=name,
                )
        found[renamed[name] if name in made else name] = value
    return found


def write_rows(rows: Sequence[OutputRow], path: Path) -> None:
    """Write a parquet file, which appears under its name when it is complete.

    Raises:
        DataError: The values of a column have no common type.
    """
    names = list(dict.fromkeys(name for row in rows for name in row))
    table = pa.table({name: _column([row.get(name) for row in rows], name) for name in names})
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    try:
        pq.write_table(table, draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def _column(values: list[Any], name: str) -> pa.Array:
    try:
        return pa.array(values)
    except (pa.ArrowException, OverflowError, TypeError) as error:
        raise DataError(
            f"the values of column {name} cannot be written as parquet: {error}; expected values of one type",
            remedy="correct or remove the column",
            column=name,
        ) from error

"""Command ``data prepare``: convert raw files to the training format of ``docs/data.md``."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from recipe_gkd.data.tables import PROMPT_KEY_HINT, read_table
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import DataError

DESCRIPTION = """Convert raw files to chat messages, and divide them into training and validation data.

python -m recipe_gkd data prepare gsm8k train.jsonl --val test.jsonl --output data/gsm8k
python -m recipe_gkd data prepare csv faq.csv --prompt-column question --response-column answer --val-fraction 0.1 \\
    --output data/faq

gsm8k reads the files of the data set of this name: questions, and solutions that end with "#### <number>".
csv reads csv, jsonl, json and parquet files with one column per text. All other columns are kept.
"""
ANSWER_HINT = 'Reason step by step, and write the final number after "####".'
"""Instruction after each question of GSM8K, in the format of its solutions."""
CALCULATION = re.compile(r"<<[^>]*>>")
"""Annotation in the solutions of GSM8K for a calculator that a model could call."""
TRAIN, VALIDATION = "train.parquet", "val.parquet"

Row = dict[str, Any]


@dataclass(frozen=True)
class Split:
    """Rows of the output.

    Attributes:
        train: Training rows.
        validation: Held-out rows, which may be empty.
        n_empty: Number of rows without a prompt, which were dropped.
        n_shared: Number of training rows whose prompt is held out, which were dropped.
    """

    train: list[Row]
    validation: list[Row]
    n_empty: int
    n_shared: int


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
        Exit status: 0 if the files are written, 1 after an error.
    """
    arguments = make_parser().parse_args(argv)
    try:
        for line in prepare(arguments):
            print(line)
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
    parser.add_argument("files", nargs="+", metavar="FILE", help="files or folders with the training rows")
    parser.add_argument("--output", type=Path, required=True, help=f"folder for {TRAIN} and {VALIDATION}")
    parser.add_argument("--val", nargs="+", default=[], metavar="FILE", help="files with the validation rows")
    parser.add_argument("--val-fraction", type=float, default=0.0, help="fraction of the rows that is held out")
    parser.add_argument("--seed", type=int, default=0, help="seed of the choice of held-out rows")
    parser.add_argument("--prompt-column", default="prompt", help="csv: column with the user's text (default: prompt)")
    parser.add_argument("--response-column", help="csv: column with the reference response")
    parser.add_argument("--ground-truth-column", help="csv: column that a reward function compares responses with")
    parser.add_argument("--data-source", help="name of the data in metrics (default: gsm8k, or none)")
    parser.add_argument("--system", help="system message of each prompt")
    parser.add_argument("--overwrite", action="store_true", help="replace existing output files")
    return parser


def prepare(arguments: argparse.Namespace) -> Iterator[str]:
    """Convert the files, write the output, and yield lines that describe it.

    Raises:
        DataError: A file or a row cannot be used, or an output file exists.
    """
    paths = arguments.output / TRAIN, arguments.output / VALIDATION
    if not arguments.overwrite and (existing := [path for path in paths if path.exists()]):
        raise DataError(f"{existing[0]} exists; choose another --output, or replace it with --overwrite")
    split = _split(arguments)
    columns = [name for name in ("prompt", "response", "ground_truth", "data_source") if name in split.train[0]]
    for path, rows in zip(paths, (split.train, split.validation), strict=True):
        if rows:
            write_rows(rows, path)
            yield f"wrote {path}: {len(rows)} rows with {', '.join(columns)}"
        elif path.exists():  # the validation rows of an earlier call
            path.unlink()
            yield f"removed {path}, because no rows are held out"
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
            "than 1, or the files of --val instead; correct it"
        )
    train, n_empty = read_rows(arguments.files, arguments)
    validation: list[Row] = []
    if arguments.val:
        validation, n_empty_val = read_rows(arguments.val, arguments)
        n_empty += n_empty_val
    elif n_held_out := round(fraction * len(train)):
        order = np.random.default_rng(arguments.seed).permutation(len(train))
        held_out = set(order[:n_held_out].tolist())
        validation = [row for index, row in enumerate(train) if index in held_out]
        train = [row for index, row in enumerate(train) if index not in held_out]
    held_out_prompts = {str(row["prompt"]) for row in validation}
    kept = [row for row in train if str(row["prompt"]) not in held_out_prompts]
    if not kept:
        raise DataError(f"no training row is left of {len(train)}: all have no prompt, or a prompt that is held out")
    return Split(kept, validation, n_empty, len(train) - len(kept))


def read_rows(files: Sequence[str], arguments: argparse.Namespace) -> tuple[list[Row], int]:
    """Return the converted rows of files, and the number of rows without a prompt."""
    convert: Callable[[Row, str], Row]
    if arguments.format == "gsm8k":
        prompt_column, needed, convert = "question", ["answer"], convert_gsm8k
    else:
        prompt_column = arguments.prompt_column
        needed = [name for name in (arguments.response_column, arguments.ground_truth_column) if name is not None]

        def convert(row: Row, where: str) -> Row:
            return convert_columns(row, prompt_column, arguments.response_column, arguments.ground_truth_column)

    try:
        table = read_table(list(files), prompt_column)
    except DataError as error:
        hint = "Name it with --prompt-column" if arguments.format == "csv" else f"{arguments.format} needs this column"
        raise DataError(str(error).replace(PROMPT_KEY_HINT, hint)) from error
    if absent := [name for name in needed if name not in table.column_names]:
        raise DataError(
            f"{', '.join(files)}: there is no column {absent[0]!r}; the files have: {', '.join(table.column_names)}. "
            "Name the columns with --prompt-column, --response-column and --ground-truth-column"
        )
    rows = table.to_pylist()
    source = arguments.data_source or ("gsm8k" if arguments.format == "gsm8k" else None)
    fixed = {} if source is None else {"data_source": source}
    system = [] if arguments.system is None else [{"role": "system", "content": arguments.system}]
    converted = []
    for number, row in enumerate(rows):
        if row[prompt_column] is None or not str(row[prompt_column]).strip():
            continue
        found = convert(row, f"row {number} of {', '.join(files)}")
        found["prompt"] = [*system, {"role": "user", "content": found["prompt"]}]
        converted.append(found | fixed)
    return converted, len(rows) - len(converted)


def convert_gsm8k(row: Row, where: str) -> Row:
    """Return a row of GSM8K (Cobbe et al. 2021, arXiv:2110.14168) in the training format, with a text as prompt.

    Raises:
        DataError: The solution has no final number.
    """
    solution, separator, number = (row["answer"] or "").rpartition("####")
    if not separator or not number.strip():
        raise DataError(
            f"{where}: the answer {row['answer']!r:.200} does not end with '#### <number>'; correct or remove it"
        )
    return {
        "prompt": f"{row['question'].strip()} {ANSWER_HINT}",
        "response": f"{CALCULATION.sub('', solution).strip()}\n#### {number.strip()}".lstrip(),
        "ground_truth": number.strip().replace(",", ""),
    }


def convert_columns(row: Row, prompt: str, response: str | None, ground_truth: str | None) -> Row:
    """Return a row with the names of the training format, and its other columns. The prompt is a text."""
    renamed = {prompt: "prompt", response: "response", ground_truth: "ground_truth"}
    others = {name: value for name, value in row.items() if name not in renamed}
    found = {"prompt": str(row[prompt])}
    if response is not None:
        found["response"] = row[response]
    if ground_truth is not None:
        found["ground_truth"] = row[ground_truth]
    return others | found


def write_rows(rows: Sequence[Row], path: Path) -> None:
    """Write a parquet file, which appears under its name when it is complete."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}")
    try:
        pq.write_table(pa.Table.from_pylist(list(rows)), draft)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)

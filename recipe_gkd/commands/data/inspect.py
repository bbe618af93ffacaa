"""Command ``data inspect``: columns, lengths, dropped rows, and a prompt with its tokens."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from recipe_gkd.commands.arguments import command_parser
from recipe_gkd.config.load import read_config
from recipe_gkd.config.schema import DataConfig
from recipe_gkd.data.prompts import ignores_tools
from recipe_gkd.data.tables import column_at, read_table
from recipe_gkd.data.tokenization import ChatTemplate, render_prompt, tokenize_prompt
from recipe_gkd.data.tools import read_tools
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import DataError
from recipe_gkd.rewards.items import truth_path

DESCRIPTION = """Show a data set as a training run would read it. Neither Ray nor a teacher is needed.

python -m recipe_gkd data inspect FILE [actor_rollout_ref.model.path=FOLDER] [data.prompt_key=question ...]

Prints columns, and with a model: lengths in tokens, rows that would be dropped, and a prompt after the chat template.
"""
SHOWN_CHARS = 60
SHOWN_IDS = 64
PERCENTILES = (0, 50, 90, 99, 100)
_MODEL_KEY, _NO_MODEL = "actor_rollout_ref.model.path", "none"


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
        Exit status: 0 if a run could read the data, 1 after an error.
    """
    try:
        for line in _report(make_parser().parse_args(argv)):
            print(line)
    except Exception as error:  # noqa: BLE001 - the command prints one error instead of a traceback
        print(f"error: {as_known_error(error, 'data inspect')}", file=sys.stderr)
        return 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = command_parser("data inspect", DESCRIPTION)
    parser.add_argument("--row", type=int, default=0, help="row whose prompt is shown, from 0 on")
    parser.usage = "%(prog)s FILE [--row ROW] [--config-name NAME] [--config-dir FOLDER] [key=value ...]"
    return parser


def _report(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the output."""
    file, *overrides = arguments.overrides or [""]
    if not file:
        raise DataError("no file was given; expected: data inspect FILE [key=value ...]")
    given = {override.lstrip("+").partition("=")[0] for override in overrides}
    model = [] if _MODEL_KEY in given else [f"{_MODEL_KEY}={_NO_MODEL}"]
    quoted = file.replace("\\", "\\\\").replace('"', '\\"')
    config = read_config(
        arguments.config_name, [f'data.train_files="{quoted}"', *model, *overrides], arguments.config_dir
    ).config
    table = read_table([file], config.data.prompt_key, config.data.response_key)
    yield from describe_columns(table)
    yield _ground_truth(table, config.data)
    if model:
        yield f"no lengths and no rendered prompt, because no tokenizer is given; add {_MODEL_KEY}=FOLDER"
        return
    from teacher.engines.tokenizer import load_tokenizer

    tokenizer = load_tokenizer(config.actor_rollout_ref.model.path)
    yield from describe_prompts(table, config.data, tokenizer, arguments.row)


def describe_columns(table: pa.Table) -> Iterator[str]:
    """Yield the number of rows, and name, type, number of nulls and first value of each column."""
    yield f"{table.num_rows} rows"
    for name in table.column_names:
        column = table.column(name)
        value = repr(column[0].as_py())
        shown = value if len(value) <= SHOWN_CHARS else f"{value[:SHOWN_CHARS]}..."
        yield f"  {name} ({column.type!s:.60}, {column.null_count} null): {shown}"


def describe_prompts(table: pa.Table, config: DataConfig, tokenizer: Any, shown_row: int) -> Iterator[str]:
    """Yield lengths of the prompts and reference responses, the number of overlong prompts, and one prompt.

    Args:
        table: Rows of the data set.
        config: Settings of the data.
        tokenizer: Tokenizer of the student.
        shown_row: Row whose prompt is shown.

    Raises:
        DataError: A prompt cannot be used, or there is no ``shown_row``.
    """
    if not 0 <= shown_row < table.num_rows:
        raise DataError(f"--row {shown_row}: the data has the rows 0 to {table.num_rows - 1}; choose one of them")
    template = ChatTemplate(config.apply_chat_template_kwargs, config.system_prompt)
    prompts, tools = table.column(config.prompt_key).to_pylist(), read_tools(table, config, "the data")
    ids = [
        tokenize_prompt(prompt, tokenizer, f"row {row}", template=template, tools=tools[row])
        for row, prompt in enumerate(prompts)
    ]
    lengths = np.array([len(each) for each in ids])
    yield f"prompt tokens: {_percentiles(lengths)}"
    overlong = np.flatnonzero(lengths > config.max_prompt_length)
    if len(overlong):
        fate = "dropped (data.filter_overlong_prompts=true)"
        if not config.filter_overlong_prompts:
            fate = f"treated with data.truncation={config.truncation}"
        rows = ", ".join(map(str, overlong[:5])) + (", ..." if len(overlong) > 5 else "")
        limit = f"data.max_prompt_length={config.max_prompt_length}"
        yield f"  {len(overlong)} of {len(ids)} are longer than {limit} and are {fate}: rows {rows}"
    if config.response_key in table.column_names:
        texts = [text for text in table.column(config.response_key).to_pylist() if isinstance(text, str)]
        if texts:
            sizes = np.array([len(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in texts])
            yield f"reference response tokens: {_percentiles(sizes)}"
    if any(isinstance(prompt, str) for prompt in prompts):
        yield "plain text prompts get no chat template" + ("; the tokenizer has one" if tokenizer.chat_template else "")
    if n_with_tools := sum(of_row is not None for of_row in tools):
        ignored = ", which the chat template ignores" if ignores_tools(prompts, tools, tokenizer, template) else ""
        yield f"{n_with_tools} of {len(prompts)} prompts have tools{ignored}"
    text = render_prompt(prompts[shown_row], tokenizer, f"row {shown_row}", template=template, tools=tools[shown_row])
    shown = ids[shown_row][:SHOWN_IDS]
    yield f"prompt of row {shown_row}, {lengths[shown_row]} tokens:"
    yield from (f"  | {line}" for line in text.split("\n"))
    yield f"tokens: {tokenizer.convert_ids_to_tokens(shown.tolist())}" + (
        " ..." if len(shown) < lengths[shown_row] else ""
    )


def _ground_truth(table: pa.Table, config: DataConfig) -> str:
    """Return the line about the column that reward functions compare responses with."""
    try:
        path = truth_path(table, config, "the data")
    except DataError:
        return f"no ground truth: there is no column data.ground_truth_key={config.ground_truth_key}"
    n_null = column_at(table, path).is_null().to_pylist().count(True)
    return f"ground truth: {'.'.join(path)}, {n_null} null"


def _percentiles(lengths: np.ndarray) -> str:
    names = ("min", "median", "90 %", "99 %", "max")
    values = np.percentile(lengths, PERCENTILES, method="nearest")
    return ", ".join(f"{name} {value}" for name, value in zip(names, values.astype(int), strict=True))

"""Command ``data inspect``: columns, lengths, dropped rows, and a prompt with its tokens."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from omegaconf import OmegaConf

from recipe_gkd.commands.arguments import command_parser
from recipe_gkd.commands.data.rollouts import describe_rollouts
from recipe_gkd.config.compose import compose_config
from recipe_gkd.config.keys import MODEL_PATH
from recipe_gkd.config.load import read_config
from recipe_gkd.config.schema import DataConfig
from recipe_gkd.conversations.setup import open_environments
from recipe_gkd.data.prompts import ignores_tools
from recipe_gkd.data.rows import DataSet, Row, read_data_set
from recipe_gkd.data.tokenization import ChatTemplate, render_prompt, tokenize_prompt
from recipe_gkd.data.values import Unreadable
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import ConfigError, DataError
from recipe_gkd.model_files import find_model, load_tokenizer
from recipe_gkd.rollout.offline_engine import limit_torch_logs
from teacher.common.display_text import make_visible, shorten

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

DESCRIPTION = """Show a data set as a training run would read it. Neither Ray nor a teacher is needed.

python -m recipe_gkd data inspect FILE [actor_rollout_ref.model.path=FOLDER] [data.prompt_key=question ...]

Prints columns, and with a model: lengths in tokens, rows that would be dropped, and a prompt after the chat template.
With --rollout N the model answers N prompts in a vLLM engine, with the tools or the environment of the configuration.
"""
SHOWN_CHARS = 60
SHOWN_IDS = 64
TAB = "\t"
PERCENTILES = (0, 50, 90, 99, 100)
_NO_MODEL = "none"


def main(argv: Sequence[str]) -> int:
    """Run the command.

    Returns:
        Exit status: 0 if a run could read the data, 1 after an error.
    """
    limit_torch_logs()
    try:
        for line in _report(make_parser().parse_intermixed_args(argv)):
            print(line)
    except Exception as error:  # noqa: BLE001 - the command prints one error instead of a traceback
        print(f"error: {as_known_error(error, 'data inspect')}", file=sys.stderr)
        return 1
    return 0


def make_parser() -> argparse.ArgumentParser:
    """Return the parser of the command."""
    parser = command_parser("data inspect", DESCRIPTION)
    parser.add_argument("--row", type=int, default=0, help="row whose prompt is shown, from 0 on")
    parser.add_argument(
        "--rollout",
        type=int,
        default=0,
        metavar="N",
        help="also sample a response, or a conversation, for N rows from --row on, and show the part of each token",
    )
    parser.usage = "%(prog)s FILE [--row ROW] [--rollout N] [--config-name NAME] [--config-dir FOLDER] [key=value ...]"
    return parser


def _report(arguments: argparse.Namespace) -> Iterator[str]:
    """Yield the lines of the output."""
    file, *overrides = arguments.overrides or [""]
    if not file:
        raise DataError("no file was given; expected: data inspect FILE [key=value ...]")
    model = [] if _names_model(arguments, overrides) else [f"{MODEL_PATH}={_NO_MODEL}"]
    quoted = file.replace("\\", "\\\\").replace('"', '\\"')
    config = read_config(
        arguments.config_name, [f'data.train_files="{quoted}"', *model, *overrides], arguments.config_dir
    ).config
    data_set = read_data_set(config.data.train_files, config.data, "the data", config.data.train_max_samples)
    yield from describe_columns(data_set)
    yield _ground_truth(data_set, config.data)
    if arguments.rollout < 0 or (arguments.rollout and model):
        raise ConfigError(
            f"--rollout {arguments.rollout}: expected a number of responses of at least 0, and a model",
            remedy=f"add {MODEL_PATH}=FOLDER",
            keys=(MODEL_PATH,),
        )
    if model:
        yield f"no lengths and no rendered prompt, because no tokenizer is given; add {MODEL_PATH}=FOLDER"
        return
    model_config = config.actor_rollout_ref.model
    tokenizer = load_tokenizer(find_model(model_config.path), trust_remote_code=model_config.trust_remote_code)
    with open_environments(config, data_set) as pool:  # their tools are in the prompts
        yield from describe_prompts(data_set, config.data, tokenizer, arguments.row)
        if arguments.rollout > 0:
            rows = range(len(data_set))[arguments.row : arguments.row + arguments.rollout]
            yield from describe_rollouts(config, data_set, rows, tokenizer, pool)


def _names_model(arguments: argparse.Namespace, overrides: Sequence[str]) -> bool:
    """Return True if an override or the config file names the folder of a model."""
    if any(override.lstrip("+").partition("=")[0] == MODEL_PATH for override in overrides):
        return True
    composed = compose_config(arguments.config_name, folder=arguments.config_dir)
    return OmegaConf.select(composed, MODEL_PATH, throw_on_missing=False) is not None


def describe_columns(data_set: DataSet) -> Iterator[str]:
    """Yield the number of rows, and name, type, number of nulls and first value of each column."""
    yield f"{len(data_set)} rows"
    for name in data_set.columns:
        kind, n_null = data_set.describe(name)
        value = data_set[0].values.get(name)
        text = f"cannot be read: {value.reason}" if isinstance(value, Unreadable) else repr(value)
        yield make_visible(f"  {name} ({kind}, {n_null} null): {shorten(text, SHOWN_CHARS)}")


def describe_prompts(
    data_set: DataSet, config: DataConfig, tokenizer: PreTrainedTokenizerBase, shown_row: int
) -> Iterator[str]:
    """Yield lengths of the prompts and reference responses, the number of overlong prompts, and one prompt.

    Args:
        data_set: Rows of the data set.
        config: Settings of the data.
        shown_row: Row whose prompt is shown.

    Raises:
        DataError: A prompt cannot be used, or there is no ``shown_row``.
    """
    if not 0 <= shown_row < len(data_set):
        what = f"--row {shown_row}: the data has the rows 0 to {len(data_set) - 1}"
        raise DataError(what, remedy="choose one of them", row=shown_row)
    template = ChatTemplate(config.apply_chat_template_kwargs, config.system_prompt)
    found = [_measure(row, tokenizer, template) for row in data_set]
    lengths = np.array([each.n_prompt for each in found])
    yield f"prompt tokens: {_percentiles(lengths)}"
    overlong = np.flatnonzero(lengths > config.max_prompt_length)
    if len(overlong):
        fate = "dropped (data.filter_overlong_prompts=true)"
        if not config.filter_overlong_prompts:
            fate = f"treated with data.truncation={config.truncation}"
        rows = ", ".join(map(str, overlong[:5])) + (", ..." if len(overlong) > 5 else "")
        limit = f"data.max_prompt_length={config.max_prompt_length}"
        yield f"  {len(overlong)} of {len(found)} are longer than {limit} and are {fate}: rows {rows}"
    if sizes := [each.n_response for each in found if each.n_response is not None]:
        yield f"reference response tokens: {_percentiles(np.array(sizes))}"
    if unusable := [each.problem for each in found if each.problem is not None]:
        yield f"{len(unusable)} reference responses cannot be used; the first: {unusable[0]}"
    if any(each.is_text for each in found):
        yield "plain text prompts get no chat template" + ("; the tokenizer has one" if tokenizer.chat_template else "")
    if with_tools := [index for index, each in enumerate(found) if each.has_tools]:
        is_ignored = ignores_tools(data_set[with_tools[0]], tokenizer, template)
        ignored = ", which the chat template ignores" if is_ignored else ""
        yield f"{len(with_tools)} of {len(found)} prompts have tools{ignored}"
    yield from _shown_prompt(data_set[shown_row], tokenizer, template)


@dataclass(frozen=True)
class _Measured:
    """Lengths of a row in tokens, and what is unusual about it."""

    n_prompt: int
    is_text: bool
    has_tools: bool
    n_response: int | None = None
    problem: DataError | None = None


def _measure(row: Row, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> _Measured:
    with row.locate_errors():
        n_prompt = len(tokenize_prompt(row.prompt, tokenizer, row.where, template=template, tools=row.tools))
    prompt = _Measured(n_prompt, isinstance(row.prompt, str), row.tools is not None)
    try:
        if row.response is None:
            return prompt
    except DataError as error:  # matters only if reference responses are trained on
        return replace(prompt, problem=error)
    return replace(prompt, n_response=len(tokenizer(row.response, add_special_tokens=False)["input_ids"]))


def _shown_prompt(row: Row, tokenizer: PreTrainedTokenizerBase, template: ChatTemplate) -> Iterator[str]:
    text = render_prompt(row.prompt, tokenizer, row.where, template=template, tools=row.tools)
    ids = tokenize_prompt(row.prompt, tokenizer, row.where, template=template, tools=row.tools)
    yield f"prompt of row {row.index}, {len(ids)} tokens:"
    yield from (f"  | {make_visible(line, keep=TAB)}" for line in text.split("\n"))
    shown = tokenizer.convert_ids_to_tokens(ids[:SHOWN_IDS].tolist())
    yield f"tokens: {shown}" + (" ..." if len(shown) < len(ids) else "")


def _ground_truth(data_set: DataSet, config: DataConfig) -> str:
    """Return the line about the column that reward functions compare responses with."""
    try:
        path = data_set.truth_path
    except DataError:
        return f"no ground truth: there is no column data.ground_truth_key={config.ground_truth_key}"
    n_null = sum(truth is None for truth in data_set.values_at(path))
    return f"ground truth: {'.'.join(path)}, {n_null} null"


def _percentiles(lengths: np.ndarray) -> str:
    names = ("min", "median", "90 %", "99 %", "max")
    values = np.percentile(lengths, PERCENTILES, method="nearest")
    return ", ".join(f"{name} {value}" for name, value in zip(names, values.astype(int), strict=True))

"""The command ``evaluate``."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import numpy.typing as npt
from omegaconf import OmegaConf

import recipe_gkd.commands.evaluate as package
from recipe_gkd.commands.arguments import DTYPE_HELP, DTYPES
from recipe_gkd.commands.evaluate.scores import Evaluation, as_json, render
from recipe_gkd.commands.model_folder import model_folder
from recipe_gkd.commands.sampled_responses import SampledModel, sample_responses
from recipe_gkd.config import Config
from recipe_gkd.config.compose import compose_config, fill_missing_keys
from recipe_gkd.config.conditions import has_reward
from recipe_gkd.config.environments import conversation_problems
from recipe_gkd.config.load import to_config
from recipe_gkd.conversations.setup import check_turns, open_environments
from recipe_gkd.data.messages import Message
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import read_data_set
from recipe_gkd.data.samples import Response, Reward
from recipe_gkd.diagnostics.unexpected_errors import as_known_error
from recipe_gkd.errors import ConfigError
from recipe_gkd.model_files import load_tokenizer
from recipe_gkd.rewards import RewardItem, RewardItems, RewardScorer
from recipe_gkd.rewards.items import CONVERSATION, conversation_fields, decode_for_people, prompt_of
from recipe_gkd.rewards.reporting import raw_field, reward_fields, scores_PN
from recipe_gkd.rollout.offline_engine import (
    OfflineEngineOptions,
    OfflineSampling,
    limit_torch_logs,
    prepare_environment,
)
from recipe_gkd.runtime.json_lines import json_line
from recipe_gkd.validation.validation import read_sources
from teacher.common.sizes import GIB

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

NAME = "the evaluation data"

Record = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        Exit status: 0 if all models were evaluated, 1 after an error, 130 after Ctrl-C.
    """
    args = _parser().parse_intermixed_args(argv)
    limit_torch_logs()
    try:
        overrides = [part for part in args.folders if _is_override(part)]
        folders = [model_folder(Path(part).expanduser()) for part in args.folders if not _is_override(part)]
        if not folders:
            remedy = "give one or more Hugging Face folders: evaluate FOLDER --data FILE"
            raise ConfigError("got no model", remedy=remedy, keys=("FOLDER",))
        config = build_config(args, overrides)
        _check_outputs(args)
        evaluations = run(args, folders, config)
    except Exception as error:  # noqa: BLE001 - the command prints one error instead of a traceback
        print(f"error: {as_known_error(error, 'evaluate')}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    print(render(evaluations, args.n))
    return 0


def run(args: argparse.Namespace, folders: Sequence[Path], config: Config) -> list[Evaluation]:
    """Evaluate the models one after another, and write the files.

    Args:
        args: Arguments of the command.
        config: Names of columns, lengths and the reward function.
    """
    evaluations = []
    with ExitStack() as stack:
        scorer = stack.enter_context(RewardScorer(config.custom_reward_function)) if has_reward(config) else None
        file = stack.enter_context(args.responses.open("w", encoding="utf-8")) if args.responses else None
        for folder in folders:
            print(f"evaluating {folder}", file=sys.stderr, flush=True)
            save = _record_writer(file)
            options = options_of(args, config)
            evaluations.append(evaluate(folder, config, sampling_of(args, config), options, scorer, save))
    if args.json is not None:
        settings = {"data": args.data, "n": args.n, "temperature": sampling_of(args, config).temperature}
        args.json.write_text(json.dumps(as_json(evaluations, settings), indent=1) + "\n", encoding="utf-8")
    return evaluations


def _record_writer(file: TextIO | None) -> Callable[[Sequence[Record]], None]:
    """Return a function that writes the records of a model, in place of the records that it wrote before."""
    start = 0 if file is None else file.tell()

    def save(records: Sequence[Record]) -> None:
        if file is not None:
            file.seek(start)
            file.truncate()
            file.writelines(json_line(record) for record in records)
            file.flush()

    return save


def evaluate(
    folder: Path,
    config: Config,
    sampling: OfflineSampling,
    options: OfflineEngineOptions,
    scorer: RewardScorer | None,
    save: Callable[[Sequence[Record]], None],
) -> Evaluation:
    """Evaluate one model.

    Args:
        folder: Hugging Face folder.
        config: Names of columns and lengths.
        sampling: Settings of sampling.
        options: Settings of the engine.
        scorer: Reward function. None: only lengths are reported.
        save: Called with a record of each response, before the responses are scored and again with their rewards.

    Raises:
        DataError: The data cannot be used.
        RewardError: The reward function failed.
    """
    prepare_environment()
    tokenizer = load_tokenizer(folder, trust_remote_code=options.trust_remote_code)
    data_set = read_data_set(config.data.val_files, config.data, NAME, config.data.val_max_samples)
    with open_environments(config, data_set) as pool:
        data = PromptData(data_set, config.data, tokenizer)
        check_turns(config, data, tokenizer)
        factory = _item_factory(data, config, tokenizer, scorer)  # before the engine starts: it may raise an error
        model = SampledModel(folder=folder, tokenizer=tokenizer, data=data, config=config)
        responses, seconds = sample_responses(model, pool, sampling, options)
    pairs = [(data.prompt(response.uid // sampling.n, response.uid), response) for response in responses]
    sources = dict(zip(data.rows, read_sources(data_set, data.rows), strict=True))
    items: list[RewardItem | None] = []
    if factory is not None:  # conversations that are left out get no reward
        items = [None if response.is_left_out else factory.build_item(prompt, response) for prompt, response in pairs]
    skips = config.custom_reward_function.skip_special_tokens
    texts = [str(tokenizer.decode(one.last_turn_ids.tolist(), skip_special_tokens=skips)) for one in responses]
    prompts = [(sources[prompt.row], prompt.row, prompt_of(data_set[prompt.row], one)) for prompt, one in pairs]
    truths = [item.ground_truth if item is not None else None for item in items] or [None] * len(responses)
    records: list[Record] = [
        _record(str(folder), *prompts[index], texts[index], truths[index], response)
        | raw_field("raw_response", texts[index], decode_for_people(response, tokenizer))
        for index, response in enumerate(responses)
    ]
    rewards = score_and_save(records, items, scorer, save)
    return Evaluation(
        model=str(folder),
        sources=list(sources.values()),
        rows=data.rows,
        rewards_PN=None if rewards is None else scores_PN(rewards, sampling.n),
        numbers=[
            _numbers_of(response) | (dict(reward.numbers) if reward is not None else {})
            for response, reward in zip(responses, rewards or [None] * len(responses), strict=True)
        ],
        lengths_PN=_kept_PN(responses, sampling.n, lambda response: len(response.ids)),
        truncated_PN=_kept_PN(responses, sampling.n, lambda response: response.finish_reason == "length"),
        seconds=seconds,
    )


def _record(
    model: str, source: str, row: int, prompt: str | list[Message], text: str, truth: object, response: Response
) -> Record:
    return {
        "model": model,
        "data_source": source,
        "row": row,
        "prompt": prompt,
        "response": text,
        "ground_truth": truth,
        **reward_fields(None),
        "response_len": len(response.ids),
        "finish_reason": response.finish_reason,
        **({} if response.transcript is None else {CONVERSATION: conversation_fields(response.transcript)}),
    }


def score_and_save(
    records: Sequence[Record],
    items: Sequence[RewardItem | None],
    scorer: RewardScorer | None,
    save: Callable[[Sequence[Record]], None],
) -> list[Reward | None] | None:
    """Save the records, score the responses, and save the records again with the rewards.

    Args:
        items: Arguments of the reward function for each record. None for one that gets no reward.

    Returns:
        The reward of each response, None for one whose call failed. None without a reward function.

    Raises:
        RewardError: The reward function failed. The records without rewards are saved.
    """
    save(records)
    if scorer is None:
        return None
    scores = iter(asyncio.run(scorer.score([item for item in items if item is not None])))
    rewards = [None if item is None else next(scores) for item in items]
    save([record | reward_fields(reward) for record, reward in zip(records, rewards, strict=True)])
    return rewards


def _item_factory(
    data: PromptData, config: Config, tokenizer: PreTrainedTokenizerBase, scorer: RewardScorer | None
) -> RewardItems | None:
    """Return the source of the reward function's arguments; None without a function."""
    if scorer is None:
        return None
    skips = config.custom_reward_function.skip_special_tokens
    return RewardItems(
        data, config.data, tokenizer, require_truth=True, truth_use=scorer.truth_use, skip_special_tokens=skips
    )


def _kept_PN(responses: Sequence[Response], n: int, value: Callable[[Response], float]) -> npt.NDArray[np.float64]:
    """Return a number of each response, [P, n]; NaN for conversations that are left out."""
    values = [np.nan if response.is_left_out else value(response) for response in responses]
    return np.array(values, np.float64).reshape(-1, n)


def _numbers_of(response: Response) -> dict[str, float]:
    """Return the numbers of a conversation for the table; empty for a single turn."""
    transcript = response.transcript
    if transcript is None:
        return {}
    found: dict[str, Any] = {
        "turns": transcript.n_turns,
        "tool calls": transcript.n_tool_calls,
        "failed": bool(transcript.failure),
    }
    if transcript.reward is not None:
        found["reward of the environment"] = transcript.reward
    return {name: float(value) for name, value in found.items()} | dict(transcript.numbers)


def build_config(args: argparse.Namespace, overrides: Sequence[str]) -> Config:
    """Return the default configuration with the settings of the command.

    Overlong prompts are an error, so that all models answer the same prompts.

    Raises:
        ConfigError: A key is unknown, or a value is invalid.
    """
    fixed = ["data.filter_overlong_prompts=false", "data.truncation=error"]
    composed = compose_config("on_policy_distill_trainer", [*fixed, *overrides])
    OmegaConf.update(composed, "data.val_files", [args.data])
    if args.reward is not None:
        path, name = _split_reward(args.reward)
        OmegaConf.update(composed, "custom_reward_function.path", path)
        if name is not None:  # otherwise the configuration's, like in the training
            OmegaConf.update(composed, "custom_reward_function.name", name)
    fill_missing_keys(composed)  # training data and model of a run
    config = to_config(composed)
    if problems := list(conversation_problems(config)):
        raise ConfigError.joined(problems)
    return config


def _split_reward(spec: str) -> tuple[str, str | None]:
    """Return the file and the function of ``--reward``. None: the default function."""
    if spec.endswith(".py"):
        return spec, None
    path, separator, name = spec.rpartition(":")
    if not separator or not path or not name:
        raise ConfigError(f"--reward: got {spec}, expected FILE.py or FILE.py:function", keys=("--reward",))
    return path, name


def sampling_of(args: argparse.Namespace, config: Config) -> OfflineSampling:
    """Return the settings of sampling: greedy for one response, temperature 1 for several."""
    temperature = args.temperature if args.temperature is not None else (0.0 if args.n == 1 else 1.0)
    if temperature == 0 and args.n > 1:
        what = f"--n {args.n} --temperature 0: all responses would be equal"
        raise ConfigError(what, remedy="use a temperature above 0", keys=("--n", "--temperature"))
    return OfflineSampling(
        n=args.n,
        max_tokens=config.data.max_response_length,
        temperature=temperature,
        top_p=args.top_p,
        seed=config.data.seed,
    )


def options_of(args: argparse.Namespace, config: Config) -> OfflineEngineOptions:
    """Return the settings of the engine."""
    return OfflineEngineOptions(
        dtype=args.dtype,
        tensor_parallel_size=args.tensor_parallel,
        gpu_memory_utilization=args.gpu_memory_utilization,
        cpu_cache_bytes=int(args.cpu_cache_gb * GIB),
        trust_remote_code=config.actor_rollout_ref.model.trust_remote_code,
        seed=config.data.seed,
    )


def _check_outputs(args: argparse.Namespace) -> None:
    """Create the folders of the output files, before any model is loaded.

    Raises:
        ConfigError: A file cannot be written.
    """
    for option, path in (("--json", args.json), ("--responses", args.responses)):
        if path is None:
            continue
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.open("a").close()
        except OSError as error:
            what = f"{option} {path} cannot be written ({error.strerror})"
            raise ConfigError(what, remedy="choose another file", keys=(option,)) from error


def _is_override(part: str) -> bool:
    return "=" in part and not Path(part).exists()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m recipe_gkd evaluate",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="All keys: python -m recipe_gkd.config",
    )
    add = parser.add_argument
    add(
        "folders",
        nargs="+",
        metavar="FOLDER | key=value",
        help="model folders, and keys of the sections data and rollout",
    )
    add("--data", required=True, metavar="FILE", help="file with the prompts")
    add(
        "--reward",
        metavar="FILE.py[:NAME]",
        help="reward function (default name: compute_score); without one, only lengths",
    )
    add("--n", type=_count, default=1, help="number of responses to each prompt (default: 1, greedy)")
    add("--temperature", type=float, help="sampling temperature (default: 0 with --n 1, else 1)")
    add("--top-p", type=float, default=1.0, help="probability mass that tokens are sampled from (default: 1)")
    add("--json", type=Path, metavar="OUT", help="file for the results")
    add("--responses", type=Path, metavar="OUT", help="file for all responses, one JSON object per line")
    add("--dtype", choices=DTYPES, default="auto", help=DTYPE_HELP)
    add("--tensor-parallel", type=_count, default=1, metavar="N", help="number of GPUs (default: 1)")
    add("--gpu-memory-utilization", type=float, default=0.8, metavar="X", help="share of a GPU's memory (default: 0.8)")
    add("--cpu-cache-gb", type=float, default=1.0, metavar="GIB", help="KV cache on a CPU, in GiB (default: 1)")
    return parser


def _count(value: str) -> int:
    number = int(value) if value.isdigit() else 0
    if number < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected a whole number of at least 1")
    return number

r"""Accuracy of one or more models on the quickstart task, with greedy decoding by vLLM.

Usage::

    python -m recipe_gkd.quickstart.evaluate --model outputs/quickstart/student \
        --data outputs/quickstart/data/held_out.parquet [--limit 256] [--json student.json]

``--model`` and ``--model-with-solution`` can be repeated. The models are evaluated one after another, and vLLM is
imported once.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_gkd.config import load_config
from recipe_gkd.data.rows import read_data_set
from recipe_gkd.errors import DataError, GkdError
from recipe_gkd.model_files import load_tokenizer
from recipe_gkd.quickstart.task import Problem, final_number, is_exact
from recipe_gkd.rollout.offline_engine import (
    OfflineEngineOptions,
    OfflineSampling,
    check_model_folder,
    generate,
    prepare_environment,
    vllm_engine,
)
from recipe_gkd.runtime.closed_output import run_until_closed
from teacher.common.fingerprint import count_ids

N_EXAMPLES = 5
MAX_RESPONSE_TOKENS = 48
"""Maximum length of a response. A correct answer has 32 tokens."""
KV_CACHE_BYTES = 64 << 20


@dataclass(frozen=True, kw_only=True)
class Example:
    """A question with a response.

    Attributes:
        question: Text of the user message.
        answer: Response of the model. Ends with ``...`` if it was truncated.
        expected: Correct answer.
        exact: True if the response is exact.
    """

    question: str
    answer: str
    expected: str
    exact: bool


@dataclass(frozen=True, kw_only=True)
class QuickstartEvaluation:
    """Result of one model.

    Attributes:
        model: Folder of the model.
        data: File of the problems.
        n: Number of problems.
        accuracy: ``n_exact / n``.
        seconds: Time of loading, generation and scoring, without the import of vLLM.
        examples: The first :data:`N_EXAMPLES` responses.
    """

    model: str
    data: str
    n: int
    n_exact: int
    accuracy: float
    seconds: float
    examples: list[Example]


def read_problems(path: Path, limit: int | None) -> list[dict[str, Any]]:
    """Return the first ``limit`` rows of a file of ``recipe_gkd.quickstart.prepare``, all rows if it is None.

    Raises:
        DataError: The file cannot be read, or has no rows.
    """
    try:
        data_set = read_data_set([str(path)], load_config("quickstart").data)
        return [{"prompt": row.prompt, "answer": row.value(("answer",))} for row in data_set[:limit]]
    except DataError as error:
        raise error.replaced(remedy="create the file with python -m recipe_gkd.quickstart.prepare") from error


def score(
    rows: list[dict[str, Any]], responses: list[str], *, model: str, data: str, seconds: float
) -> QuickstartEvaluation:
    """Count the exact responses.

    Args:
        rows: Problems.
        responses: Response to each problem.
        model: Folder of the model, for the result.
        data: File of the problems, for the result.
        seconds: Time of the evaluation, for the result.
    """
    examples = [
        Example(
            question=row["prompt"][-1]["content"],
            answer=response,
            expected=row["answer"],
            exact=is_exact(response, row["answer"]),
        )
        for row, response in zip(rows, responses, strict=True)
    ]
    n_exact = sum(example.exact for example in examples)
    return QuickstartEvaluation(
        model=model, data=data, n=len(rows), n_exact=n_exact, accuracy=n_exact / len(rows),
        seconds=round(seconds, 2), examples=examples[:N_EXAMPLES],
    )  # fmt: skip


def generate_greedy(model: Path, chats: list[list[dict[str, str]]]) -> list[str]:
    """Generate one greedy response to each chat.

    Args:
        model: Hugging Face folder with a tokenizer.
        chats: Lists of chat messages.

    Returns:
        Texts without special tokens. A truncated text ends with ``...``.

    Raises:
        ModelError: ``model`` is not a Hugging Face folder with a tokenizer.
    """
    check_model_folder(model)
    prepare_environment()
    tokenizer: Any = load_tokenizer(model)
    prompts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False) for chat in chats]
    options = OfflineEngineOptions(dtype="float32", gpu_memory_utilization=0.2, cpu_cache_bytes=KV_CACHE_BYTES)
    with vllm_engine(model, options, n_tokens=count_ids(tokenizer)) as engine:
        outputs = [found for [found] in generate(engine, prompts, OfflineSampling(max_tokens=MAX_RESPONSE_TOKENS))]
    texts = [tokenizer.decode(out.ids.tolist(), skip_special_tokens=True) for out in outputs]
    return [text if out.finish_reason == "stop" else text + "..." for text, out in zip(texts, outputs, strict=True)]


def evaluate(model: Path, data: Path, limit: int | None = None, *, with_solution: bool = False) -> QuickstartEvaluation:
    """Evaluate one model in this process.

    Args:
        model: Hugging Face folder with a tokenizer.
        data: File of ``recipe_gkd.quickstart.prepare``.
        limit: Number of problems, None for all.
        with_solution: True to put the solution into each prompt, as for the teacher of ``quickstart.sh --self``.

    Raises:
        DataError: The data cannot be read.
        ModelError: The model cannot be loaded.
    """
    rows = read_problems(data, limit)
    started = time.monotonic()
    chats = [with_given_solution(row) if with_solution else row["prompt"] for row in rows]
    responses = generate_greedy(model, chats)
    return score(rows, responses, model=str(model), data=str(data), seconds=time.monotonic() - started)


def with_given_solution(row: dict[str, Any]) -> list[dict[str, str]]:
    """Return the chat prompt of a row with the solution before the question."""
    a, b = row["prompt"][-1]["content"].removesuffix("=").split("+")
    return Problem(int(a), int(b)).messages(with_solution=True)


def render(evaluation: QuickstartEvaluation) -> str:
    """Return a summary with examples."""
    lines = [f"{evaluation.model}: {evaluation.n_exact} of {evaluation.n} answers exact ({evaluation.accuracy:.1%})"]
    for example in evaluation.examples:
        verdict = "exact" if example.exact else f"wrong, expected {final_number(example.expected)}"
        lines.append(f"  {example.question} {example.answer}  ({verdict})")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    """Run the command. Return its exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m recipe_gkd.quickstart.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--model",
        type=lambda folder: (Path(folder), False),
        action="append",
        default=[],
        metavar="FOLDER",
        help="Hugging Face folder; repeatable",
    )
    parser.add_argument(
        "--model-with-solution",
        type=lambda folder: (Path(folder), True),
        action="append",
        dest="model",
        metavar="FOLDER",
        help="like --model, but each prompt contains the solution",
    )
    parser.add_argument("--data", type=Path, required=True, help="parquet file with the columns prompt and answer")
    parser.add_argument("--limit", type=int, help="number of problems; default: all")
    parser.add_argument("--json", type=Path, action="append", help="file for the result; once for each --model")
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit: got {args.limit}, expected at least 1")
    if not args.model:
        parser.error("got no model; give --model FOLDER")
    if args.json and len(args.json) != len(args.model):
        parser.error(f"got {len(args.model)} --model and {len(args.json)} --json; give one file for each model")
    try:
        for (model, solved), file in zip(args.model, args.json or [None] * len(args.model), strict=True):
            evaluation = evaluate(model, args.data, args.limit, with_solution=solved)
            print(render(evaluation), flush=True)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(dataclasses.asdict(evaluation), indent=1))
    except GkdError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(run_until_closed(main))

"""Greedy answers of one or more models through vLLM, and how many of them are exact.

    python -m recipe_gkd.quickstart.evaluate --model outputs/quickstart/student \
        --data outputs/quickstart/data/held_out.parquet [--limit 256] [--json student.json]

`--model` may be given several times: vLLM is imported once and the models are evaluated one after another.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import logging
import os
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from recipe_gkd.errors import DataError, GkdError, ModelError
from recipe_gkd.quickstart.task import final_number, is_exact
from recipe_gkd.rollout.environment import worker_environment

N_SHOWN = 5
MAX_ANSWER_TOKENS = 48
"""A right answer takes 32 tokens; one that is longer is wrong."""
KV_CACHE_BYTES = 64 << 20

# Read when torch and vLLM are imported: a rollout worker's on any device, and no messages below an error.
_ENVIRONMENT = worker_environment("cuda") | {
    "VLLM_LOGGING_LEVEL": "ERROR",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}


@dataclass(frozen=True, kw_only=True)
class Example:
    """One question, what the model answered, and what is right."""

    question: str
    answer: str
    expected: str
    exact: bool


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How one model did."""

    model: str
    data: str
    n: int
    n_exact: int
    accuracy: float
    """n_exact / n."""
    seconds: float
    """Loading, generation and scoring, without the import of vLLM."""
    examples: list[Example]
    """The first few, in the order of the data."""


def read_problems(path: Path, limit: int | None) -> list[dict[str, Any]]:
    """The first `limit` rows of a file that `prepare` made. Raises DataError if it is not such a file."""
    try:
        table = pq.read_table(path, columns=["prompt", "answer"])
    except (OSError, pa.ArrowException) as error:
        raise DataError(
            f"{path} cannot be read as a parquet file with the columns prompt and answer ({error}): "
            "make it with python -m recipe_gkd.quickstart.prepare"
        ) from error
    rows: list[dict[str, Any]] = table.slice(0, limit).to_pylist()
    if not rows:
        raise DataError(f"{path} has no rows to evaluate: make it again with recipe_gkd.quickstart.prepare --fresh")
    return rows


def score(rows: list[dict[str, Any]], answers: list[str], *, model: str, data: str, seconds: float) -> Evaluation:
    """Count the exact answers; `answers` are in the order of `rows`."""
    examples = [
        Example(
            question=row["prompt"][-1]["content"],
            answer=answer,
            expected=row["answer"],
            exact=is_exact(answer, row["answer"]),
        )
        for row, answer in zip(rows, answers, strict=True)
    ]
    n_exact = sum(example.exact for example in examples)
    return Evaluation(
        model=model, data=data, n=len(rows), n_exact=n_exact, accuracy=n_exact / len(rows),
        seconds=round(seconds, 2), examples=examples[:N_SHOWN],
    )  # fmt: skip


def greedy_answers(model: Path, chats: list[list[dict[str, str]]]) -> list[str]:
    """One greedy answer to each chat, decoded without special tokens; an answer that was cut has "..." at its end.

    Raises ModelError if `model` is not a Hugging Face folder with a tokenizer.
    """
    for name in ("config.json", "tokenizer_config.json"):
        if not (model / name).is_file():
            raise ModelError(
                f"{model} has no {name}, so it is not a Hugging Face model folder with a tokenizer: check --model"
            )
    os.environ.update(_ENVIRONMENT)
    import torch
    from transformers import AutoTokenizer

    on_gpu = torch.cuda.is_available()
    if not on_gpu:
        os.environ.update(worker_environment("cpu"))
    # Said while vLLM is imported, before it reads its own logging level.
    logging.getLogger("vllm").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", category=FutureWarning, module="vllm")
    from vllm import LLM, SamplingParams, TokensPrompt

    memory: dict[str, Any] = {"gpu_memory_utilization": 0.2} if on_gpu else {"kv_cache_memory_bytes": KV_CACHE_BYTES}
    engine = LLM(
        model=str(model),
        dtype="float32",
        enforce_eager=True,
        disable_log_stats=True,
        seed=0,
        use_tqdm_on_load=False,
        **memory,
    )
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(model)
        prompts = [
            TokensPrompt(
                prompt_token_ids=tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
            )
            for chat in chats
        ]
        params = SamplingParams(temperature=0.0, max_tokens=MAX_ANSWER_TOKENS)
        outputs = [request.outputs[0] for request in engine.generate(prompts, params, use_tqdm=False)]
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
    return [out.text if out.finish_reason == "stop" else out.text + "..." for out in outputs]


def evaluate(model: Path, data: Path, limit: int | None = None) -> Evaluation:
    """Evaluate one model in this process. Raises DataError and ModelError for input that cannot be used."""
    rows = read_problems(data, limit)
    started = time.monotonic()
    answers = greedy_answers(model, [row["prompt"] for row in rows])
    return score(rows, answers, model=str(model), data=str(data), seconds=time.monotonic() - started)


def show(evaluation: Evaluation) -> str:
    """A few lines for people."""
    lines = [f"{evaluation.model}: {evaluation.n_exact} of {evaluation.n} answers exact ({evaluation.accuracy:.1%})"]
    for example in evaluation.examples:
        verdict = "right" if example.exact else f"wrong, expected {final_number(example.expected)}"
        lines.append(f"  {example.question} {example.answer}  ({verdict})")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m recipe_gkd.quickstart.evaluate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--model", type=Path, action="append", required=True, help="Hugging Face folder; repeatable")
    parser.add_argument("--data", type=Path, required=True, help="parquet file with the columns prompt and answer")
    parser.add_argument("--limit", type=int, help="only the first so many problems")
    parser.add_argument("--json", type=Path, action="append", help="write the result here; once for each --model")
    args = parser.parse_args(argv)
    if args.limit is not None and args.limit < 1:
        parser.error(f"--limit: got {args.limit}, expected at least 1")
    if args.json and len(args.json) != len(args.model):
        parser.error(f"got {len(args.model)} --model and {len(args.json)} --json: give one file for each model")
    try:
        for model, file in zip(args.model, args.json or [None] * len(args.model), strict=True):
            evaluation = evaluate(model, args.data, args.limit)
            print(show(evaluation), flush=True)
            if file is not None:
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(dataclasses.asdict(evaluation), indent=1))
    except GkdError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

r"""Table of the example: the pruned student before and after the distillation, next to the teacher.

Usage::

    python examples/smollm2/compare.py outputs/smollm2

Reads the metrics of ``run/`` and the evaluations of ``results/``, which launch/example_smollm2.sh makes, and computes
the greedy agreement. Writes ``results/comparison.json`` and prints a table and ten answers side by side.
"""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from recipe_gkd.commands.model_folder import model_folder
from recipe_gkd.commands.report.run_files import read_run
from recipe_gkd.errors import DataError, GkdError

NAMES = ("teacher", "before", "after")
"""The models in the order of ``recipe_gkd evaluate``."""
N_SIDE_BY_SIDE, WIDTH = 10, 100
SOURCE = "instructions"


@dataclass(frozen=True)
class Turn:
    """Token ids of a prompt and the teacher's greedy answer, and the number of those that are the prompt's."""

    ids: list[int]
    n_prompt: int


def read_answers(path: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the records of each model in ``recipe_gkd evaluate --responses``, in the order of NAMES."""
    by_model: dict[str, list[dict[str, Any]]] = {}
    try:
        for line in path.read_text(encoding="utf-8").splitlines():
            record = json.loads(line)
            by_model.setdefault(record["model"], []).append(record)
    except OSError as error:
        raise DataError(
            f"{path} cannot be read: {error.strerror}", remedy="run launch/example_smollm2.sh", file=path
        ) from error
    if len(by_model) != len(NAMES):
        raise DataError(f"{path} has answers of {len(by_model)} models, expected {len(NAMES)}", file=path)
    return dict(zip(NAMES, by_model.values(), strict=True))


def turns_of(records: Sequence[Mapping[str, Any]], tokenizer: PreTrainedTokenizerBase) -> list[Turn]:
    """Return the token ids of prompts and answers; an answer that ended has the end token."""
    turns = []
    for record in records:
        prompt = tokenizer.apply_chat_template(record["prompt"], add_generation_prompt=True, return_dict=True)
        answer = tokenizer(record["response"], add_special_tokens=False).input_ids
        end = [tokenizer.eos_token_id] if record["finish_reason"] == "stop" else []
        turns.append(Turn([*prompt["input_ids"], *answer, *end], len(prompt["input_ids"])))
    return turns


@torch.no_grad()
def agreement(model: PreTrainedModel, turns: Sequence[Turn]) -> float:
    """Return the share of answer tokens that are the likeliest token of the model too."""
    n_equal = n_total = 0
    for turn in turns:
        answer_T = torch.tensor(turn.ids[turn.n_prompt :])
        logits_1TV = model(torch.tensor([turn.ids]), logits_to_keep=len(answer_T) + 1).logits
        n_equal += int((logits_1TV[0, :-1].argmax(-1) == answer_T).sum())
        n_total += len(answer_T)
    return n_equal / n_total


def compare(out: Path) -> dict[str, Any]:
    """Return the figures of the table and the answers, by model.

    Raises:
        DataError: A file of the example is missing.
        CheckpointError: The run has no complete checkpoint.
    """
    results, run = out / "results", read_run(out / "run")
    answers = read_answers(results / "val.responses.jsonl")
    scores = {
        name: [model["scores"] for model in json.loads((results / f"{name}.json").read_text())["models"]]
        for name in ("val", "capitals")
    }
    folders = (out / "teacher", out / "student", model_folder(out / "run"))
    tokenizer = AutoTokenizer.from_pretrained(folders[0])
    turns = turns_of(answers["teacher"], tokenizer)
    figures: dict[str, dict[str, float]] = {}
    for index, (name, folder) in enumerate(zip(NAMES, folders, strict=True)):
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        figures[name] = {
            "agreement": agreement(model, turns),
            "ended": 1 - scores["val"][index][SOURCE]["truncated_fraction"],
            "capitals": scores["capitals"][index]["capitals"]["mean"],
        }
    for metric in ("kl", "reverse_kl"):
        series = run.series.get(f"val/{SOURCE}/{metric}")
        if series is None or len(series.values) < 2:
            raise DataError(f"{out / 'run'} has no metric val/{SOURCE}/{metric} before and after the training")
        figures["teacher"][metric] = 0.0
        figures["before"][metric], figures["after"][metric] = float(series.values[0]), float(series.values[-1])
    return {
        "steps": run.last_step,
        "prompts": len(turns),
        "figures": figures,
        "answers": {name: [record["response"] for record in records] for name, records in answers.items()},
        "instructions": [record["prompt"][-1]["content"] for record in answers["teacher"]],
    }


def render(found: Mapping[str, Any]) -> str:
    """Return the table and ten answers of the three models."""
    figures = found["figures"]
    rows = {
        "forward KL to the teacher, nats per token": ("kl", ".3f"),
        "reverse KL to the teacher, nats per token": ("reverse_kl", ".3f"),
        f"greedy agreement with the teacher, {found['prompts']} answers": ("agreement", ".1%"),
        "answers that end": ("ended", ".1%"),
        "capitals named": ("capitals", ".1%"),
    }
    names = ("before", "after", "teacher")
    lines = [f"{found['steps']} steps".ljust(52) + "".join(name.rjust(10) for name in names)]
    for label, (key, spec) in rows.items():
        lines.append(label.ljust(52) + "".join(format(figures[name][key], spec).rjust(10) for name in names))
    for index in range(min(N_SIDE_BY_SIDE, found["prompts"])):
        lines += ["", *_wrapped("", found["instructions"][index], " ")]
        for name in names:
            lines += _wrapped(f"  {name:<8}", found["answers"][name][index], " " * 10)
    return "\n".join(lines)


def _wrapped(head: str, text: str, indent: str) -> list[str]:
    return textwrap.wrap(head + " ".join(text.split()), WIDTH, subsequent_indent=indent) or [head]


def main(out: Path) -> int:
    """Run the command. Return its exit status."""
    try:
        found = compare(out)
    except (GkdError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    (out / "results" / "comparison.json").write_text(json.dumps(found, indent=1, ensure_ascii=False), encoding="utf-8")
    print(render(found))
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1] if len(sys.argv) > 1 else "outputs/smollm2")))

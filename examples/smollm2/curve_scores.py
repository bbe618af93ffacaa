r"""Exact scores of a student, over the whole vocabulary.

Usage::

    python examples/smollm2/curve_scores.py TEACHER STUDENT VALIDATION.jsonl ANSWERS.jsonl

VALIDATION.jsonl has the student's greedy responses, from a validation with these weights. ANSWERS.jsonl has the
teacher's, from ``recipe_gkd evaluate --responses``. Prints one JSON object:

- ``forward_kl``, ``reverse_kl``: mean KL divergence per token of the student's responses, in nats. Validations of a run
  report lower bounds, because they know the teacher's top-k only;
- ``teacher_nll``: mean negative log-likelihood of the teacher's responses under the student, in nats per token;
- ``agreement``: share of the tokens of the teacher's responses that are the student's likeliest token;
- ``ended``: share of the student's responses that end.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from compare import Turn, turns_of
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase


def _log_probs_TV(model: PreTrainedModel, turn: Turn) -> Tensor:
    n_response = len(turn.ids) - turn.n_prompt
    logits_1TV = model(torch.tensor([turn.ids]), logits_to_keep=n_response + 1).logits
    return torch.log_softmax(logits_1TV[0, :-1], dim=-1)


@torch.no_grad()
def divergences(student: PreTrainedModel, teacher: PreTrainedModel, turns: Sequence[Turn]) -> dict[str, float]:
    """Return the mean KL divergences per response token between both models, in nats."""
    sums, n_tokens = torch.zeros(2, dtype=torch.float64), 0
    for turn in turns:
        q_TV, p_TV = _log_probs_TV(student, turn), _log_probs_TV(teacher, turn)
        sums += torch.stack([(p_TV.exp() * (p_TV - q_TV)).sum(), (q_TV.exp() * (q_TV - p_TV)).sum()]).double()
        n_tokens += len(q_TV)
    forward, reverse = (sums / n_tokens).tolist()
    return {"forward_kl": forward, "reverse_kl": reverse}


@torch.no_grad()
def likelihood(student: PreTrainedModel, turns: Sequence[Turn]) -> dict[str, float]:
    """Return the mean negative log-likelihood of responses, in nats per token, and the greedy agreement."""
    nll, n_equal, n_tokens = 0.0, 0, 0
    for turn in turns:
        q_TV, ids_T = _log_probs_TV(student, turn), torch.tensor(turn.ids[turn.n_prompt :])
        nll -= float(q_TV.gather(1, ids_T[:, None]).sum())
        n_equal += int((q_TV.argmax(-1) == ids_T).sum())
        n_tokens += len(ids_T)
    return {"teacher_nll": nll / n_tokens, "agreement": n_equal / n_tokens}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Return the records of a JSON Lines file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def score(
    teacher: PreTrainedModel,
    student: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    validation: Sequence[Mapping[str, Any]],
    answers: Sequence[Mapping[str, Any]],
) -> dict[str, float]:
    """Return the scores of the module from the records of its files."""
    responses = [{**record, "response": record["answer"]} for record in validation if record["answer"]]
    return {
        **divergences(student, teacher, turns_of(responses, tokenizer)),
        **likelihood(student, turns_of([record for record in answers if record["response"]], tokenizer)),
        "ended": sum(record["finish_reason"] == "stop" for record in responses) / len(responses),
    }


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    teacher, student = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in arguments[:2]
    )
    validation, answers = (read_lines(Path(file)) for file in arguments[2:])
    print(json.dumps(score(teacher, student, AutoTokenizer.from_pretrained(arguments[0]), validation, answers)))


if __name__ == "__main__":
    main(sys.argv[1:])

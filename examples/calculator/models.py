"""Data and models of the example: a teacher that calls the calculator, and a student that has hardly learned it.

Usage::

    python examples/calculator/models.py OUT [--seed 0] [--teacher-steps 500] [--student-steps 60]

The output is ``OUT/{train,held_out}.parquet``, ``OUT/teacher``, ``OUT/student`` and ``OUT/models.json``. It takes one
to two minutes on two cores.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from transformers import PreTrainedTokenizerFast, Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).parent))

from conversations import (  # beside this file
    ASSISTANT,
    END,
    TOOL,
    build_tokenizer,
    call_text,
    prompt_text,
    write_parquet,
)

from recipe_gkd.addition.task import HIGHEST, LOWEST, Problem, make_splits
from recipe_gkd.quickstart.models import RECIPES, build_model

BATCH_SIZE = 64
N_TRAIN, N_HELD_OUT = 4096, 256


def encode(tokenizer: PreTrainedTokenizerFast, problem: Problem) -> tuple[list[int], list[int]]:
    """Return a correct conversation: its token ids, and the same with -100 where the model does not write."""
    parts = [
        (prompt_text(problem), False),
        (call_text(problem) + END, True),
        (f"{TOOL}{problem.a + problem.b}{ASSISTANT}", False),
        (f"{problem.a + problem.b}{END}", True),
    ]
    ids: list[int] = []
    labels: list[int] = []
    for text, is_own in parts:
        part = tokenizer(text, add_special_tokens=False)["input_ids"]
        ids += part
        labels += part if is_own else [-100] * len(part)
    return ids, labels


def train(
    model: Qwen2ForCausalLM, tokenizer: PreTrainedTokenizerFast, seed: int, steps: int, excluded: set[tuple[int, int]]
) -> float:
    """Train on correct conversations about other problems than the excluded ones, and return the last loss."""
    rng = random.Random(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    loss = torch.zeros(())
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20, 2 * (steps - step) / steps)
        problems: list[Problem] = []
        while len(problems) < BATCH_SIZE:
            problem = Problem(rng.randint(LOWEST, HIGHEST), rng.randint(LOWEST, HIGHEST))
            problems += [problem] if problem.pair not in excluded else []
        pairs = [encode(tokenizer, problem) for problem in problems]
        n_columns = max(len(ids) for ids, _ in pairs)
        ids_RS = torch.tensor([ids + [tokenizer.pad_token_id] * (n_columns - len(ids)) for ids, _ in pairs])
        labels_RS = torch.tensor([labels + [-100] * (n_columns - len(labels)) for _, labels in pairs])
        logits_RSV = model(input_ids=ids_RS[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits_RSV.flatten(0, 1), labels_RS[:, 1:].flatten(), ignore_index=-100)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return loss.item()


def main(argv: list[str] | None = None) -> int:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--teacher-steps", type=int, default=500)
    parser.add_argument("--student-steps", type=int, default=60)
    args = parser.parse_args(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    splits = make_splits(args.seed, n_train=N_TRAIN, n_held_out=N_HELD_OUT, n_dev=1)
    write_parquet(splits.train, args.out / "train.parquet")
    write_parquet(splits.held_out, args.out / "held_out.parquet")
    transformers.utils.logging.disable_progress_bar()
    tokenizer, excluded = build_tokenizer(), {problem.pair for problem in splits.held_out}
    for number, (role, steps) in enumerate((("teacher", args.teacher_steps), ("student", args.student_steps))):
        began, seed = time.monotonic(), 2 * args.seed + number
        model = build_model(replace(RECIPES[role], tied_embeddings=False), tokenizer, seed)
        loss = train(model, tokenizer, seed, steps, excluded)
        model.save_pretrained(args.out / role)
        tokenizer.save_pretrained(args.out / role)
        print(f"{role}: {steps} steps in {time.monotonic() - began:.0f} s, loss {loss:.3f}", flush=True)
    (args.out / "models.json").write_text(json.dumps(vars(args), default=str))  # all files are complete
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Supports of the divergence (``teacher.support``): accuracy on real models, and cost in the engines.

    python benchmarks/support.py accuracy STUDENT TEACHER PROMPTS.jsonl [--prompts 32] [--tokens 64] [--json FILE]
    python benchmarks/support.py rollout STUDENT [--json FILE]
    python benchmarks/support.py teacher TEACHER [--json FILE]

`accuracy` samples responses from the student and compares each divergence on a support, with the tail as one outcome,
with the divergence of the whole vocabulary: the mean value in nats, as a share of the exact one, and the error of the
gradient in the logits, relative to its length. `union` has half of its ids from each model.

`rollout` measures the generation with and without likeliest ids, `teacher` the scoring of each support. Rounds
alternate; figures are medians.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

SIZES = (4, 16, 64, 256)
KINDS = ("forward_kl", "reverse_kl", "jsd")
CHUNK = 64
N_ROUNDS = 5


def read_prompts(path: Path, tokenizer: Any, n: int) -> list[list[int]]:
    """Return the token ids of the first prompts of a data file."""
    with path.open(encoding="utf-8") as lines:
        rows = [json.loads(line)["prompt"] for line in itertools.islice(lines, n)]
    return [
        tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
        for messages in rows
    ]


def response_log_probs(args: argparse.Namespace) -> Iterator[tuple[Any, Any]]:
    """Yield log-probabilities of student and teacher at the positions of each sampled response, [T, V] each."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    student, teacher = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval() for path in (args.student, args.teacher)
    )
    torch.manual_seed(0)
    for ids in read_prompts(args.data, AutoTokenizer.from_pretrained(args.student), args.prompts):
        prompt_1N = torch.tensor([ids])
        options = {"do_sample": True, "temperature": 1.0, "top_k": 0, "top_p": 1.0, "max_new_tokens": args.tokens}
        with torch.no_grad():
            whole_1N = student.generate(prompt_1N, attention_mask=torch.ones_like(prompt_1N), **options)
            logps = [model(whole_1N).logits[0, len(ids) - 1 : -1].log_softmax(-1) for model in (student, teacher)]
        yield logps[0], logps[1]


def supports(log_q_TV: Any, log_p_TV: Any, k: int) -> dict[str, Any]:
    """Return the ids of each support with ``k`` ids; -1 for an id of the union that both models have."""
    import torch

    of_teacher, of_student = log_p_TV.topk(k).indices, log_q_TV.topk(k).indices
    first, second = of_teacher[:, : k // 2], of_student[:, : k // 2]
    repeated = (second[:, :, None] == first[:, None, :]).any(2)
    union = torch.cat([first, second.masked_fill(repeated, -1)], 1)
    return {"teacher": of_teacher, "student": of_student, "union": union}


def exact_divergence(kind: str, log_q_TV: Any, log_p_TV: Any) -> Any:
    """Return the divergence of the whole vocabulary at each position, [T]."""
    q_TV, p_TV = log_q_TV.exp(), log_p_TV.exp()
    if kind == "forward_kl":
        return (p_TV * (log_p_TV - log_q_TV)).sum(1)
    if kind == "reverse_kl":
        return (q_TV * (log_q_TV - log_p_TV)).sum(1)
    log_m_TV = ((p_TV + q_TV) / 2).log()
    return ((p_TV * (log_p_TV - log_m_TV)).sum(1) + (q_TV * (log_q_TV - log_m_TV)).sum(1)) / 2


def with_gradient(loss: Callable[[Any], Any], logits_TV: Any) -> tuple[float, Any]:
    """Return the sum of a loss, and its gradient in the logits."""
    import torch

    leaf = logits_TV.clone().requires_grad_()
    total = loss(leaf).sum()
    return float(total.detach()), torch.autograd.grad(total, leaf)[0]


def accuracy(args: argparse.Namespace) -> dict[str, Any]:
    """Return value and gradient error of each divergence, support and size."""
    from recipe_gkd.losses import Divergence, topk_divergence

    exact, length = dict.fromkeys(KINDS, 0.0), dict.fromkeys(KINDS, 0.0)
    found: dict[tuple[str, str, int], list[float]] = {}
    n_tokens = 0
    for log_q, log_p in response_log_probs(args):
        n_tokens += len(log_q)
        for log_q_TV, log_p_TV in zip(log_q.split(CHUNK), log_p.split(CHUNK), strict=True):
            vocab_size = log_q_TV.shape[1]
            for kind in KINDS:
                value, gradient = with_gradient(
                    lambda logits, kind=kind, log_p_TV=log_p_TV: exact_divergence(
                        kind, logits.log_softmax(-1), log_p_TV
                    ),
                    log_q_TV,
                )
                exact[kind] += value
                length[kind] += float(gradient.square().sum())
                for k in args.sizes:
                    for name, ids in supports(log_q_TV, log_p_TV, k).items():
                        logps = log_p_TV.gather(1, ids.clamp(min=0)).masked_fill(ids < 0, float("-inf"))
                        part, approximate = with_gradient(
                            lambda logits, logps=logps, ids=ids, kind=kind, size=vocab_size: topk_divergence(
                                logits, logps, ids, Divergence(kind=kind), vocab_size=size
                            )[0],
                            log_q_TV,
                        )
                        sums = found.setdefault((kind, name, k), [0.0, 0.0])
                        sums[0] += part
                        sums[1] += float((approximate - gradient).square().sum())
    print(f"{n_tokens} tokens; exact: " + ", ".join(f"{kind} {exact[kind] / n_tokens:.3f}" for kind in KINDS))
    print("share of the exact value / relative error of the gradient")
    print(f"{'':12}{'k':>5}" + "".join(f"{name:>18}" for name in ("teacher", "student", "union")))
    for kind in KINDS:
        for k in args.sizes:
            cells = []
            for name in ("teacher", "student", "union"):
                value, error = found[kind, name, k]
                cells.append(f"{value / exact[kind]:.3f} / {(error / length[kind]) ** 0.5:.3f}")
            print(f"{kind:12}{k:5}" + "".join(f"{cell:>18}" for cell in cells))
    figures = {
        f"{kind}/{name}/{k}": {"share": value / exact[kind], "gradient_error": (error / length[kind]) ** 0.5}
        for (kind, name, k), (value, error) in found.items()
    }
    return {"tokens": n_tokens, "exact": {kind: exact[kind] / n_tokens for kind in KINDS}, **figures}


def rollout(args: argparse.Namespace) -> dict[str, Any]:
    """Return the time of a token of generation with each number of likeliest ids, in microseconds."""
    from recipe_gkd.rollout.offline_engine import prepare_environment

    prepare_environment()
    from vllm import LLM, SamplingParams, TokensPrompt

    if not args.plain:
        import recipe_gkd.rollout.vllm.compat  # noqa: F401  # replaces vLLM's conversion of log-probabilities

    engine = LLM(str(args.student), dtype="float32", max_model_len=512, max_logprobs=max(args.ids), enforce_eager=True)
    rng = np.random.default_rng(0)
    prompts = [TokensPrompt(prompt_token_ids=rng.integers(5, 1000, 32).tolist()) for _ in range(args.sequences)]
    times: dict[int, list[float]] = {n: [] for n in args.ids}
    for _ in range(N_ROUNDS):
        for n in args.ids:
            params = SamplingParams(
                max_tokens=args.tokens, ignore_eos=True, seed=0, logprobs=n, flat_logprobs=True, detokenize=False
            )
            began = time.perf_counter()
            engine.generate(prompts, params, use_tqdm=False)
            times[n].append((time.perf_counter() - began) / (args.sequences * args.tokens) * 1e6)
    return _print("us per generated token", {str(n): statistics.median(each) for n, each in times.items()})


def teacher(args: argparse.Namespace) -> dict[str, Any]:
    """Return the time of a scored token of the teacher's engine with each support, in microseconds."""
    from teacher.engines.base import EngineConfig
    from teacher.engines.vllm_engine import VllmEngine
    from teacher.records import TeacherSequence

    engine = VllmEngine(EngineConfig(str(args.teacher), max(args.ids), dtype="float32", max_model_len=512))
    rng = np.random.default_rng(0)
    ids = [rng.integers(5, 1000, 32 + args.tokens, dtype=np.int32) for _ in range(args.sequences)]
    variants: dict[str, Callable[[np.ndarray], TeacherSequence]] = {
        f"teacher {max(args.ids)}": lambda ids_N: TeacherSequence(ids_N, 32)
    }
    for n in args.ids[:-1]:
        support_TJ = np.stack([rng.permutation(1000)[:n] for _ in range(args.tokens)]).astype(np.int32)
        for with_top_k in (False, True):
            name = f"{'union, ' if with_top_k else ''}student {n}"
            variants[name] = lambda ids_N, support_TJ=support_TJ, with_top_k=with_top_k: TeacherSequence(
                ids_N, 32, support_ids_TJ=support_TJ, with_top_k=with_top_k
            )
    times: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(N_ROUNDS):
        for name, sequence_of in variants.items():
            began = time.perf_counter()
            for key, ids_N in enumerate(ids):
                engine.add(key, sequence_of(rng.permutation(ids_N)))  # no prompt is in the cache
            while engine.has_work():
                engine.step()
            times[name].append((time.perf_counter() - began) / (args.sequences * args.tokens) * 1e6)
    engine.close()
    return _print("us per scored token", {name: statistics.median(each) for name, each in times.items()})


def _print(unit: str, figures: dict[str, float]) -> dict[str, Any]:
    first = next(iter(figures.values()))
    for name, value in figures.items():
        print(f"{name:>24}: {value:8.1f} {unit}, {value / first:.3f} times the first")
    return figures


def main() -> None:
    """Run one of the three benchmarks."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    for function, positional in (
        (accuracy, ("student", "teacher", "data")),
        (rollout, ("student",)),
        (teacher, ("teacher",)),
    ):
        command = commands.add_parser(function.__name__)
        for name in positional:
            command.add_argument(name, type=Path)
        command.add_argument("--json", type=Path)
        command.add_argument("--tokens", type=int, default=64)
        command.add_argument("--prompts", type=int, default=32)
        command.add_argument("--sequences", type=int, default=16)
        command.add_argument("--sizes", type=int, nargs="+", default=SIZES)
        command.add_argument(
            "--ids", type=int, nargs="+", default=[0, 16, 64] if function is rollout else [16, 64, 256]
        )
        command.add_argument("--plain", action="store_true", help="rollout: vLLM's own conversion to Python objects")
        command.set_defaults(function=function)
    args = parser.parse_args()
    figures = args.function(args)
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

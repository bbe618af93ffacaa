"""Measure an update of the actor: its time relative to transformers, and the host's work on the data per token.

    OMP_NUM_THREADS=1 python benchmarks/actor.py [--strategy megatron|fsdp] [--quick] [--json FILE]

A model of 0.46M parameters is trained by two programs in one process, with the same weights, samples and distillation
loss, in float32:

    actor         StudentActor.update: checks, packing, forward and backward, clipping, optimizer step, metrics
    transformers  Qwen2ForCausalLM on a padded batch, topk_divergence, clip_grad_norm_, torch.optim.AdamW

``step_over_transformers`` has sequences of equal length. ``step_over_transformers_uneven`` has long-tailed lengths;
``tokens_over_padded`` is the part of the padded batch that is not padding. The programs alternate, and a ratio is the
median of the rounds' ratios. The first round checks that loss and gradient norm are equal.

``host_us_per_token_k64`` and ``host_us_per_token_k256`` are the time that the calling thread spends on the data of an
update, per response token: dividing the batch among the ranks, checking and planning, waiting until a micro-batch is
packed, and copying it to the device. The teacher's top-k has 64 or 256 entries. Packing takes place in another thread
while the device computes; ``packing_us_per_token_*`` is its processor time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import numpy as np
import torch
import transformers
from torch import Tensor

from recipe_gkd.actor import update
from recipe_gkd.actor.batch.micro_batch_plan import MicroBatchPlan
from recipe_gkd.actor.batch.prefetch import Prefetcher
from recipe_gkd.actor.fsdp import forward_backward as fsdp
from recipe_gkd.actor.megatron import forward_backward as megatron
from recipe_gkd.actor.ranks import RankSpec
from recipe_gkd.actor.student_actor import StudentActor
from recipe_gkd.commands.gpu_smoke.tiny_models import make_sample, random_top_k
from recipe_gkd.config import load_config
from recipe_gkd.data.samples import Sample
from recipe_gkd.data.sharding import shard_batch
from recipe_gkd.losses import Divergence, topk_divergence
from recipe_gkd.weight_sync.store import open_store

VOCABULARY = 512
PROMPT_TOKENS = 32
STEP_TOP_K = 64
HOST_RESPONSE_TOKENS, HOST_MAX_TOKENS = 512, 4096
LR, WEIGHT_DECAY, BETAS, MAX_NORM = 1e-4, 0.01, (0.9, 0.95), 1.0
ACTOR = "actor_rollout_ref.actor"


def make_samples(lengths: Sequence[int], k: int, seed: int = 0) -> list[Sample]:
    """Return samples with the given response lengths and a random teacher's top-k."""
    rng = np.random.default_rng(seed)
    rows = 256
    tile, ids = random_top_k(rng, rows, VOCABULARY, k, sharpness=1.0)
    samples = []
    for uid, length in enumerate(lengths):
        row_of_T, ids_T = rng.integers(0, rows, length), rng.integers(0, VOCABULARY, length)
        prompt = rng.integers(0, VOCABULARY, PROMPT_TOKENS)
        samples.append(make_sample(uid, prompt, ids_T, tile[row_of_T], ids[row_of_T]))
    return samples


def write_model(folder: Path) -> None:
    torch.manual_seed(0)
    config = transformers.Qwen2Config(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=384, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=8192, tie_word_embeddings=True, dtype="float32",
    )  # fmt: skip
    transformers.Qwen2ForCausalLM(config).save_pretrained(folder)


# ---- the two programs


class Program(Protocol):
    def update(self, samples: Sequence[Sample]) -> dict[str, float]: ...


class Actor:
    """The project's actor on one rank, in this process."""

    def __init__(self, folder: Path, strategy: str, *overrides: str) -> None:
        config = load_config(
            "on_policy_distill_trainer",
            [
                f"{ACTOR}.strategy={strategy}",
                "data.train_files=unused", f"actor_rollout_ref.model.path={folder}", "trainer.device=cpu",
                f"{ACTOR}.megatron.dtype=float32", f"{ACTOR}.fsdp_config.dtype=float32", f"{ACTOR}.optim.lr={LR}",
                f"{ACTOR}.optim.betas=[{BETAS[0]},{BETAS[1]}]", f"{ACTOR}.optim.weight_decay={WEIGHT_DECAY}",
                f"{ACTOR}.optim.clip_grad={MAX_NORM}", f"{ACTOR}.optim.lr_decay_style=constant", *overrides,
            ],
        )  # fmt: skip
        spec = RankSpec(rank=0, world_size=1, local_rank=0, device="cpu", rendezvous=open_store("127.0.0.1", 60))
        self._actor, self._step = StudentActor(config, spec, total_steps=1), 0
        self._actor.setup()

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        self._step += 1
        return self._actor.update(samples, self._step - 1)

    def close(self) -> None:
        self._actor.shutdown()


class Transformers:
    """The same training with transformers and torch's AdamW."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._model.train()
        matrices = [p for p in self._model.parameters() if p.ndim > 1]
        vectors = [p for p in self._model.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
        self._adam = torch.optim.AdamW(groups, lr=LR, betas=BETAS)

    def update(self, samples: Sequence[Sample]) -> dict[str, float]:
        self._adam.zero_grad()
        loss = self._loss_T(samples).mean()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), MAX_NORM)
        self._adam.step()
        return {"actor/loss": loss.item(), "actor/grad_norm": norm.item()}

    def _loss_T(self, samples: Sequence[Sample]) -> Tensor:
        inputs = [torch.from_numpy(sample.token_ids[:-1]).long() for sample in samples]
        ids_BS = torch.nn.utils.rnn.pad_sequence(inputs, batch_first=True)
        is_padded = len({len(ids) for ids in inputs}) > 1
        ones = [torch.ones_like(ids) for ids in inputs]
        mask_BS = torch.nn.utils.rnn.pad_sequence(ones, batch_first=True) if is_padded else None
        logits_BSV = self._model(ids_BS, attention_mask=mask_BS, use_cache=False).logits
        parts = zip(logits_BSV, samples, strict=True)
        logits_TV = torch.cat([each[len(sample.prompt.ids) - 1 : sample.n_tokens - 1] for each, sample in parts])
        logps_TK = torch.from_numpy(np.concatenate([sample.teacher.logps_TK for sample in samples]))
        ids_TK = torch.from_numpy(np.concatenate([sample.teacher.ids_TK for sample in samples])).long()
        divergence = Divergence(kind="forward_kl", tail="bucket")
        loss_T, _ = topk_divergence(logits_TV, logps_TK, ids_TK, divergence, vocab_size=VOCABULARY)
        return loss_T


# ---- measurements


def compare_steps(folder: Path, lengths: Sequence[int], rounds: int, strategy: str) -> dict[str, float]:
    """Return the median time of both programs in seconds, and the median ratio."""
    samples, actor = make_samples(lengths, STEP_TOP_K), Actor(folder, strategy)
    programs: dict[str, Program] = {"actor": actor, "transformers": Transformers(folder)}
    first = [program.update(samples) for program in programs.values()]
    for name in ("actor/loss", "actor/grad_norm"):
        one, other = (metrics[name] for metrics in first)
        assert np.isclose(one, other, rtol=1e-4), f"{name} differs: {one} and {other}"
    seconds: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds + 1):
        for name, program in programs.items():
            started = time.perf_counter()
            program.update(samples)
            seconds[name].append(time.perf_counter() - started)
    actor.close()
    ratios = [a / b for a, b in zip(seconds["actor"][1:], seconds["transformers"][1:], strict=True)]
    medians = {f"{name}_s": statistics.median(times[1:]) for name, times in seconds.items()}
    sizes = [sample.n_tokens - 1 for sample in samples]
    real = sum(sizes) / (len(sizes) * max(sizes))
    return medians | {"ratio": statistics.median(ratios), "tokens": sum(sizes), "tokens_over_padded": real}


def measure_host(folder: Path, n_samples: int, k: int, rounds: int, strategy: str) -> dict[str, float]:
    """Return the host's time per response token of each part, and their sum ``host``, in microseconds."""
    samples = make_samples([HOST_RESPONSE_TOKENS] * n_samples, k)
    n_tokens = sum(len(sample.response.ids) for sample in samples)
    actor = Actor(folder, strategy, f"{ACTOR}.max_token_len={HOST_MAX_TOKENS}")
    found = []
    for _ in range(rounds + 1):
        seconds: dict[str, float] = defaultdict(float)
        with timed_parts(seconds):
            with timed(seconds, "sharding"):
                [shard] = shard_batch(samples, 1)
            actor.update(shard)
        found.append({name: 1e6 * value / n_tokens for name, value in seconds.items()})
    actor.close()
    parts = {name: statistics.median(round_[name] for round_ in found[1:]) for name in found[0]}
    return parts | {"host": sum(parts[name] for name in ("sharding", "planning", "waiting", "staging"))}


@contextmanager
def timed_parts(seconds: dict[str, float]) -> Iterator[None]:
    """Add the time of the parts of an update to ``seconds``."""

    def wrapped(function: Callable[..., Any], name: str, clock: Callable[[], float]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with timed(seconds, name, clock):
                return function(*args, **kwargs)

        return call

    parts = [
        (update, "plan_micro_batches", "planning", time.perf_counter),
        (Prefetcher, "_wait", "waiting", time.perf_counter),
        (megatron, "to_device", "staging", time.perf_counter),
        (fsdp, "to_device", "staging", time.perf_counter),
        (MicroBatchPlan, "stage", "packing", time.thread_time),
    ]
    patches = [
        mock.patch.object(where, name, wrapped(getattr(where, name), key, clock)) for where, name, key, clock in parts
    ]
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


@contextmanager
def timed(seconds: dict[str, float], name: str, clock: Callable[[], float] = time.perf_counter) -> Iterator[None]:
    started = clock()
    yield
    seconds[name] += clock() - started


def long_tailed_lengths(count: int) -> list[int]:
    lengths = np.random.default_rng(0).lognormal(4, 1, count)
    return np.clip(lengths, 8, 480).astype(int).tolist()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--strategy", choices=["megatron", "fsdp"], default="megatron", help="backend of the actor")
    parser.add_argument("--rounds", type=int, default=20, help="rounds of the comparison (default: 20)")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads (default: 1)")
    parser.add_argument("--quick", action="store_true", help="small sizes, as a smoke test")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    given = parser.parse_args()
    torch.set_num_threads(given.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    n_samples, rounds, host_rounds = (4, 1, 1) if given.quick else (32, given.rounds, 3)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_model(folder)
        shapes = {"": [96] * n_samples, "_uneven": long_tailed_lengths(n_samples)}
        for suffix, lengths in shapes.items():
            row = compare_steps(folder, lengths, rounds, given.strategy)
            found |= {f"step_over_transformers{suffix}": row.pop("ratio"), f"step{suffix}": row}
        for k in (64, 256):
            row = measure_host(folder, 2 * n_samples, k, host_rounds, given.strategy)
            found |= {f"host_us_per_token_k{k}": row.pop("host"), f"packing_us_per_token_k{k}": row.pop("packing")}
            found[f"host_parts_us_per_token_k{k}"] = row
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()

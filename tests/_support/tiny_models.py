"""Tiny Hugging Face models, random batches, and an actor on them.

Megatron and transformers are imported by the functions that use them, because unit tests import this module, too.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from recipe_gkd.actor.objective.loss_terms import GlobalDenominators
from recipe_gkd.commands.gpu_smoke.tiny_actor import actor_config, running_actor
from recipe_gkd.commands.gpu_smoke.tiny_models import make_sample, random_top_k
from recipe_gkd.config import Config
from recipe_gkd.data.samples import InsertedTokens, Sample
from recipe_gkd.data.sharding import shard_batch
from tests._support.waiting import PATIENCE_S

DEVICE = os.environ.get("GKD_TEST_DEVICE", "cpu")
"""Device of the actors of :func:`make_config`; ``cuda`` with a simulated GPU, see ``tests/gpu_paths``."""
VOCAB = 96
TOP_K = 8
MODEL = "actor_rollout_ref.model.path"
ACTOR = "actor_rollout_ref.actor"
MEGATRON = f"{ACTOR}.megatron"
LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def make_folder(path: Path, kind: str, seed: int = 0) -> Path:
    """Write a Hugging Face folder with random weights, biases and norms.

    Args:
        path: Folder to create.
        kind: Name of the architecture: ``qwen2``, ``qwen2_untied``, ``qwen3``, ``llama``, ``llama3`` (with scaled
            rotary embedding), ``qwen2_moe``, ``qwen3_moe`` or ``mixtral``.
        seed: Seed of the weights.
    """
    torch.manual_seed(seed)
    model = _random_model(kind)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.copy_(1 + 0.1 * torch.randn_like(parameter))
            else:
                parameter.normal_(0, 0.1 if "bias" in name else 0.15)
    model.save_pretrained(path, max_shard_size="40kB" if kind == "llama" else "5GB")  # several files for llama
    (path / "tokenizer.json").write_text("{}")
    (path / "generation_config.json").write_text('{"max_new_tokens": 7}')
    return path


def _random_model(kind: str) -> Any:
    import transformers

    sizes: dict[str, Any] = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=4 if kind == "qwen3" else 2, max_position_embeddings=256, rms_norm_eps=1e-6,
        tie_word_embeddings=kind in ("qwen2", "qwen3"), dtype="float32",
    )  # fmt: skip
    if kind in ("qwen2", "qwen2_untied"):
        return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**sizes))
    if kind == "qwen3":
        return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**sizes, head_dim=12))
    if kind == "qwen3_moe":
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20, norm_topk_prob=True)
        config = transformers.Qwen3MoeConfig(**sizes, **experts, head_dim=12, mlp_only_layers=[1])
        return transformers.Qwen3MoeForCausalLM(config)
    if kind == "qwen2_moe":
        experts = dict(num_experts=4, num_experts_per_tok=2, moe_intermediate_size=20)
        config = transformers.Qwen2MoeConfig(**sizes, **experts, shared_expert_intermediate_size=24)
        return transformers.Qwen2MoeForCausalLM(config)
    if kind == "mixtral":
        return transformers.MixtralForCausalLM(transformers.MixtralConfig(**sizes, num_local_experts=4))
    scaled = dict(rope_type="llama3", rope_theta=5e5, factor=8.0, **LLAMA3_ROPE)
    rope: dict[str, Any] = {"rope_parameters": scaled} if kind == "llama3" else {}
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, **rope))


def make_samples(count: int, *, seed: int = 0, sharpness: float = 1.5) -> list[Sample]:
    """Return samples with prompts of 1 to 9 tokens, responses of 0 to 20 tokens, and a random teacher's top-k.

    Args:
        count: Number of samples.
        seed: Seed of tokens and log-probabilities.
        sharpness: Standard deviation of the teacher's logits.
    """
    rng = np.random.default_rng(seed)
    samples = []
    for uid in range(count):
        prompt = rng.integers(0, VOCAB, rng.integers(1, 10)).astype(np.int32)
        response = rng.integers(0, VOCAB, rng.integers(0, 21)).astype(np.int32)
        samples.append(make_sample(uid, prompt, response, *random_top_k(rng, len(response), VOCAB, TOP_K, sharpness)))
    return samples


def with_turns(samples: Sequence[Sample], *, seed: int = 0) -> list[Sample]:
    """Return the samples as conversations of up to three turns, with 1 to 6 other tokens between two turns."""
    rng = np.random.default_rng(seed)
    found = []
    for sample in samples:
        n_tokens = len(sample.response.ids)
        starts = np.sort(rng.permutation(np.arange(1, max(n_tokens, 1)))[:2])
        before_N = np.repeat(starts, rng.integers(1, 7, len(starts))).astype(np.int32)
        inserted = InsertedTokens(ids_N=rng.integers(0, VOCAB, len(before_N)).astype(np.int32), before_N=before_N)
        found.append(replace(sample, response=replace(sample.response, inserted=inserted)))
    return found


def make_config(folder: Path, *overrides: str, ranks: int = 1) -> Config:
    """Return the configuration of a float32 actor on ``DEVICE`` for the model in ``folder``."""
    return actor_config(
        folder, DEVICE, f"trainer.n_gpus_per_node={ranks}", f"{MEGATRON}.dtype=float32",
        f"{ACTOR}.optim.weight_decay=0.05", f"{ACTOR}.optim.clip_grad=0.5", *overrides,
    )  # fmt: skip


def started(
    rank: int, world_size: int, port: int, config: Config, total_steps: int = 10, n_token_ids: int | None = None
) -> AbstractContextManager[Any]:
    """Set up an actor, and destroy its process groups at the end."""
    return running_actor(
        config,
        rank=rank,
        world_size=world_size,
        rendezvous=("127.0.0.1", port),
        total_steps=total_steps,
        n_token_ids=n_token_ids,
    )


def update(actor: Any, samples: Sequence[Sample], step: int = 0) -> dict[str, float]:
    """Run one optimizer step with this data-parallel rank's shard, as the driver does."""
    return actor.update(shard_of(actor, samples), step)


def shard_of(actor: Any, samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples of this data-parallel rank."""
    return shard_batch(samples, actor.layout.dp_size)[actor.layout.dp_rank]


def packed_logits(actor: Any, samples: Sequence[Sample]) -> Tensor | None:
    """Return the logits of one packed row of all samples, [N, V], on the last pipeline stage; None elsewhere."""
    from megatron.core import parallel_state as mpu

    from recipe_gkd.actor.batch.micro_batch_plan import MicroBatchPlan
    from recipe_gkd.actor.megatron import patches
    from recipe_gkd.actor.megatron.forward_backward import run_micro_batches
    from recipe_gkd.actor.objective.objective import MicroBatchLosses

    group = [_with_loss_in_all_rows(sample, uid) for uid, sample in enumerate(samples)]
    starts = torch.tensor([0, *(sample.n_tokens - 1 for sample in group)]).cumsum(0)

    def gather_logits(student: Any, batch: Any) -> Any:
        logits_NW = student.logits(torch.arange(len(batch.uids_T), device=actor.device))
        parts = [torch.empty_like(logits_NW) for _ in range(actor.layout.tp_size)]
        dist.all_gather(parts, logits_NW.contiguous(), group=mpu.get_tensor_model_parallel_group())
        own = starts[batch.uids_T.cpu()] + batch.positions_T.cpu(), torch.cat(parts, 1)[:, :VOCAB].cpu()
        by_rank: list[Any] = [None] * actor.layout.cp_size
        dist.all_gather_object(by_rank, own, group=mpu.get_context_parallel_group())
        rows, logits = (torch.cat(parts) for parts in zip(*by_rank, strict=True))
        return MicroBatchLosses(loss_T=logits_NW.sum(1), sums={"logits": logits[rows.argsort()]}, maxima={})

    gkd = actor._config.gkd
    plan = MicroBatchPlan(
        groups=[group] * 2,
        count=2,
        denominators=GlobalDenominators.of(GlobalDenominators.counts(group)),
        loss_agg_mode=gkd.loss_agg_mode,
        layout=actor.layout,
        row_multiple=actor.backend.row_multiple,
        device=actor.device,
        attention=actor.backend.attention,
    )
    with patches.on_host(), torch.no_grad():
        reports = run_micro_batches(
            actor.backend.model, plan, gather_logits, gkd=gkd, timeout_s=PATIENCE_S, forward_only=True
        )
    return reports[0]["sums"]["logits"] if reports else None


def with_ids_below(n_token_ids: int, sample: Sample) -> Sample:
    """Return the sample with smaller ids only."""
    prompt, response = sample.prompt.ids % n_token_ids, sample.response.ids % n_token_ids
    ids_TK = np.tile(np.arange(sample.teacher.ids_TK.shape[1], dtype=np.int32), (len(response), 1))
    return make_sample(sample.prompt.uid, prompt, response, sample.teacher.logps_TK, ids_TK)


def _with_loss_in_all_rows(sample: Sample, uid: int) -> Sample:
    """Return a sample of the same tokens whose prompt is one token, so that each row predicts a response token."""
    ids = sample.token_ids
    return make_sample(uid, ids[:1], ids[1:], np.full((len(ids) - 1, 1), -1.0), np.zeros((len(ids) - 1, 1)))


def transformers_logits(model: Any, samples: Sequence[Sample]) -> Tensor:
    """Return the logits of the same rows from a transformers model, one sample at a time, [N, V]."""
    rows = [torch.as_tensor(sample.token_ids[:-1]).long() for sample in samples]
    with torch.no_grad():
        return torch.cat([model(ids[None]).logits[0] for ids in rows])


def without_empty(samples: Sequence[Sample]) -> list[Sample]:
    """Return the samples with at least one response token."""
    return [sample for sample in samples if len(sample.response.ids)]

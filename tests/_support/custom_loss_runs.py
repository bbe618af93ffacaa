"""Runs of an objective with a custom loss, in this process or on one rank of a tensor-parallel group."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.actor.batch.device_batch import DeviceBatch, to_device
from recipe_gkd.actor.batch.packing import pack
from recipe_gkd.actor.batch.staging import stage
from recipe_gkd.actor.objective.loss_metrics import compute_loss_metrics, sum_names
from recipe_gkd.actor.objective.loss_terms import GlobalDenominators
from recipe_gkd.actor.objective.objective import MicroBatchLosses, Objective
from recipe_gkd.config.schema import CustomLossConfig, GkdConfig
from recipe_gkd.data.samples import Sample, TeacherTopK
from recipe_gkd.losses.student_output import HiddenStates, Logits
from tests._support import custom_losses
from tests._support.tiny_models import TOP_K, VOCAB, make_config, make_samples

PATH = str(Path(custom_losses.__file__).resolve())
HIDDEN = 12
COLUMNS = 112  # a multiple of 2, with padding

# Loss, metrics, and the gradients in the hidden states and in the output layer, float64.
Result = tuple[Tensor, dict[str, float], list[Tensor]]


def gkd_config(*overrides: str, custom: str | None = None) -> GkdConfig:
    gkd = make_config(Path("unused"), *overrides).gkd
    return replace(gkd, custom_loss=CustomLossConfig(path=PATH, name=custom)) if custom else gkd


def make_batch(samples: list[Sample]) -> DeviceBatch:
    packed, device = pack(samples), torch.device("cpu")
    denominators = GlobalDenominators.of(GlobalDenominators.counts(samples))
    return to_device(stage(packed, denominators.weights(packed, "token-mean"), device), device)


def teacher_logits(sample: Sample) -> Tensor:
    """Return the teacher's logits that predict the response tokens of a sample, float64 [T, V]."""
    rng = np.random.default_rng(sample.prompt.uid)
    return torch.as_tensor(rng.normal(size=(len(sample.response.ids), VOCAB)) * 1.5)


def score(sample: Sample, temperature: float) -> TeacherTopK:
    """Return the score of a teacher that divides all its logits by the temperature."""
    log_p_TV = (teacher_logits(sample) / temperature).log_softmax(1)
    top = log_p_TV.topk(TOP_K, dim=1)
    sampled_T = log_p_TV.gather(1, torch.as_tensor(sample.response.ids).long()[:, None])[:, 0]
    return TeacherTopK(
        logps_TK=top.values.float().numpy(),
        ids_TK=top.indices.int().numpy(),
        sampled_logps_T=sampled_T.float().numpy(),
    )


def scored_samples(temperature: float = 1.0) -> list[Sample]:
    """Return responses with and without a teacher, a reward and a reference."""
    rng = np.random.default_rng(0)
    samples = []
    for number, sample in enumerate(make_samples(7)):
        n_tokens = len(sample.response.ids)
        teacher = score(sample, temperature)
        response = replace(sample.response, logprobs=rng.normal(-4, 0.5, n_tokens).astype(np.float32))
        if number == 3:
            teacher = TeacherTopK.absent(n_tokens)
        reward = float(number) if number != 4 else None
        samples.append(replace(sample, teacher=teacher, response=response, advantage=rng.normal(), reward=reward))
    samples[5] = replace(samples[5], prompt=replace(samples[5].prompt, reference_ids=samples[5].response.ids))
    return samples


def loss_and_gradients(
    gkd: GkdConfig, samples: list[Sample] | None = None, *, tp_group: ProcessGroup | None = None
) -> Result:
    batch = make_batch(scored_samples(gkd.distill_temperature) if samples is None else samples)
    generator = torch.Generator().manual_seed(0)
    n_tokens, rank, size = len(batch.ids_TK), 0, 1
    if tp_group is not None:
        rank, size = tp_group.rank(), tp_group.size()
    hidden_TD = torch.randn(n_tokens, HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
    whole_VD = torch.randn(COLUMNS, HIDDEN, generator=generator, dtype=torch.float64)
    weight_WD = whole_VD.chunk(size)[rank].clone().requires_grad_()
    if gkd.fuse_lm_head:
        student: Logits | HiddenStates = HiddenStates(
            hidden_TD=hidden_TD, weight_WD=weight_WD, tp_group=tp_group, chunk_tokens=gkd.chunk_tokens
        )
    else:
        student = Logits(logits_TW=hidden_TD @ weight_WD.T, tp_group=tp_group, chunk_tokens=gkd.chunk_tokens)
    losses: MicroBatchLosses = Objective(gkd=gkd, vocab_size=VOCAB, tp_group=tp_group)(student, batch)
    grad_TD, grad_WD = torch.autograd.grad(losses.loss_T.sum(), (hidden_TD, weight_WD))
    if tp_group is not None and not gkd.fuse_lm_head:  # Megatron's output layer sums this gradient over the ranks
        dist.all_reduce(grad_TD, group=tp_group)
    sums = {name: value.item() for name, value in losses.sums.items()}
    assert sums.keys() >= set(sum_names(gkd, ["default"]))
    return losses.loss_T.detach(), compute_loss_metrics(gkd, ["default"], sums, {}), [grad_TD, grad_WD]


LAYOUTS = [[], ["gkd.chunk_tokens=3"], ["gkd.fuse_lm_head=true", "gkd.chunk_tokens=5"]]

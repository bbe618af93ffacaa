"""Replay of the experts of the rollout (``rollout.routing_replay``): equality with transformers on given experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from recipe_gkd.actor.fsdp.routing_replay import ROUTERS
from recipe_gkd.data.samples import Sample
from tests._support.families import BY_TYPE, make_family_folder
from tests._support.layouts import CP2, EP2, ETP1, OVERRIDE, PP2, RECOMPUTE, SP, TP2, VPP2
from tests._support.routed_experts import ForcedExperts, chosen_experts, with_experts
from tests._support.tiny_models import ACTOR, make_config, make_samples, with_turns
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs
from tests.integration.actor.reference import assert_metrics, assert_weights, reference_training

REPLAY = "actor_rollout_ref.rollout.routing_replay=true"
AGREEMENT = "actor/routing_agreement"
LR = 1e-3
SETTINGS = [f"{ACTOR}.optim.lr={LR}", f"{ACTOR}.max_token_len=40"]  # several micro-batches
FSDP = [*SETTINGS, f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.dtype=float32"]
CHECKPOINTED = f"{ACTOR}.fsdp_config.gradient_checkpointing=true"
SELECTIVE = [f"{OVERRIDE}.recompute_granularity=selective", f"{OVERRIDE}.recompute_modules=[moe]"]
PLAIN_BATCHES = [make_samples(9), with_turns(make_samples(9, seed=1))]
LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "one process": (1, []),
    "recomputed layers": (1, RECOMPUTE),
    "recomputed experts": (1, SELECTIVE),
    "tensor 2, half of the experts on each": (2, [TP2, SP, ETP1, EP2]),
    "pipeline 2, recomputed layers": (2, [PP2, *RECOMPUTE]),
    "context 2 x expert 2": (2, [CP2, EP2]),
}
SLOW_LAYOUTS: dict[str, tuple[int, list[str]]] = {
    "tensor 2 of each expert": (2, [TP2, SP]),
    "pipeline 2, interleaved, x expert 2, recomputed layers": (4, [PP2, VPP2, EP2, *RECOMPUTE]),
    "context 2 x tensor 2 x expert 2": (4, [CP2, TP2, SP, EP2]),
}


class Case:
    """A model, samples with experts, and the training of transformers on these experts in float64."""

    def __init__(self, folder: Path) -> None:
        hf = transformers.AutoConfig.from_pretrained(folder)
        # The reference has no choice from groups, as tokens without given experts need it.
        every_token = bool(getattr(hf, "n_group", None))
        self.folder = folder
        self.batches = [with_experts(batch, hf, every_token=every_token) for batch in PLAIN_BATCHES]
        forced = ForcedExperts.of([sample for batch in self.batches for sample in batch])
        self.metrics, self.weights = reference_training(folder, self.batches, lr=LR, prepare=forced.force)
        self.agreement = None if every_token else self._agreement(forced)

    def _agreement(self, forced: ForcedExperts) -> float:
        n_sequences = sum(len(sample.response.ids) > 0 for sample in self.batches[0])
        first = forced.agreements[:n_sequences]
        return sum(each.n_same for each in first) / sum(each.n_given for each in first)

    def check(self, results: list[jobs.Training], rel: float = 5e-4) -> None:
        """Compare a training on each rank."""
        for result in results:
            assert_metrics(result.metrics, self.metrics, rel=rel)
            assert self.agreement is None or result.metrics[0][AGREEMENT] == pytest.approx(self.agreement, abs=1e-6)
        assert results[0].weights.keys() == self.weights.keys()
        assert_weights(results[0].weights, self.weights)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    """Return the case of a Qwen3-MoE with a dense layer."""
    folder = tmp_path_factory.mktemp("replay") / "model"
    return Case(make_family_folder(folder, BY_TYPE["qwen3_moe"], {"mlp_only_layers": [1], "num_hidden_layers": 4}))


def families(names: Any) -> list[Any]:
    """Return families as parameters. Those that are not tested by default are slow."""
    return [pytest.param(name, marks=() if BY_TYPE[name].is_default else pytest.mark.slow) for name in names]


@pytest.mark.parametrize("name", families(ROUTERS))
def test_fsdp_training_on_given_experts_equals_transformers(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    """Gradients of the router are among the compared weights. Recomputation replays, too."""
    case = Case(make_family_folder(tmp_path / "model", BY_TYPE[name]))
    config = make_config(case.folder, *FSDP, CHECKPOINTED, REPLAY, ranks=2)
    case.check(pool.run(2, jobs.train_any, config, case.batches))


@pytest.mark.parametrize("name", families(name for name in ROUTERS if not BY_TYPE[name].megatron))
def test_megatron_training_on_given_experts_equals_transformers(name: str, pool: WorkerPool, tmp_path: Path) -> None:
    case = Case(make_family_folder(tmp_path / "model", BY_TYPE[name]))
    case.check(pool.run(1, jobs.train_any, make_config(case.folder, *SETTINGS, REPLAY), case.batches))


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW_LAYOUTS)])
def test_megatron_layout_on_given_experts_equals_transformers(name: str, pool: WorkerPool, case: Case) -> None:
    ranks, overrides = (LAYOUTS | SLOW_LAYOUTS)[name]
    config = make_config(case.folder, *SETTINGS, *overrides, REPLAY, ranks=ranks)
    case.check(pool.run(ranks, jobs.train_any, config, case.batches))


@pytest.mark.parametrize("settings", [FSDP, SETTINGS], ids=["fsdp", "megatron"])
def test_replay_of_own_experts_changes_nothing(settings: list[str], pool: WorkerPool, case: Case) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(case.folder, dtype=torch.float32)
    batch = chosen_experts(model, PLAIN_BATCHES[1])

    def train(samples: list[Sample], *overrides: str) -> tuple[dict[str, float], dict[str, Tensor]]:
        [result] = pool.run(1, jobs.train_any, make_config(case.folder, *settings, *overrides), [samples])
        return result.metrics[0], result.weights

    metrics, weights = train(batch, REPLAY)
    want_metrics, want_weights = train(PLAIN_BATCHES[1])
    assert metrics[AGREEMENT] == 1 and AGREEMENT not in want_metrics
    assert metrics["actor/loss"] == pytest.approx(want_metrics["actor/loss"], rel=1e-6)
    assert metrics["actor/grad_norm"] == pytest.approx(want_metrics["actor/grad_norm"], rel=1e-5)
    assert_weights(weights, {name: tensor.double() for name, tensor in want_weights.items()})

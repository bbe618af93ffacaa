"""LoRA in the Megatron backend: equality with a training of transformers and peft, on any parallel layout."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import peft
import pytest
import torch
import transformers
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader

from recipe_gkd.actor.lora import initial_factor
from recipe_gkd.actor.megatron.export import export_adapters
from recipe_gkd.actor.megatron.parallel import destroy_parallel
from recipe_gkd.config import Config
from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import CheckpointMismatch, ConfigError, GkdError
from tests._support.errors import check_error
from tests._support.families import BY_TYPE, make_family_folder
from tests._support.layouts import BF16, CP2, EP2, OVERLAP, PLAIN_OPTIMIZER, PP2, RECOMPUTE, SP, TP2, VPP2
from tests._support.tiny_models import ACTOR, make_config, started, transformers_logits, update, without_empty
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs, save_jobs
from tests.integration.actor.lora_reference import (
    ADAPTERS,
    BATCHES,
    RANK,
    peft_training,
    stored_weights,
    targets_of,
)
from tests.integration.actor.reference import assert_metrics, assert_weights

N_UPDATES = 3
SLOW = pytest.mark.slow
LAYOUTS: dict[str, tuple[str, int, list[str]]] = {
    "one process": ("qwen2", 1, []),
    "one process, recomputed activations": ("llama", 1, RECOMPUTE),
    "tensor 2, sequence parallel": ("qwen3", 2, [TP2, SP]),
    "tensor 2": ("qwen2", 2, [TP2]),
    "pipeline 2": ("qwen2", 2, [PP2]),
    "data 2": ("llama", 2, []),
    "context 2": ("qwen2", 2, [CP2]),
    "tensor 2 x pipeline 2, sequence parallel": ("qwen2", 4, [TP2, PP2, SP]),
    "experts, tensor 2, sequence parallel": ("qwen3_moe", 2, [TP2, SP]),
    "shared experts, tensor 2, sequence parallel": ("qwen2_moe", 2, [TP2, SP]),
    "two modules, plain optimizer": (
        "qwen3", 2, [PLAIN_OPTIMIZER, f"{ACTOR}.lora.target_modules=[k_proj,mlp.up_proj]"]
    ),
    "pipeline 2, interleaved, recomputed activations": ("qwen2", 2, [PP2, VPP2, *RECOMPUTE]),
    "tensor 2, recomputed activations, fused head": ("llama", 2, [TP2, *RECOMPUTE, "gkd.fuse_lm_head=true"]),
    "data 2, overlapped": ("qwen2", 2, OVERLAP),
    "experts 2": ("qwen3_moe", 2, [EP2]),
    "shared experts, one process": ("qwen2_moe", 1, []),
}  # fmt: skip
DEFAULT = {"one process", "one process, recomputed activations", "tensor 2, sequence parallel"}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in DEFAULT else SLOW) for name in LAYOUTS])
def test_training_on_layout_equals_peft(name: str, pool: WorkerPool, folders: dict[str, Path]) -> None:
    """The exported weights have the names and shapes of the folder, and the values of ``merge_and_unload``."""
    kind, ranks, overrides = LAYOUTS[name]
    config = make_config(folders[kind], *ADAPTERS, *overrides, ranks=ranks)
    targets = targets_of(config.actor_rollout_ref.actor.lora.target_modules)
    want_metrics, want_weights = peft_training(folders[kind], targets, N_UPDATES)
    results = pool.run(ranks, jobs.train_any, config, BATCHES[:N_UPDATES])
    for result in results:
        assert_metrics(result.metrics, want_metrics, rel=1e-4)
    weights, meta = results[0].weights, results[0].meta
    assert_weights(weights, want_weights)
    stored = stored_weights(folders[kind])
    assert {name: shape for name, shape, _ in meta} == {name: tuple(tensor.shape) for name, tensor in stored.items()}
    merged = {name for name, tensor in weights.items() if not torch.equal(tensor, stored[name])}
    assert merged == {name for name, tensor in stored.items() if not torch.equal(want_weights[name], tensor.double())}
    assert merged and "model.embed_tokens.weight" not in merged


class State(NamedTuple):
    """State of a rank.

    Attributes:
        adapters: New adapters by name; only on rank 0.
        base_is_unchanged: True if an update did not change any frozen parameter.
        gradients: Numbers of the parameters with a gradient buffer, and of those with an optimizer state.
        trained: Number of trained parameters.
        dtypes: Data types of the trained and of the frozen parameters.
    """

    adapters: dict[str, Tensor]
    base_is_unchanged: bool
    gradients: tuple[int, int]
    trained: int
    dtypes: tuple[set[torch.dtype], set[torch.dtype]]


def describe_state(rank: int, world_size: int, port: int, config: Config, batch: list[Sample]) -> State:
    """Return the adapters before an update, and the state after it."""
    with started(rank, world_size, port, config) as actor:
        model = actor.backend.model
        adapters = {name: tensor.clone() for name, tensor in export_adapters(model)}
        parameters = [parameter for chunk in model.chunks for parameter in chunk.parameters()]
        frozen = [parameter for parameter in parameters if not parameter.requires_grad]
        trained = [parameter for parameter in parameters if parameter.requires_grad]
        before = [parameter.detach().clone() for parameter in frozen]
        update(actor, batch)
        with_buffer = [parameter for parameter in parameters if hasattr(parameter, "main_grad")]
        states = [p.optimizer.param_groups for p in model.optimizer.chained_optimizers]
        optimized = [parameter for groups in states for group in groups for parameter in group["params"]]
        return State(
            adapters=adapters,
            base_is_unchanged=all(torch.equal(*pair) for pair in zip(before, frozen, strict=True)),
            gradients=(sum(p.numel() for p in with_buffer), sum(p.numel() for p in optimized)),
            trained=sum(p.numel() for p in trained),
            dtypes=({p.dtype for p in trained}, {p.dtype for p in frozen}),
        )


@pytest.mark.parametrize(("ranks", "overrides"), [(1, []), (2, [TP2, SP]), pytest.param(4, [TP2, PP2], marks=SLOW)])
def test_only_adapters_are_trained_and_start_alike_on_each_layout(
    ranks: int, overrides: list[str], pool: WorkerPool, folders: dict[str, Path]
) -> None:
    config = make_config(folders["qwen2"], *ADAPTERS, *overrides, BF16, ranks=ranks)
    states = pool.run(ranks, describe_state, config, BATCHES[0])
    for state in states:
        assert state.base_is_unchanged and state.trained > 0
        assert state.gradients == (state.trained, state.trained)
        assert state.dtypes == ({torch.bfloat16}, {torch.bfloat16})
    adapters = states[0].adapters
    assert not any(state.adapters for state in states[1:]), "only rank 0 may yield adapters"
    assert len(adapters) == 2 * 7 * 4
    for name, tensor in adapters.items():
        layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        if name.endswith(".lora_A.weight"):
            want = initial_factor(layer, RANK, tensor.shape[1], config.data.seed).bfloat16()
            assert torch.equal(tensor, want), name
        else:
            assert tensor.shape[1] == RANK and not tensor.any(), name


@pytest.mark.parametrize(
    ("kind", "ranks", "overrides"),
    [("qwen2", 2, [TP2, SP]), pytest.param("qwen2_moe", 2, [PP2], marks=SLOW)],
)
def test_saved_folder_has_merged_weights_and_a_peft_folder(
    kind: str, ranks: int, overrides: list[str], pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    config = make_config(folders[kind], *ADAPTERS, *overrides, ranks=ranks)
    logits = next(x for x in pool.run(ranks, save_jobs.save_hf, config, BATCHES[0], path) if x is not None)
    merged = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(folders[kind], dtype=torch.float32)
    samples = without_empty(BATCHES[0])
    new = transformers_logits(base, samples)
    adapted = peft.PeftModel.from_pretrained(base, path / "adapter")
    assert all(parameter.dtype == torch.float32 for parameter in adapted.parameters())
    for model in (merged, adapted):
        want = transformers_logits(model, samples)
        torch.testing.assert_close(logits[: len(want)], want, rtol=0, atol=2e-5)
    assert (new - logits[: len(new)]).abs().max() > 1e-2, "the update must change the model"


@pytest.mark.parametrize(
    ("kind", "saved", "ranks", "resumed", "ranks_then", "exactly"),
    [
        pytest.param("qwen2", [TP2, SP], 2, [TP2, SP], 2, True, id="tensor 2"),
        pytest.param("phi3", [TP2, SP], 2, [], 1, False, id="joined layers, tensor 2 to 1", marks=SLOW),
        pytest.param("qwen2", [], 1, [TP2], 2, False, id="1 to tensor 2", marks=SLOW),
        pytest.param("glm4", [], 1, [TP2], 2, False, id="joined layers, 1 to tensor 2", marks=SLOW),
        pytest.param("qwen2", [], 2, [PP2], 2, False, id="data 2 to pipeline 2", marks=SLOW),
        pytest.param("qwen2", [BF16], 2, [BF16], 2, True, id="bfloat16, data 2", marks=SLOW),
        pytest.param("phi3", [PLAIN_OPTIMIZER, TP2], 2, [PLAIN_OPTIMIZER], 1, False, id="plain", marks=SLOW),
    ],
)
def test_resume_in_any_layout_repeats_next_step(
    kind: str, saved: list[str], ranks: int, resumed: list[str], ranks_then: int, exactly: bool,
    pool: WorkerPool, folders: dict[str, Path], tmp_path: Path,
) -> None:  # fmt: skip
    path = tmp_path / "ckpt"
    folder = folders.get(kind) or make_family_folder(tmp_path / "model", BY_TYPE[kind])
    config = make_config(folder, *ADAPTERS, *saved, ranks=ranks)
    job = save_jobs.train_and_save
    want_metrics, want_weights = pool.run(ranks, job, config, BATCHES[0], BATCHES[1], path)[0]
    keys = FileSystemReader(path).read_metadata().state_dict_metadata
    assert all(".lora_A." in key or ".lora_B." in key for key in keys if not key.startswith("rng"))
    config = make_config(folder, *ADAPTERS, *resumed, ranks=ranks_then)
    step, metrics, weights = pool.run(ranks_then, save_jobs.resume_and_train, config, path, BATCHES[1])[0]
    assert step == 1
    for key in ("actor/kl_loss", "actor/grad_norm"):
        assert metrics[key] == (want_metrics[key] if exactly else pytest.approx(want_metrics[key], rel=1e-5)), key
    for name, tensor in weights.items():
        if exactly:
            assert torch.equal(tensor, want_weights[name]), name
        else:
            assert (tensor - want_weights[name]).abs().mean() < 1e-5, name


def test_checkpoint_of_other_adapters_is_refused(pool: WorkerPool, folders: dict[str, Path], tmp_path: Path) -> None:
    config = make_config(folders["llama"], *ADAPTERS)
    pool.run(1, save_jobs.train_and_save, config, BATCHES[0], BATCHES[1], tmp_path / "ckpt")
    others = {("lora_alpha",): [*ADAPTERS, f"{ACTOR}.lora.alpha=5"], ("lora_alpha", "lora_rank", "target_modules"): []}
    for differing, overrides in others.items():
        other = make_config(folders["llama"], *overrides)
        [error] = pool.run(1, save_jobs.load_with_error, other, tmp_path / "ckpt")
        check_error(error, CheckpointMismatch, path=tmp_path / "ckpt", differing=differing)


def test_dropout_changes_gradient_of_first_update(pool: WorkerPool, folders: dict[str, Path]) -> None:
    """The loss is equal, because B is zero, but the gradient of B is that of other inputs."""
    [want, *_], _ = peft_training(folders["qwen2"], None, N_UPDATES)
    config = make_config(folders["qwen2"], *ADAPTERS, f"{ACTOR}.lora.dropout=0.5")
    [got] = pool.run(1, jobs.train_any, config, BATCHES[:1])[0].metrics
    assert got["actor/kl_loss"] == pytest.approx(want["actor/kl_loss"], rel=1e-4)
    assert got["actor/grad_norm"] != pytest.approx(want["actor/grad_norm"], rel=1e-2)


def start_with_error(rank: int, world_size: int, port: int, config: Config) -> GkdError | None:
    """Return the error of the start of an actor."""
    try:
        with started(rank, world_size, port, config):
            return None
    except GkdError as error:
        return error
    finally:
        destroy_parallel()


@pytest.mark.parametrize(
    ("kind", "ranks", "overrides", "keys"),
    [
        ("qwen3_moe", 1, [f"{ACTOR}.lora.target_modules=[gate]"], ("lora.target_modules",)),
        pytest.param(
            "qwen2", 2, [PP2, f"{ACTOR}.lora.target_modules=[0.self_attn.q_proj]"],
            (
                "lora.target_modules", "megatron.pipeline_model_parallel_size",
                "megatron.virtual_pipeline_model_parallel_size",
            ),
            marks=SLOW,
        ),
        pytest.param(
            "qwen2_moe", 1, [f"{ACTOR}.lora.dropout=0.1"], ("lora.dropout", "lora.target_modules"),
            marks=SLOW,
        ),
    ],
)  # fmt: skip
def test_unsupported_adapters_are_refused_on_all_ranks(
    kind: str, ranks: int, overrides: list[str], keys: tuple[str, ...], pool: WorkerPool, folders: dict[str, Path]
) -> None:
    config = make_config(folders[kind], *ADAPTERS, *overrides, ranks=ranks)
    for error in pool.run(ranks, start_with_error, config):
        check_error(error, ConfigError, keys=tuple(f"{ACTOR}.{key}" for key in keys))

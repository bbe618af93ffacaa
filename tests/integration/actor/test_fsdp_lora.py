"""LoRA in the FSDP backend: equality with a training of transformers and peft, on any number of ranks."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from recipe_gkd.commands.gpu_smoke.tiny_actor import exported
from recipe_gkd.config import Config
from recipe_gkd.data.samples import Sample
from tests._support.tiny_models import ACTOR, make_config, started, update
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import fsdp_save_jobs, jobs
from tests.integration.actor.lora_reference import ADAPTERS, BATCHES, peft_training, targets_of
from tests.integration.actor.reference import assert_metrics, assert_weights

FSDP = [f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.dtype=float32"]
BFLOAT16 = f"{ACTOR}.fsdp_config.dtype=bfloat16"
LORA = [*FSDP, *ADAPTERS]
SETTINGS: dict[str, tuple[str, int, list[str]]] = {
    "one process": ("qwen2", 1, []),
    "two shards, fused head, checkpointed": (
        "qwen2", 2, ["gkd.fuse_lm_head=true", f"{ACTOR}.fsdp_config.gradient_checkpointing=true"]
    ),
    "two copies, two modules": (
        "qwen3", 2, [f"{ACTOR}.fsdp_config.fsdp_size=1", f"{ACTOR}.lora.target_modules=[q_proj,mlp.up_proj]"]
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if "two copies" in name else ()) for name in SETTINGS]
)
def test_training_equals_peft(name: str, pool: WorkerPool, folders: dict[str, Path]) -> None:
    """The exported weights have the names and shapes of the folder, and the values of ``merge_and_unload``."""
    kind, ranks, overrides = SETTINGS[name]
    config = make_config(folders[kind], *LORA, *overrides, ranks=ranks)
    targets = config.actor_rollout_ref.actor.lora.target_modules
    want_metrics, want_weights = peft_training(folders[kind], targets_of(targets))
    results = pool.run(ranks, jobs.train_any, config, BATCHES)
    for result in results:
        assert_metrics(result.metrics, want_metrics, rel=1e-4)
    weights, meta = results[0].weights, results[0].meta
    assert_weights(weights, want_weights)
    stored = load_file(folders[kind] / "model.safetensors")
    assert {name: shape for name, shape, _ in meta} == {name: tuple(tensor.shape) for name, tensor in stored.items()}
    merged = {name for name, tensor in weights.items() if not torch.equal(tensor, stored[name])}
    assert merged == {name for name, tensor in stored.items() if not torch.equal(want_weights[name], tensor.double())}
    assert merged and "model.embed_tokens.weight" not in merged


def test_dropout_changes_gradient_of_first_update(pool: WorkerPool, folders: dict[str, Path]) -> None:
    """The loss is equal, because B is zero, but the gradient of B is that of other inputs."""
    [want, *_], _ = peft_training(folders["qwen2"], None)
    config = make_config(folders["qwen2"], *LORA, f"{ACTOR}.lora.dropout=0.5")
    [got] = pool.run(1, jobs.train_any, config, BATCHES[:1])[0].metrics
    assert got["actor/kl_loss"] == pytest.approx(want["actor/kl_loss"], rel=1e-4)
    assert got["actor/grad_norm"] != pytest.approx(want["actor/grad_norm"], rel=1e-2)


@pytest.mark.gpu
def test_training_on_gpu_equals_peft(pool: WorkerPool, folders: dict[str, Path]) -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    want_metrics, want_weights = peft_training(folders["qwen2"], None)
    config = make_config(folders["qwen2"], *LORA, "trainer.device=cuda")
    [(metrics, weights)] = pool.run(1, jobs.train_on_device, config, BATCHES)
    assert_metrics(metrics, want_metrics, rel=1e-4)
    assert_weights(weights, want_weights)


@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)])
def test_new_adapters_do_not_change_logits_bitwise(dtype: str, pool: WorkerPool, folders: dict[str, Path]) -> None:
    settings = f"{ACTOR}.fsdp_config.dtype={dtype}"
    plain, adapted = (
        pool.run(2, logits_around_update, make_config(folders["llama"], *options, settings, ranks=2), BATCHES[0])
        for options in (FSDP, LORA)
    )
    for (want, _, _), (got, changed, dtypes) in zip(plain, adapted, strict=True):
        assert torch.equal(got, want) and not torch.equal(changed, want)
        assert dtypes == {"trained": {"float32"}, "frozen": {dtype}}


def logits_around_update(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample]
) -> tuple[Tensor, Tensor, dict[str, set[str]]]:
    """Return the logits before and after an update, and the data types of trained and frozen parameters."""
    with started(rank, world_size, port, config) as actor:
        students = jobs._record_students(actor)
        update(actor, batch, 0)
        n_micro_batches = len(students)
        update(actor, batch, 1)
        logits = [student.logits_TW.detach().cpu() for student in students]
        parameters = list(actor.backend.model.module.parameters())
        dtypes = {
            kind: {str(p.dtype).removeprefix("torch.") for p in parameters if p.requires_grad == (kind == "trained")}
            for kind in ("trained", "frozen")
        }
        return torch.cat(logits[:n_micro_batches]), torch.cat(logits[n_micro_batches:]), dtypes


def test_saved_folder_has_merged_weights_and_a_peft_folder(
    pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "saved"
    config = make_config(folders["qwen2"], *LORA, ranks=2)
    want = pool.run(2, train_and_export, config, BATCHES[0], path)[0]
    merged = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    base = transformers.AutoModelForCausalLM.from_pretrained(folders["qwen2"], dtype=torch.float32)
    adapted = peft.PeftModel.from_pretrained(base, path / "adapter").merge_and_unload()
    for loaded in (merged.state_dict(), adapted.state_dict()):
        for name, tensor in want.items():
            assert torch.equal(loaded[name], tensor), name


def train_and_export(
    rank: int, world_size: int, port: int, config: Config, batch: list[Sample], path: Path
) -> dict[str, Tensor]:
    """Run an update, save a Hugging Face folder, and return the exported weights."""
    with started(rank, world_size, port, config) as actor:
        update(actor, batch, 0)
        actor.save_hf(path)
        return exported(actor)


class TestCheckpoint:
    def test_resume_restores_adapters_exactly_on_other_ranks(
        self, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        config = make_config(folders["qwen2"], *LORA, BFLOAT16, ranks=2)
        want, want_metrics, _ = pool.run(
            2, fsdp_save_jobs.train_and_save, config, BATCHES[0], BATCHES[1], tmp_path / "saved"
        )[0]  # fmt: skip
        assert all(".lora_A." in name or ".lora_B." in name for name in want if name != "random")
        config = make_config(folders["qwen2"], *LORA, BFLOAT16)
        step, state, metrics, _ = pool.run(
            1, fsdp_save_jobs.load_and_save, config, tmp_path / "saved", BATCHES[1], tmp_path / "copy"
        )[0]  # fmt: skip
        assert step == 1 and state.keys() == want.keys()
        assert all(torch.equal(state[name], tensor) for name, tensor in want.items() if name != "random")
        assert metrics["actor/kl_loss"] == pytest.approx(want_metrics["actor/kl_loss"], rel=1e-2)

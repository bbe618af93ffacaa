"""The command ``export``: its folder equals the one that the run saved, for checkpoints of several ranks."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from unittest import mock

import peft
import pytest
import torch
import transformers
import yaml
from safetensors.torch import load_file

from recipe_gkd.commands.export.source import find_source
from recipe_gkd.commands.export.write import loaded
from recipe_gkd.config import Config
from recipe_gkd.data.samples import Sample
from tests._support.repository import REPO
from tests._support.tiny_models import ACTOR, MEGATRON, make_config, make_samples, started, update
from tests._support.waiting import PATIENCE_S
from tests._support.worker_pool import WorkerPool

FSDP = [f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.dtype=bfloat16"]
RUNS: dict[str, tuple[str, int, list[str]]] = {
    "megatron": ("llama", 2, [f"{MEGATRON}.tensor_model_parallel_size=2"]),
    "megatron, experts": ("qwen3_moe", 2, [f"{MEGATRON}.pipeline_model_parallel_size=2", f"{MEGATRON}.dtype=bfloat16"]),
    "megatron, bfloat16": ("qwen2", 1, [f"{MEGATRON}.dtype=bfloat16"]),
    "megatron, LoRA": ("qwen2", 2, [f"{MEGATRON}.pipeline_model_parallel_size=2", f"{ACTOR}.lora.rank=4"]),
    "fsdp": ("qwen2", 2, FSDP),
    "fsdp, LoRA": ("qwen2_untied", 2, [*FSDP, f"{ACTOR}.lora.rank=4"]),
    "megatron, LoRA, experts": ("qwen3_moe", 1, [f"{ACTOR}.lora.rank=4"]),
    "fsdp, LoRA, experts": ("qwen3_moe", 1, [FSDP[0], f"{ACTOR}.fsdp_config.dtype=float32", f"{ACTOR}.lora.rank=4"]),
}
STOP_IDS = [5, 7]
"""Ids that ended responses of the runs. The model folders declare no ids."""
SLOW = RUNS.keys() - {"fsdp, LoRA"}


def save_all(rank: int, world_size: int, port: int, config: Config, batch: list[Sample], folder: Path) -> None:
    """Run an update, and save the sharded checkpoint and the Hugging Face folder."""
    with started(rank, world_size, port, config) as actor:
        update(actor, batch)
        actor.save_checkpoint(folder / "actor")
        actor.finish_saves()
        actor.save_hf(folder / "huggingface", STOP_IDS)


def make_run(name: str, folder: Path, folders: dict[str, Path], pool: WorkerPool) -> Path:
    """Write a run with one checkpoint. Its model folder has a chat template. Return the checkpoint folder."""
    kind, ranks, overrides = RUNS[name]
    model = folder / "model"
    shutil.copytree(folders[kind], model)
    (model / "chat_template.jinja").write_text("{{ messages[0].content }}")
    checkpoint = folder / "run" / "global_step_1"
    checkpoint.mkdir(parents=True)
    config = make_config(model, *overrides, ranks=ranks)
    pool.run(ranks, save_all, config, make_samples(6), checkpoint)
    (checkpoint / "trainer.json").write_text(json.dumps({"stop_token_ids": STOP_IDS}))
    settings = config.actor_rollout_ref.actor
    section = {
        "model": {"path": str(model)},
        "actor": {
            "megatron": {"dtype": settings.megatron.dtype},
            "fsdp_config": {"dtype": settings.fsdp_config.dtype},
            "lora": {"rank": settings.lora.rank},
        },
    }
    (folder / "run" / "config.yaml").write_text(yaml.safe_dump({"actor_rollout_ref": section}))
    return checkpoint


def export(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run the command in a separate process."""
    command = [sys.executable, "-m", "recipe_gkd", "export", *map(str, arguments)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("RANK", "WORLD_SIZE"))}
    return subprocess.run(
        command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in RUNS])
def test_folder_equals_the_one_of_the_run(
    name: str, tmp_path: Path, pool: WorkerPool, folders: dict[str, Path]
) -> None:
    checkpoint = make_run(name, tmp_path, folders, pool)
    run = export(checkpoint, tmp_path / "out")
    assert run.returncode == 0, run.stderr
    saved = checkpoint / "huggingface"
    names = {file.name for file in saved.iterdir() if file.is_file()}
    assert {"chat_template.jinja", "generation_config.json", "tokenizer.json"} <= names
    assert {file.name for file in (tmp_path / "out").iterdir()} == names
    assert json.loads((saved / "generation_config.json").read_text())["eos_token_id"] == STOP_IDS
    for file in names:
        assert (tmp_path / "out" / file).read_bytes() == (saved / file).read_bytes(), file


def count_reads(rank: int, world_size: int, port: int, run: Path) -> int:
    """Load a checkpoint for an export. Return how often the weights of the model folder are read."""
    from recipe_gkd.actor.megatron import megatron_model

    with mock.patch.object(megatron_model, "load_hf", wraps=megatron_model.load_hf) as load, loaded(find_source(run)):
        return load.call_count


def test_model_folder_is_read_once(tmp_path: Path, pool: WorkerPool, folders: dict[str, Path]) -> None:
    """Its rounding errors in 16 bits, which a training reads again, are not those of the checkpoint."""
    checkpoint = make_run("megatron, bfloat16", tmp_path, folders, pool)
    assert pool.run(1, count_reads, checkpoint.parent) == [1]


@pytest.mark.slow
def test_adapter_of_megatron_equals_the_one_of_the_run(
    tmp_path: Path, pool: WorkerPool, folders: dict[str, Path]
) -> None:
    checkpoint = make_run("megatron, LoRA", tmp_path, folders, pool)
    run = export(checkpoint, tmp_path / "adapter", "--adapter")
    assert run.returncode == 0, run.stderr
    for file in (checkpoint / "huggingface" / "adapter").iterdir():
        assert (tmp_path / "adapter" / file.name).read_bytes() == file.read_bytes()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["megatron", "fsdp"])
def test_adapter_that_peft_cannot_load_is_refused(
    backend: str, tmp_path: Path, pool: WorkerPool, folders: dict[str, Path]
) -> None:
    """Peft takes the names of the dense layer of this mixture of experts for names of experts."""
    checkpoint = make_run(f"{backend}, LoRA, experts", tmp_path, folders, pool)
    assert not (checkpoint / "huggingface" / "adapter").exists()
    run = export(checkpoint, tmp_path / "adapter", "--adapter")
    assert run.returncode == 1 and "onto other layers" in run.stderr and "Traceback" not in run.stderr
    assert not (tmp_path / "adapter").exists()


@pytest.mark.slow
def test_adapter_dtype_shards_and_refusals(tmp_path: Path, pool: WorkerPool, folders: dict[str, Path]) -> None:
    checkpoint = make_run("fsdp, LoRA", tmp_path, folders, pool)
    saved = checkpoint / "huggingface"
    assert export(checkpoint, tmp_path / "adapter", "--adapter").returncode == 0
    for file in (saved / "adapter").iterdir():
        assert (tmp_path / "adapter" / file.name).read_bytes() == file.read_bytes()
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    peft.PeftModel.from_pretrained(base, tmp_path / "adapter")

    run = export(checkpoint.parent, tmp_path / "float32", "--dtype", "float32", "--max-shard-gb", "0.00002")
    assert run.returncode == 0, run.stderr
    assert len(list((tmp_path / "float32").glob("model-*.safetensors"))) > 1
    complete, expected = weights_of(tmp_path / "float32"), weights_of(saved)
    assert complete.keys() == expected.keys()
    for name, tensor in complete.items():
        assert tensor.dtype == torch.float32
        torch.testing.assert_close(tensor, expected[name].float(), rtol=0.01, atol=0.01)
    assert transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "float32").dtype == torch.float32

    assert "is not empty" in export(checkpoint, tmp_path / "float32").stderr
    shard = next((checkpoint / "actor").glob("*.distcp"))
    shard.write_bytes(shard.read_bytes()[:-100])
    run = export(checkpoint, tmp_path / "damaged")
    assert run.returncode == 1 and "is damaged" in run.stderr and "Traceback" not in run.stderr
    assert not (tmp_path / "damaged").exists()

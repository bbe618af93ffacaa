"""A resumed run goes on as if it had not been interrupted; what does not fit is refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import transformers

from recipe_gkd.actor.hf_save import save_hf_folder
from tests._support.tiny_models import ACTOR, MEGATRON, VOCAB, make_config, make_samples
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs
from tests.integration.actor.test_layouts import PLAIN_OPTIMIZER, PP2, SP, TP2, VPP2

pytestmark = pytest.mark.timeout(150)

FIRST, SECOND = make_samples(6), make_samples(6, seed=1)
ASYNC, BF16 = f"{ACTOR}.checkpoint.async_save=true", f"{MEGATRON}.dtype=bfloat16"
DECAY = f"{ACTOR}.optim.lr_decay_style=linear"


@pytest.mark.parametrize(
    ("saved", "ranks", "resumed", "ranks_then", "exactly"),
    [
        pytest.param([TP2, SP], 2, [TP2, SP], 2, True, id="tensor 2"),
        pytest.param([TP2, SP], 2, [], 1, False, id="tensor 2 to 1"),
        pytest.param([ASYNC], 2, [PP2], 2, False, id="data 2 in the background to pipeline 2"),
        pytest.param([PP2], 2, [], 1, False, id="pipeline 2 to 1"),
        pytest.param([PP2, VPP2], 2, [PP2, VPP2], 2, True, id="interleaved pipeline"),
        pytest.param([BF16, ASYNC], 2, [BF16], 2, True, id="bfloat16 in the background, data 2"),
        pytest.param([PLAIN_OPTIMIZER, TP2], 2, [PLAIN_OPTIMIZER], 1, False, id="plain optimizer, tensor 2 to 1"),
    ],
)
def test_resumed_run_takes_the_same_next_step(
    saved: list[str], ranks: int, resumed: list[str], ranks_then: int, exactly: bool,
    pool: WorkerPool, folders: dict[str, Path], tmp_path: Path,
) -> None:  # fmt: skip
    config = make_config(folders["qwen2"], DECAY, *saved, ranks=ranks)
    want_metrics, want_weights = pool.run(ranks, jobs.train_and_save, config, FIRST, SECOND, tmp_path / "ckpt")[0]
    config = make_config(folders["qwen2"], DECAY, *resumed, ranks=ranks_then)
    step, metrics, weights = pool.run(ranks_then, jobs.resume_and_train, config, tmp_path / "ckpt", SECOND)[0]
    assert step == 1
    for key in ("actor/kl_loss", "actor/grad_norm", "actor/lr"):
        assert metrics[key] == (want_metrics[key] if exactly else pytest.approx(want_metrics[key], rel=1e-5)), key
    for name, tensor in weights.items():
        if exactly:
            assert torch.equal(tensor, want_weights[name]), name
        elif not name.endswith("k_proj.bias"):  # whose gradient is rounding noise
            assert (tensor - want_weights[name]).abs().mean() < 2e-6, name


@pytest.mark.parametrize("optimizer", [[], [PLAIN_OPTIMIZER]], ids=["distributed", "plain"])
def test_resumed_run_uses_its_own_optimizer_settings(
    optimizer: list[str], pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = make_config(folders["qwen2"], *optimizer)
    changes = (["betas=[0.8,0.999]"], ["lr=0.02", "weight_decay=0.2", "clip_grad=0.3"])
    _, unchanged_weights = pool.run(1, jobs.train_and_save, config, FIRST, SECOND, tmp_path / "ckpt")[0]
    for names in changes:
        then = make_config(folders["qwen2"], *optimizer, *(f"{ACTOR}.optim.{name}" for name in names))
        want = pool.run(1, jobs.change_settings, config, then, FIRST, SECOND)[0]
        _, _, weights = pool.run(1, jobs.resume_and_train, then, tmp_path / "ckpt", SECOND)[0]
        assert any(not torch.equal(weights[key], unchanged_weights[key]) for key in weights), names
        assert all(torch.equal(weights[key], want[key]) for key in weights), names


def test_checkpoints_that_do_not_fit_are_refused(pool: WorkerPool, folders: dict[str, Path], tmp_path: Path) -> None:
    config = make_config(folders["qwen2"], f"{ACTOR}.checkpoint.save_contents=[model,extra]",
                         f"{ACTOR}.checkpoint.load_contents=[model,extra]")  # fmt: skip
    pool.run(1, jobs.train_and_save, config, FIRST, SECOND, tmp_path / "weights_only")
    step, _, _ = pool.run(1, jobs.resume_and_train, config, tmp_path / "weights_only", SECOND)[0]
    assert step == 1

    def message(path: str, kind: str) -> str:
        return pool.run(1, jobs.resume_fails, make_config(folders[kind]), tmp_path / path)[0]

    assert "is no complete checkpoint of the actor" in message("nowhere", "qwen2")
    assert "has no optimizer, only model, extra" in message("weights_only", "qwen2")
    assert "is a checkpoint of another model (family: qwen2 there, llama here" in message("weights_only", "llama")


def test_large_model_is_saved_in_several_files_with_an_index(folders: dict[str, Path], tmp_path: Path) -> None:
    model = transformers.AutoModelForCausalLM.from_pretrained(folders["qwen2_untied"])
    weights = model.state_dict()
    meta = [[(name, tuple(tensor.shape), "float32")] for name, tensor in weights.items()]
    save_hf_folder(
        tmp_path / "saved", folders["qwen2_untied"], meta, lambda first, last: list(weights.items())[first:last],
        lambda function, _: function(), file_bytes=50_000,
    )  # fmt: skip
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert len(files) > 2 and all(file.stat().st_size < 60_000 for file in files)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in weights.items())
    assert not (tmp_path / "saved.partial").exists()


@pytest.mark.parametrize(
    ("kind", "ranks", "overrides"),
    [("qwen2", 2, [TP2]), ("qwen2_untied", 2, [PP2, BF16]), ("qwen3", 1, []), ("llama", 4, [TP2, PP2])],
)
def test_saved_folder_loads_in_transformers_with_the_logits_of_the_actor(
    kind: str, ranks: int, overrides: list[str], pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    path = tmp_path / "deep" / "saved"
    config = make_config(folders[kind], *overrides, ranks=ranks)
    logits = next(x for x in pool.run(ranks, jobs.save_hf, config, FIRST, path) if x is not None)
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")
    bf16 = BF16 in overrides
    assert model.dtype == (torch.bfloat16 if bf16 else torch.float32)
    os.umask(umask := os.umask(0o077))
    assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o666 & ~umask}
    assert model.config.vocab_size == VOCAB and (path / "tokenizer.json").is_file()
    assert (path / "generation_config.json").read_text() == '{"max_new_tokens": 7}'
    want = jobs.transformers_rows(model, FIRST).float()
    torch.testing.assert_close(logits[: len(want)].float(), want, rtol=0, atol=0.1 if bf16 else 1e-5)

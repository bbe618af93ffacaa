"""Checkpoints and saved Hugging Face folders: a resumed run continues exactly, and a saved folder has the weights."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

from recipe_gkd.errors import CheckpointError, CheckpointMismatch, GkdError
from tests._support.errors import check_error
from tests._support.layouts import BF16, CP2, OVERLAP, PLAIN_OPTIMIZER, PP2, SP, TP2, VPP2
from tests._support.tiny_models import ACTOR, VOCAB, make_config, make_samples, transformers_logits, without_empty
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs, save_jobs

FIRST, SECOND = make_samples(6), make_samples(6, seed=1)
ASYNC = f"{ACTOR}.checkpoint.async_save=true"
DECAY = f"{ACTOR}.optim.lr_decay_style=linear"


class TestResume:
    @pytest.mark.parametrize(
        ("saved", "ranks", "resumed", "ranks_then", "exactly"),
        [
            pytest.param([TP2, SP], 2, [TP2, SP], 2, True, id="tensor 2"),
            pytest.param([TP2, SP], 2, [], 1, False, id="tensor 2 to 1", marks=pytest.mark.slow),
            pytest.param([ASYNC], 2, [PP2], 2, False, id="data 2 in the background to pipeline 2"),
            pytest.param([PP2], 2, [], 1, False, id="pipeline 2 to 1", marks=pytest.mark.slow),
            pytest.param([CP2], 2, [TP2, SP], 2, False, id="context 2 to tensor 2"),
            pytest.param([CP2], 2, [CP2], 2, True, id="context 2", marks=pytest.mark.slow),
            pytest.param([PP2, VPP2], 2, [PP2, VPP2], 2, True, id="interleaved pipeline", marks=pytest.mark.slow),
            pytest.param(
                [BF16, ASYNC, *OVERLAP], 2, [BF16, *OVERLAP], 2, True, id="bfloat16, overlapped, background, data 2"
            ),
            pytest.param([PLAIN_OPTIMIZER, TP2], 2, [PLAIN_OPTIMIZER], 1, False, id="plain optimizer, tensor 2 to 1"),
        ],
    )
    def test_resume_in_any_layout_repeats_next_step(
        self, saved: list[str], ranks: int, resumed: list[str], ranks_then: int, exactly: bool,
        pool: WorkerPool, folders: dict[str, Path], tmp_path: Path,
    ) -> None:  # fmt: skip
        path = tmp_path / "ckpt"
        config = make_config(folders["qwen2"], DECAY, *saved, ranks=ranks)
        want_metrics, want_weights = pool.run(ranks, save_jobs.train_and_save, config, FIRST, SECOND, path)[0]
        config = make_config(folders["qwen2"], DECAY, *resumed, ranks=ranks_then)
        step, metrics, weights = pool.run(ranks_then, save_jobs.resume_and_train, config, path, SECOND)[0]
        assert step == 1
        for key in ("actor/kl_loss", "actor/grad_norm", "actor/lr"):
            assert metrics[key] == (want_metrics[key] if exactly else pytest.approx(want_metrics[key], rel=1e-5)), key
        for name, tensor in weights.items():
            if exactly:
                assert torch.equal(tensor, want_weights[name]), name
            elif not name.endswith("k_proj.bias"):  # its gradient is rounding noise
                assert (tensor - want_weights[name]).abs().mean() < 2e-6, name

    @pytest.mark.parametrize("optimizer", [[], [PLAIN_OPTIMIZER], [PLAIN_OPTIMIZER, BF16]], ids=" ".join)
    def test_checkpoint_from_before_the_first_update_is_complete(
        self, optimizer: list[str], pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        path = tmp_path / "ckpt"
        config = make_config(folders["qwen2"], *optimizer)
        want_metrics, want = pool.run(1, save_jobs.save_before_update, config, FIRST, path)[0]
        step, metrics, weights = pool.run(1, save_jobs.resume_and_train, config, path, FIRST)[0]
        assert step == 0 and metrics["actor/kl_loss"] == want_metrics["actor/kl_loss"]
        assert all(torch.equal(tensor, want[name]) for name, tensor in weights.items())

    def test_extra_states_of_modules_are_no_part_of_a_checkpoint(
        self, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        """Transformer Engine's norms have them, and the norms of this project do not."""
        path = tmp_path / "ckpt"
        config = make_config(folders["qwen2"])
        pool.run(1, save_jobs.save_before_update, config, FIRST, path)
        loaded, updated, last = pool.run(1, save_jobs.exchange_with_extra_states, config, FIRST, path)[0]
        saved = load_file(folders["qwen2"] / "model.safetensors")
        assert all(torch.equal(tensor, saved[name]) for name, tensor in loaded.items())
        assert all(torch.equal(tensor, updated[name]) for name, tensor in last.items())
        assert not all(torch.equal(tensor, updated[name]) for name, tensor in loaded.items())

    def test_sharded_state_allocates_nothing_and_loads_gathered_state(
        self, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        config = make_config(folders["qwen2"], ranks=2)
        results = pool.run(2, save_jobs.load_gathered_state, config, FIRST, SECOND, tmp_path / "ckpt")
        for allocated, gathered, parameter_bytes in results:
            assert gathered > 3 * parameter_bytes, "the count must include the tensors that Megatron allocates"
            assert max(allocated) < parameter_bytes / 100

    @pytest.mark.parametrize("optimizer", [[], [PLAIN_OPTIMIZER]], ids=["distributed", "plain"])
    def test_resume_with_changed_hyperparameters_uses_them(
        self, optimizer: list[str], pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        path = tmp_path / "ckpt"
        config = make_config(folders["qwen2"], *optimizer)
        changes = (["betas=[0.8,0.999]"], ["lr=0.02", "weight_decay=0.2", "clip_grad=0.3"])
        _, unchanged_weights = pool.run(1, save_jobs.train_and_save, config, FIRST, SECOND, path)[0]
        for names in changes:
            then = make_config(folders["qwen2"], *optimizer, *(f"{ACTOR}.optim.{name}" for name in names))
            want = pool.run(1, jobs.train_with_changed_config, config, then, FIRST, SECOND)[0]
            _, _, weights = pool.run(1, save_jobs.resume_and_train, then, path, SECOND)[0]
            assert any(not torch.equal(weights[key], unchanged_weights[key]) for key in weights), names
            assert all(torch.equal(weights[key], want[key]) for key in weights), names

    def test_load_of_unsuitable_checkpoint_raises(
        self, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        contents = [f"{ACTOR}.checkpoint.{key}_contents=[model,extra]" for key in ("save", "load")]
        config = make_config(folders["qwen2"], *contents)
        pool.run(1, save_jobs.train_and_save, config, FIRST, SECOND, tmp_path / "weights_only")
        step, _, _ = pool.run(1, save_jobs.resume_and_train, config, tmp_path / "weights_only", SECOND)[0]
        assert step == 1

        def error(path: str, kind: str) -> GkdError | None:
            return pool.run(1, save_jobs.load_with_error, make_config(folders[kind]), tmp_path / path)[0]

        path = tmp_path / "weights_only"
        check_error(error("nowhere", "qwen2"), CheckpointError, path=tmp_path / "nowhere" / "metadata.json")
        check_error(error("weights_only", "qwen2"), CheckpointMismatch, path=path, differing=("optimizer",))
        other_model = error("weights_only", "llama")
        assert isinstance(other_model, CheckpointMismatch) and "family" in other_model.differing


class TestHfFolder:
    @pytest.mark.parametrize(
        ("kind", "ranks", "overrides"),
        [("qwen2", 2, [TP2]), ("qwen2_untied", 2, [PP2, BF16]), ("qwen3", 1, []), ("llama", 4, [TP2, PP2])],
    )
    def test_save_hf_loaded_by_transformers_has_same_logits(
        self, kind: str, ranks: int, overrides: list[str], pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        path = tmp_path / "deep" / "saved"
        config = make_config(folders[kind], *overrides, ranks=ranks)
        logits = next(x for x in pool.run(ranks, save_jobs.save_hf, config, FIRST, path) if x is not None)
        model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype="auto")
        bf16 = BF16 in overrides
        assert model.dtype == (torch.bfloat16 if bf16 else torch.float32)
        os.umask(umask := os.umask(0o077))
        assert {file.stat().st_mode & 0o777 for file in path.iterdir()} == {0o666 & ~umask}
        assert model.config.vocab_size == VOCAB and (path / "tokenizer.json").is_file()
        assert (path / "generation_config.json").read_text() == '{"max_new_tokens": 7}'
        want = transformers_logits(model, without_empty(FIRST)).float()
        torch.testing.assert_close(logits[: len(want)].float(), want, rtol=0, atol=0.1 if bf16 else 1e-5)

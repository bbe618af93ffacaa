"""Invalid samples and settings: the error names the cause on every rank, and the weights are unchanged."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from tests._support.layouts import OVERRIDE, PP2, TP2
from tests._support.tiny_models import TOP_K, make_config, make_folder, make_sample, make_samples, without_empty
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs

pytestmark = pytest.mark.timeout(120)

VALID = [sample for sample in without_empty(make_samples(6)) if jobs.POISONED_TOKEN not in sample.token_ids]
LOGPS, IDS = np.full((2, TOP_K), -3.0), np.tile(np.arange(TOP_K), (2, 1))
POISONED = make_sample(1234, [3, jobs.POISONED_TOKEN], [4, 5], LOGPS, IDS)
NOT_A_DISTRIBUTION = make_sample(1234, [3], [4, 5], np.zeros((2, TOP_K)), IDS)


class TestUpdate:
    @pytest.mark.parametrize(("ranks", "overrides"), [(1, []), (2, [PP2]), (2, [])])
    def test_update_with_infinite_loss_names_sample_and_keeps_weights(
        self, ranks: int, overrides: list[str], pool: WorkerPool, folders: dict[str, Path]
    ) -> None:
        config = make_config(folders["qwen2_untied"], *overrides, ranks=ranks)
        results = pool.run(ranks, jobs.update_with_fault, config, [*VALID, POISONED], "weights")
        for message, unchanged, usable in results:
            assert message.startswith("WorkerError: update 3: the loss is not finite in the samples with uid 1234;")
            assert unchanged and usable

    def test_update_with_infinite_gradient_keeps_weights(self, pool: WorkerPool, folders: dict[str, Path]) -> None:
        config = make_config(folders["qwen2_untied"], ranks=2)
        uids = ", ".join(str(sample.prompt.uid) for sample in VALID)
        expected = f"WorkerError: update 3: the gradient is not finite in the batch with the sample uids {uids};"
        for message, unchanged, usable in pool.run(2, jobs.update_with_fault, config, VALID, "gradient"):
            assert message.startswith(expected)
            assert unchanged and usable

    def test_update_with_invalid_teacher_row_raises_on_all_ranks(
        self, pool: WorkerPool, folders: dict[str, Path]
    ) -> None:
        config = make_config(folders["qwen2_untied"], ranks=2)
        results = pool.run(2, jobs.update_with_fault, config, [*VALID, NOT_A_DISTRIBUTION], "")
        messages = sorted(message for message, _, _ in results)
        assert messages[0].startswith("DataError: sample 1234: the teacher's top-k has probability 8 at response")
        assert messages[1].startswith("SecondaryFailure: update 3: another rank rejected a sample")
        assert all(unchanged and usable for _, unchanged, usable in results)


class TestSetup:
    def test_setup_with_unsuitable_settings_raises(
        self, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        def message(*overrides: str, ranks: int = 1, folder: Path = folders["llama"]) -> str:
            # Every rank raises the error before it waits for another rank, so one rank is enough.
            return pool.run(1, jobs.start_with_error, make_config(folder, *overrides, ranks=ranks), ranks)[0]

        assert "config.recompute_granularty is unknown: did you mean recompute_granularity?" in message(
            f"{OVERRIDE}.recompute_granularty=full"
        )
        experts = message("actor_rollout_ref.actor.strategy=fsdp", folder=folders["qwen3_moe"])
        assert "is a mixture-of-experts model" in experts and "strategy=megatron" in experts
        assert "must divide the model's 4 heads, 2 key/value heads" in message(TP2.replace("=2", "=4"), ranks=4)

        folder = make_folder(tmp_path / "broken", "qwen2")
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"][:-1].contiguous()
        save_file(weights, folder / "model.safetensors")
        assert "up_proj.weight has shape (47, 32), expected (48, 32) according to config.json" in message(folder=folder)
        del weights["model.layers.1.mlp.up_proj.weight"]
        save_file(weights, folder / "model.safetensors")
        assert "there is no tensor model.layers.1.mlp.up_proj.weight" in message(folder=folder)
        (folder / "model.safetensors").write_bytes(b"truncated")
        assert "cannot be read as safetensors" in message(folder=folder)

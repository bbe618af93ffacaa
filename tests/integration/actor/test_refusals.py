"""Invalid samples and settings: the error names the cause on every rank, and the weights are unchanged."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from recipe_gkd.commands.gpu_smoke.tiny_models import make_sample
from recipe_gkd.errors import ConfigError, DataError, GkdError, ModelError, SecondaryFailure, WorkerError
from tests._support.errors import check_error
from tests._support.layouts import OVERRIDE, PP2, TP2
from tests._support.tiny_models import MEGATRON, TOP_K, make_config, make_folder, make_samples, without_empty
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs

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
        for error, unchanged, usable in results:
            check_error(error, WorkerError, phase="update 3", uids=(1234,))
            assert unchanged and usable

    def test_update_with_infinite_gradient_keeps_weights(self, pool: WorkerPool, folders: dict[str, Path]) -> None:
        config = make_config(folders["qwen2_untied"], ranks=2)
        uids = tuple(sample.prompt.uid for sample in VALID)
        for error, unchanged, usable in pool.run(2, jobs.update_with_fault, config, VALID, "gradient"):
            check_error(error, WorkerError, phase="update 3", uids=uids)
            assert unchanged and usable

    def test_update_with_invalid_teacher_row_raises_on_all_ranks(
        self, pool: WorkerPool, folders: dict[str, Path]
    ) -> None:
        config = make_config(folders["qwen2_untied"], ranks=2)
        results = pool.run(2, jobs.update_with_fault, config, [*VALID, NOT_A_DISTRIBUTION], "")
        own, secondary = sorted((error for error, _, _ in results), key=lambda error: type(error).__name__)
        check_error(own, DataError, uid=1234, position=0)
        check_error(secondary, SecondaryFailure, phase="update 3")
        assert all(unchanged and usable for _, unchanged, usable in results)


class TestSetup:
    def test_setup_with_unsuitable_settings_raises(
        self, pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
    ) -> None:
        def error(*overrides: str, ranks: int = 1, folder: Path = folders["llama"]) -> GkdError | None:
            # Every rank raises the error before it waits for another rank, so one rank is enough.
            return pool.run(1, jobs.start_with_error, make_config(folder, *overrides, ranks=ranks), ranks)[0]

        misspelled = error(f"{OVERRIDE}.recompute_granularty=full")
        check_error(misspelled, ConfigError, keys=(f"{OVERRIDE}.recompute_granularty",))
        quantized = make_folder(tmp_path / "quantized", "qwen3_moe")
        content = json.loads((quantized / "config.json").read_text()) | {"quantization_config": {"quant_method": "fp8"}}
        (quantized / "config.json").write_text(json.dumps(content))
        experts = error("actor_rollout_ref.actor.strategy=fsdp", folder=quantized)
        check_error(experts, ModelError, path=quantized, names=("quantization_config",))
        layout = error(TP2.replace("=2", "=4"), ranks=4)
        check_error(layout, ConfigError, keys=(f"{MEGATRON}.tensor_model_parallel_size",))

        folder = make_folder(tmp_path / "broken", "qwen2")
        weights = load_file(folder / "model.safetensors")
        weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"][:-1].contiguous()
        save_file(weights, folder / "model.safetensors")
        file, name = folder / "model.safetensors", "model.layers.1.mlp.up_proj.weight"
        check_error(error(folder=folder), ModelError, path=file, names=(name,))
        del weights[name]
        save_file(weights, file)
        check_error(error(folder=folder), ModelError, path=folder, names=(name,))
        file.write_bytes(b"truncated")
        check_error(error(folder=folder), ModelError, path=file, names=())

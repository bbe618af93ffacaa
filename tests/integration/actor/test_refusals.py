"""What cannot be trained on, or with, is refused by name, on every rank, and leaves the weights as they were."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.torch import load_file, save_file

from recipe_gkd.actor.model_dims import check_fits, read_model_dims
from recipe_gkd.errors import ConfigError, ModelError
from tests._support.tiny_models import MEGATRON, TOP_K, make_config, make_folder, make_sample, make_samples
from tests._support.worker_pool import WorkerPool
from tests.integration.actor import jobs
from tests.integration.actor.test_layouts import PP2, TP2, VPP2

pytestmark = pytest.mark.timeout(120)

GOOD = [s for s in make_samples(6) if len(s.response.ids) and jobs.POISONED_TOKEN not in s.token_ids]
LOGPS, IDS = np.full((2, TOP_K), -3.0), np.tile(np.arange(TOP_K), (2, 1))
POISONED = make_sample(1234, [3, jobs.POISONED_TOKEN], [4, 5], LOGPS, IDS)
NO_DISTRIBUTION = make_sample(1234, [3], [4, 5], np.zeros((2, TOP_K)), IDS)


@pytest.mark.parametrize(("ranks", "overrides"), [(1, []), (2, [PP2]), (2, [])])
def test_loss_that_is_not_finite_names_step_and_sample_and_leaves_the_weights(
    ranks: int, overrides: list[str], pool: WorkerPool, folders: dict[str, Path]
) -> None:
    config = make_config(folders["qwen2_untied"], *overrides, ranks=ranks)
    for message, unchanged, goes_on in pool.run(ranks, jobs.refused, config, [*GOOD, POISONED], "weights"):
        assert message.startswith("WorkerError: update 3: the loss is not finite, in sample 1234;")
        assert unchanged and goes_on


def test_gradient_that_is_not_finite_leaves_the_weights(pool: WorkerPool, folders: dict[str, Path]) -> None:
    config = make_config(folders["qwen2_untied"], ranks=2)
    uids = ", ".join(str(sample.prompt.uid) for sample in GOOD)
    for message, unchanged, goes_on in pool.run(2, jobs.refused, config, GOOD, "gradient"):
        assert message.startswith(f"WorkerError: update 3: the gradient is not finite, in the batch of sample {uids};")
        assert unchanged and goes_on


def test_sample_that_is_no_distribution_is_refused_by_the_rank_that_has_it_and_stops_the_others(
    pool: WorkerPool, folders: dict[str, Path]
) -> None:
    config = make_config(folders["qwen2_untied"], ranks=2)
    responses = pool.run(2, jobs.refused, config, [*GOOD, NO_DISTRIBUTION], "")
    messages = sorted(message for message, _, _ in responses)
    assert messages[0].startswith("DataError: sample 1234: the teacher's top-k has probability 8 at response")
    assert messages[1].startswith("SecondaryFailure: update 3: another rank refused a sample")
    assert all(unchanged and goes_on for _, unchanged, goes_on in responses)


def test_settings_that_do_not_fit_the_model_are_refused(
    pool: WorkerPool, folders: dict[str, Path], tmp_path: Path
) -> None:
    def message(*overrides: str, ranks: int = 1, folder: Path = folders["llama"]) -> str:
        # Every rank finds the same, before any of them waits for another: one is enough.
        return pool.run(1, jobs.fails_to_start, make_config(folder, *overrides, ranks=ranks), ranks)[0]

    assert "config.recompute_granularty is unknown: did you mean recompute_granularity?" in message(
        f"{MEGATRON}.override_transformer_config.recompute_granularty=full"
    )
    assert "must divide the model's 4 heads, 2 key/value heads" in message(TP2.replace("=2", "=4"), ranks=4)

    folder = make_folder(tmp_path / "broken", "qwen2")
    weights = load_file(folder / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"] = weights["model.layers.1.mlp.up_proj.weight"][:-1].contiguous()
    save_file(weights, folder / "model.safetensors")
    assert "up_proj.weight has shape (47, 32), its config.json calls for (48, 32)" in message(folder=folder)
    del weights["model.layers.1.mlp.up_proj.weight"]
    save_file(weights, folder / "model.safetensors")
    assert "there is no tensor model.layers.1.mlp.up_proj.weight" in message(folder=folder)
    (folder / "model.safetensors").write_bytes(b"cut off")
    assert "cannot be read as safetensors" in message(folder=folder)


def test_layouts_that_do_not_divide_the_model_are_found_by_its_numbers_alone(folders: dict[str, Path]) -> None:
    def check(*overrides: str, ranks: int) -> None:
        config = make_config(folders["llama"], *overrides, ranks=ranks)
        check_fits(read_model_dims(folders["llama"]), config.actor_rollout_ref.actor.megatron)

    check(TP2, PP2, VPP2, ranks=4)
    with pytest.raises(ConfigError, match="must divide the model's 4 heads, 2 key/value heads"):
        check(TP2.replace("=2", "=4"), ranks=4)
    with pytest.raises(ConfigError, match="4 layers cannot be divided equally into 3 pipeline stages"):
        check(PP2.replace("=2", "=3"), ranks=3)


def test_numbers_of_a_model_are_read_without_megatron() -> None:
    program = "import sys; import recipe_gkd.actor.model_dims; sys.exit(bool({'megatron', 'torch'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=60)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "gpt2"}, "is a 'gpt2' model; the actor can train: qwen2, qwen3, llama"),
        ({"model_type": "from_the_future"}, "is a 'from_the_future' model; the actor can train: qwen2, qwen3, llama"),
        ({"hidden_size": "wide"}, "config.json cannot be read .*'hidden_size' expected int"),
        ({"hidden_act": "gelu"}, "hidden_act=gelu"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rotary scaling .*yarn"),
    ],
)
def test_model_of_an_unsupported_kind_is_refused(
    changes: dict[str, object], expected: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    config = json.loads((folders["qwen2"] / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changes))
    with pytest.raises(ModelError, match=expected):
        read_model_dims(tmp_path)


def test_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"no config.json in .*; actor_rollout_ref.model.path must be"):
        read_model_dims(tmp_path)

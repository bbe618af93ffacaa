"""Weight syncs of architectures whose folders have other names or layers than the model families.

``tests/integration/families/test_rollout.py`` has the families.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from recipe_gkd.errors import ModelError
from recipe_gkd.preflight import read_student
from recipe_gkd.rollout.checkpoint_names import folder_shapes
from tests._support.causal_models import ENGINE_MODELS, save_engine_model
from tests._support.errors import raises
from tests._support.rollout_models import config_for
from tests.integration.rollout.fsdp_workers import FSDP, Workers, assert_computed_by, load, running_workers


@pytest.fixture(scope="module")
def workers(ray_session: None) -> Iterator[Workers]:
    with running_workers() as running:
        yield running


@pytest.mark.slow  # tests/integration/actor/test_fsdp.py compares the export, and tests/unit/actor its names.
@pytest.mark.parametrize("name", ENGINE_MODELS)
def test_sync_after_training_of_architecture_matches_its_export(name: str, workers: Workers, tmp_path: Path) -> None:
    """GPT-2 has the names of its published folder, which differ from the names of transformers' modules."""
    folder, export = save_engine_model(tmp_path / "model", name), tmp_path / "export"
    with raises(ModelError, path=folder, names=("model_type",)):
        read_student(config_for(folder))
    config = config_for(folder, *FSDP)
    read_student(config)
    before, after = asyncio.run(workers.train_and_sync(config, export))
    trained, info = load(export)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    assert folder_shapes(str(export)).keys() == {
        stored for stored in folder_shapes(str(folder)) if not stored.endswith(".attn.bias")
    }
    assert_computed_by(load(folder)[0], before)
    assert_computed_by(trained, after)
    assert {response.weights_version for response in after.values()} == {7}
    assert not all(np.array_equal(before[uid].ids, response.ids) for uid, response in after.items())

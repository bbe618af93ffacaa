"""Weight syncs of each family from an FSDP actor to an engine: the engine computes the exported model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from recipe_gkd.preflight import read_student
from tests._support.families import FAMILIES, Family, make_family_folder
from tests._support.rollout_models import config_for
from tests.integration.rollout.fsdp_workers import FSDP, Workers, assert_computed_by, load, running_workers

SERVED = [family for family in FAMILIES if not family.fsdp and not family.rollout]


@pytest.fixture(scope="module")
def workers(ray_session: None) -> Iterator[Workers]:
    with running_workers() as running:
        yield running


@pytest.mark.slow  # by default a sync of adapters runs, and syncs of Qwen2 in tests/integration/rollout
@pytest.mark.parametrize("family", SERVED, ids=lambda family: family.model_type)
def test_engine_computes_the_model_before_and_after_a_sync(family: Family, workers: Workers, tmp_path: Path) -> None:
    folder, export = make_family_folder(tmp_path / "model", family, family.rollout_config), tmp_path / "export"
    config = config_for(folder, *FSDP)
    read_student(config)
    before, after = asyncio.run(workers.train_and_sync(config, export))
    assert_computed_by(load(folder)[0], before)
    assert_computed_by(load(export)[0], after)
    assert {response.weights_version for response in after.values()} == {7}
    assert not all(np.array_equal(before[uid].ids, response.ids) for uid, response in after.items())

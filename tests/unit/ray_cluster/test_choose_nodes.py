from __future__ import annotations

import pytest

from recipe_gkd.ray_cluster.pools import choose_nodes
from tests._support.pool_specs import configured_specs

GPUS = dict(CPU=8.0, GPU=4.0)


@pytest.mark.parametrize(
    ("sizes", "nodes", "fits"),
    [
        pytest.param(dict(actor=2, rollout=2), [GPUS], True, id="one node"),
        pytest.param(dict(actor=3, rollout=2), [GPUS], False, id="one node too small"),
        pytest.param(dict(actor=4, rollout=4), [GPUS, GPUS], True, id="a full node each"),
        pytest.param(dict(actor=3, rollout=3), [GPUS, GPUS], True, id="a node each"),
        pytest.param(dict(actor=2, rollout=2, actor_nodes=2), [GPUS, GPUS], True, id="rollout fits on one node"),
        pytest.param(dict(actor=3, rollout=2, actor_nodes=2), [GPUS, GPUS], False, id="rollout would be split"),
        pytest.param(dict(actor=1, rollout=1, actor_nodes=2), [GPUS], False, id="too few nodes"),
    ],
)
def test_choose_nodes_fits_if_each_bundle_finds_a_node(
    sizes: dict[str, int], nodes: list[dict[str, float]], fits: bool
) -> None:
    assert (choose_nodes(configured_specs(**sizes), nodes) is not None) == fits


def test_choose_nodes_on_cpu_uses_the_same_numbers() -> None:
    assert choose_nodes(configured_specs("cpu", actor=2, rollout=2), [dict(CPU=4.0)])
    assert not choose_nodes(configured_specs("cpu", actor=2, rollout=3), [dict(CPU=4.0)])

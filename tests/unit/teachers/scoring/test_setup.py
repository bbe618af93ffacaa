"""Default limit of the teachers' rows, which depends on the nodes that read them."""

from __future__ import annotations

import pytest

from recipe_gkd.teachers.scoring import setup
from recipe_gkd.teachers.scoring.homes import Homes
from recipe_gkd.teachers.scoring.pool import ScoringPool
from recipe_gkd.teachers.scoring.setup import max_row_bytes
from teacher.client import ClientSpec
from tests._support.base_config import base_config

ADDRESSES = {"driver": "10.0.0.1", "a": "10.0.0.2", "b": "10.0.0.3"}
STORES = {"driver": 400.0, "a": 1000.0, "b": 1000.0}


@pytest.mark.parametrize(
    ("server_ip", "homes", "limit"),
    [
        pytest.param("10.0.0.9", Homes(("a", "b"), (0, 1)), 1000, id="ranks on both nodes"),
        pytest.param("10.0.0.9", Homes(("b",), (0, 0)), 500, id="last pipeline stages on one node"),
        pytest.param("10.0.0.9", Homes(("a", "b"), (0, 0, 0, 1)), 666, id="more ranks on one node"),
        pytest.param("127.0.0.1", Homes(("a", "b"), (0, 1)), 200, id="loopback service"),
    ],
)
def test_default_limit_fills_half_of_the_store_of_the_fullest_node(
    server_ip: str, homes: Homes, limit: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(setup, "store_bytes", lambda nodes: {node: STORES[node] for node in nodes})
    pool = ScoringPool({"default": ClientSpec(server_ip, 1, {})}, "driver", lambda *_: None, per_node=1)
    pool.start_on(ADDRESSES)
    pool.homes = homes
    assert max_row_bytes(base_config(), pool) == limit

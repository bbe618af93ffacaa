"""Workers of a run as far as they describe themselves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from recipe_gkd.cluster import Cluster


def described_cluster(engine_dtype: str, device: str = "cpu") -> Cluster:
    """Return workers without processes.

    Args:
        engine_dtype: Data type of the rollout engines.
        device: Name of the actors' devices.
    """
    return cast(Cluster, SimpleNamespace(engine_dtype=engine_dtype, actor_devices=(device,)))

"""Check that all actor ranks see the driver's run folder."""

from __future__ import annotations

import tempfile
from typing import Protocol

from recipe_gkd.checkpoints.folders import PROBE
from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.config import Config
from recipe_gkd.config.conditions import saves_checkpoints
from recipe_gkd.errors import ResourceError
from recipe_gkd.runtime.remote_group import RemoteGroup

TIMEOUT_S = 10.0
"""Deadline of a look into the folder."""


class PathOwner(Protocol):
    """Worker that looks for files on its node."""

    def path_exists(self, path: str) -> bool:
        """Return True if a path exists on this worker's node."""


async def check_shared_folder(config: Config, actors: RemoteGroup[PathOwner]) -> None:
    """Check that all actor ranks see the driver's run folder, because they write checkpoints and profiles there.

    Raises:
        ResourceError: A rank does not see it. ``workers`` lists these ranks.
    """
    if not saves_checkpoints(config) and not config.trainer.profile.steps:
        return
    folder = folder_of(config.trainer).absolute()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=PROBE) as probe:
        found = await actors.call(
            PathOwner.path_exists, probe.name, timeout_s=TIMEOUT_S, phase="look for the checkpoint folder"
        )
    if unable := [actors.label(rank) for rank, exists in enumerate(found) if not exists]:
        raise ResourceError(
            f"{', '.join(unable)} cannot see trainer.default_local_dir={folder} of the driver",
            workers=tuple(unable),
            remedy="set it to a folder on a disk that all nodes share, or write neither checkpoints nor profiles: "
            "trainer.save_freq=-1 trainer.best_metric=null trainer.profile.steps=[]",
        )

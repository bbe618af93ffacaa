"""Check that all actor ranks see the driver's run folder."""

from __future__ import annotations

import tempfile

from recipe_gkd.checkpoints.folders import PROBE
from recipe_gkd.checkpoints.run_folder import folder_of
from recipe_gkd.config import Config
from recipe_gkd.config.validate import saves_checkpoints
from recipe_gkd.errors import ResourceError
from recipe_gkd.ray_cluster.worker_group import WorkerGroup

TIMEOUT_S = 10.0
"""Deadline of a look into the folder."""


async def check_shared_folder(config: Config, actors: WorkerGroup) -> None:
    """Check that all actor ranks see the driver's run folder, because they write checkpoints and profiles there.

    Raises:
        ResourceError: A rank does not see it. The message names the rank.
    """
    if not saves_checkpoints(config) and not config.trainer.profile.steps:
        return
    folder = folder_of(config.trainer).absolute()
    with tempfile.NamedTemporaryFile(dir=folder, prefix=PROBE) as probe:
        found = await actors.call(
            "path_exists", probe.name, timeout_s=TIMEOUT_S, phase="look for the checkpoint folder"
        )
    if unable := [actors.label(rank) for rank, exists in enumerate(found) if not exists]:
        raise ResourceError(
            f"{', '.join(unable)} cannot see trainer.default_local_dir={folder} of the driver; set it to a folder on "
            "a disk that all nodes share, or write neither checkpoints nor profiles: trainer.save_freq=-1 "
            "trainer.best_metric=null trainer.profile.steps=[]"
        )

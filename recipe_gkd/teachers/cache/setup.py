"""Cache of a teacher's scores as a run configures it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from recipe_gkd.config import Config
from recipe_gkd.teachers.backends import TeacherBackend
from recipe_gkd.teachers.cache.scores import CacheSettings, ScoreCache
from teacher.common.sizes import GIB
from teacher.records import TeacherInfo

_HELLO_TIMEOUT_S = 10.0


def n_ids_of(teacher: object) -> int:
    """Return the number of ids to which a backend or its description is restricted, 0 for all."""
    return int(getattr(teacher, "n_ids", 0))  # some cannot exclude ids


def cache_settings(config: Config, info: TeacherInfo, n_ids: int) -> CacheSettings | None:
    """Return the cache of a teacher, or None if the run has none.

    Args:
        info: Description of the teacher.
        n_ids: Number of ids that have a probability, 0 for all.
    """
    teacher = config.actor_rollout_ref.teacher
    if teacher.cache_dir is None:
        return None
    return CacheSettings(
        info=replace(info, last_tokens=()),
        folder=Path(teacher.cache_dir),
        max_bytes=int(teacher.cache_gb * GIB),
        top_k=teacher.top_k,
        wire_dtype=teacher.wire_dtype,
        temperature=config.gkd.distill_temperature,
        n_ids=n_ids,
    )


def open_cache(config: Config, client: TeacherBackend) -> ScoreCache | None:
    """Return the cache of a teacher for this process, or None if the run has none.

    Args:
        client: Backend of the teacher, after its vocabulary was checked.

    Raises:
        TeacherError: The teacher cannot be reached.
    """
    if config.actor_rollout_ref.teacher.cache_dir is None:
        return None
    settings = cache_settings(config, client.hello(timeout_s=_HELLO_TIMEOUT_S), n_ids_of(client))
    return None if settings is None else ScoreCache(settings)

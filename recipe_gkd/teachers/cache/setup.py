"""Caches of the teachers of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np

from recipe_gkd.config import Config
from recipe_gkd.teachers.backends import TeacherBackend, hello_now, score_now
from recipe_gkd.teachers.cache.scores import CacheSettings, ScoreCache
from teacher.common.probe import probe_sequence
from teacher.common.sizes import GIB


def open_caches(config: Config, clients: Mapping[str, TeacherBackend]) -> dict[str, CacheSettings]:
    """Let each teacher score its probe, and open its cache in this process. Without ``teacher.cache_dir`` do nothing.

    Args:
        clients: Backend of each teacher, by name, after its vocabulary was checked.

    Returns:
        Cache of each teacher, by name.

    Raises:
        TeacherSetupError: The folder cannot be used.
        TeacherError: A teacher did not score its probe.
    """
    teacher = config.actor_rollout_ref.teacher
    if teacher.cache_dir is None:
        return {}
    caches = {}
    for name, client in clients.items():
        info = hello_now(client, config)
        n_ids = int(getattr(client, "n_ids", 0))  # some backends cannot exclude ids
        probe = probe_sequence(n_ids or info.n_tokens, info.max_model_len)
        [scored] = score_now(name, client, [probe], config)
        caches[name] = CacheSettings(
            info=replace(info, last_tokens=()),
            probe_T=np.asarray(scored.sampled_logps_T, np.float32),
            folder=Path(teacher.cache_dir),
            max_bytes=int(teacher.cache_gb * GIB),
            top_k=teacher.top_k,
            wire_dtype=teacher.wire_dtype,
            temperature=config.gkd.distill_temperature,
            n_ids=n_ids,
        )
        ScoreCache(caches[name]).open()
    return caches

"""Sleep of a teacher service during a run that shares its GPUs."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from recipe_gkd.config import Config
from recipe_gkd.teachers.router import Teachers
from teacher.errors import TeacherError

log = logging.getLogger(__name__)

LAST_WAKE_S = 60.0
"""Deadline of the wake-up at the end of a run, whose error the user waits for."""


@asynccontextmanager
async def teacher_asleep(config: Config, teachers: Teachers) -> AsyncIterator[None]:
    """Let the teachers sleep before the body, which may wake them, and wake them after it.

    Without ``teacher.sleep_between_batches`` nothing happens. A failed wake-up at the end is logged.

    Args:
        teachers: Clients of the teachers.

    Raises:
        TeacherError: A service cannot sleep.
    """
    if not config.actor_rollout_ref.teacher.sleep_between_batches:
        yield
        return
    try:
        await teachers.sleep()
        yield
    finally:
        log.info("waking the teacher, up to %g s", LAST_WAKE_S)
        try:
            await teachers.wake(timeout_s=LAST_WAKE_S)
        except TeacherError as error:
            log.warning("the teacher still sleeps: %s; wake it with `python -m teacher wake`", error)

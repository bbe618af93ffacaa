"""Teacher model as a service: it scores token sequences and returns top-k log-probabilities of the response positions.

Trainers use ``TeacherClient`` or ``AsyncTeacherClient``, which import neither torch nor an engine.
``teacher/start_server.sh`` starts the service.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from teacher.exports import *  # noqa: F403


def __getattr__(name: str) -> Any:
    """Return an exported name. It is imported now, so that the scripts start without numpy and ZeroMQ."""
    if name != "__all__" and name.startswith("__"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("teacher.exports"), name)

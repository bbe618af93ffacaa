"""Conversion of unexpected exceptions into errors for the user."""

from __future__ import annotations

import traceback
from pathlib import Path

from recipe_gkd.errors import GkdError, UnexpectedError
from recipe_gkd.runtime.tasks import first_failure
from teacher.errors import TeacherError

_REPOSITORY = Path(__file__).resolve().parents[2]
_PACKAGES = tuple(str(_REPOSITORY / name) for name in ("recipe_gkd", "teacher"))


def as_known_error(error: Exception, phase: str) -> GkdError | TeacherError:
    """Return ``error`` itself if the project raised it on purpose, else an :class:`UnexpectedError` that wraps it.

    Args:
        error: Any exception.
        phase: Phase of the run, for the message.

    Returns:
        An error whose message contains the phase, the exception and the line of this project that raised it.
        ``__cause__`` is the exception with its traceback.
    """
    if isinstance(error, GkdError | TeacherError):
        return error
    root = first_failure(error)
    text = " ".join(str(root).split()) or "no message"
    if isinstance(root, OSError) and root.errno is not None:
        advice = "the operating system rejected the operation; check the disk, the memory and the limits of the machine"
    else:
        advice = "this error is not expected and may be a bug; please report it with the traceback"
    unexpected = UnexpectedError(
        f"{type(root).__name__}: {text}", phase=phase, details=(f"in {_code_location(root)}",), remedy=advice
    )
    unexpected.__cause__ = error
    return unexpected


def _code_location(error: BaseException) -> str:
    """Return the project's innermost line in the traceback.

    If a dependency raised the error, put the dependency's line first.
    """
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown location"
    project_frames = [frame for frame in frames if frame.filename.startswith(_PACKAGES)]
    shown = [*project_frames[-1:], *(frames[-1:] if frames[-1] not in project_frames else [])]
    return ", called from ".join(f"{frame.filename}:{frame.lineno} ({frame.name})" for frame in reversed(shown))

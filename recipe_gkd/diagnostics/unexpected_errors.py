"""Conversion of unexpected exceptions into an error for the user, the only one."""

from __future__ import annotations

import traceback
from pathlib import Path

from recipe_gkd.errors import GkdError, UnexpectedError
from recipe_gkd.runtime.tasks import first_failure
from teacher.errors import TeacherError

_PACKAGES = tuple(str(Path(__file__).resolve().parents[1] / name) for name in ("recipe_gkd", "teacher"))


def as_known_error(error: Exception, phase: str) -> GkdError | TeacherError:
    """Return ``error`` itself if the project raised it on purpose, else an :class:`UnexpectedError` about it.

    The message names the phase of the run, the exception and the place in this project; ``__cause__`` is the exception
    with its traceback.
    """
    if isinstance(error, GkdError | TeacherError):
        return error
    root = first_failure(error)
    text = " ".join(str(root).split()) or "no message"
    if isinstance(root, OSError) and root.errno is not None:
        meaning = "the operating system refused this; look at the disk, the memory and the limits of the machine"
    else:
        meaning = "this error is not expected here and may be a bug; please report it with the traceback"
    unexpected = UnexpectedError(f"{phase}: {type(root).__name__}: {text}\nin {_place(root)}; {meaning}")
    unexpected.__cause__ = error
    return unexpected


def _place(error: BaseException) -> str:
    """Return the innermost line of this project in the traceback, and the line that raised if it is another's."""
    frames = traceback.extract_tb(error.__traceback__)
    if not frames:
        return "an unknown place"
    ours = [frame for frame in frames if frame.filename.startswith(_PACKAGES)]
    places = [*ours[-1:], *(frames[-1:] if frames[-1] not in ours else [])]
    return ", called from ".join(f"{frame.filename}:{frame.lineno} ({frame.name})" for frame in reversed(places))

"""Tell whether an exception means that the CUDA device of this process is lost."""

from __future__ import annotations

from recipe_gkd.errors import GkdError


def is_device_loss(error: BaseException | None) -> bool:
    """Return True if ``error``, or an exception that led to it, is a CUDA error of this process.

    After a CUDA error every later call to the device fails, too. The text of a :class:`GkdError` does not count: on a
    weight channel it may repeat what another process reported of its own device.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if not isinstance(error, GkdError) and "CUDA error" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False

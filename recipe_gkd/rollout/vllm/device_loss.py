"""Detection of a lost CUDA device."""

from __future__ import annotations

from recipe_gkd.errors import GkdError


def is_device_loss(error: BaseException | None) -> bool:
    """Return True if ``error``, or one of its causes, is a CUDA error of this process.

    After a CUDA error every later call to the device fails. The text of a :class:`GkdError` is ignored, because an
    error of the weight transport may repeat the error of another process.
    """
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if not isinstance(error, GkdError) and "CUDA error" in str(error):
            return True
        error = error.__cause__ or error.__context__
    return False

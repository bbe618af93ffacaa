"""Detection of a lost CUDA device."""

from __future__ import annotations

from recipe_gkd.errors import GkdError
from teacher.common.causes import causes_of


def is_device_loss(error: BaseException | None) -> bool:
    """Return True if ``error``, or one of its causes, is a CUDA error of this process.

    After a CUDA error every later call to the device fails. The text of a :class:`GkdError` is ignored, because an
    error of the weight transport may repeat the error of another process.
    """
    return any("CUDA error" in str(each) for each in causes_of(error) if not isinstance(each, GkdError))

"""Units of memory, and sizes as text."""

from __future__ import annotations

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


def size_text(n_bytes: float) -> str:
    """Return a size as text, such as ``1.50 GiB``, ``2.5 MiB``, ``1.5 KiB`` or ``0 bytes``."""
    for unit, name, digits in ((GIB, "GiB", 2), (MIB, "MiB", 1), (KIB, "KiB", 1)):
        if n_bytes >= unit:
            return f"{n_bytes / unit:.{digits}f} {name}"
    return f"{n_bytes:.0f} bytes"

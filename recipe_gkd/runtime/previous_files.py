"""Files that a new run would overwrite are kept under another name."""

from __future__ import annotations

from pathlib import Path


def keep_previous(path: Path) -> None:
    """Rename an existing file with content to ``NAME.previous.SUFFIX``, ``NAME.previous2.SUFFIX`` and so on.

    Raises:
        OSError: The file cannot be renamed.
    """
    if not path.is_file() or not path.stat().st_size:
        return
    names = (path.with_suffix(f".previous{number}{path.suffix}") for number in ("", *range(2, 1_000_000)))
    path.replace(next(name for name in names if not name.exists()))

"""Versions of installed packages. Nothing is imported."""

from __future__ import annotations

from importlib import metadata


def installed_version(*distributions: str) -> str | None:
    """Return the version of the first of these distributions that is installed, None if none is."""
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return None

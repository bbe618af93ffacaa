"""Reader of the Dockerfile."""

from __future__ import annotations

from tests._support.repository import REPO


def docker_instructions() -> list[tuple[str, str]]:
    """Return the instructions of the Dockerfile with their arguments, continuation lines joined."""
    text = (REPO / "Dockerfile").read_text(encoding="utf-8")
    lines = "\n".join(line for line in text.splitlines() if not line.startswith("#")).replace("\\\n", " ").splitlines()
    return [(line.split(None, 1)[0], line.split(None, 1)[1]) for line in lines if line.strip()]

"""Instructions of a CPU, as torch reports them."""

from __future__ import annotations

import pytest


def set_cpu_flags(monkeypatch: pytest.MonkeyPatch, *flags: str) -> None:
    """Let torch report an x86 CPU with these capabilities only."""
    monkeypatch.setattr("torch.cpu.get_capabilities", lambda: {"architecture": "x86_64"} | dict.fromkeys(flags, True))

from __future__ import annotations

from typing import Any

import pytest

from recipe_gkd.commands import check_devices


def test_unexpected_error_starts_with_name_of_the_command(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: Any) -> None:
        raise RuntimeError("no file handles")

    monkeypatch.setattr(check_devices, "compose_config", fail)
    assert check_devices.main([]) == 1
    assert "error: check-devices: RuntimeError: no file handles" in capsys.readouterr().err

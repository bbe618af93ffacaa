"""Dispatch of ``python -m recipe_gkd <command>``."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest

from recipe_gkd.__main__ import COMMANDS, main


class TestDispatch:
    def test_help_lists_every_command(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["--help"]) == 0
        lines = capsys.readouterr().out.splitlines()
        for name, (_, text) in COMMANDS.items():
            assert any(line.split() == [name, *text.split()] for line in lines)

    def test_no_command_prints_usage_and_fails(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main([]) == 2
        assert "usage: python -m recipe_gkd COMMAND" in capsys.readouterr().err

    def test_unknown_command_is_named_with_the_known_ones(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check_device"]) == 2
        message = capsys.readouterr().err
        assert "unknown command 'check_device'" in message and "check-devices" in message

    @pytest.mark.parametrize("command", COMMANDS)
    def test_command_has_main_and_help(self, command: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert callable(importlib.import_module(f"recipe_gkd.commands.{COMMANDS[command][0]}").main)
        with pytest.raises(SystemExit) as ended:
            main([command, "--help"])
        assert ended.value.code == 0
        assert f"python -m recipe_gkd {command}" in capsys.readouterr().out

    def test_module_runs_as_process(self) -> None:
        run = subprocess.run([sys.executable, "-m", "recipe_gkd"], capture_output=True, text=True, check=False)
        assert run.returncode == 2 and "check-devices" in run.stderr

    def test_invalid_config_is_one_error_without_traceback(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["check-devices", "trainer.nnodes=two"]) == 1
        message = capsys.readouterr().err
        assert "error: trainer.nnodes: got 'two'" in message and "Traceback" not in message

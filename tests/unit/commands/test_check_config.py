"""The command ``check-config``."""

from __future__ import annotations

import subprocess
import sys

import pytest

from recipe_gkd.__main__ import main


def test_valid_configuration_prints_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", "--config-name", "quickstart", "trainer.scheduler=sync"]) == 0
    assert capsys.readouterr() == ("quickstart with 1 overrides is valid\n", "")


def test_all_wrong_keys_are_in_one_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check-config", "--config-name", "quickstart", "gkd.betaa=1", "trainer.schedular=sync"]) == 1
    message = capsys.readouterr().err
    assert "gkd.betaa" in message and "did you mean trainer.scheduler?" in message


def test_command_imports_no_worker() -> None:
    script = (
        "import sys; from recipe_gkd.__main__ import main; main(['check-config', '--config-name', 'quickstart']); "
        "print({'ray', 'vllm', 'transformers', 'megatron'} & set(sys.modules))"
    )
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert run.stdout.splitlines()[-1] == "set()"

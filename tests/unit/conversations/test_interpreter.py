"""Processes of environments: another interpreter, and what a class sets up once in each."""

from __future__ import annotations

import asyncio
import stat
import sys
from pathlib import Path
from typing import Any

import pytest

from recipe_gkd.config.environments import EnvironmentSettings
from recipe_gkd.conversations.pool import EnvironmentPool
from recipe_gkd.errors import ConfigError
from tests._support.conversations import FILE, settings_of
from tests._support.errors import raises
from tests._support.waiting import PATIENCE_S

ROW: dict[str, Any] = {"prompt": [], "ground_truth": "2", "data_source": None, "extra": {"name": "x"}}
KEY = "rollout.environment_python"


def program(path: Path, text: str) -> Path:
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def steps(settings: EnvironmentSettings) -> dict[str, Any]:
    async def once(pool: EnvironmentPool) -> dict[str, Any]:
        async with asyncio.timeout(PATIENCE_S):
            session = await pool.open(0)
            await session.reset(ROW)
            return await session.step({"role": "assistant", "content": "1"}, [])

    with EnvironmentPool(settings, 1) as pool:
        return asyncio.run(once(pool))


class TestInterpreter:
    def test_process_runs_in_it_and_needs_only_the_standard_library(self, tmp_path: Path) -> None:
        """The interpreter has no packages, and keeps its own import path."""
        text = f'#!/bin/sh\nINTERPRETER=other exec {sys._base_executable} -I -S "$@"\n'  # type: ignore[attr-defined]
        python = program(tmp_path / "python", text)
        found = steps(settings_of(f"rollout.environment={FILE}:Interpreter", f"{KEY}={python}"))
        assert found["messages"] == [{"role": "user", "content": "other numpy=False"}]

    def test_process_has_the_packages_of_this_interpreter_without_it(self) -> None:
        found = steps(settings_of(f"rollout.environment={FILE}:Interpreter"))
        assert found["messages"] == [{"role": "user", "content": "None numpy=True"}]

    def test_link_into_a_virtual_environment_is_kept(self, tmp_path: Path) -> None:
        link = tmp_path / "python"
        link.symlink_to(sys.executable)
        assert settings_of(f"rollout.environment={FILE}:Echo", f"{KEY}={link}").python == str(link)

    def test_functions_need_transformers_for_their_schemas(self, tmp_path: Path) -> None:
        text = f'#!/bin/sh\nexec {sys._base_executable} -I -S "$@"\n'  # type: ignore[attr-defined]
        python = program(tmp_path / "python", text)
        settings = settings_of(f"rollout.tools=[{FILE}:add]", "rollout.tool_parser=hermes", f"{KEY}={python}")
        with pytest.raises(ConfigError, match=r"schema of add cannot be read.*Install transformers for"):
            EnvironmentPool(settings, 1)

    @pytest.mark.parametrize(
        ("text", "expected"),
        [
            (None, "is no executable file; expected the path of a Python of at least 3.11"),
            ("#!/bin/sh\necho 3 10\n", "is Python 3.10; expected"),
            ("#!/bin/sh\necho hello\n", "it does not print its version: ValueError"),
            ("#!/bin/sh\nexit 3\n", "it does not print its version: CalledProcessError"),
            ("#!/no/interpreter\n", "it does not print its version: FileNotFoundError"),
        ],
        ids=["missing", "old", "other", "fails", "broken"],
    )
    def test_file_that_is_no_suitable_python_is_refused(self, tmp_path: Path, text: str | None, expected: str) -> None:
        path = tmp_path / "python"
        if text is not None:
            program(path, text)
        with pytest.raises(ConfigError, match=expected) as caught:
            settings_of(f"rollout.environment={FILE}:Echo", f"{KEY}={path}")
        assert caught.value.keys == (KEY,) and "give the interpreter of a virtual environment" in str(caught.value)

    def test_file_that_is_not_executable_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "python").write_text("")
        with raises(ConfigError, keys=(KEY,)):
            settings_of(f"rollout.environment={FILE}:Echo", f"{KEY}={tmp_path / 'python'}")


class TestSetup:
    def test_class_can_set_its_tools_once(self) -> None:
        settings = settings_of(f"rollout.environment={FILE}:Prepared", "rollout.environment_kwargs.name=buy")
        with EnvironmentPool(settings, 1) as pool:
            assert pool.tools == [{"type": "function", "function": {"name": "buy"}}]

    def test_error_of_the_setup_ends_the_start(self) -> None:
        settings = settings_of(f"rollout.environment={FILE}:Prepared", "rollout.environment_kwargs.name=raises")
        with pytest.raises(ConfigError, match=r"its setup_process raised:(.|\n)*KeyError: 'the shop is closed'"):
            EnvironmentPool(settings, 1)

"""Settings of conversations: the user's environment or tools, which run in separate processes."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_gkd.config.conditions import has_conversations, trains_on_references
from recipe_gkd.config.keys import key_name
from recipe_gkd.config.schema import Config
from recipe_gkd.errors import ConfigError
from recipe_gkd.runtime.user_code import split_spec

ENVIRONMENT = key_name(lambda config: config.rollout.environment)
TOOLS = key_name(lambda config: config.rollout.tools)
PYTHON = key_name(lambda config: config.rollout.environment_python)
PARSER = key_name(lambda config: config.rollout.tool_parser)
HISTORY = key_name(lambda config: config.rollout.history)
MIN_PYTHON = (3, 11)
VERSION_TIMEOUT_S = 60.0
_EXPECTED_CLASS = "a Python file that defines a class with reset(row) and step(message, tool_calls)"
_EXPECTED_TOOL = "a Python file that defines this function, with type hints and an Args section in its docstring"


@dataclass(frozen=True, kw_only=True)
class EnvironmentSettings:
    """The user's code of conversations, for the processes that run it.

    Attributes:
        environment: File and name of the class. None with tools.
        kwargs: Arguments of its constructor.
        tools: File and name of each function.
        timeout_s: Deadline of a call.
        python: Path of the interpreter. None for the same one.
    """

    environment: Mapping[str, str] | None
    kwargs: Mapping[str, Any]
    tools: tuple[Mapping[str, str], ...]
    timeout_s: float
    python: str | None = None

    @classmethod
    def of(cls, config: Config) -> EnvironmentSettings:
        """Return the settings of a configuration with conversations.

        Raises:
            ConfigError: A file does not exist, a value is not ``FILE.py:Name``, or the interpreter cannot be used.
        """
        rollout = config.rollout
        environment = None
        if rollout.environment is not None:
            environment = _location(rollout.environment, ENVIRONMENT, "environment.py:Shop", _EXPECTED_CLASS)
        tools = tuple(_location(spec, TOOLS, "tools.py:search", _EXPECTED_TOOL) for spec in rollout.tools)
        return cls(
            environment=environment,
            kwargs=dict(rollout.environment_kwargs),
            tools=tools,
            timeout_s=rollout.environment_timeout_s,
            python=None if rollout.environment_python is None else _interpreter(rollout.environment_python),
        )

    def load_error(self, number: int, reason: str) -> ConfigError:
        """Return the error of a file that cannot be used.

        Args:
            number: Index of the tool; 0 for the environment.
            reason: Reason, as the predicate of a sentence.
        """
        key, spec, expected = (
            (ENVIRONMENT, self.environment, _EXPECTED_CLASS)
            if self.environment is not None
            else (TOOLS, self.tools[number], _EXPECTED_TOOL)
        )
        what = f"{key}={spec['path']}:{spec['name']}: {reason}"
        return ConfigError(what, details=(f"Expected {expected}",), remedy=f"correct it, or {key}", keys=(key,))


def _location(spec: str, key: str, example: str, expected: str) -> dict[str, str]:
    path, name = split_spec(spec, key=key, example=example)
    file = Path(path).absolute()
    if not file.is_file():
        raise ConfigError(f"{key}={spec}: {file} is no file; expected {expected}", keys=(key,))
    return {"path": str(file), "name": name}


def _interpreter(path: str) -> str:
    """Return the absolute path of an interpreter that can run environments. Links are kept: they lead to a venv.

    Raises:
        ConfigError: It is no executable file, or no Python of at least version 3.11.
    """
    file, expected = Path(path).absolute(), f"expected the path of a Python of at least {_version_text(MIN_PYTHON)}"
    remedy = f"give the interpreter of a virtual environment, such as {PYTHON}=/venvs/mine/bin/python, or null"
    if not (file.is_file() and os.access(file, os.X_OK)):
        raise ConfigError(f"{PYTHON}={path}: {file} is no executable file; {expected}", remedy=remedy, keys=(PYTHON,))
    command = [str(file), "-I", "-c", "import sys; print(*sys.version_info[:2])"]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=VERSION_TIMEOUT_S, check=True
        )
        version = tuple(map(int, done.stdout.split()))
    except (OSError, subprocess.SubprocessError, ValueError) as error:
        what = f"{PYTHON}={path}: it does not print its version: {type(error).__name__}: {error}; {expected}"
        raise ConfigError(what, remedy=remedy, keys=(PYTHON,)) from error
    if version < MIN_PYTHON:
        what = f"{PYTHON}={path} is Python {_version_text(version)}; {expected}"
        raise ConfigError(what, remedy=remedy, keys=(PYTHON,))
    return str(file)


def _version_text(version: Sequence[int]) -> str:
    return ".".join(map(str, version))


def conversation_problems(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each invalid combination of the keys of conversations."""
    rollout = config.rollout
    if rollout.environment is not None and rollout.tools:
        yield ConfigError(
            f"{ENVIRONMENT}={rollout.environment} with {TOOLS}={list(rollout.tools)}: an environment receives the "
            "tool calls itself",
            remedy=f"call the functions in its step(), and list them in its attribute tools; or set {ENVIRONMENT}=null",
            keys=(ENVIRONMENT, TOOLS),
        )
    for key, specs in ((ENVIRONMENT, [rollout.environment]), (TOOLS, rollout.tools)):
        for spec in filter(None, specs):
            try:
                split_spec(spec, key=key)
            except ConfigError as error:
                yield error
    if rollout.tools and rollout.tool_parser is None:
        yield ConfigError(
            f"{TOOLS}={list(rollout.tools)} without {PARSER}: the model's calls cannot be found in its text",
            remedy=f"set {PARSER} to the format of the student, such as hermes (Qwen) or llama3_json",
            keys=(TOOLS, PARSER),
        )
    if has_conversations(config) and trains_on_references(config.gkd) and config.gkd.sft_share == 1:
        yield ConfigError(
            f"{ENVIRONMENT} or {TOOLS} with gkd.sft_share=1: no response is sampled, so there is no conversation",
            remedy=f"lower gkd.sft_share, or set {ENVIRONMENT}=null and {TOOLS}=[]",
            keys=(ENVIRONMENT, TOOLS, "gkd.sft_share"),
        )

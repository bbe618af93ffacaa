"""Environments and tools of tests. The process of the environments loads this file by its path."""

from __future__ import annotations

import asyncio
import ctypes
import importlib.util
import os
import time
from pathlib import Path
from typing import Any


class Echo:
    """Environment that returns what it was told, until the student has said 0."""

    def __init__(self, folder: str = "", reward: float | None = None) -> None:
        self.folder, self.reward, self.n_steps, self.uid = folder, reward, 0, ""

    async def reset(self, row: dict[str, Any]) -> None:
        self.uid = str(row["extra"].get("name", ""))
        if self.folder:
            with (Path(self.folder) / self.uid).open("a") as file:
                file.write("reset\n")

    async def step(self, message: dict[str, Any], tool_calls: list[Any]) -> Any:
        self.n_steps += 1
        if message["content"] == "0":
            return {"done": True, "reward": self.reward, "info": {"steps": self.n_steps, "name": self.uid}}
        return {"messages": [{"role": "user", "content": message["content"]}], "reward": self.reward}

    async def close(self) -> None:
        if self.folder:
            with (Path(self.folder) / self.uid).open("a") as file:
                file.write("close\n")


class Calling(Echo):
    """Environment that answers tool calls as a tool, and other turns as a user."""

    async def step(self, message: dict[str, Any], tool_calls: list[Any]) -> Any:
        if not tool_calls:
            return await super().step(message, tool_calls)
        return [{"role": "tool", "content": "46", "tool_call_id": tool_calls[0]["id"]}]


class Faulty(Echo):
    """Environment with a fault for the samples whose name is the name of a fault."""

    async def step(self, message: dict[str, Any], tool_calls: list[Any]) -> Any:
        match self.uid:
            case "raises":
                raise KeyError("the shop is closed")
            case "returns":
                return {"role": "assistant", "content": 3}
            case "class":
                return {"messages": "0", "info": {"state": Echo()}}
            case "huge":
                return {"done": True, "reward": 10**400}
            case "hostile":
                return {"done": True, "reward": Hostile()}
            case "numbers":
                return {"done": True, "info": {"state": Echo(), "n": Half(), "huge": 10**400, "nan": float("nan")}}
            case "surrogate":
                return {"role": "user", "content": "\ud83d", "extra": Echo()}
            case "waits":
                await asyncio.sleep(3600)
            case "blocks":
                time.sleep(3600)
            case "exits":
                os._exit(3)
            case "crashes":
                await asyncio.gather(asyncio.sleep(0), self._crash())
        return await super().step(message, tool_calls)

    async def _crash(self) -> None:
        ctypes.string_at(0)


class Half:
    """Number of another type, such as those of numpy."""

    def __float__(self) -> float:
        return 0.5


class Hostile:
    """Object that cannot be shown."""

    def __float__(self) -> float:
        raise LookupError("no number")


class Slow(Echo):
    """Environment of plain functions that take a second."""

    def step(self, message: dict[str, Any], tool_calls: list[Any]) -> Any:  # type: ignore[override]
        time.sleep(1)
        return {"role": "user", "content": "1"}


class SlowStart(Echo):
    """Environment whose constructor takes a second. It writes to its folder that it is closed."""

    def __init__(self, folder: str) -> None:
        time.sleep(1)
        super().__init__(folder)
        self.uid = "started"


class Prompting(Echo):
    """Environment that sets the prompt."""

    async def reset(self, row: dict[str, Any]) -> Any:
        return [{"role": "user", "content": row["ground_truth"]}]


class Recalling(Echo):
    """Environment whose prompt has a tool call in OpenAI's form."""

    async def reset(self, row: dict[str, Any]) -> Any:
        calls = [{"id": "0", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}]
        return [{"role": "assistant", "content": "", "tool_calls": calls}, {"role": "tool", "content": "2"}]


class NoReset:
    """Class without the methods of an environment."""


def add(a: int, b: int = 1) -> int:
    """Add two numbers.

    Args:
        a: First number.
        b: Second number.
    """
    return a + b


async def wait(seconds: float) -> str:
    """Wait.

    Args:
        seconds: Time.
    """
    await asyncio.sleep(seconds)
    return "waited"


def block(seconds: float) -> str:
    """Wait in a thread.

    Args:
        seconds: Time.
    """
    time.sleep(seconds)
    return "blocked"


def fail() -> None:
    """Fail."""
    raise RuntimeError("no luck")


def unreadable() -> dict[object, object]:
    """Return something that is no JSON."""
    return {(1, 2): "x"}


def undescribed(x):
    return x


class Prepared(Echo):
    """Environment that finds its tools when its process starts."""

    tools: list[Any] = []  # noqa: RUF012 - setup_process sets it

    @classmethod
    def setup_process(cls, name: str) -> None:
        if name == "raises":
            raise KeyError("the shop is closed")
        cls.tools = [{"type": "function", "function": {"name": name}}]

    def __init__(self, name: str) -> None:
        super().__init__()


class Interpreter(Echo):
    """Environment that returns a variable and the modules of its interpreter."""

    async def step(self, message: dict[str, Any], tool_calls: list[Any]) -> Any:
        has_numpy = importlib.util.find_spec("numpy") is not None
        return {"role": "user", "content": f"{os.environ.get('INTERPRETER')} numpy={has_numpy}"}

"""Files with reward functions, and items for them."""

from __future__ import annotations

import textwrap
from pathlib import Path
from typing import Any

from recipe_gkd.config.schema import RewardFunctionConfig
from recipe_gkd.rewards import RewardItem

HEAD = "def compute_score(prompt, response, ground_truth, extra):\n"


def settings(path: Path | str | None, **values: Any) -> RewardFunctionConfig:
    """Return the configuration of the reward function in ``path``."""
    defaults: dict[str, Any] = {
        "kwargs": {},
        "functions": {},
        "max_concurrency": 16,
        "on_failure": "fail",
        "failure_value": 0.0,
        "max_failures": None,
        "name": "compute_score",
        "skip_special_tokens": True,
        "on_training": True,
        "timeout_s": 20.0,
        "num_workers": 1,
    }
    return RewardFunctionConfig(path=None if path is None else str(path), **(defaults | values))


def reward_file(folder: Path, body: str, *, before: str = "") -> Path:
    """Write a file whose ``compute_score`` has this body, and return its path. ``before``: code before the function."""
    path = folder / "my_reward.py"
    path.write_text(before + "\n" + HEAD + textwrap.indent(textwrap.dedent(body), "    "))
    return path


def item(uid: int = 0, response: str = "a response", **values: Any) -> RewardItem:
    """Return a reward item with default values."""
    return RewardItem(
        uid=uid,
        where=f"row {uid} of the tests",
        response=response,
        **({"prompt": "a prompt", "ground_truth": "a truth", "extra": {}, "data_source": None} | values),
    )

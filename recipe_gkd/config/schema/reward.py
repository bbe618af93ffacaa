"""Section ``custom_reward_function``."""

from __future__ import annotations

from typing import Any

from pydantic.dataclasses import dataclass

from recipe_gkd.config.limits import MAX_DEVICES
from recipe_gkd.config.schema.fields import STRICT, key, timeout


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardFunctionConfig:
    """Reward function, section ``custom_reward_function``."""

    path: str | None = key("Python file that defines the reward function. null: no reward function.")
    name: str = key(
        "Name of the function in the file. Its parameters are (prompt, response, ground_truth, extra), or "
        "verl's (data_source, solution_str, ground_truth, extra_info). It returns a number, or a dict with `score`."
    )
    kwargs: dict[str, Any] = key(
        "Keyword arguments of the function besides these. Command line: `custom_reward_function.kwargs.scale=2`."
    )
    on_training: bool = key("Score training responses even if no loss uses the reward, to report `reward/*` metrics.")
    timeout_s: float = timeout("one call of the reward function, in seconds.")
    num_workers: int = key("Number of processes that call the reward function.", ge=1, le=MAX_DEVICES)

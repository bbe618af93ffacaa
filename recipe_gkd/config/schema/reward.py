"""Section ``custom_reward_function``."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field
from pydantic.dataclasses import dataclass

from recipe_gkd.config.limits import MAX_CALLS, MAX_COEFFICIENT, MAX_DEVICES, MAX_STEPS
from recipe_gkd.config.schema.fields import STRICT, PathUse, UserPath, key, timeout
from recipe_gkd.config.schema.unused import FAILURE_ENDS_RUN, NO_REWARD, NO_REWARDED_RESPONSE, SEVERAL_REWARDS, needs

RewardFailureMode = Literal["fail", "skip", "value"]


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardFunctionEntry:
    """One of several reward functions, a value of ``custom_reward_function.functions``."""

    path: UserPath = ""
    name: str = "compute_score"
    weight: Annotated[float, Field(ge=-MAX_COEFFICIENT, le=MAX_COEFFICIENT)] = 1.0
    kwargs: dict[str, Any] = Field(default_factory=dict)


def _as_entry(value: Any) -> Any:
    """Return ``FILE.py:name`` as the mapping that it stands for."""
    if not isinstance(value, str):
        return value
    path, separator, name = value.rpartition(":")
    return {"path": path, "name": name} if separator else {"path": value}


@dataclass(frozen=True, kw_only=True, config=STRICT)
class RewardFunctionConfig:
    """Reward function, section ``custom_reward_function``."""

    path: UserPath | None = key(
        "Python file that defines the reward function. null: no reward function.", unused=[NO_REWARDED_RESPONSE]
    )
    name: str = key(
        "Name of the function in the file. Its parameters are (prompt, response, ground_truth, extra), or "
        "verl's (data_source, solution_str, ground_truth, extra_info). It returns a number, or a dict with `score` and "
        "other numbers, which become metrics. It may be an `async def` function.",
        unused=[NO_REWARD, SEVERAL_REWARDS],
    )
    kwargs: dict[str, Any] = key(
        "Keyword arguments of the function besides these. Command line: `custom_reward_function.kwargs.scale=2`.",
        unused=[NO_REWARD, SEVERAL_REWARDS],
    )
    functions: dict[str, Annotated[RewardFunctionEntry, BeforeValidator(_as_entry), PathUse.SOURCE]] = key(
        "Several reward functions instead of `path`, as label -> `{path, name, weight, kwargs}` or `FILE.py:name`. The "
        "reward is the weighted sum; `reward/LABEL` and `val/SOURCE/LABEL` are the scores. Default values: "
        "`compute_score`, 1, none. Command line: `custom_reward_function.functions.format=rewards.py:format_score`.",
        unused=[NO_REWARDED_RESPONSE],
    )
    skip_special_tokens: bool = key(
        "Decode responses without special tokens. false: the function also sees tokens such as `<think>` where the "
        "tokenizer lists them as special, and the token that ends the response.",
        unused=[NO_REWARD],
    )
    on_training: bool = key(
        "Score training responses even if no loss uses the reward, to report `reward/*` metrics.", unused=[NO_REWARD]
    )
    timeout_s: float = timeout("one call of the reward function, in seconds.", unused=[NO_REWARD])
    num_workers: int = key(
        "Number of processes that call the reward function.", unused=[NO_REWARD], ge=1, le=MAX_DEVICES
    )
    max_concurrency: int = key(
        "Number of responses that an `async def` function scores at a time in each process.",
        unused=[NO_REWARD],
        ge=1,
        le=MAX_CALLS,
    )
    on_failure: RewardFailureMode | None = key(
        "If a call of the reward function fails. `fail`: the run ends. `skip`: the response has no reward; it has "
        "advantage 0 and is left out of all means. `value`: its reward is `failure_value`. null: `fail` with "
        "`gkd.use_rl_loss`, else `skip`, because the rewards are then only metrics.",
        unused=[NO_REWARD],
    )
    failure_value: float = key(
        "Reward of a response whose call failed. Used if `on_failure` is `value`.",
        unused=[needs(lambda config: config.custom_reward_function.on_failure, "value")],
        ge=-MAX_COEFFICIENT,
        le=MAX_COEFFICIENT,
    )
    max_failures: int | None = key(
        "Number of failed calls since the start of the command above which the run ends. null: no limit. Used if "
        "`on_failure` is not `fail`.",
        unused=[FAILURE_ENDS_RUN],
        ge=0,
        le=MAX_STEPS,
    )

"""The reward functions of a configuration: one of ``custom_reward_function.path``, or several weighted ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from recipe_gkd.config.keys import REWARD
from recipe_gkd.config.schema import Config, RewardFunctionConfig
from recipe_gkd.errors import ConfigError

SUM_NAME = "reward"
"""Name of the weighted sum of several functions, as in the metric ``val/<data_source>/reward``."""
STATISTICS = ("mean", "std", "min", "max", "zero_std_group_fraction", "failures")
"""Names of the metrics ``reward/*`` that every run with rewards has."""
VALIDATION_METRICS = ("response_len", "truncated_fraction", "seq_rep_4", "looping_fraction", "kl", "reverse_kl")
"""Names of the metrics ``val/<data_source>/*`` that are no rewards."""
_LABEL = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(frozen=True, kw_only=True)
class RewardFunction:
    """A reward function of the user.

    Attributes:
        label: Name in ``custom_reward_function.functions``. Empty for the function of ``custom_reward_function.path``.
        path: Python file.
        name: Name of the function in the file.
        weight: Weight of its score in the reward.
        kwargs: Keyword arguments in addition to the response's.
    """

    label: str
    path: str
    name: str
    weight: float
    kwargs: Mapping[str, Any]

    @property
    def path_key(self) -> str:
        """Configuration key of the file."""
        return f"{REWARD}.functions.{self.label}.path" if self.label else f"{REWARD}.path"

    @property
    def name_key(self) -> str:
        """Configuration key of the name."""
        return f"{REWARD}.functions.{self.label}.name" if self.label else f"{REWARD}.name"

    @property
    def description(self) -> str:
        """The function in messages, such as ``compute_score of reward.py``."""
        described = f"{self.name} of {self.path}"
        return f"{self.label} ({described})" if self.label else described


def reward_functions(section: RewardFunctionConfig) -> tuple[RewardFunction, ...]:
    """Return the reward functions; empty without one."""
    if section.functions:
        return tuple(
            RewardFunction(label=label, path=entry.path, name=entry.name, weight=entry.weight, kwargs=entry.kwargs)
            for label, entry in section.functions.items()
        )
    if section.path is None:
        return ()
    return (RewardFunction(label="", path=section.path, name=section.name, weight=1.0, kwargs=section.kwargs),)


def reward_name(section: RewardFunctionConfig) -> str:
    """Return the name of the reward in the metrics of validation."""
    return SUM_NAME if section.functions else section.name


def reserved_names(section: RewardFunctionConfig) -> frozenset[str]:
    """Return the names that no number in the result of a function may have."""
    name = reward_name(section)
    return frozenset({*STATISTICS, *VALIDATION_METRICS, name, *section.functions})


def reward_problems(config: Config) -> Iterator[ConfigError]:
    """Yield an error for each invalid combination in the section."""
    section = config.custom_reward_function
    if section.path is not None and section.functions:
        yield ConfigError(
            f"{REWARD}.path={section.path} with {REWARD}.functions={{{', '.join(section.functions)}}}: they are one "
            "function or several",
            remedy=f"set {REWARD}.path=null, or remove {REWARD}.functions",
            keys=(f"{REWARD}.path", f"{REWARD}.functions"),
        )
    for label, entry in section.functions.items():
        if not entry.path:
            yield ConfigError(
                f"{REWARD}.functions.{label} has no path",
                remedy=f"set {REWARD}.functions.{label}.path to the Python file that defines {entry.name}",
                keys=(f"{REWARD}.functions.{label}.path",),
            )
    taken = {*STATISTICS, *VALIDATION_METRICS, SUM_NAME}
    for label in section.functions:
        if label in taken or not _LABEL.fullmatch(label):
            yield ConfigError(
                f"{REWARD}.functions.{label}: the label names the metrics reward/{label} and val/SOURCE/{label}; "
                f"expected letters, digits and _ - . and none of {', '.join(sorted(taken))}",
                remedy="rename it",
                keys=(f"{REWARD}.functions.{label}",),
            )
    if section.functions and not any(entry.weight for entry in section.functions.values()):
        yield ConfigError(
            f"the weights of all {REWARD}.functions are 0, so the reward is always 0",
            remedy="raise one of them",
            keys=(f"{REWARD}.functions",),
        )

"""Messages and numbers of a conversation, beside its tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

ConversationEnd = Literal["stop", "length", "turns", "time", "failure"]
"""End of a conversation: by the environment, or because the student called no tool; at ``data.max_response_length``,
``rollout.max_turns`` or ``rollout.conversation_timeout_s``; by a failure of the environment."""


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """Messages and numbers of a conversation.

    Attributes:
        messages: Messages after the prompt, of all roles.
        n_turns: Number of turns of the student.
        prompt: Messages that the environment has set in place of the row's prompt. None: the row's prompt.
        n_tool_calls: Number of tool calls.
        n_tool_errors: Number of tool calls that failed. The student saw their errors.
        step_rewards: Reward of the environment after each turn; None for a step without one.
        numbers: Other numbers of the environment, the latest of each name.
        environment_s: Time in calls of the environment, in seconds.
        n_restarts: Number of restarts because another conversation ended the process of the environment.
        failure: Error of the environment that ended the conversation. Empty if there is none.
    """

    messages: Sequence[Mapping[str, Any]]
    n_turns: int
    end: ConversationEnd
    prompt: Sequence[Mapping[str, Any]] | None = None
    n_tool_calls: int = 0
    n_tool_errors: int = 0
    step_rewards: tuple[float | None, ...] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    environment_s: float = 0.0
    n_restarts: int = 0
    failure: str = ""

    @property
    def rewards(self) -> tuple[float, ...]:
        """Rewards of the environment, in the order of the turns; empty without any."""
        return tuple(reward for reward in self.step_rewards if reward is not None)

    @property
    def turn_rewards(self) -> tuple[float, ...]:
        """Reward of the environment for each turn, 0 for a turn without one."""
        missing = (0.0,) * (self.n_turns - len(self.step_rewards))
        return tuple(reward or 0.0 for reward in self.step_rewards) + missing

    @property
    def reward(self) -> float | None:
        """Sum of the rewards of the environment, None without any."""
        return sum(self.rewards) if self.rewards else None

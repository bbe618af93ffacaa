"""State of a conversation: turns of the student, and the tokens between them. Pure data, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from recipe_gkd.data.messages import Message
from recipe_gkd.data.samples import ConversationEnd, InsertedTokens, Prompt, Response, Transcript


@dataclass
class ConversationState:
    """A conversation so far.

    Attributes:
        prompt: Prompt, whose tokens the environment may have replaced.
        turns: Response of each turn.
        between: Tokens after each turn but the last one, int32 [N] each.
        messages: Messages after the prompt.
        rewards: Reward of each step that had one.
        numbers: Numbers of the environment, the latest of each name.
        n_tool_calls: Number of calls of the student.
        n_tool_errors: Number of calls that failed.
    """

    prompt: Prompt
    turns: list[Response] = field(default_factory=list)
    between: list[np.ndarray] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    n_tool_calls: int = 0
    n_tool_errors: int = 0

    @property
    def n_tokens(self) -> int:
        """Number of tokens after the prompt."""
        return sum(len(turn.ids) for turn in self.turns) + sum(map(len, self.between))

    @property
    def context_ids(self) -> np.ndarray:
        """Prompt and all tokens after it, int32 [P + T + N]."""
        parts = [self.prompt.ids]
        for number, turn in enumerate(self.turns):
            parts.append(turn.ids)
            parts += self.between[number : number + 1]
        return np.concatenate(parts)

    def response(
        self, end: ConversationEnd, *, version: int, environment_s: float, n_restarts: int, failure: str = ""
    ) -> Response:
        """Return all turns as one response.

        Args:
            end: Reason of the end.
            version: Weights version of a response without tokens.
            environment_s: Time in calls of the environment.
            n_restarts: Number of restarts because the process of the environment ended.
            failure: Error of the environment that ended the conversation. Empty if there is none.
        """
        turns = self.turns
        ids_T = _joined([turn.ids for turn in turns], np.int32)
        # Tokens after the last turn predict nothing.
        ends = np.cumsum([len(turn.ids) for turn in turns])
        between = self.between[: max(len(turns) - 1, 0)]
        inserted = None
        if any(map(len, between)):
            before_N = np.repeat(ends[: len(between)], [len(ids) for ids in between]).astype(np.int32)
            kept = before_N < len(ids_T)  # a last turn without tokens
            inserted = InsertedTokens(ids_N=_joined(between, np.int32)[kept], before_N=before_N[kept])
        student_ids = [turn.student_ids_TJ for turn in turns if turn.student_ids_TJ is not None]
        return Response(
            uid=self.prompt.uid,
            ids=ids_T,
            logprobs=_joined([turn.logprobs for turn in turns], np.float32),
            finish_reason="stop" if end == "stop" else "length",
            weights_version=min((turn.weights_version for turn in turns), default=version),
            versions_T=_joined([turn.versions_T for turn in turns], np.int32),
            student_ids_TJ=np.concatenate(student_ids) if student_ids else None,
            inserted=inserted,
            transcript=Transcript(
                messages=self.messages,
                n_turns=len(turns),
                end=end,
                n_tool_calls=self.n_tool_calls,
                n_tool_errors=self.n_tool_errors,
                rewards=tuple(self.rewards),
                numbers=self.numbers,
                environment_s=environment_s,
                n_restarts=n_restarts,
                failure=failure,
            ),
        )


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype, casting="same_kind")

"""State of a conversation: turns of the student, and the tokens between them. Pure data, without an engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from recipe_gkd.conversations.template import NextTokens
from recipe_gkd.data.messages import Message
from recipe_gkd.data.samples import InsertedTokens, Prompt, Response, Rewrite
from recipe_gkd.data.transcript import ConversationEnd, Transcript
from recipe_gkd.errors import DataError


@dataclass
class ConversationState:
    """A conversation so far.

    Attributes:
        prompt: Prompt, whose tokens the environment may have replaced.
        reset_messages: Messages that the environment has set in place of the row's prompt. None: the row's prompt.
        turns: Response of each turn.
        between: Tokens after each turn but the last one. They may replace all tokens before them.
        messages: Messages after the prompt.
        rewards: Reward of each step, None for one without.
        numbers: Numbers of the environment, the latest of each name.
        n_tool_calls: Number of calls of the student.
        n_tool_errors: Number of calls that failed.
    """

    prompt: Prompt
    reset_messages: list[Message] | None = None
    turns: list[Response] = field(default_factory=list)
    between: list[NextTokens] = field(default_factory=list)
    messages: list[Message] = field(default_factory=list)
    rewards: list[float | None] = field(default_factory=list)
    numbers: dict[str, float] = field(default_factory=dict)
    n_tool_calls: int = 0
    n_tool_errors: int = 0

    @property
    def n_tokens(self) -> int:
        """Number of tokens after the prompt, as the student sees them."""
        return len(self.context_ids) - len(self.prompt.ids)

    def n_tokens_with(self, tokens: NextTokens) -> int:
        """Return the number of tokens after the prompt if ``tokens`` are the next ones."""
        return len(tokens.ids) + (-len(self.prompt.ids) if tokens.is_rewrite else self.n_tokens)

    def add(self, tokens: NextTokens) -> None:
        """Add tokens after the last turn.

        Raises:
            DataError: They replace the prompt, but a teacher has its own, which takes its place.
        """
        ids, has_other_prompt = self.prompt.ids, self.prompt.teacher_ids is not None
        if tokens.is_rewrite and has_other_prompt and not np.array_equal(tokens.ids[: len(ids)], ids):
            raise DataError(
                "the chat template has changed the prompt, whose place the teacher's own prompt takes",
                remedy="set rollout.history=keep, or let the teacher see the student's prompts",
            )
        self.between.append(tokens)

    @property
    def context_ids(self) -> np.ndarray:
        """All tokens that the student sees, int32."""
        parts = [self.prompt.ids]
        for number, turn in enumerate(self.turns):
            parts.append(turn.ids)
            for tokens in self.between[number : number + 1]:
                parts = [*([] if tokens.is_rewrite else parts), tokens.ids]
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
        ends = np.cumsum([len(turn.ids) for turn in turns]).tolist()
        between = [found for found in zip(ends, self.between, strict=False) if found[0] < len(ids_T)]
        appended = [(end, tokens.ids) for end, tokens in between if not tokens.is_rewrite]
        inserted = None
        if any(len(ids) for _, ids in appended):
            before_N = np.repeat([end for end, _ in appended], [len(ids) for _, ids in appended]).astype(np.int32)
            inserted = InsertedTokens(ids_N=_joined([ids for _, ids in appended], np.int32), before_N=before_N)
        routed = self._routed_experts()
        rewrites = [(end, tokens.ids) for end, tokens in between if tokens.is_rewrite]
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
            rewrites=tuple(
                Rewrite(before=end, context_ids=ids, routed_experts_PX=experts_PX)
                for (end, ids), experts_PX in zip(rewrites, routed[1:], strict=False)
            ),
            routed_experts_PX=routed[0],
            transcript=Transcript(
                messages=self.messages,
                n_turns=len(turns),
                end=end,
                prompt=self.reset_messages,
                n_tool_calls=self.n_tool_calls,
                n_tool_errors=self.n_tool_errors,
                step_rewards=tuple(self.rewards),
                numbers=self.numbers,
                environment_s=environment_s,
                n_restarts=n_restarts,
                failure=failure,
            ),
        )

    def _routed_experts(self) -> list[np.ndarray | None]:
        """Return the experts of each sequence. A turn adds the rows of the tokens that no turn before it had computed.

        Later turns have rows for all tokens before them, but others if the weights have changed.
        """
        found: list[np.ndarray | None] = [None]
        for number, turn in enumerate(self.turns):
            if number and self.between[number - 1].is_rewrite:
                found.append(None)
            before_PX, turn_PX = found[-1], turn.routed_experts_PX
            if before_PX is None or turn_PX is None:
                found[-1] = before_PX if turn_PX is None else turn_PX
            else:
                found[-1] = np.concatenate([before_PX, turn_PX[len(before_PX) :]])
        return found


def _joined(parts: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *parts], dtype=dtype, casting="same_kind")

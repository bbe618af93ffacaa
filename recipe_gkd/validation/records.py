"""Records of validation responses: lines of the file, and a table for the log."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_gkd.data.samples import Prompt, Response, Reward
from recipe_gkd.data.values import is_list_of_objects
from recipe_gkd.rewards import RewardItem
from recipe_gkd.rewards.items import CONVERSATION, conversation_fields
from recipe_gkd.rewards.reporting import raw_field, reward_fields
from recipe_gkd.runtime.json_lines import json_line
from recipe_gkd.validation.kl import FORWARD
from recipe_gkd.validation.tokens import TOKENS
from teacher.common.display_text import excerpt, make_visible

LENGTH = "response_len"
ENDS = {
    "length": "truncated",
    "turns": "ended by rollout.max_turns",
    "time": "ended by rollout.conversation_timeout_s",
    "failure": "failed",
}
LOGGED_CHARS = 200
"""Maximum number of characters of each text in the log. The file contains the whole text."""


@dataclass(frozen=True)
class ScoredResponse:
    """A validation response and its scores.

    Attributes:
        data_source: Data source of the prompt.
        response: Response to the prompt.
        item: Arguments of the reward function.
        reward: Reward of the response. None without a reward function.
        kl: Mean forward KL divergence over its scored tokens in nats. None if it is not reported, or without tokens.
        raw: Response with all special tokens, for people. None: not known.
        tokens: Its tokens with their KL divergences; see :mod:`recipe_gkd.validation.tokens`. None: not in the file.
    """

    data_source: str
    prompt: Prompt
    response: Response
    item: RewardItem
    reward: Reward | None = None
    kl: float | None = None
    raw: str | None = None
    tokens: dict[str, Any] | None = None

    @property
    def shown(self) -> str:
        """Response for people."""
        return self.item.response if self.raw is None else self.raw

    @property
    def is_truncated(self) -> bool:
        """True if a limit ended the response, such as ``data.max_response_length``."""
        return self.response.finish_reason == "length"

    @property
    def mark(self) -> str:
        """Mark of a response that a limit, or a failure of its environment, has ended."""
        transcript = self.response.transcript
        if transcript is None or not self.is_truncated:
            return " (truncated)" if self.is_truncated else ""
        return f" ({ENDS[transcript.end]})"


def response_lines(scored: Sequence[ScoredResponse]) -> bytes:
    """Return the lines of a file of responses: one JSON object per response.

    ``answer`` is the text for the reward function; ``raw_answer`` has the special tokens that it lacks, if any.
    """
    lines = [
        {
            "data_source": one.data_source,
            "row": one.prompt.row,
            "prompt": one.item.prompt,
            "answer": one.item.response,
            **raw_field("raw_answer", one.item.response, one.raw),
            "ground_truth": one.item.ground_truth,
            **reward_fields(one.reward),
            **({} if one.kl is None else {FORWARD: one.kl}),
            LENGTH: len(one.response.ids),
            "finish_reason": one.response.finish_reason,
            **({} if (found := one.response.transcript) is None else {CONVERSATION: conversation_fields(found)}),
            **({} if one.tokens is None else {TOKENS: one.tokens}),
        }
        for one in scored
    ]
    return "".join(map(json_line, lines)).encode()


def table_of(scored: Sequence[ScoredResponse], n: int, path: Path) -> str:
    """Return a readable table of ``n`` evenly spaced responses, which are the same ones each time.

    Responses have their special tokens, such as the one that ends them, and a mark if they were truncated.
    """
    n = min(n, len(scored))
    lines = [f"{n} of {len(scored)} responses, all in {path}"]
    for one in (scored[i * len(scored) // n] for i in range(n)):
        lines += [
            f"  {make_visible(one.data_source)}, row {one.prompt.row}",
            f"    prompt        {_excerpt(one.item.prompt)}",
            f"    response      {_excerpt(one.shown)}{one.mark}",
        ]
        if one.item.ground_truth is not None:
            lines.append(f"    ground truth  {_excerpt(one.item.ground_truth)}")
        if one.reward is not None:
            numbers = "".join(f", {name} {value:g}" for name, value in one.reward.numbers.items())
            lines.append(f"    reward        {one.reward.score:g}{numbers}")
        if one.kl is not None:
            lines.append(f"    KL            {one.kl:.4g} nats per token")
    return "\n".join(lines)


def _excerpt(value: object) -> str:
    """Return the beginning and the end of a text, on one line."""
    if is_list_of_objects(value) and value:
        value = " | ".join(f"{message.get('role')}: {message.get('content')}" for message in value)
    return make_visible(excerpt(str(value), LOGGED_CHARS))

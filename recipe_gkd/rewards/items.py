"""Arguments of a reward function: one decoded response and the data of its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from recipe_gkd.config.schema import DataConfig
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.rows import VERL_TRUTH, Row
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.data.transcript import Transcript
from recipe_gkd.errors import DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass(frozen=True, kw_only=True)
class RewardItem:
    """Arguments of a reward function (:mod:`recipe_gkd.rewards.binding`), and the sample that they belong to.

    Attributes:
        uid: Index of the sample, for errors.
        where: Row of the prompt, for errors, such as ``row 17 of the training data``.
        prompt: Prompt: a text, or messages whose contents are texts. The messages of an environment's ``reset``, if it
            returned any.
        response: Decoded response; without special tokens if ``custom_reward_function.skip_special_tokens``. Of a
            conversation, the last turn.
        ground_truth: Value of ``data.ground_truth_key``.
        extra: All other columns of the row. With conversations also :data:`CONVERSATION`.
        data_source: Value of column ``data.data_source_key``, None if the data has no such column.
        n_turns: Number of turns of the conversation, 1 if there is none.
    """

    uid: int
    where: str
    prompt: str | list[dict[str, Any]]
    response: str
    ground_truth: object
    extra: dict[str, Any]
    data_source: object
    n_turns: int = 1

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of :func:`recipe_gkd.rewards.binding.values_of`."""
        names = "prompt", "response", "ground_truth", "extra", "data_source"
        return {name: getattr(self, name) for name in names}


CONVERSATION = "conversation"
"""Entry of ``extra`` with the fields of :func:`conversation_fields`."""


def conversation_fields(transcript: Transcript) -> dict[str, Any]:
    """Return a conversation as a JSON object: its messages after the prompt, its end, and the environment's results."""
    return {
        "messages": list(transcript.messages),
        "n_turns": transcript.n_turns,
        "end": transcript.end,
        "tool_calls": transcript.n_tool_calls,
        "tool_errors": transcript.n_tool_errors,
        "rewards": list(transcript.rewards),
        "turn_rewards": list(transcript.turn_rewards),
        "reward": transcript.reward,
        "info": dict(transcript.numbers),
        **({"failure": transcript.failure} if transcript.failure else {}),
    }


def prompt_of(row: Row, response: Response) -> str | list[dict[str, Any]]:
    """Return the prompt that the student saw: of the row, or the messages of the environment's ``reset``."""
    transcript = response.transcript
    return row.prompt if transcript is None or transcript.prompt is None else list(map(dict, transcript.prompt))


TruthUse = Literal["required", "optional", "unused"]
"""Use of the ground truth: by a parameter without default value, by another parameter, or by none."""


def decode_for_people(response: Response, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a response with all its special tokens. It has U+FFFD where the bytes of a character are incomplete."""
    return str(tokenizer.decode(response.sequence_ids.tolist(), skip_special_tokens=False))


class RewardItems:
    """Factory of reward items from the data set that the prompts come from.

    Args:
        config: Names of its columns.
        require_truth: True to require a ground truth in every row in use.
        truth_use: Use of the ground truth by the reward functions. If it is not required, it is None in data without
            such a column.
        skip_special_tokens: Decode responses without special tokens.

    Raises:
        DataError: The data has neither ``data.ground_truth_key`` nor, if this is the default, verl's field, or with
            ``require_truth`` a row has no value there. If the ground truth is optional, only a key that is not the
            default must exist; if it is unused, this is not raised.
    """

    def __init__(
        self,
        data: PromptData,
        config: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        *,
        require_truth: bool = False,
        truth_use: TruthUse = "required",
        skip_special_tokens: bool = True,
    ) -> None:
        self._data_set, self._config, self._tokenizer = data.data_set, config, tokenizer
        self._skip_special_tokens = skip_special_tokens
        try:
            _ = self._data_set.truth_path
        except DataError:
            is_named = config.ground_truth_key != VERL_TRUTH[-1]
            if truth_use == "required" or (truth_use == "optional" and is_named):
                raise
        if require_truth and truth_use == "required":
            self._refuse_nulls(data.rows)

    def build_item(self, prompt: Prompt, response: Response) -> RewardItem:
        """Return the item of a response to a prompt of the data set."""
        row = self._data_set[prompt.row]
        extra = row.extra
        if (transcript := response.transcript) is not None:
            extra = extra | {CONVERSATION: conversation_fields(transcript)}
        return RewardItem(
            uid=response.uid,
            where=row.where,
            prompt=prompt_of(row, response),
            response=str(
                self._tokenizer.decode(response.last_turn_ids.tolist(), skip_special_tokens=self._skip_special_tokens)
            ),
            ground_truth=row.ground_truth,
            extra=extra,
            data_source=row.data_source,
            n_turns=1 if transcript is None else transcript.n_turns,
        )

    def _refuse_nulls(self, rows: list[int]) -> None:
        truths = self._data_set.take(rows).values_at(self._data_set.truth_path)
        null_rows = [row for row, truth in zip(rows, truths, strict=True) if truth is None]
        if null_rows:
            row, key = self._data_set[null_rows[0]], self._config.ground_truth_key
            with row.locate_errors(key):
                raise DataError(
                    f"data.ground_truth_key={key}: {row.where} has no value there, like {len(null_rows)} of "
                    f"{len(rows)} rows in use; expected a ground truth in each row",
                    remedy="fill the column in all files, or remove these rows",
                )

"""What a reward function is given: one answer, in words, with what the data says about its prompt."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from recipe_gkd.config.schema import DataConfig
from recipe_gkd.data.prompts import PromptData, column_at, column_path
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.errors import DataError


@dataclass(frozen=True, kw_only=True)
class RewardItem:
    """The arguments of a reward function (:mod:`recipe_gkd.rewards.binding`), and whose they are."""

    uid: int
    """Of the sample, for errors."""
    where: str
    """Its row, for errors: ``row 17 of the training data``."""
    prompt: str | list[dict[str, Any]]
    """As it stands in the data."""
    response: str
    """Decoded, without special tokens."""
    ground_truth: Any
    """From ``data.ground_truth_key``."""
    extra: dict[str, Any]
    """All other columns of the row."""
    data_source: Any
    """Value of column ``data.data_source_key``; None if the data has no such column."""

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of :func:`recipe_gkd.rewards.binding.values_of`."""
        names = "prompt", "ground_truth", "extra", "data_source"
        return {name: getattr(self, name) for name in names} | {"answer": self.response}


class RewardItems:
    """Makes them, from the data set that the prompts came from.

    Raises :class:`DataError` at once if the data has no ``data.ground_truth_key``; with ``must_have_truth`` also if a
    prompt has nothing there.
    """

    def __init__(self, data: PromptData, config: DataConfig, tokenizer: Any, *, must_have_truth: bool = False) -> None:
        self._table, self._config, self._tokenizer = data.table, config, tokenizer
        self._name = data.name
        self._truth = column_path(
            data.table,
            config.ground_truth_key,
            setting="data.ground_truth_key",
            is_for="that the reward function compares answers with",
        )
        if must_have_truth:
            self._refuse_nulls(data.rows)

    def of(self, prompt: Prompt, response: Response) -> RewardItem:
        row = self._table.slice(prompt.row, 1).to_pylist()[0]
        text = self._tokenizer.decode(response.ids.tolist(), skip_special_tokens=True)
        truth: Any = row
        for name in self._truth:
            truth = None if truth is None else truth[name]
        taken = {self._config.prompt_key}
        if len(self._truth) == 1:  # else it stays, with what is beside the truth
            taken.add(self._truth[0])
        extra = {name: value for name, value in row.items() if name not in taken}
        return RewardItem(
            uid=response.uid,
            where=f"row {prompt.row} of {self._name}",
            prompt=row[self._config.prompt_key],
            response=text,
            ground_truth=truth,
            extra=extra,
            data_source=row.get(self._config.data_source_key),
        )

    def _refuse_nulls(self, rows: list[int]) -> None:
        is_null = column_at(self._table, self._truth).is_null().to_numpy()
        without = [row for row in rows if is_null[row]]
        if without:
            raise DataError(
                f"data.ground_truth_key={self._config.ground_truth_key}: row {without[0]} of {self._name} has nothing "
                f"there, as {len(without)} of {len(rows)} rows in use; expected something to compare answers with in "
                "each. Fill the column in all files, or remove these rows"
            )

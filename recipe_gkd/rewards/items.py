"""Arguments of a reward function: one decoded response and the data of its prompt."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any, Literal

import pyarrow as pa

from recipe_gkd.config.schema import DataConfig
from recipe_gkd.data.prompts import PromptData
from recipe_gkd.data.samples import Prompt, Response
from recipe_gkd.data.tables import column_at, column_path
from recipe_gkd.errors import DataError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RewardItem:
    """Arguments of a reward function (:mod:`recipe_gkd.rewards.binding`), and the sample that they belong to.

    Attributes:
        uid: Index of the sample, for errors.
        where: Row of the prompt, for errors, such as ``row 17 of the training data``.
        prompt: Prompt as in the data.
        response: Response, decoded without special tokens.
        ground_truth: Value of ``data.ground_truth_key``.
        extra: All other columns of the row.
        data_source: Value of column ``data.data_source_key``, None if the data has no such column.
    """

    uid: int
    where: str
    prompt: str | list[dict[str, Any]]
    response: str
    ground_truth: Any
    extra: dict[str, Any]
    data_source: Any

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments of :func:`recipe_gkd.rewards.binding.values_of`."""
        names = "prompt", "response", "ground_truth", "extra", "data_source"
        return {name: getattr(self, name) for name in names}


TruthUse = Literal["required", "optional", "unused"]
"""Use of the ground truth: by a parameter without default value, by another parameter, or by none."""
VERL_TRUTH = ["reward_model", "ground_truth"]
"""Path of the ground truth in files that were prepared for verl."""


class RewardItems:
    """Factory of reward items from the data set that the prompts come from.

    Args:
        data: The data set.
        config: Names of its columns.
        tokenizer: Tokenizer of the student.
        require_truth: True to require a ground truth in every row in use.
        truth_use: Use of the ground truth by the reward functions. If it is not required, it is None in data without
            such a column.

    Raises:
        DataError: The data has neither ``data.ground_truth_key`` nor, if this is the default, verl's field, or with
            ``require_truth`` a row has no value there. If the ground truth is optional, only a key that is not the
            default must exist; if it is unused, this is not raised.
    """

    def __init__(
        self,
        data: PromptData,
        config: DataConfig,
        tokenizer: Any,
        *,
        require_truth: bool = False,
        truth_use: TruthUse = "required",
    ) -> None:
        self._table, self._config, self._tokenizer = data.table, config, tokenizer
        self._name = data.name
        self._truth_path: list[str] | None = None
        try:
            self._truth_path = truth_path(data.table, config, data.name)
        except DataError:
            is_named = config.ground_truth_key != VERL_TRUTH[-1]
            if truth_use == "required" or (truth_use == "optional" and is_named):
                raise
        if require_truth and truth_use == "required":
            self._refuse_nulls(data.rows)

    def build_item(self, prompt: Prompt, response: Response) -> RewardItem:
        """Return the item of a response to a prompt of the data set."""
        row = self._table.slice(prompt.row, 1).to_pylist()[0]
        text = self._tokenizer.decode(response.ids.tolist(), skip_special_tokens=True)
        path = self._truth_path
        truth: Any = None if path is None else row
        for name in path or ():
            truth = None if truth is None else truth[name]
        used = {self._config.prompt_key}
        if (
            path is not None and len(path) == 1
        ):  # A nested ground truth stays in `extra` together with its sibling fields.
            used.add(path[0])
        extra = {name: value for name, value in row.items() if name not in used}
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
        assert self._truth_path is not None
        is_null = column_at(self._table, self._truth_path).is_null().to_numpy()
        null_rows = [row for row in rows if is_null[row]]
        if null_rows:
            raise DataError(
                f"data.ground_truth_key={self._config.ground_truth_key}: row {null_rows[0]} of {self._name} has no "
                f"value there, like {len(null_rows)} of {len(rows)} rows in use; expected a ground truth in each row. "
                "Fill the column in all files, or remove these rows"
            )


def truth_path(table: pa.Table, config: DataConfig, name: str) -> list[str]:
    """Return the path of the ground truth: ``data.ground_truth_key``, or verl's if the default is absent.

    Args:
        table: Data set.
        config: Settings of the data.
        name: Name of the data set, for the log.

    Raises:
        DataError: There is no such column.
    """
    key, names = config.ground_truth_key, table.column_names
    if key == VERL_TRUTH[-1] and key not in names and VERL_TRUTH[0] in names:
        field = table.schema.field(VERL_TRUTH[0]).type
        if pa.types.is_struct(field) and field.get_field_index(VERL_TRUTH[1]) >= 0:
            log.info("%s: the ground truth is %s, as in verl's files", name, ".".join(VERL_TRUTH))
            return VERL_TRUTH
    return column_path(
        table,
        key,
        setting="data.ground_truth_key",
        purpose="that the reward function compares responses with",
    )

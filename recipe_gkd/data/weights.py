"""Weights of response tokens from a column of the data: ``gkd.position_weights_key``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from recipe_gkd.config.keys import key_name
from recipe_gkd.data.rows import DataSet
from recipe_gkd.errors import DataError

KEY = key_name(lambda config: config.gkd.position_weights_key)
_LARGEST = float(np.finfo(np.float32).max)


def read_weights(data_set: DataSet, rows: Sequence[int], column: str) -> list[np.ndarray | None]:
    """Return the weights of the responses to each prompt, float32 [N], None for a row without a value.

    A number is the weight of all response tokens. Of a list, value t is the weight of token t, and the last value that
    of all later tokens.

    Args:
        rows: Rows of the prompts.
        column: Name of the column; dots select a nested field.

    Raises:
        DataError: There is no such column, a row has something else than numbers of at least 0, or all are 0.
    """
    path = data_set.find(column, setting=KEY, purpose="with the weights of response tokens")
    weights: list[np.ndarray | None] = []
    for index in rows:
        row = data_set[index]
        with row.locate_errors(column):
            weights.append(_weights(row.value(path), f"{row.where}, column {column}"))
    if not any(each is None or each.any() for each in weights):
        raise DataError(
            f"{KEY}={column}: all weights of {data_set.name} are 0, so there is nothing to learn",
            remedy="correct the column, or set the key to null",
            column=column,
        )
    return weights


def expanded(weights: np.ndarray | None, n_tokens: int) -> np.ndarray:
    """Return the weights of a response with this number of tokens, float32 [T]."""
    if weights is None:
        return np.ones(n_tokens, np.float32)
    n_later = max(0, n_tokens - len(weights))
    return np.concatenate([weights[:n_tokens], np.full(n_later, weights[-1], np.float32)])


def _weights(value: object, where: str) -> np.ndarray | None:
    if value is None:
        return None
    numbers = value if isinstance(value, list) else [value]
    if not numbers or not all(_is_weight(number) for number in numbers):
        raise DataError(
            f"{where}: {value!r:.100} is no weight, expected a number of at least 0, or a list of one or more of them",
            remedy="correct the value",
        )
    return np.array(numbers, np.float32)


def _is_weight(number: object) -> bool:
    return isinstance(number, int | float) and not isinstance(number, bool) and 0 <= number <= _LARGEST

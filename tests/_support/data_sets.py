"""Data sets of tests, without files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa

from recipe_gkd.config.schema import DataConfig
from recipe_gkd.data.arrow_rows import ArrowRows
from recipe_gkd.data.rows import TRAINING, DataSet
from tests._support.base_config import base_config


def data_set_of(columns: pa.Table | dict[str, Any], config: DataConfig | None = None, name: str = TRAINING) -> DataSet:
    """Return a data set with columns of values."""
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    rows = ArrowRows(Path("table"), (table.schema, table.to_batches()))
    return DataSet([rows], base_config().data if config is None else config, name)

"""The table of model families."""

from __future__ import annotations

from tests._support.families import BY_TYPE, FAMILIES
from tests.integration.families import table


def test_page_is_the_output_of_the_generator() -> None:
    text = table.PAGE.read_text(encoding="utf-8")
    assert text == table.page(text), "run python -m tests.integration.families.table"


def test_each_model_type_has_one_row() -> None:
    assert len(BY_TYPE) == len(FAMILIES)

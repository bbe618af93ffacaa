"""The tables of model families and of sizes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from tests._support.families import BY_TYPE, FAMILIES
from tests._support.released_models import RELEASED_MODELS, ReleasedModel
from tests.integration.families import sizes, table


def test_page_is_the_output_of_the_generator() -> None:
    text = table.PAGE.read_text(encoding="utf-8")
    assert text == table.page(text), "run python -m tests.integration.families.table"


def test_each_model_type_has_one_row() -> None:
    assert len(BY_TYPE) == len(FAMILIES)


@pytest.mark.slow
def test_sizes_are_the_output_of_the_generator() -> None:
    text = table.PAGE.read_text(encoding="utf-8")
    assert text == sizes.page(text), "run python -m tests.integration.families.sizes"


def test_sizes_have_a_row_for_each_model() -> None:
    text = table.PAGE.read_text(encoding="utf-8").split(sizes.BEGIN)[1].split(sizes.END)[0]
    names = [line.split(" | ")[0].removeprefix("| ") for line in text.splitlines() if line.startswith("| ")]
    assert names == ["model", *(model.name for model in RELEASED_MODELS)]


@pytest.mark.slow
@pytest.mark.parametrize("model", RELEASED_MODELS, ids=lambda model: model.name)
def test_released_model_has_its_number_of_parameters(model: ReleasedModel, tmp_path: Path) -> None:
    config = transformers.AutoConfig.from_pretrained(model.write(tmp_path / "model"))
    with torch.device("meta"):
        built = transformers.AutoModelForCausalLM.from_config(config)
    n_parameters = sum(parameter.numel() for parameter in built.parameters())
    assert n_parameters == pytest.approx(model.billions * 1e9, rel=0.01)

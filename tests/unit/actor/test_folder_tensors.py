"""Reading of a model folder in parts, compared with what transformers loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from recipe_gkd.actor.folder_reader import FolderReader
from recipe_gkd.actor.fsdp.folder_tensors import read_rows, stored_tensors
from recipe_gkd.actor.fsdp.loading import computed_buffers
from tests._support.families import FAMILIES, Family, make_family_folder

N_RANKS = 3


class CountingReader(FolderReader):
    """Reader that counts the numbers that it has read."""

    n_read = 0

    def read(self, name: str, index: tuple[slice, ...] = ()) -> Tensor:
        tensor = super().read(name, index)
        self.n_read += tensor.numel()
        return tensor


def on_meta(folder: Path) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)


@pytest.mark.parametrize(
    "family", [pytest.param(family, id=family.model_type) for family in FAMILIES if not family.fsdp]
)
def test_ranks_read_their_rows_and_compute_the_buffers_of_transformers(family: Family, tmp_path: Path) -> None:
    folder = make_family_folder(tmp_path, family)
    want = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    state, model = want.state_dict(keep_vars=True), on_meta(folder)
    with CountingReader(folder) as reader:
        stored = stored_tensors(model, folder, reader.shapes())
        assert {id(state[name]) for name in stored} >= {id(parameter) for parameter in want.parameters()}
        n_numbers = 0
        for name, form in stored.items():
            n_numbers += state[name].numel()
            if not state[name].dim():
                assert torch.equal(read_rows(model, name, form, reader, 0, None).float(), state[name]), name
                continue
            parts = [tensor.shape[0] for tensor in torch.arange(len(state[name])).chunk(N_RANKS)]
            first = 0
            for n_rows in parts:
                rows = read_rows(model, name, form, reader, first, first + n_rows)
                assert torch.equal(rows.float(), state[name][first : first + n_rows]), name
                first += n_rows
        assert reader.n_read == n_numbers
    buffers = computed_buffers(model)
    assert buffers.keys() == dict(want.named_buffers()).keys()
    for name, buffer in want.named_buffers():
        assert name in stored or torch.equal(buffers[name], buffer), name

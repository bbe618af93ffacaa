"""Rows of the vocabulary that no token has."""

from __future__ import annotations

import torch
from torch import nn

from recipe_gkd.actor.fsdp.optimizer import keep_padding_rows

ROWS, N_TOKEN_IDS = 8, 5


class Model(nn.Module):
    """A model with two embeddings of tokens, as Gemma 4 has, and one of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.tokens_per_layer = nn.Embedding(ROWS, 2), nn.Embedding(ROWS, 3)
        self.positions, self.head = nn.Embedding(ROWS + 1, 2), nn.Linear(2, ROWS, bias=False)

    def get_input_embeddings(self) -> nn.Module:
        return self.tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.head


def test_padding_rows_of_all_embeddings_of_tokens_are_kept() -> None:
    model = Model()
    before = {name: weight.clone() for name, weight in model.named_parameters()}
    with keep_padding_rows(model, N_TOKEN_IDS), torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    for name, weight in model.named_parameters():
        n_changed = len(weight) if name == "positions.weight" else N_TOKEN_IDS
        assert torch.equal(weight[:n_changed], before[name][:n_changed] / 2)
        assert torch.equal(weight[n_changed:], before[name][n_changed:])

"""The registry of distillation losses, and its use by the configuration and the documentation."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from recipe_gkd.config.schema import GkdConfig
from recipe_gkd.errors import ConfigError
from recipe_gkd.losses import Divergence, registry
from recipe_gkd.losses.distributions import BucketedDistributions, bucketed_distributions
from recipe_gkd.losses.registry import (
    divergence_names,
    get_divergence,
    get_sampled_token_loss,
    loss_names,
    register_divergence,
    register_sampled_token_loss,
    sampled_token_loss_names,
)
from tests._support.errors import raises
from tests._support.repository import REPO


@pytest.fixture
def temporary_losses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_divergences", dict(registry._divergences))
    monkeypatch.setattr(registry, "_sampled_token_losses", dict(registry._sampled_token_losses))


@pytest.mark.usefixtures("temporary_losses")
class TestRegister:
    def test_new_divergence_is_selected_by_name(self) -> None:
        @register_divergence("chi_squared")
        def chi_squared(distributions: BucketedDistributions, *, beta: float) -> Tensor:
            return beta * (distributions.q_TC - distributions.p_TC).square().sum(1)

        log_q_TB = torch.tensor([[0.25, 0.75]]).log()
        distributions = bucketed_distributions(
            log_q_TB, torch.tensor([[0.5]]).log(), torch.ones(1, 1, dtype=torch.bool), "bucket"
        )
        loss_T = Divergence(kind="chi_squared", parameters={"beta": 2.0})(distributions)
        torch.testing.assert_close(loss_T, torch.tensor([0.25]))
        assert divergence_names()[-1] == "chi_squared" and "chi_squared" in loss_names()

    def test_new_sampled_token_loss_is_selected_by_name(self) -> None:
        @register_sampled_token_loss("absolute")
        def absolute(logp_T: Tensor, teacher_logp_T: Tensor) -> Tensor:
            return (logp_T - teacher_logp_T).abs()

        loss = get_sampled_token_loss("absolute")
        assert loss(torch.tensor([1.0]), torch.tensor([3.0]), values={"baseline_T": 0.0}).item() == 2

    def test_parameters_without_value_keep_their_defaults(self) -> None:
        @register_divergence("scaled")
        def scaled(_: BucketedDistributions, *, alpha: float = 0.3, beta: float = 7.0, **options: float) -> Tensor:
            assert not options
            return torch.tensor([alpha, beta])

        distributions = bucketed_distributions(
            torch.zeros(1, 2), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), "bucket"
        )
        assert Divergence(kind="scaled", parameters={"beta": 2.0})(distributions).tolist() == pytest.approx([0.3, 2.0])

    def test_parameter_without_value_and_default_is_refused(self) -> None:
        def scaled(logp_T: Tensor, teacher_logp_T: Tensor, alpha: float) -> Tensor: ...

        with raises(ConfigError, keys=("gkd.distill_loss_type",)):
            register_sampled_token_loss("scaled")(scaled)
        assert "scaled" not in loss_names()

    def test_divergence_whose_parameter_is_no_key_is_refused(self) -> None:
        @register_divergence("scaled")
        def scaled(distributions: BucketedDistributions, *, alpha: float) -> Tensor: ...

        distributions: Any = None
        with raises(ConfigError, keys=("gkd.distill_loss_type",)):
            get_divergence("scaled")(distributions, values={"beta": 1.0})

    @pytest.mark.parametrize("register", [register_divergence, register_sampled_token_loss])
    @pytest.mark.parametrize("name", ["jsd", "k1"])
    def test_name_in_use_is_refused(self, register: type, name: str) -> None:
        with raises(ConfigError, keys=("gkd.distill_loss_type",)):
            register(name)(lambda distributions: distributions)


def test_get_divergence_with_unknown_name_is_refused() -> None:
    with raises(ConfigError, keys=("gkd.distill_loss_type",)):
        get_divergence("kl")


def test_unknown_tail_mode_is_refused() -> None:
    with raises(ConfigError, keys=("gkd.tail",)):
        bucketed_distributions(torch.zeros(1, 2), torch.zeros(1, 1), torch.ones(1, 1, dtype=torch.bool), "drop")


@pytest.mark.parametrize("name", divergence_names())
def test_parameters_of_divergence_are_config_keys(name: str) -> None:
    assert set(get_divergence(name).parameters) <= {field.name for field in dataclasses.fields(GkdConfig)}


def test_parameters_of_sampled_token_losses_are_those_the_objective_passes() -> None:
    for name in sampled_token_loss_names():
        assert set(get_sampled_token_loss(name).parameters) <= set(registry.SAMPLED_TOKEN_PARAMETERS)


def test_docs_table_lists_exactly_the_registered_losses() -> None:
    text = (REPO / "docs" / "objectives.md").read_text()
    section = text.split("## Distillation")[1].split("\n## ")[0]
    assert tuple(re.findall(r"^\| `(\w+)` \|", section, re.MULTILINE)) == loss_names()

"""Weights of response tokens from a user's file: effect on loss and gradient, and checks of their values."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from recipe_gkd.actor.objective.loss_metrics import sum_names
from recipe_gkd.data.weights import expanded
from recipe_gkd.errors import ConfigError, CustomLossError
from recipe_gkd.losses.position_weights import KEY, load_position_weights
from tests._support.custom_loss_runs import (
    LAYOUTS,
    PATH,
    gkd_config,
    loss_and_gradients,
    make_batch,
    scored_samples,
)
from tests._support.errors import raises

WEIGHTS = [None, np.array([0.25], np.float32), np.array([3.0, 0.0, 0.5], np.float32)]
SHARE = f"{KEY}={PATH}:share_of_response"


class TestLoss:
    @pytest.mark.parametrize("layout", LAYOUTS)
    def test_loss_and_gradient_equal_a_custom_loss_with_the_same_weights(self, layout: list[str]) -> None:
        loss_T, found, grads = loss_and_gradients(gkd_config(*layout, SHARE))
        expected_T, expected, expected_grads = loss_and_gradients(gkd_config(*layout, custom="weighted_forward_kl"))
        torch.testing.assert_close(loss_T, expected_T, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grads, expected_grads, rtol=1e-12, atol=1e-12)
        assert found["actor/loss"] == pytest.approx(expected["actor/loss"], rel=1e-12)

    @pytest.mark.parametrize("loss", ["reverse_kl", "k1", "k3"])
    def test_tokens_are_multiplied_and_the_reported_divergence_is_not(self, loss: str) -> None:
        overrides = [f"gkd.distill_loss_type={loss}"]
        weighted_T, found, _ = loss_and_gradients(gkd_config(*overrides, SHARE))
        plain_T, expected, _ = loss_and_gradients(gkd_config(*overrides))
        batch = make_batch(scored_samples())
        lengths_R = torch.bincount(batch.sequence_T)
        weights_T = (1 + batch.positions_T) / lengths_R[batch.sequence_T] * batch.has_teacher_T
        torch.testing.assert_close(weighted_T, plain_T * weights_T, rtol=1e-6, atol=1e-9)
        assert found["actor/kl_loss"] == pytest.approx(expected["actor/kl_loss"], rel=1e-12)
        mean = weights_T.sum() / batch.has_teacher_T.sum()
        assert found["actor/position_weight"] == pytest.approx(float(mean), rel=1e-6)


class TestColumn:
    @pytest.mark.parametrize("with_function", [False, True])
    def test_tokens_are_multiplied_by_the_weights_of_their_row(self, with_function: bool) -> None:
        function = [SHARE] if with_function else []
        samples = [
            replace(sample, prompt=replace(sample.prompt, weights=WEIGHTS[number % len(WEIGHTS)]))
            for number, sample in enumerate(scored_samples())
        ]
        found_T, found, _ = loss_and_gradients(gkd_config(f"{KEY}_key=weight", *function), samples)
        plain_T, expected, _ = loss_and_gradients(gkd_config(*function), samples)
        weights_T = torch.cat(
            [torch.from_numpy(expanded(sample.prompt.weights, len(sample.response.ids))) for sample in samples]
        )
        assert len(weights_T.unique()) > 3 and (found_T != plain_T).any()
        torch.testing.assert_close(found_T, plain_T * weights_T, rtol=1e-6, atol=1e-9)
        assert found["actor/kl_loss"] == expected["actor/kl_loss"]
        batch = make_batch(samples)
        own_T = weights_T[batch.has_teacher_T]
        if not with_function:
            assert found["actor/position_weight"] == pytest.approx(float(own_T.mean()), rel=1e-6)

    def test_column_is_ignored_without_the_key(self) -> None:
        weighted = [replace(sample, prompt=replace(sample.prompt, weights=WEIGHTS[1])) for sample in scored_samples()]
        losses = [loss_and_gradients(gkd_config(), samples)[0] for samples in (weighted, scored_samples())]
        assert torch.equal(*losses) and "actor/position_weight" not in loss_and_gradients(gkd_config(), weighted)[1]


class TestChecks:
    @pytest.mark.parametrize(
        "name", ["negative_weights", "infinite_weights", "one_weight", "weights_that_raise", "forward_kl"]
    )
    def test_invalid_weights_are_refused_with_the_key(self, name: str) -> None:
        with raises(CustomLossError, keys=(KEY,)):
            load_position_weights(f"{PATH}:{name}")

    @pytest.mark.parametrize("spec", ["weights.py", f"{PATH}:", f"{PATH}:missing", "/nowhere/weights.py:late"])
    def test_invalid_spec_is_refused_with_the_configuration(self, spec: str) -> None:
        with raises(ConfigError, keys=(KEY,)):
            gkd_config(f"{KEY}={spec}")

    def test_invalid_weight_in_training_names_samples(self) -> None:
        [reference] = [sample for sample in scored_samples() if sample.is_reference]
        with raises(CustomLossError, output="weights", uids=(reference.prompt.uid,)):
            loss_and_gradients(gkd_config(f"{KEY}={PATH}:infinite_weights_of_references"))

    def test_relative_path_becomes_absolute(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(Path(PATH).parent)
        gkd = gkd_config(f"{KEY}={Path(PATH).name}:share_of_response")
        assert gkd.position_weights == f"{PATH}:share_of_response"
        assert "actor/position_weight" in sum_names(gkd, ["default"])

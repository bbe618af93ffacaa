"""Custom losses from a user's file: checks of their outputs, and equality with built-in losses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from torch import Tensor

from recipe_gkd.actor.objective.loss_metrics import sum_names
from recipe_gkd.actor.objective.objective import Objective
from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import ConfigError, CustomLossError
from recipe_gkd.losses import LossInputs, LossOutputs
from recipe_gkd.losses.custom import GRADIENT, example_inputs, load_custom_loss
from recipe_gkd.losses.distributions import bucketed_distributions
from recipe_gkd.losses.divergences import forward_kl, reverse_kl
from recipe_gkd.losses.student_output import Logits
from tests._support import custom_losses
from tests._support.custom_loss_runs import (
    COLUMNS,
    HIDDEN,
    LAYOUTS,
    PATH,
    gkd_config,
    loss_and_gradients,
    make_batch,
    scored_samples,
    teacher_logits,
)
from tests._support.errors import raises
from tests._support.repository import REPO
from tests._support.tiny_models import VOCAB


class TestEqualsBuiltIn:
    """A custom loss that computes forward KL gives the loss and the gradients of the built-in forward KL."""

    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("temperature", ["1", "2"])
    def test_single_process(self, layout: list[str], temperature: str) -> None:
        overrides = [*layout, f"gkd.distill_temperature={temperature}"]
        loss_T, found, grads = loss_and_gradients(gkd_config(*overrides, custom="forward_kl"))
        expected_T, expected, expected_grads = loss_and_gradients(gkd_config(*overrides))
        torch.testing.assert_close(loss_T, expected_T, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(grads, expected_grads, rtol=1e-12, atol=1e-12)
        assert found.pop("actor/custom_kl") == pytest.approx(expected["actor/kl_loss"], rel=1e-12)
        assert found == pytest.approx(expected, rel=1e-12)


class TestGradient:
    @pytest.mark.parametrize("layout", LAYOUTS)
    @pytest.mark.parametrize("temperature", ["1", "2"])
    def test_all_statistics_equal_dense_autograd(self, layout: list[str], temperature: str) -> None:
        gkd = gkd_config(*layout, f"gkd.distill_temperature={temperature}", custom="all_statistics")
        loss_T, _, (grad_TD, _) = loss_and_gradients(gkd)
        samples = scored_samples(gkd.distill_temperature)
        batch = make_batch(samples)
        generator = torch.Generator().manual_seed(0)
        hidden_TD = torch.randn(len(loss_T), HIDDEN, generator=generator, dtype=torch.float64).requires_grad_()
        weight_VD = torch.randn(COLUMNS, HIDDEN, generator=generator, dtype=torch.float64)
        logits_TV = (hidden_TD @ weight_VD.T)[:, :VOCAB]
        inputs = dense_inputs(logits_TV, samples, gkd.distill_temperature)
        expected_T = custom_losses.all_statistics(inputs).loss_T * batch.weights["distill"]
        torch.testing.assert_close(loss_T, expected_T.detach(), rtol=1e-10, atol=1e-10)
        expected_TD = torch.autograd.grad(expected_T.sum(), hidden_TD)[0]
        torch.testing.assert_close(grad_TD, expected_TD, rtol=1e-9, atol=1e-10)


def dense_inputs(logits_TV: Tensor, samples: list[Sample], temperature: float) -> LossInputs:
    """Return the inputs of a custom loss, computed on whole distributions."""
    batch = make_batch(samples)
    sampled_T1 = torch.cat([torch.as_tensor(sample.response.ids) for sample in samples]).long()[:, None]
    teacher_TV = (torch.cat([teacher_logits(sample) for sample in samples]) / temperature).log_softmax(1)
    scored_T, whole_TV = batch.has_teacher_T, (logits_TV / temperature).log_softmax(1)
    ids_TK = batch.ids_TK.clamp(min=0)
    in_support_TV = torch.zeros_like(whole_TV, dtype=torch.bool).scatter(1, ids_TK, True) & scored_T[:, None]
    tail_T = whole_TV.masked_fill(in_support_TV, -torch.inf).logsumexp(1)
    student_TB = torch.cat([whole_TV.gather(1, ids_TK).where(scored_T[:, None], 0), tail_T[:, None]], 1)
    teacher_TK = batch.logps_TK.double()
    teacher_tail_T = (1 - teacher_TK.exp().sum(1)).log()
    teacher_TB = torch.cat([teacher_TK.where(scored_T[:, None], 0), teacher_tail_T[:, None]], 1)
    valid_TB = torch.cat([scored_T[:, None].expand_as(ids_TK), torch.ones(len(ids_TK), 1, dtype=torch.bool)], 1)
    log_q_TV = logits_TV.log_softmax(1)
    has_reward_T = ~batch.rewards_T.isnan()
    return LossInputs(
        student_logps_TB=student_TB,
        student_sampled_logps_T=log_q_TV.gather(1, sampled_T1)[:, 0],
        student_entropy_T=-(log_q_TV.exp() * log_q_TV).sum(1),
        teacher_logps_TB=teacher_TB,
        teacher_probs_TB=teacher_TB.exp() * valid_TB,
        teacher_ids_TK=batch.ids_TK,
        valid_TB=valid_TB,
        teacher_sampled_logps_T=teacher_TV.gather(1, sampled_T1)[:, 0].float().where(scored_T, 0),
        sampling_logps_T=batch.sampling_logps_T,
        advantages_T=batch.advantages_T,
        rewards_T=batch.rewards_T.where(has_reward_T, 0),
        has_reward_T=has_reward_T,
        has_teacher_T=scored_T,
        is_reference_T=batch.is_reference_T,
        positions_T=batch.positions_T,
        sequence_T=batch.sequence_T,
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_objective_passes_kernel_backend_to_kernels(layout: list[str]) -> None:
    with raises(ConfigError, keys=("gkd.kernel_backend",)):
        loss_and_gradients(gkd_config(*layout, "gkd.kernel_backend=triton"))


class TestInputs:
    def test_flags_positions_and_sequences_follow_the_samples(self, monkeypatch: pytest.MonkeyPatch) -> None:
        seen: list[LossInputs] = []

        def record(inputs: LossInputs) -> LossOutputs:
            seen.append(inputs)
            return custom_losses.forward_kl(inputs)

        loss = load_custom_loss(PATH, "forward_kl")
        monkeypatch.setattr(
            "recipe_gkd.actor.objective.distillation.load_custom_loss", lambda *_: replace(loss, function=record)
        )
        loss_and_gradients(gkd_config(custom="forward_kl"))
        [inputs] = seen
        samples = [sample for sample in scored_samples() if len(sample.response.ids)]
        lengths = [len(sample.response.ids) for sample in samples]
        assert inputs.sequence_T.tolist() == np.repeat(np.arange(len(samples)), lengths).tolist()
        assert inputs.positions_T.tolist() == [n for length in lengths for n in range(length)]
        for tensor, per_sample in (
            (inputs.has_teacher_T, [bool((sample.teacher.ids_TK >= 0).any()) for sample in samples]),
            (inputs.is_reference_T, [sample.is_reference for sample in samples]),
            (inputs.has_reward_T, [sample.reward is not None for sample in samples]),
            (inputs.rewards_T, [sample.reward or 0.0 for sample in samples]),
        ):
            assert tensor.tolist() == np.repeat(per_sample, lengths).tolist()
        for each in fields(inputs):
            assert getattr(inputs, each.name).isfinite().all(), each.name

    def test_empty_micro_batch_has_no_loss_and_zero_gradient(self) -> None:
        gkd = gkd_config(custom="forward_kl")
        batch = make_batch([])
        logits_TW = torch.zeros(0, COLUMNS).requires_grad_()
        student = Logits(logits_TW=logits_TW.clone(), tp_group=None, chunk_tokens=None)
        losses = Objective(gkd=gkd, vocab_size=VOCAB, tp_group=None)(student, batch)
        losses.loss_T.sum().backward()
        assert losses.sums["actor/custom_kl"].item() == 0 and logits_TW.grad is not None


class TestChecks:
    @pytest.mark.parametrize(
        ("function", "output", "cause"),
        [
            (custom_losses.no_outputs, "", None),
            (custom_losses.scalar_loss, "loss_T", None),
            (custom_losses.integer_loss, "loss_T", None),
            (custom_losses.float_loss, "loss_T", None),
            (custom_losses.detached_loss, GRADIENT, None),
            (custom_losses.new_leaf_loss, GRADIENT, None),
            (custom_losses.constant_loss, GRADIENT, None),
            (custom_losses.nan_gradient, GRADIENT, None),
            (custom_losses.failing_backward, GRADIENT, KeyError),
            (custom_losses.other_device, "loss_T", None),
            (custom_losses.metric_on_other_device, "metrics['kl']", None),
            (custom_losses.nan_loss, "loss_T", None),
            (custom_losses.list_metrics, "metrics", None),
            (custom_losses.float_metric, "metrics['mean_kl']", None),
            (custom_losses.scalar_metric, "metrics['mean_kl']", None),
            (custom_losses.infinite_metric, "metrics['inverse']", None),
            (custom_losses.unnamed_metric, "metrics['my kl']", None),
            (custom_losses.raises, "", KeyError),
        ],
    )
    def test_invalid_output_is_refused_by_name(
        self, function: Callable[..., LossOutputs], output: str, cause: type[Exception] | None
    ) -> None:
        with raises(CustomLossError, keys=("gkd.custom_loss",), output=output) as caught:
            load_custom_loss(PATH, function.__name__)
        assert type(caught.value.__cause__) is (cause or type(None))

    def test_invalid_output_in_training_names_samples(self) -> None:
        [reference] = [sample for sample in scored_samples() if sample.is_reference]
        with raises(CustomLossError, output="loss_T", uids=(reference.prompt.uid,)):
            loss_and_gradients(gkd_config(custom="nan_of_references"))

    def test_name_of_other_object_is_refused(self) -> None:
        with raises(CustomLossError, keys=("gkd.custom_loss",), output=""):
            load_custom_loss(PATH, "NOT_A_FUNCTION")

    def test_metric_name_in_use_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="names are in use: actor/grad_norm"):
            sum_names(gkd_config(custom="reserved_metric"), ["default"])

    def test_metrics_that_differ_between_calls_are_refused(self) -> None:
        loss, inputs = load_custom_loss(PATH, "metrics_of_long_batches_only"), example_inputs()
        short = replace(inputs, **{each.name: getattr(inputs, each.name)[:3] for each in fields(inputs)})
        with raises(CustomLossError, output="metrics"):
            loss(short)

    def test_values_at_tokens_without_teacher_are_ignored(self) -> None:
        loss, inputs = load_custom_loss(PATH, "forward_kl"), example_inputs()
        has_teacher_T = inputs.positions_T != 2

        def nan_without_teacher(inputs: LossInputs) -> LossOutputs:
            outputs = custom_losses.nan_loss(inputs)
            return replace(outputs, metrics={"custom_kl": outputs.loss_T})

        outputs = replace(loss, function=nan_without_teacher)(replace(inputs, has_teacher_T=has_teacher_T))
        assert ((outputs.loss_T == 0) == ~has_teacher_T).all() and outputs.metrics["custom_kl"].isfinite().all()


def test_docs_example_returns_documented_loss() -> None:
    loss = load_custom_loss(str(REPO / "docs" / "examples" / "custom_loss.py"), "entropy_gated_kl")
    inputs = example_inputs(dtype=torch.float64)
    outputs = loss(inputs)
    buckets = bucketed_distributions(
        inputs.student_logps_TB, inputs.teacher_logps_TB[:, :-1], inputs.valid_TB[:, :-1], "bucket"
    )
    is_uncertain_T = -(inputs.teacher_probs_TB * inputs.teacher_logps_TB).sum(1) > 1.0
    assert is_uncertain_T.any() and not is_uncertain_T.all()
    expected_T = torch.where(is_uncertain_T, forward_kl(buckets), reverse_kl(buckets)) - 0.01 * inputs.student_entropy_T
    torch.testing.assert_close(outputs.loss_T, expected_T)
    assert loss.metric_names == ("forward_kl", "uncertain_fraction")
    outputs.loss_T.sum().backward()
    assert inputs.student_entropy_T.grad is not None

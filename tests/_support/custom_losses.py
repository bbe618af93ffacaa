"""User files of ``gkd.custom_loss`` for tests: correct functions, and functions with one mistake each."""

from __future__ import annotations

import torch

from recipe_gkd.losses import LossInputs, LossOutputs


def forward_kl(inputs: LossInputs) -> LossOutputs:
    terms_TB = inputs.teacher_probs_TB * (inputs.teacher_logps_TB - inputs.student_logps_TB)
    return LossOutputs(loss_T=terms_TB.sum(1), metrics={"custom_kl": terms_TB.sum(1)})


def all_statistics(inputs: LossInputs) -> LossOutputs:
    """Return a loss that depends on every student statistic and on every constant."""
    ratio_T = (inputs.student_sampled_logps_T - inputs.sampling_logps_T).clamp(-2, 2).exp()
    loss_T = forward_kl(inputs).loss_T * (1 + inputs.positions_T) / (2 + inputs.sequence_T)
    loss_T = loss_T - 0.3 * inputs.student_entropy_T - ratio_T * (inputs.advantages_T + inputs.rewards_T)
    loss_T = loss_T + 0.1 * (inputs.teacher_sampled_logps_T - inputs.student_sampled_logps_T).square()
    return LossOutputs(loss_T=loss_T, metrics={"ratio": ratio_T, "reference_fraction": inputs.is_reference_T})


def response_weighted_kl(inputs: LossInputs) -> LossOutputs:
    """Return a loss whose gradient at a token depends on all tokens of its response."""
    kl_T = forward_kl(inputs).loss_T
    n_responses = int(inputs.sequence_T.max()) + 1
    total_R = torch.zeros(n_responses, dtype=kl_T.dtype, device=kl_T.device).index_add(0, inputs.sequence_T, kl_T)
    loss_T = kl_T * total_R[inputs.sequence_T].tanh() + 0.1 * inputs.student_entropy_T.cumsum(0) / 100
    return LossOutputs(loss_T=loss_T, metrics={"response_kl": total_R[inputs.sequence_T]})


def share_of_response(inputs: LossInputs) -> torch.Tensor:
    """Return weights that rise from the first token of a response to 1 at its last one."""
    n_responses = int(inputs.sequence_T.max()) + 1
    lengths_R = torch.bincount(inputs.sequence_T, minlength=n_responses)
    return (1 + inputs.positions_T) / lengths_R[inputs.sequence_T]


def weighted_forward_kl(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss_T=forward_kl(inputs).loss_T * share_of_response(inputs))


def negative_weights(inputs: LossInputs) -> torch.Tensor:
    return share_of_response(inputs) - 0.5


def infinite_weights(inputs: LossInputs) -> torch.Tensor:
    return 1 / inputs.positions_T


def one_weight(inputs: LossInputs) -> torch.Tensor:
    return torch.ones(())


def weights_that_raise(inputs: LossInputs) -> torch.Tensor:
    raise KeyError(inputs.n_tokens)


def infinite_weights_of_references(inputs: LossInputs) -> torch.Tensor:
    return torch.where(inputs.is_reference_T, torch.inf, 1.0)


def no_outputs(inputs: LossInputs) -> torch.Tensor:
    return forward_kl(inputs).loss_T


def scalar_loss(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss_T=forward_kl(inputs).loss_T.mean())


def integer_loss(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss_T=inputs.positions_T)


def float_loss(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss_T=1.0)  # type: ignore[arg-type]


def detached_loss(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss_T=forward_kl(inputs).loss_T.detach())


def new_leaf_loss(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss_T=forward_kl(inputs).loss_T.detach().requires_grad_())


def constant_loss(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss_T=torch.tensor(forward_kl(inputs).loss_T.tolist(), requires_grad=True))


def nan_gradient(inputs: LossInputs) -> LossOutputs:
    """Return a finite loss with NaN gradients, 0 times the infinite derivative of sqrt at masked buckets."""
    differences_TB = inputs.teacher_probs_TB - inputs.student_logps_TB.exp()
    return LossOutputs(loss_T=(differences_TB * (differences_TB > 0)).sqrt().sum(1))


def failing_backward(inputs: LossInputs) -> LossOutputs:
    def fail(_: torch.Tensor) -> None:
        raise KeyError("gradient")

    loss_T = forward_kl(inputs).loss_T
    loss_T.register_hook(fail)
    return LossOutputs(loss_T=loss_T)


def other_device(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss_T=torch.empty_like(inputs.student_sampled_logps_T, device="meta"))


def metric_on_other_device(inputs: LossInputs) -> LossOutputs:
    loss_T = forward_kl(inputs).loss_T
    return LossOutputs(loss_T=loss_T, metrics={"kl": loss_T.detach().to("meta")})


def nan_of_references(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss_T=forward_kl(inputs).loss_T.where(~inputs.is_reference_T, torch.nan))


def nan_loss(inputs: LossInputs) -> LossOutputs:
    loss_T = forward_kl(inputs).loss_T
    return LossOutputs(loss_T=torch.where(inputs.positions_T == 2, torch.nan, loss_T))


def list_metrics(inputs: LossInputs) -> LossOutputs:
    return LossOutputs(loss_T=forward_kl(inputs).loss_T, metrics=["ratio"])  # type: ignore[arg-type]


def float_metric(inputs: LossInputs) -> LossOutputs:
    loss_T = forward_kl(inputs).loss_T
    return LossOutputs(loss_T=loss_T, metrics={"mean_kl": loss_T.mean().item()})  # type: ignore[dict-item]


def scalar_metric(inputs: LossInputs) -> LossOutputs:
    loss_T = forward_kl(inputs).loss_T
    return LossOutputs(loss_T=loss_T, metrics={"mean_kl": loss_T.mean()})


def infinite_metric(inputs: LossInputs) -> LossOutputs:
    loss_T = forward_kl(inputs).loss_T
    return LossOutputs(loss_T=loss_T, metrics={"inverse": 1 / inputs.positions_T})


def unnamed_metric(inputs: LossInputs) -> LossOutputs:
    loss_T = forward_kl(inputs).loss_T
    return LossOutputs(loss_T=loss_T, metrics={"my kl": loss_T})


def reserved_metric(inputs: LossInputs) -> LossOutputs:
    loss_T = forward_kl(inputs).loss_T
    return LossOutputs(loss_T=loss_T, metrics={"grad_norm": loss_T})


def raises(inputs: LossInputs) -> LossOutputs:
    raise KeyError("student_logits")


def metrics_of_long_batches_only(inputs: LossInputs) -> LossOutputs:
    loss_T = forward_kl(inputs).loss_T
    return LossOutputs(loss_T=loss_T, metrics={"kl": loss_T} if inputs.n_tokens > 4 else {})


NOT_A_FUNCTION = 3

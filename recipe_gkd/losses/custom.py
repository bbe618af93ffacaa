"""A distillation loss from a user's file: ``gkd.custom_loss.path`` and ``gkd.custom_loss.name``.

The function has the form ``def my_loss(inputs: LossInputs) -> LossOutputs``. It replaces the loss of
``gkd.distill_loss_type``, with the weight ``gkd.distill_loss_coef``.

Shape suffixes: T response tokens of a micro-batch, K teacher top-k, B = K + 1 buckets (tail last).
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from recipe_gkd.errors import CustomLossError
from recipe_gkd.runtime.user_code import load_attribute

KEY = "gkd.custom_loss"
GRADIENT = "gradient of loss_T"
METRIC_NAME = re.compile(r"[A-Za-z0-9_./-]+")
EXAMPLE_LENGTHS = (5, 3)
EXAMPLE_TOP_K = 4
MAX_UIDS_IN_MESSAGE = 8
# Fields of `LossInputs` that carry the gradient.
STUDENT_INPUTS = ("student_logps_TB", "student_sampled_logps_T", "student_entropy_T")


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Inputs of a custom loss: the response tokens of one micro-batch, one response after the other.

    All tensors are identical on every tensor-parallel and context-parallel rank. Values are finite at every token.
    Tensors named ``student_*`` carry the gradient; all others are constants. An invalid bucket has teacher probability
    0 and both log-probabilities 0, so a sum over buckets needs no mask if its terms have such a factor.

    Attributes:
        student_logps_TB: Student's log-probability of each bucket at ``gkd.distill_temperature``: the teacher's ids,
            and last all other ids together. With gradient.
        student_sampled_logps_T: Student's log-probability of the response token at temperature 1. With gradient.
        student_entropy_T: Entropy of the student's whole distribution at temperature 1, in nats. With gradient.
        teacher_logps_TB: Teacher's log-probability of each bucket at ``gkd.distill_temperature``.
        teacher_probs_TB: Teacher's probability of each bucket.
        teacher_ids_TK: Token ids of the support (the teacher's top-k by default), int64; -1 for an unused entry.
        valid_TB: True for the buckets that exist, bool.
        teacher_sampled_logps_T: Teacher's log-probability of the response token at ``gkd.distill_temperature``; 0
            without ``has_teacher_T``. Leave such tokens out of means and standard deviations of your own.
        sampling_logps_T: Log-probability of the response token at temperature 1 under the weights that sampled it; 0
            for reference responses.
        advantages_T: GRPO advantage of the response; 0 with ``gkd.use_rl_loss=false``.
        rewards_T: Reward of the response; 0 if it has none.
        has_reward_T: True if the response has a reward, bool.
        has_teacher_T: True for the tokens that a teacher scored, bool. Only these tokens are in the loss.
        is_reference_T: True if the response is a reference response of the data set, bool.
        positions_T: Position in the response, int64, from 0.
        sequence_T: Index of the response in the micro-batch, int64, ascending from 0.
    """

    student_logps_TB: Tensor
    student_sampled_logps_T: Tensor
    student_entropy_T: Tensor
    teacher_logps_TB: Tensor
    teacher_probs_TB: Tensor
    teacher_ids_TK: Tensor
    valid_TB: Tensor
    teacher_sampled_logps_T: Tensor
    sampling_logps_T: Tensor
    advantages_T: Tensor
    rewards_T: Tensor
    has_reward_T: Tensor
    has_teacher_T: Tensor
    is_reference_T: Tensor
    positions_T: Tensor
    sequence_T: Tensor

    @property
    def n_tokens(self) -> int:
        """Number of response tokens T."""
        return len(self.positions_T)


@dataclass(frozen=True, kw_only=True)
class LossOutputs:
    """Result of a custom loss.

    Attributes:
        loss_T: Loss of each token, [T], with gradient. Values at tokens without a teacher are ignored.
        metrics: Value of each token, [T], by name. The mean over the tokens that a teacher scored is reported as
            ``actor/<name>``. The names must be the same in every call.
    """

    loss_T: Tensor
    metrics: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class CustomLoss:
    """A user's loss function whose outputs are checked at each call.

    Attributes:
        function: The user's function.
        label: Name and file of the function, for error messages.
        metric_names: Names of the metrics that it returns, sorted.
    """

    function: Callable[[LossInputs], Any]
    label: str
    metric_names: tuple[str, ...]

    def __call__(self, inputs: LossInputs, *, uids_T: Tensor | None = None) -> LossOutputs:
        """Return the checked outputs. Loss and metrics are 0 at tokens without a teacher.

        Args:
            uids_T: Uid of each token's sample, int64, for error messages; None if the tokens belong to no samples.

        Raises:
            CustomLossError: The function failed, or an output is invalid.
        """
        outputs = _checked_call(self.function, self.label, inputs, uids_T)
        if (names := tuple(sorted(outputs.metrics))) != self.metric_names:
            raise CustomLossError(
                f"{self.label} returned the metrics {list(names)}, expected {list(self.metric_names)} as in its first "
                "call",
                remedy="return the same metrics in every call",
                keys=(KEY,),
                output="metrics",
            )
        valid_T = inputs.has_teacher_T
        metrics = {name: value_T.detach().double().where(valid_T, 0) for name, value_T in outputs.metrics.items()}
        return LossOutputs(loss_T=outputs.loss_T.where(valid_T, 0), metrics=metrics)


@functools.cache
def load_custom_loss(path: str, name: str) -> CustomLoss:
    """Import a user's loss function and call it once on random example inputs.

    The call and its backward pass find mistakes before any worker starts. The call also returns the names of the
    metrics. The result is cached.

    Args:
        path: ``gkd.custom_loss.path``, a Python file.
        name: ``gkd.custom_loss.name``, a function in it.

    Raises:
        ConfigError: The file or the function does not exist.
        CustomLossError: Its outputs or their gradients are invalid.
    """
    function, label = load_attribute(path, name, key=KEY), f"{KEY}: {name} of {path}"
    if not callable(function):
        what = f"{label} is of type {_describe(function)}, expected a function of LossInputs"
        raise CustomLossError(what, keys=(KEY,))
    inputs = example_inputs()
    with torch.enable_grad():
        outputs = _checked_call(function, label, inputs)
    _check_gradients(outputs.loss_T, label, inputs)
    return CustomLoss(function=function, label=label, metric_names=tuple(sorted(outputs.metrics)))


def _checked_call(
    function: Callable[[LossInputs], Any], label: str, inputs: LossInputs, uids_T: Tensor | None = None
) -> LossOutputs:
    try:
        outputs = function(inputs)
    except (Exception, SystemExit) as error:  # a user's function can raise any exception
        raise CustomLossError(f"{label} raised {type(error).__name__}: {error}", keys=(KEY,)) from error
    if not isinstance(outputs, LossOutputs):
        what = f"{label} returned {_describe(outputs)}, expected recipe_gkd.losses.LossOutputs"
        raise CustomLossError(what, keys=(KEY,))
    check_token_values(outputs.loss_T, "loss_T", label, inputs, uids_T)
    if not outputs.loss_T.is_floating_point():
        what = f"{label} returned loss_T of dtype {outputs.loss_T.dtype}, expected a floating-point dtype"
        raise CustomLossError(what, keys=(KEY,), output="loss_T")
    if torch.is_grad_enabled() and inputs.student_logps_TB.requires_grad and not outputs.loss_T.requires_grad:
        raise _no_gradient_error(label)
    if not isinstance(outputs.metrics, Mapping):
        what = f"{label} returned metrics of type {_describe(outputs.metrics)}, expected a dict of tensors"
        raise CustomLossError(what, keys=(KEY,), output="metrics")
    for name, value_T in outputs.metrics.items():
        if not (isinstance(name, str) and METRIC_NAME.fullmatch(name)):
            what = f"{label} returned a metric named {name!r}, expected letters, digits and _ . / - only"
            raise CustomLossError(what, keys=(KEY,), output=f"metrics[{name!r}]")
        check_token_values(value_T, f"metrics[{name!r}]", label, inputs, uids_T)
    return outputs


def _check_gradients(loss_T: Tensor, label: str, inputs: LossInputs) -> None:
    """Check that the loss depends on the student's statistics, with finite gradients."""
    try:
        gradients = torch.autograd.grad(
            loss_T.sum(), [getattr(inputs, name) for name in STUDENT_INPUTS], allow_unused=True
        )
    except Exception as error:  # a backward function of the user can raise any exception
        what = f"{label} returned loss_T whose backward pass raised {type(error).__name__}: {error}"
        raise CustomLossError(what, keys=(KEY,), output=GRADIENT) from error
    found = {name: gradient for name, gradient in zip(STUDENT_INPUTS, gradients, strict=True) if gradient is not None}
    if not found:
        raise _no_gradient_error(label)
    if invalid := [f"inputs.{name}" for name, gradient in found.items() if not gradient.isfinite().all()]:
        raise CustomLossError(
            f"{label} returned a finite loss_T whose gradient is not finite, with respect to {', '.join(invalid)}",
            remedy="avoid functions with an infinite derivative, such as sqrt at 0",
            keys=(KEY,),
            output=GRADIENT,
        )


def _no_gradient_error(label: str) -> CustomLossError:
    return CustomLossError(
        f"{label} returned loss_T without a gradient: it does not depend on the student",
        remedy="compute it from inputs.student_*, without detach(), item() or torch.no_grad()",
        keys=(KEY,),
        output=GRADIENT,
    )


def check_token_values(
    value_T: Any, output: str, label: str, inputs: LossInputs, uids_T: Tensor | None, *, key: str = KEY
) -> None:
    """Check a user's result that has one value for each response token.

    Args:
        value_T: Result of the user's function.
        output: Name of the result, for the error.
        label: Name and file of the function, for the error.
        inputs: Inputs of the function.
        uids_T: Uid of each token's sample; None if the tokens belong to no samples.
        key: Config key of the function.

    Raises:
        CustomLossError: It is no tensor [T] of real numbers on the device of the inputs, or is not finite at a token
            that a teacher scored.
    """
    if not isinstance(value_T, Tensor):
        what = f"{label} returned {output} of type {_describe(value_T)}, expected a tensor [T]"
        raise CustomLossError(what, keys=(key,), output=output)
    if value_T.device != (device := inputs.positions_T.device):
        raise CustomLossError(
            f"{label} returned {output} on device {value_T.device}, expected {device}",
            remedy="create tensors on the device of the inputs",
            keys=(key,),
            output=output,
        )
    if value_T.shape != (inputs.n_tokens,):
        raise CustomLossError(
            f"{label} returned {output} of shape {tuple(value_T.shape)}, expected [T] = ({inputs.n_tokens},): one "
            "value for each response token",
            keys=(key,),
            output=output,
        )
    if value_T.is_complex():
        what = f"{label} returned {output} of dtype {value_T.dtype}, expected real numbers"
        raise CustomLossError(what, keys=(key,), output=output)
    invalid_T = ~value_T.detach().isfinite() & inputs.has_teacher_T
    if invalid_T.any():
        token = int(invalid_T.nonzero()[0])
        uids = () if uids_T is None else tuple(uids_T[invalid_T].unique().tolist())
        samples = f" of the samples with uid {_list_uids(uids)}" if uids else ""
        raise CustomLossError(
            f"{label} returned {output} with {value_T[token].item()} at token {token} of {inputs.n_tokens} (position "
            f"{int(inputs.positions_T[token])} of response {int(inputs.sequence_T[token])} in the micro-batch), "
            f"expected finite numbers; {int(invalid_T.sum())} tokens{samples} are affected",
            keys=(key,),
            output=output,
            uids=uids,
        )


def _list_uids(uids: tuple[int, ...]) -> str:
    return ", ".join(map(str, uids[:MAX_UIDS_IN_MESSAGE])) + (", ..." if len(uids) > MAX_UIDS_IN_MESSAGE else "")


def _describe(value: Any) -> str:
    return f"{type(value).__module__}.{type(value).__name__}".removeprefix("builtins.")


def example_inputs(*, dtype: torch.dtype = torch.float32, seed: int = 0) -> LossInputs:
    """Return random inputs of two responses, for a test of a custom loss.

    Args:
        dtype: Dtype of the floating-point tensors.
        seed: Seed of the random numbers.
    """
    generator = torch.Generator().manual_seed(seed)
    n_tokens = sum(EXAMPLE_LENGTHS)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    teacher_logps_TB = normal(n_tokens, EXAMPLE_TOP_K + 1).log_softmax(1)
    positions_T = torch.cat([torch.arange(length) for length in EXAMPLE_LENGTHS])
    return LossInputs(
        student_logps_TB=normal(n_tokens, EXAMPLE_TOP_K + 1).log_softmax(1).requires_grad_(),
        student_sampled_logps_T=(-normal(n_tokens).abs()).requires_grad_(),
        student_entropy_T=normal(n_tokens).abs().requires_grad_(),
        teacher_logps_TB=teacher_logps_TB,
        teacher_probs_TB=teacher_logps_TB.exp(),
        teacher_ids_TK=torch.arange(EXAMPLE_TOP_K).repeat(n_tokens, 1),
        valid_TB=torch.ones(n_tokens, EXAMPLE_TOP_K + 1, dtype=torch.bool),
        teacher_sampled_logps_T=-normal(n_tokens).abs(),
        sampling_logps_T=-normal(n_tokens).abs(),
        advantages_T=normal(n_tokens),
        rewards_T=normal(n_tokens),
        has_reward_T=torch.ones(n_tokens, dtype=torch.bool),
        has_teacher_T=torch.ones(n_tokens, dtype=torch.bool),
        is_reference_T=torch.zeros(n_tokens, dtype=torch.bool),
        positions_T=positions_T,
        sequence_T=(positions_T == 0).cumsum(0) - 1,
    )

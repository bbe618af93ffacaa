"""Registry of the distillation losses. ``gkd.distill_loss_type`` selects one by name.

A new loss is one decorated function: a divergence in :mod:`~recipe_gkd.losses.divergences`, or a loss on the sampled
token in :mod:`~recipe_gkd.losses.sampled_token`. The configuration, the tests and the documentation check read their
names from here.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from recipe_gkd.errors import ConfigError

KEY = "gkd.distill_loss_type"
Function = TypeVar("Function", bound=Callable[..., Any])

N_DIVERGENCE_INPUTS = 1  # distributions
N_SAMPLED_TOKEN_INPUTS = 2  # log-probabilities under the student and the teacher

SAMPLED_TOKEN_PARAMETERS = ("baseline_T", "scale_T")
"""Statistics of the sample that a loss on the sampled token can have as parameters."""


@dataclass(frozen=True, kw_only=True)
class RegisteredLoss:
    """A distillation loss and the names of its parameters.

    Attributes:
        name: Value of ``gkd.distill_loss_type``.
        function: Function that returns the loss of each position, [T].
        parameters: Names of the function's parameters after its inputs, such as ``beta``.
        required: Names of the parameters without a default.
    """

    name: str
    function: Callable[..., Any]
    parameters: tuple[str, ...]
    required: tuple[str, ...] = ()

    def __call__(self, *inputs: Any, values: Mapping[str, Any]) -> Any:
        """Return the loss of each position.

        Args:
            values: Values by parameter name. Names that the function does not have are ignored. Parameters without a
                value keep their default.

        Returns:
            Loss of each position, [T].

        Raises:
            ConfigError: A parameter has neither a value nor a default.
        """
        if missing := [name for name in self.required if name not in values]:
            raise ConfigError(
                f"the distillation loss {self.name!r} has parameters without a value: {', '.join(missing)}",
                remedy="give them a default, or names of keys in the section gkd",
                keys=(KEY,),
            )
        return self.function(*inputs, **{name: values[name] for name in self.parameters if name in values})


_divergences: dict[str, RegisteredLoss] = {}
_sampled_token_losses: dict[str, RegisteredLoss] = {}


def register_divergence(name: str) -> Callable[[Function], Function]:
    """Register a divergence of the teacher from the student.

    The decorated function takes :class:`~recipe_gkd.losses.distributions.BucketedDistributions` and keyword-only
    parameters. A parameter gets the value of the key of its name in the section ``gkd``, or keeps its default. The
    function returns [T].

    Args:
        name: Value of ``gkd.distill_loss_type``.

    Raises:
        ConfigError: The name is registered already.
    """
    return _register(_divergences, name, N_DIVERGENCE_INPUTS)


def register_sampled_token_loss(name: str) -> Callable[[Function], Function]:
    """Register a loss on the log-probabilities of the sampled token under the student and the teacher.

    The decorated function takes ``logp_T`` and ``teacher_logp_T``, and may take ``baseline_T`` and ``scale_T``. A
    parameter of another name must have a default, and keeps it. The function returns [T].

    Args:
        name: Value of ``gkd.distill_loss_type``.

    Raises:
        ConfigError: The name is registered already, or a parameter has neither a value nor a default.
    """
    return _register(_sampled_token_losses, name, N_SAMPLED_TOKEN_INPUTS, SAMPLED_TOKEN_PARAMETERS)


def _register(
    losses: dict[str, RegisteredLoss], name: str, n_inputs: int, supplied: tuple[str, ...] | None = None
) -> Callable[[Function], Function]:
    def decorate(function: Function) -> Function:
        if name in loss_names():
            what = f"a distillation loss named {name!r} is registered already"
            raise ConfigError(what, remedy="choose another name", keys=(KEY,))
        declared = list(inspect.signature(function).parameters.values())[n_inputs:]
        named = [each for each in declared if each.kind not in (each.VAR_POSITIONAL, each.VAR_KEYWORD)]
        required = tuple(each.name for each in named if each.default is each.empty)
        if supplied is not None and (unknown := [each for each in required if each not in supplied]):
            raise ConfigError(
                f"the distillation loss {name!r} has the parameter {unknown[0]} without a default, expected one of "
                f"{', '.join(supplied)}",
                remedy="rename it, or give it a default",
                keys=(KEY,),
            )
        parameters = tuple(each.name for each in named)
        losses[name] = RegisteredLoss(name=name, function=function, parameters=parameters, required=required)
        return function

    return decorate


def get_divergence(name: str) -> RegisteredLoss:
    """Return the divergence with this name.

    Raises:
        ConfigError: No divergence has this name.
    """
    return _get(_divergences, name, "divergence")


def get_sampled_token_loss(name: str) -> RegisteredLoss:
    """Return the loss on the sampled token with this name.

    Raises:
        ConfigError: No loss on the sampled token has this name.
    """
    return _get(_sampled_token_losses, name, "loss on the sampled token")


def _get(losses: dict[str, RegisteredLoss], name: str, kind: str) -> RegisteredLoss:
    if name not in losses:
        raise ConfigError(f"got {kind} {name!r}, expected one of {', '.join(losses)}", keys=(KEY,))
    return losses[name]


def divergence_names() -> tuple[str, ...]:
    """Return the names of the divergences, in the order of registration."""
    return tuple(_divergences)


def sampled_token_loss_names() -> tuple[str, ...]:
    """Return the names of the losses on the sampled token, in the order of registration."""
    return tuple(_sampled_token_losses)


def loss_names() -> tuple[str, ...]:
    """Return all values of ``gkd.distill_loss_type``."""
    return divergence_names() + sampled_token_loss_names()

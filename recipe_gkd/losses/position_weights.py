"""Weights of response tokens in the distillation loss, from a user's file: ``gkd.position_weights=FILE.py:function``.

The function has the form ``def my_weights(inputs: LossInputs) -> Tensor`` and returns a weight of at least 0 for each
response token, [T]. The loss of a token is multiplied by its weight, which has no gradient. The mean over the tokens
stays a division by their number, so weights with the mean 1 keep the size of the loss.

Shape suffixes: T response tokens of a micro-batch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from recipe_gkd.errors import CustomLossError
from recipe_gkd.losses.custom import LossInputs, check_token_values, example_inputs
from recipe_gkd.runtime.user_code import load_attribute, split_spec

KEY = "gkd.position_weights"
OUTPUT = "weights"


@dataclass(frozen=True, kw_only=True)
class PositionWeights:
    """A user's function of weights, whose result is checked at each call.

    Attributes:
        function: The user's function.
        label: Name and file of the function, for error messages.
    """

    function: Callable[[LossInputs], Any]
    label: str

    def __call__(self, inputs: LossInputs, *, uids_T: Tensor | None = None) -> Tensor:
        """Return the checked weights, [T]. They are 0 at tokens without a teacher.

        Args:
            uids_T: Uid of each token's sample, int64, for error messages; None if the tokens belong to no samples.

        Raises:
            CustomLossError: The function failed, or a weight is invalid.
        """
        try:
            with torch.no_grad():
                weights_T = self.function(inputs)
        except (Exception, SystemExit) as error:  # a user's function can raise any exception
            raise CustomLossError(f"{self.label} raised {type(error).__name__}: {error}", keys=(KEY,)) from error
        check_token_values(weights_T, OUTPUT, self.label, inputs, uids_T, key=KEY)
        weights_T = weights_T.detach().to(inputs.student_sampled_logps_T.dtype).where(inputs.has_teacher_T, 0)
        if bool((weights_T < 0).any()):
            raise CustomLossError(
                f"{self.label} returned the weight {weights_T.min().item():.4g}, expected at least 0: with a "
                "negative weight the student would move away from the teacher",
                keys=(KEY,),
                output=OUTPUT,
            )
        return weights_T


@functools.cache
def load_position_weights(spec: str) -> PositionWeights:
    """Import a user's function and call it once on random example inputs. The result is cached.

    Args:
        spec: ``gkd.position_weights``, ``FILE.py:function``.

    Raises:
        ConfigError: The file or the function does not exist.
        CustomLossError: Its result is invalid.
    """
    path, name = split_spec(spec, key=KEY, example="weights.py:my_weights")
    function, label = load_attribute(path, name, key=KEY), f"{KEY}: {name} of {path}"
    if not callable(function):
        raise CustomLossError(
            f"{label} is of type {type(function).__name__}, expected a function of LossInputs", keys=(KEY,)
        )
    weights = PositionWeights(function=function, label=label)
    weights(example_inputs())
    return weights

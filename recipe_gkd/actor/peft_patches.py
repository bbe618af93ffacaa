"""Changes of peft. Each has its reason and the code of peft that needs it."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_CONVERSION = "peft.utils.transformers_weight_conversion.convert_peft_config_for_transformers"


@contextmanager
def unconverted_targets() -> Iterator[None]:
    """Keep the target layers of an adapter as they are given.

    For mixtures of experts, ``BaseTuner.inject_adapter`` (``peft/tuners/tuners_utils.py``) takes names that end in
    ``gate_proj``, ``up_proj`` or ``down_proj`` for the experts of transformers 4. It would adapt the joined experts
    instead of the dense and shared feed-forward layers with these names.
    """
    with mock.patch(_CONVERSION, lambda *args, **options: None):
        yield


def empty_model(folder: str) -> PreTrainedModel:
    """Return the model of a folder without data."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    with torch.device("meta"):
        model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    return model


def is_converted(config: Any, model: PreTrainedModel) -> bool:
    """Return True if peft would replace the target layers, so that ``from_pretrained`` cannot load the adapter."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    converted = copy.deepcopy(config)
    convert_peft_config_for_transformers(converted, model=model, conversions=None)
    return set(converted.target_modules) != set(config.target_modules)

"""Reference training of adapters with transformers and peft, in float64."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from recipe_gkd.actor.lora import initial_factor
from recipe_gkd.actor.peft_patches import unconverted_targets
from recipe_gkd.commands.gpu_smoke.reference import LR, train_reference
from tests._support.tiny_models import ACTOR, make_config, make_samples

RANK, ALPHA = 4, 12
ADAPTERS = [f"{ACTOR}.lora.rank={RANK}", f"{ACTOR}.lora.alpha={ALPHA}"]
BATCHES = [make_samples(9, seed=seed) for seed in range(5)]


@cache
def peft_training(
    folder: Path, targets: tuple[str, ...] | None, n_batches: int = len(BATCHES), lr: float = LR
) -> tuple[list[dict[str, float]], dict[str, Tensor]]:
    """Return metrics and merged weights of a plain training with peft on the first of :data:`BATCHES`.

    Args:
        folder: Model folder.
        targets: Last parts of the names of the layers with adapters; None for all linear layers.
        n_batches: Number of updates.
        lr: Learning rate.

    Returns:
        Metrics of each update, and the weights of ``merge_and_unload`` under the names of a saved folder.
    """
    # The grouped experts do not support float64, and only "eager" attention has all options.
    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    linear = [name for name, part in base.named_modules() if isinstance(part, torch.nn.Linear) and name != "lm_head"]
    names = linear if targets is None else list(targets)
    options = peft.LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=names, task_type="CAUSAL_LM")
    with unconverted_targets():
        model = peft.get_peft_model(base, options)
    set_initial_factors(model, make_config(folder).data.seed)
    metrics = train_reference(model.double(), BATCHES[:n_batches], lr=lr)
    return metrics, saved_weights(model.merge_and_unload())


def set_initial_factors(model: Any, seed: int) -> None:
    """Set the factors A of a model of peft to those of the actor."""
    for name, factor in model.named_parameters():
        if name.endswith(".lora_A.default.weight"):
            layer = name.removeprefix("base_model.model.").removesuffix(".lora_A.default.weight")
            factor.data.copy_(initial_factor(layer, *factor.shape, seed))


def saved_weights(model: Any) -> dict[str, Tensor]:
    """Return the weights of a model of transformers under the names of a saved folder."""
    with tempfile.TemporaryDirectory() as path:  # saving converts the experts of a mixture and their names
        model.save_pretrained(path)
        return stored_weights(Path(path))


def stored_weights(folder: Path) -> dict[str, Tensor]:
    """Return all weights of a folder."""
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def targets_of(names: Sequence[str] | None) -> tuple[str, ...] | None:
    """Return the argument of :func:`peft_training` for a value of ``lora.target_modules``."""
    return None if names is None else tuple(names)

"""Compute what a run needs from its configuration: memory, micro-batches, and bytes that are sent. Nothing is started.

python -m recipe_gkd plan --config-name on_policy_distill_trainer key=value ... [--device-memory-gb 80] [--json]

Of the model only config.json is read, and no data. The memory is estimated for the fullest rank: weights, gradients and
optimizer state, activations and logits of a full micro-batch, and the KV cache. If something does not fit, the smallest
change of the configuration that makes it fit is printed with its figures.

On a machine without a GPU the figures of a run with GPUs are printed without a comparison, except with
--device-memory-gb.

With --timing the time of each stage of a step is predicted from the data sheet of the GPU and from assumptions, which
are printed: --timing --device-name "NVIDIA H100 80GB HBM3" --teacher-model DIR [--teacher-gpus 2]

Exit status: 0 if everything fits or nothing was compared, 1 if something does not fit, and after an error.
"""

from recipe_gkd.commands.plan.command import main

__all__ = ["main"]

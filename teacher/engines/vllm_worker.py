"""What the service adds to vLLM's worker class: it runs in the process of each tensor-parallel rank.

The temperature divides what the model's `compute_logits` returns: both of vLLM's model runners take prompt logprobs
from there, by a log_softmax in fp32, and the model has applied its own soft cap and scale. (The `scale` of the model's
`logits_processor` would divide in the model's dtype, and so round bf16 logits once more; nor has every model one.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class TemperatureCalls:
    """Methods for `worker_extension_cls`, called by `LLMEngine.collective_rpc`; vLLM makes it a base of its worker."""

    model_runner: Any

    def set_logits_temperature(self, temperature: float) -> None:
        """All logits from now on are fp32 and divided by `temperature`; 1 gives the model its own back."""
        model = self.model_runner.model
        of_model = getattr(model.compute_logits, "of_model", model.compute_logits)
        model.compute_logits = of_model if temperature == 1.0 else _divided(of_model, temperature)


def _divided(compute_logits: Callable[..., Any], temperature: float) -> Callable[..., Any]:
    def divided(*args: Any, **kwargs: Any) -> Any:
        logits = compute_logits(*args, **kwargs)
        # In place, as vLLM's sampler does it: nobody else has these logits. None: another rank has them.
        return None if logits is None else logits.float().div_(temperature)

    divided.of_model = compute_logits  # type: ignore[attr-defined]
    return divided

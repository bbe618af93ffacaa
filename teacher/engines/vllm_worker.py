"""What the service adds to vLLM's worker class: it runs in the process of each tensor-parallel rank.

Temperature and padding are applied to what the model's `compute_logits` returns: both of vLLM's model runners take
prompt logprobs from there, by a log_softmax in fp32. By then the model has applied its own soft cap and scale, gathered
the ranks' parts, and cut off what vLLM itself adds to the output layer. (The `scale` of the model's `logits_processor`
would divide in the model's dtype, and so round bf16 logits once more; nor has every model one.)
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class LogitsCalls:
    """Methods for `worker_extension_cls`, called by `LLMEngine.collective_rpc`; vLLM makes it a base of its worker."""

    model_runner: Any

    def set_logits(self, temperature: float, n_tokens: int | None) -> None:
        """From now on all logits are divided by `temperature`, in fp32, and those from `n_tokens` on are -inf.

        A temperature of 1 and no `n_tokens` give the model its own logits back, and cost nothing.
        """
        model = self.model_runner.model
        of_model = getattr(model.compute_logits, "of_model", model.compute_logits)
        own = temperature == 1.0 and n_tokens is None
        model.compute_logits = of_model if own else _changed(of_model, temperature, n_tokens)


def _changed(compute_logits: Callable[..., Any], temperature: float, n_tokens: int | None) -> Callable[..., Any]:
    def changed(*args: Any, **kwargs: Any) -> Any:
        logits = compute_logits(*args, **kwargs)
        if logits is None:  # another rank has them
            return None
        # In place, as vLLM's sampler does it: nobody else has these logits.
        if temperature != 1.0:
            logits = logits.float().div_(temperature)
        if n_tokens is not None:
            logits[..., n_tokens:] = float("-inf")
        return logits

    changed.of_model = compute_logits  # type: ignore[attr-defined]
    return changed

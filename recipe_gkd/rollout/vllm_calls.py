"""What is added to vLLM's worker class, in the process of each tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from recipe_gkd.rollout.vllm_weights import WeightUpdateCalls


class PaddingCalls:
    """An output layer is often larger than the tokenizer; what its other rows say is chance."""

    model_runner: Any

    def gkd_exclude_padding(self, n_tokens: int) -> None:
        """Ids from ``n_tokens`` on have probability 0 from now on: they are not sampled, and logprobs know no more.

        At the model's `compute_logits`, from which both of vLLM's model runners sample: it belongs to the model, not to
        its weights, so an update leaves it as it is.
        """
        model = self.model_runner.model
        model.compute_logits = _without_padding(model.compute_logits, n_tokens)


def _without_padding(compute_logits: Callable[..., Any], n_tokens: int) -> Callable[..., Any]:
    def without_padding(*args: Any, **kwargs: Any) -> Any:
        logits = compute_logits(*args, **kwargs)
        if logits is not None:  # None: another rank has them
            logits[..., n_tokens:] = float("-inf")
        return logits

    return without_padding


class WorkerCalls(WeightUpdateCalls, PaddingCalls):
    """Both, for ``worker_extension_cls``: vLLM makes it a base of its worker."""

"""Result of a step of a weight update on one tensor-parallel rank."""

from __future__ import annotations

from dataclasses import dataclass

from recipe_gkd.errors import GkdError, ResourceError
from recipe_gkd.weight_sync.stats import ReceivedUpdate


@dataclass(frozen=True, kw_only=True)
class UpdateOutcome:
    """Result of a method of :class:`~recipe_gkd.rollout.vllm.calls.WeightUpdateCalls`.

    Attributes:
        error: The exception, without its cause; None if there was none.
        is_unusable: True after a CUDA error of this process or an error of a reload.
        has_mixed_weights: True if the model may have weights of two versions.
        shortage: Result of the check of the memory; None if an update fits.
        received: Measurements of a received update.
    """

    error: GkdError | None = None
    is_unusable: bool = False
    has_mixed_weights: bool = False
    shortage: ResourceError | None = None
    received: ReceivedUpdate | None = None

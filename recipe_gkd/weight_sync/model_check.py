"""Verification of the model that generates: its log-probabilities against the actor's for the same tokens.

A sync verifies the bytes that were received. An engine that loads them can still compute another model: it can keep a
packed copy of an old weight, skip a layer, or read other RoPE settings than the actor. Its responses then look normal,
and the student is trained on tokens of a model that does not exist anywhere else.

Measures, each a mean absolute difference of log-probabilities at temperature 1, in nats:

================================== ====================================================================================
``actor/rollout_log_prob_diff``    tokens of a batch that the actor's present weights sampled
``weights/sync_log_prob_diff``     tokens that each engine samples after a sync (:mod:`recipe_gkd.hybrid.sync_probe`)
``weights/wake_log_prob_diff``     a fixed request after an engine woke (:mod:`recipe_gkd.hybrid.verification`)
================================== ====================================================================================
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping

from recipe_gkd.errors import ModelMismatch

log = logging.getLogger(__name__)

UPDATE_METRIC, SYNC_METRIC = "actor/rollout_log_prob_diff", "weights/sync_log_prob_diff"
BOUND_FLOAT32_ON_CPU = 0.004
"""Largest difference in nats. Measured: at most 2e-5 (SmolLM2-135M). An engine that rounds float32 weights to bfloat16
gave 0.01 and more."""
BOUND_FLOAT32_ON_GPU = 0.05
"""Not measured. Transformer Engine multiplies float32 matrices in TF32, which has three more bits than bfloat16."""
BOUND_16_BIT = 0.25
"""Bound of other data types. Measured on a CPU: 0.05 with SmolLM2-135M; wrong weights give more than 0.5."""


def default_bound(dtypes: Collection[str], *, on_cpu: bool) -> float:
    """Return the bound for the data types of actor and engines, in nats."""
    if {*dtypes} != {"float32"}:
        return BOUND_16_BIT
    return BOUND_FLOAT32_ON_CPU if on_cpu else BOUND_FLOAT32_ON_GPU


class MismatchGuard:
    """Warning at once, and an error after several steps, if the engines compute another model than the actor.

    Args:
        bound: Largest difference in nats. None: nothing is checked.
        patience: Number of consecutive steps above the bound after which the run ends. Steps without a comparison do
            not count: with a staleness bound of 2 or more a weight sync may skip versions.
        dtypes: Data types of actor and engines, for the message.

    Attributes:
        bound: As in the argument.
    """

    def __init__(self, bound: float | None, patience: int, dtypes: Collection[str]) -> None:
        self.bound, self._patience, self._dtypes = bound, patience, sorted(dtypes)
        self._last_wrong_step, self._n_steps = -1, 0

    @property
    def is_enabled(self) -> bool:
        """True if differences are checked."""
        return self.bound is not None

    def observe(self, step: int, differences: Mapping[str, float]) -> None:
        """Compare differences of one step with the bound.

        Args:
            step: Step whose batch the tokens belong to, from 0. Several calls for one step count once.
            differences: Difference in nats by the name of the tokens' source, such as ``rollout worker 0``. Empty if
                there was no comparison.

        Raises:
            ModelMismatch: The bound was exceeded in ``patience`` consecutive steps that were compared.
        """
        # A comparison with NaN is false, so NaN is wrong.
        wrong = {} if self.bound is None else {n: d for n, d in differences.items() if not d <= self.bound}
        if not wrong:
            if differences and step != self._last_wrong_step:
                self._n_steps = 0
            return
        if step != self._last_wrong_step:
            self._n_steps, self._last_wrong_step = self._n_steps + 1, step
        mismatch = self._mismatch(step, wrong)
        if self._n_steps >= self._patience:
            last = (
                f"This is compared step {self._n_steps} in a row (mismatch_patience={self._patience}). Resume from a "
                "checkpoint before these steps; mismatch_bound=null disables the check"
            )
            raise mismatch.replaced(details=(last,))
        log.warning("%s. The run ends after %d compared steps like this in a row", mismatch, self._patience)

    def _mismatch(self, step: int, wrong: Mapping[str, float]) -> ModelMismatch:
        listed = ", ".join(f"{name} {difference:.3g}" for name, difference in wrong.items())
        return ModelMismatch(
            "the rollout engine computes another model than the actor: the log-probabilities of tokens that it sampled "
            f"with the actor's present weights differ from the actor's by {listed} nats on average; expected at most "
            f"{self.bound:g} for {' and '.join(self._dtypes)} (actor_rollout_ref.rollout.mismatch_bound). The student "
            "is trained on responses of that other model",
            phase=f"step {step + 1}",
            sources=tuple(wrong),
            n_steps=self._n_steps,
            remedy="run python -m recipe_gkd doctor with the same keys; use one dtype for "
            "actor_rollout_ref.rollout.dtype and the actor; compare rope_scaling and tie_word_embeddings in the model "
            "folder's config.json with its weights, and the installed vLLM with the tested release",
        )

    def observe_update(self, step: int, metrics: Mapping[str, float]) -> None:
        """Compare the tokens of an update's batch, if the present weights sampled any of them.

        Args:
            step: Step of the batch, from 0.
            metrics: Metrics of the update.
        """
        if UPDATE_METRIC in metrics:
            self.observe(step, {"the batch": metrics[UPDATE_METRIC]})

"""Utilization of the devices: model FLOPs of the actor's updates, as a fraction of the peak rate."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from recipe_gkd.actor.strategy import read_student_dims
from recipe_gkd.actor.student_dims import StudentDims
from recipe_gkd.config import Config
from recipe_gkd.config.keys import key_name
from recipe_gkd.data.samples import Sample
from recipe_gkd.metrics.device_peaks import peak_tflops
from recipe_gkd.metrics.flops import update_flops

log = logging.getLogger(__name__)

PEAK_KEY = key_name(lambda config: config.trainer.device_peak_tflops)


class ActorUtilization:
    """Model FLOPs utilization (MFU) of the actor's devices.

    Args:
        pool_tflops: Peak rate of all actor devices together, in TFLOP/s.
    """

    def __init__(self, dims: StudentDims, pool_tflops: float) -> None:
        self._dims, self._pool_flops = dims, pool_tflops * 1e12

    @classmethod
    def of(cls, config: Config, device_names: Sequence[str]) -> ActorUtilization | None:
        """Return the computation for a run, or None with a line in the log if a peak rate or the FLOPs are unknown.

        Args:
            config: Configuration of the run. The student's folder exists.
        """
        peak, dtype = config.trainer.device_peak_tflops, config.actor_rollout_ref.actor.dtype
        peaks = {name: peak or peak_tflops(name, dtype) for name in device_names}
        if unknown := sorted(name for name, tflops in peaks.items() if tflops is None):
            log.info(
                "perf/mfu/actor is left out: the peak rate of %s is unknown; set %s to log it",
                ", ".join(unknown),
                PEAK_KEY,
            )
            return None
        if not device_names:
            return None
        if config.actor_rollout_ref.actor.lora.rank:
            log.info("perf/mfu/actor is left out: its FLOPs include weight gradients, which frozen weights do not have")
            return None
        dims = read_student_dims(config.actor_rollout_ref.model.path, config)
        if problem := dims.flops_problem():
            log.info("perf/mfu/actor is left out: %s", problem)
            return None
        return cls(dims, sum(peaks[name] or 0.0 for name in device_names))

    def metrics(self, samples: Iterable[Sample], update_s: float) -> dict[str, float]:
        """Return ``perf/mfu/actor`` of an update.

        Args:
            samples: Global batch.
            update_s: Duration of the update, in seconds.
        """
        trained = [sample for sample in samples if len(sample.response.ids)]  # the actor leaves out the others
        lengths = [sample.n_tokens - 1 for sample in trained]  # the last token is not an input
        flops = update_flops(self._dims, lengths, sum(len(sample.response.ids) for sample in trained))
        return {"perf/mfu/actor": flops / (update_s * self._pool_flops)} if update_s > 0 else {}

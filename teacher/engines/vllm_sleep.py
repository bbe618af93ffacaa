"""Sleep and wake-up of a vLLM engine, with a verification of the model after each wake-up.

vLLM's sleep mode (level 1) copies the weights to pinned host memory, frees weights and KV cache on each device, and
restores them at the same addresses. CUDA contexts, communicators and compiled kernels stay. Level 2 would drop the
weights, which a teacher never receives again. On a CPU vLLM ignores the call: the KV cache is freed here, and the
weights stay in memory.

==========  ===========================================================  ===========
state       event                                                        next state
==========  ===========================================================  ===========
awake       ``sleep``: checksums, release                                asleep
asleep      ``wake``: restore; checksums and probe as before             awake
asleep      ``wake``: a checksum or the probe differs                    (dead)
any         vLLM or the allocation of memory failed                      (dead)
==========  ===========================================================  ===========

The checksums cover parameters and buffers. vLLM keeps other weights elsewhere: on a CPU all linear layers, which it
packs (``layers/utils.py``, ``dispatch_cpu_unquantized_gemm``). Only the probe covers these.

A dead engine raises, so that its worker ends. The verification exists because a model without its weights still
returns valid distributions: the loss of a uniform one is finite, so the run would continue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from teacher.engines.self_check import check_unchanged
from teacher.engines.vllm_memory import TeacherCalls
from teacher.errors import TeacherModelDamaged
from teacher.records import ScoredSequence

logger = logging.getLogger(__name__)

_TOLERANCES = {"torch.float32": 1e-4}
_TOLERANCE_16_BIT = 0.05
"""Largest difference of log-probabilities of the probe. It is scored alone, so the same kernels run as at the start."""
_MAX_NAMES = 3
_RESTART = "restart this worker"


class SleepMode:
    """Sleep mode of an engine.

    Lifecycle::

        mode = SleepMode(engine, score_probe, on_cpu=False)   # scores the probe once
        mode.sleep()                                          # without requests in the engine
        mode.wake()                                           # raises if the model is not the same
    """

    def __init__(self, engine: Any, score_probe: Callable[[], ScoredSequence], *, on_cpu: bool) -> None:
        """Score the probe with the model as loaded.

        Args:
            engine: vLLM's `LLMEngine`, started with its sleep mode (on CUDA).
            score_probe: Function that scores the probe at temperature 1.
            on_cpu: True for the CPU build of vLLM.
        """
        self._engine, self._score_probe, self._on_cpu = engine, score_probe, on_cpu
        self._probe = score_probe()
        self._checksums: list[dict[str, int]] = []

    def sleep(self) -> None:
        """Release the memory of weights (not on a CPU) and KV cache."""
        began = time.monotonic()
        self._checksums = self._engine.collective_rpc(TeacherCalls.checksum_weights.__name__)
        self._engine.sleep(level=1)
        if self._on_cpu:
            self._engine.collective_rpc(TeacherCalls.release_kv_cache.__name__)
        logger.info("asleep after %.1f s", time.monotonic() - began)

    def wake(self) -> None:
        """Restore weights and KV cache, and verify the model.

        Raises:
            TeacherModelDamaged: The model is not the same as before the sleep.
        """
        began = time.monotonic()
        if not self._engine.wake_up():
            raise TeacherModelDamaged("vLLM did not restore all memory", remedy=_RESTART)
        if not self._engine.reset_prefix_cache():
            raise TeacherModelDamaged("vLLM did not empty its prefix cache after the sleep", remedy=_RESTART)
        self._engine.collective_rpc(TeacherCalls.reset_kv_cache.__name__)
        check_checksums(self._checksums, self._engine.collective_rpc(TeacherCalls.checksum_weights.__name__))
        try:
            dtype = str(self._engine.model_config.dtype)
            check_unchanged(self._probe, self._score_probe(), _TOLERANCES.get(dtype, _TOLERANCE_16_BIT))
        except RuntimeError as error:
            raise TeacherModelDamaged(
                f"the teacher is not the same after its wake-up: {error}", remedy=_RESTART
            ) from error
        logger.info("awake and verified after %.1f s", time.monotonic() - began)


def check_checksums(before: Sequence[dict[str, int]], after: Sequence[dict[str, int]]) -> None:
    """Compare the checksums of the weights of all ranks.

    Args:
        before: Checksums by name of each rank, before the sleep.
        after: Checksums after the wake-up.

    Raises:
        TeacherModelDamaged: They differ.
    """
    wrong = [
        f"{name} of rank {rank}"
        for rank, (old, new) in enumerate(zip(before, after, strict=True))
        for name in old | new
        if old.get(name) != new.get(name)
    ]
    if wrong:
        more = f" and {len(wrong) - _MAX_NAMES} more" if len(wrong) > _MAX_NAMES else ""
        raise TeacherModelDamaged(
            "the weights of the teacher are not the same after its wake-up: the checksums differ of "
            f"{', '.join(wrong[:_MAX_NAMES])}{more}, of {sum(map(len, before))} tensors",
            tensors=tuple(wrong),
            remedy=_RESTART,
        )

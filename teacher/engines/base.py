"""Interface between a worker and its engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from teacher.errors import TeacherRequestError
from teacher.records import LogitSettings, ModelInfo, ScoredSequence, TeacherSequence


@dataclass(frozen=True)
class EngineConfig:
    """Model and limits of an engine.

    Attributes:
        ckpt_path: Local folder in Hugging Face format, with its tokenizer.
        n_logprobs: Log-probabilities per position (K), from 1 to the number of token ids.
        model_name: Name of the served model. Empty selects the name of the folder.
        tp_size: Number of tensor-parallel ranks.
        dtype: ``"auto"`` (see :func:`teacher.common.data_types.engine_dtype`), ``"float32"``, ``"bfloat16"`` or
            ``"float16"``.
        head_dtype: Data type of the logits: ``"float32"``, ``"model"`` (the data type of the weights), or ``"auto"``;
            see :func:`teacher.common.head_dtype.wants_float32_head`.
        max_model_len: Longest sequence in tokens. 0 selects the model's maximum.
        logits_mib: Memory for the logits of one engine step and everything computed from them, in MiB. On a CPU it
            determines the number of tokens per step. On CUDA it determines how many rows of logits exist at a time.
        kv_cache_mib: Size of the KV cache, in MiB. 0 selects vLLM's choice on a GPU, and 256 on a CPU.
        max_result_mib: Host memory for the results of all sequences in the engine, in MiB. A sequence whose result
            alone needs more is rejected.
        gpu_memory_utilization: Fraction of the GPU memory for weights and KV cache. Not used on a CPU.
        sleep_mode: Allow `SleepingEngine.sleep`. On CUDA it determines how memory is allocated.
        async_scheduling: ``"on"`` schedules a step while the GPU computes the one before it, ``"off"`` does not, and
            ``"auto"`` leaves it to vLLM. Not used on a CPU.
    """

    ckpt_path: str
    n_logprobs: int
    model_name: str = ""
    tp_size: int = 1
    dtype: str = "auto"
    head_dtype: str = "auto"
    max_model_len: int = 0
    logits_mib: int = 1024
    kv_cache_mib: int = 0
    max_result_mib: int = 2048
    gpu_memory_utilization: float = 0.85
    sleep_mode: bool = False
    async_scheduling: str = "auto"


class ScoringEngine(Protocol):
    """Engine that scores sequences in steps, all with the same settings of the logits.

    Sequences are added under keys and are returned by `step` in any order. The engine queues those that do not fit yet.

    Lifecycle::

        engine.set_logits(LogitSettings(2.0))         # only without work
        engine.check(sequence, LogitSettings(2.0))    # raises if the sequence is invalid
        engine.add(key, sequence)
        while engine.has_work():
            results = engine.step()           # [(key, scored sequence or error), ...]
        engine.close()

    An exception from `step` or `set_logits` means that the engine is dead. An exception from `check` or `add`
    concerns only that sequence. A sequence that is rejected after `add` is returned by `step` with its error.
    """

    @property
    def info(self) -> ModelInfo:
        """Model and limits."""
        ...

    @property
    def capacity_tokens(self) -> int:
        """Tokens that a worker should hold: two steps. More tokens would only wait in the engine."""
        ...

    @property
    def logits(self) -> LogitSettings:
        """Settings of the logits, initially temperature 1 and all ids."""
        ...

    def set_logits(self, settings: LogitSettings) -> None:
        """Set the settings of the sequences added from now on. The engine must have no work.

        Args:
            settings: Settings that `check` accepted.
        """
        ...

    def check(self, sequence: TeacherSequence, settings: LogitSettings) -> None:
        """Validate a sequence.

        Raises:
            TeacherRequestError: This model cannot score the sequence, or not with these settings.
        """
        ...

    def add(self, key: int, sequence: TeacherSequence) -> None:
        """Add a sequence that `check` accepted."""
        ...

    def discard(self, keys: list[int]) -> None:
        """Remove sequences whose requests were canceled or expired."""
        ...

    def has_work(self) -> bool:
        """Return True if a sequence was added and not returned yet."""
        ...

    def step(self) -> list[tuple[int, ScoredSequence | TeacherRequestError]]:
        """Run one step, and return the keys and results of the sequences that it completed."""
        ...

    def close(self) -> None:
        """Free the model."""
        ...


@runtime_checkable
class SleepingEngine(Protocol):
    """Engine that can release the memory of its devices and restore it. An exception means that the engine is dead.

    Lifecycle::

        engine.sleep()       # without work
        engine.wake()        # the model is verified
    """

    @property
    def has_sleep_mode(self) -> bool:
        """True if this engine was started with its sleep mode."""
        ...

    def sleep(self) -> None:
        """Release the memory of the devices. The engine must have no work."""
        ...

    def wake(self) -> None:
        """Restore the model and verify it.

        Raises:
            TeacherError: The model is not the same as before the sleep.
        """
        ...

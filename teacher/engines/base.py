"""What a worker needs from an engine."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from teacher.errors import TeacherRequestError
from teacher.records import ModelInfo, ScoredSequence, TeacherSequence


@dataclass(frozen=True)
class EngineConfig:
    """How to load a teacher.

    Attributes:
        ckpt_path: local folder in Hugging Face format, with its tokenizer.
        n_logprobs: K, 1 to the number of the tokenizer's ids.
        model_name: name of the served model; the folder's name if empty.
        tp_size: tensor-parallel ranks of one worker.
        dtype: "auto" (the checkpoint's), "float32", "bfloat16" or "float16".
        max_model_len: longest sequence to score; 0 for the longest that the model knows.
        logits_mib: memory for one engine step's logits and all that is computed from them, which decides how many
            tokens a step takes.
        kv_cache_mib: size of the KV cache; 0 for vLLM's choice on a GPU, and 256 on a CPU.
        max_answer_mib: host memory for the answers of all sequences that the engine is at; a sequence whose own answer
            needs more is refused.
        gpu_memory_utilization: share of a GPU's memory for weights and KV cache; not used on a CPU.
    """

    ckpt_path: str
    n_logprobs: int
    model_name: str = ""
    tp_size: int = 1
    dtype: str = "auto"
    max_model_len: int = 0
    logits_mib: int = 1024
    kv_cache_mib: int = 0
    max_answer_mib: int = 2048
    gpu_memory_utilization: float = 0.85


class ScoringEngine(Protocol):
    """Sequences go in under keys and come out, in any order, as steps complete them, all at one temperature.

    Any number may go in: the engine keeps those waiting for which it has no room yet.

    An exception out of `step` or `set_temperature` means that the engine is dead; one out of `check` or `add` concerns
    that sequence only. A sequence that is refused later, when there is room for it, comes out of `step` with the error.
    """

    @property
    def info(self) -> ModelInfo: ...

    @property
    def capacity_tokens(self) -> int:
        """Tokens of two steps: while one is computed, the next one's are here; more would only wait."""
        ...

    @property
    def temperature(self) -> float:
        """What logits are divided by, 1 at first."""
        ...

    def set_temperature(self, temperature: float) -> None:
        """For the sequences added from now on. Only while there is no work, and only what `check` let through."""
        ...

    def check(self, sequence: TeacherSequence, temperature: float) -> None:
        """Raise TeacherRequestError if this model cannot score the sequence, or not at this temperature."""
        ...

    def add(self, key: int, sequence: TeacherSequence) -> None: ...

    def discard(self, keys: list[int]) -> None:
        """Forget sequences that nobody waits for."""
        ...

    def has_work(self) -> bool: ...

    def step(self) -> list[tuple[int, ScoredSequence | TeacherRequestError]]: ...

    def close(self) -> None: ...

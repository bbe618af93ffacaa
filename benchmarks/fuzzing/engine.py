"""Engine without a model, and a stop signal, for workers in threads of this process."""

from __future__ import annotations

import socket

from fuzzing import seeds
from teacher.errors import TeacherRequestError
from teacher.records import LogitSettings, ModelInfo, ScoredSequence, TeacherSequence


class EndSignal:
    """Descriptor that becomes readable on ``set``."""

    def __init__(self) -> None:
        self._receiver, self._sender = socket.socketpair()

    def set(self) -> None:
        """Make the descriptor readable."""
        self._sender.send(b"\0")

    def fileno(self) -> int:
        """Return the descriptor."""
        return self._receiver.fileno()

    def close(self) -> None:
        """Close the descriptor."""
        self._receiver.close()
        self._sender.close()


class PreparedEngine:
    """Engine that returns prepared arrays for every sequence, and can sleep.

    It refuses what the real engine refuses: sequences that are too long, and ids outside of the tokenizer.
    """

    has_sleep_mode = True

    def __init__(self) -> None:
        self.info: ModelInfo = seeds.MODEL
        self.capacity_tokens = 1000
        self.logits = LogitSettings()
        self._waiting: dict[int, TeacherSequence] = {}

    def set_logits(self, settings: LogitSettings) -> None:
        """Store the settings."""
        self.logits = settings

    def check(self, sequence: TeacherSequence, settings: LogitSettings) -> None:
        """Refuse a sequence that does not fit the model."""
        ids, n_ids = sequence.token_ids, settings.n_ids or self.info.n_tokens
        if len(ids) > self.info.max_model_len or settings.n_ids > self.info.n_tokens:
            raise TeacherRequestError(f"{len(ids)} tokens or {settings.n_ids} ids are too many")
        if ids.min() < 0 or ids.max() >= n_ids:
            raise TeacherRequestError(f"token ids must be 0 to {n_ids - 1}")

    def add(self, key: int, sequence: TeacherSequence) -> None:
        """Queue a sequence."""
        self._waiting[key] = sequence

    def discard(self, keys: list[int]) -> None:
        """Remove sequences."""
        for key in keys:
            self._waiting.pop(key, None)

    def has_work(self) -> bool:
        """Return True if a sequence waits."""
        return bool(self._waiting)

    def step(self) -> list[tuple[int, ScoredSequence | TeacherRequestError]]:
        """Return the scores of all sequences."""
        waiting, self._waiting = self._waiting, {}
        return [(key, seeds.scores([sequence])[0]) for key, sequence in waiting.items()]

    def sleep(self) -> None:
        """Do nothing."""

    def wake(self) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

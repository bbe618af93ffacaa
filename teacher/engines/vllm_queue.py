"""Sequences of a vLLM engine: queued before it, admitted to it, and removed from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from teacher.engines.admission import Admission, Demand
from teacher.engines.sizes import ResultMemory
from teacher.engines.vllm_internals import read_kv_cache
from teacher.errors import TeacherRequestError
from teacher.records import TeacherSequence

logger = logging.getLogger(__name__)


class SequenceQueue:
    """Open sequences of one `LLMEngine`. `Admission` decides when vLLM gets each of them."""

    def __init__(self, engine: Any, make_params: Callable[[TeacherSequence], Any], memory: ResultMemory) -> None:
        """Create an empty queue.

        Args:
            engine: vLLM's `LLMEngine`.
            make_params: Sequence -> vLLM's `SamplingParams` of its request.
            memory: Memory for the results of all admitted sequences.
        """
        self._engine, self._make_params, self._memory = engine, make_params, memory
        self._kv_cache = read_kv_cache(engine)
        self._admission = Admission(Demand(self._kv_cache.n_blocks, memory.max_bytes))
        self._open: dict[int, TeacherSequence] = {}

    def __len__(self) -> int:
        return len(self._open)

    def add(self, key: int, sequence: TeacherSequence) -> None:
        """Append a sequence to the queue."""
        self._open[key] = sequence
        demand = Demand(self._kv_cache.blocks_for(len(sequence.token_ids)), self._memory.bytes_of(sequence))
        self._admission.queue(key, sequence, demand)

    def admit(self) -> list[tuple[int, TeacherRequestError]]:
        """Pass vLLM the sequences that fit. Return the rejected sequences, each with its own error."""
        rejected = []
        while (admitted := self._admission.admit()) is not None:
            key, sequence = admitted
            try:
                params = self._make_params(sequence)
                self._engine.add_request(str(key), {"prompt_token_ids": sequence.token_ids.tolist()}, params)
            except Exception as error:  # of any type: vLLM validates a request before it takes it
                logger.exception("vLLM rejected a sequence of %d tokens", len(sequence.token_ids))
                self.discard([key])
                message = f"the engine rejected the request: {type(error).__name__}: {error}"
                rejected.append((key, TeacherRequestError(message)))
        return rejected

    def complete(self, key: int) -> TeacherSequence | None:
        """Remove and return an admitted sequence that vLLM has finished. Return None if it was discarded."""
        sequence = self._open.pop(key, None)
        if sequence is not None:
            self._admission.release(key)
        return sequence

    def discard(self, keys: list[int]) -> None:
        """Remove sequences, and abort admitted ones."""
        self._engine.abort_request([str(key) for key in self._admission.discard(keys)])
        for key in keys:
            self._open.pop(key, None)

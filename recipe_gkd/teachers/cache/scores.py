"""`ScoreCache`: scores of responses that a teacher has scored before, and requests of the others.

Scores are kept by everything that determines them: the teacher, the settings of the requests, the tokens, and the ids
of the support. Another teacher has other folders, so nothing needs to be cleared. Weights that changed under the same
name are found by the probe, which is scored at the start and compared with that of the folder.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from recipe_gkd.config.keys import key_name
from recipe_gkd.teachers.cache.files import SUFFIX, ScoreFiles, replace_file
from teacher.common.probe import MAX_PROBE_DIFFERENCE, probe_difference, probe_sequence
from teacher.errors import TeacherChanged, TeacherError, TeacherSetupError
from teacher.records import ScoredSequence, TeacherInfo, TeacherSequence

CACHE_DIR = key_name(lambda config: config.actor_rollout_ref.teacher.cache_dir)
ABOUT = "about.json"
PROBE = "probe.npy"

SendRequest = Callable[[Sequence[TeacherSequence]], Awaitable[list[ScoredSequence]]]
"""Function that scores sequences and checks the results."""


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """Cache of a run, with the settings that determine its teacher's scores. It can be sent to another process.

    Attributes:
        info: Description of the teacher.
        folder: ``teacher.cache_dir``.
        max_bytes: Maximum size of the folder.
        top_k: Log-probabilities per position, None for all that the teacher returns.
        wire_dtype: Type of the top-k's log-probabilities.
        temperature: Divisor of the teacher's logits.
        n_ids: Number of ids that have a probability, 0 for all.
    """

    info: TeacherInfo
    folder: Path
    max_bytes: int
    top_k: int | None
    wire_dtype: str
    temperature: float
    n_ids: int

    def about(self) -> dict[str, object]:
        """Return everything that determines the scores of a sequence."""
        info = self.info
        return {
            "model_name": info.model_name,
            "engine": info.engine,
            "vocab_size": info.vocab_size,
            "n_tokens": info.n_tokens,
            "tokenizer_fingerprint": info.tokenizer_fingerprint,
            "top_k": self.top_k or info.n_logprobs,
            "wire_dtype": self.wire_dtype,
            "temperature": self.temperature,
            "n_ids": self.n_ids,
        }


class ScoreCache:
    """Scores of one teacher with the settings of a run.

    Lifecycle::

        cache = ScoreCache(settings)
        scored, is_cached = await cache.scores(sequences, send_request)    # concurrently

    Attributes:
        folder: Folder of these scores, a part of ``cache_dir``.
    """

    def __init__(self, settings: CacheSettings) -> None:
        """Use the folder of a teacher, which is created when the teacher is verified."""
        self._about = json.dumps(settings.about(), indent=1)
        self.folder = settings.folder / hashlib.blake2b(self._about.encode(), digest_size=8).hexdigest()
        self._files = ScoreFiles(settings.folder, settings.max_bytes)
        self._info, self._n_ids = settings.info, settings.n_ids
        self._verification, self._is_verified = asyncio.Lock(), False

    @cached_property
    def probe(self) -> TeacherSequence:
        """Sequence whose scores are compared with those of the folder."""
        return probe_sequence(self._n_ids or self._info.n_tokens, self._info.max_model_len)

    def verify(self, probe: ScoredSequence) -> None:
        """Compare the teacher with the one whose scores the folder has. A new folder gets its description and probe.

        Args:
            probe: Scores of :attr:`probe` by the running teacher.

        Raises:
            TeacherChanged: The folder has scores of other weights.
            TeacherSetupError: The folder cannot be written.
        """
        found_T = np.asarray(probe.sampled_logps_T, np.float32)
        try:
            kept_T = self._kept_probe(found_T)
        except (OSError, ValueError, EOFError) as error:
            raise TeacherSetupError(
                f"{CACHE_DIR}: {self.folder} cannot be used: {type(error).__name__}: {error}",
                path=self.folder,
                options=(CACHE_DIR,),
                remedy="correct its permissions, delete it, or choose another folder",
            ) from error
        difference = probe_difference(kept_T, found_T) if kept_T.shape == found_T.shape else math.inf
        if not difference <= MAX_PROBE_DIFFERENCE:
            raise TeacherChanged(
                f"{self.folder} has scores of other weights of {self._info.model_name}: their fingerprint is "
                f"{_fingerprint(kept_T)}, the running teacher's {_fingerprint(found_T)}; log-probabilities of a "
                f"fixed sequence differ by up to {difference:.3g}, expected at most {MAX_PROBE_DIFFERENCE:g}",
                options=(CACHE_DIR,),
                remedy="delete this folder, or choose another one, if the teacher was changed on purpose",
            )

    def _kept_probe(self, found_T: np.ndarray) -> np.ndarray:
        """Return the probe of the folder, which is ``found_T`` in a new folder."""
        path = self.folder / PROBE
        if not path.exists():
            buffer = io.BytesIO()
            np.save(buffer, found_T)
            replace_file(self.folder / ABOUT, memoryview(self._about.encode()))
            replace_file(path, buffer.getbuffer())
        return np.asarray(np.load(path), np.float32)

    async def scores(
        self, sequences: Sequence[TeacherSequence], send_request: SendRequest
    ) -> tuple[list[ScoredSequence], list[bool]]:
        """Return the scores of sequences in their order, and which of them were in the cache.

        Args:
            send_request: Function that scores the sequences that are not in the cache.

        Raises:
            TeacherError: The request failed. ``sequence`` is the index in ``sequences``.
            TeacherChanged: The folder has scores of other weights.
        """
        await self._verify(send_request)
        paths = [self._path(sequence) for sequence in sequences]
        found = await asyncio.to_thread(lambda: [self._files.read(path) for path in paths])
        missing = [i for i, scored in enumerate(found) if scored is None]
        if missing:
            try:
                requested = await send_request([sequences[i] for i in missing])
            except TeacherError as error:
                if error.sequence is None or error.sequence >= len(missing):
                    raise
                raise error.replaced(sequence=missing[error.sequence]) from error
            await asyncio.to_thread(self._write, [paths[i] for i in missing], requested)
            for i, scored in zip(missing, requested, strict=True):
                found[i] = scored
        return [scored for scored in found if scored is not None], [i not in set(missing) for i in range(len(found))]

    async def _verify(self, send_request: SendRequest) -> None:
        async with self._verification:
            if not self._is_verified:
                try:
                    [probe] = await send_request([self.probe])
                except TeacherError as error:
                    raise error.replaced(sequence=None) from error
                await asyncio.to_thread(self.verify, probe)
                self._is_verified = True

    def _write(self, paths: Sequence[Path], scored: Sequence[ScoredSequence]) -> None:
        for path, scores in zip(paths, scored, strict=True):
            self._files.write(path, scores)

    def _path(self, sequence: TeacherSequence) -> Path:
        ids_TJ = sequence.support_ids_TJ
        digest = hashlib.blake2b(digest_size=16)
        digest.update(np.asarray([sequence.prompt_len, sequence.n_support, sequence.with_top_k], np.int64).tobytes())
        digest.update(np.ascontiguousarray(sequence.token_ids, np.int32).tobytes())
        if ids_TJ is not None:
            digest.update(np.ascontiguousarray(ids_TJ, np.int32).tobytes())
        name = digest.hexdigest()
        return self.folder / name[:2] / f"{name[2:]}{SUFFIX}"


def _fingerprint(logps_T: np.ndarray) -> str:
    """Return a short text that depends on the weights of a teacher."""
    return hashlib.sha256(np.round(logps_T.astype(np.float64), 2).tobytes()).hexdigest()[:12]

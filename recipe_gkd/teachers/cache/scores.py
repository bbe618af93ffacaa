"""`ScoreCache`: scores of responses that a teacher has scored before, and requests of the others.

Scores are kept by everything that determines them: the teacher, the settings of the requests, the tokens, and the ids
of the support. The weights are recognized by the probe, which the driver lets each teacher score at the start: scores
are used if their folder has the same probe. Another teacher has other folders, so nothing needs to be cleared.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from recipe_gkd.config.keys import key_name
from recipe_gkd.teachers.cache.files import SUFFIX, ScoreFiles, replace_file
from teacher import WireDtype
from teacher.common.probe import probe_difference
from teacher.errors import TeacherError, TeacherSetupError
from teacher.records import ScoredSequence, TeacherInfo, TeacherSequence

CACHE_DIR = key_name(lambda config: config.actor_rollout_ref.teacher.cache_dir)
ABOUT, PROBE = "about.json", "probe.npy"
SAME_WEIGHTS = 1e-3
"""Largest difference of the probe's log-probabilities, in nats, with which the scores of a folder are used."""

SendRequest = Callable[[Sequence[TeacherSequence]], Awaitable[list[ScoredSequence]]]
"""Function that scores sequences and checks the results."""


@dataclass(frozen=True, kw_only=True)
class CacheSettings:
    """Cache of a run, with everything that determines its teacher's scores. It can be sent to another process.

    Attributes:
        info: Description of the teacher.
        probe_T: Its scores of the probe, float32 [T].
        folder: ``teacher.cache_dir``.
        max_bytes: Maximum size of the folder.
        top_k: Log-probabilities per position, None for all that the teacher returns.
        wire_dtype: Type of the top-k's log-probabilities.
        temperature: Divisor of the teacher's logits.
        n_ids: Number of ids that have a probability, 0 for all.
    """

    info: TeacherInfo
    probe_T: np.ndarray
    folder: Path
    max_bytes: int
    top_k: int | None
    wire_dtype: WireDtype
    temperature: float
    n_ids: int

    def about(self) -> str:
        """Return everything that determines the scores of a sequence but the weights, as JSON."""
        info = self.info
        values = {
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
        return json.dumps(values, indent=1)


class ScoreCache:
    """Scores of one teacher with the settings of a run.

    Lifecycle::

        cache = ScoreCache(settings)
        cache.open()                                                       # optional: report an unusable folder early
        scored, is_cached = await cache.scores(sequences, send_request)    # concurrently
    """

    def __init__(self, settings: CacheSettings) -> None:
        """Create a cache without touching its folder."""
        self._settings = settings
        self._files = ScoreFiles(settings.folder, settings.max_bytes)

    def open(self) -> Path:
        """Return the folder of these scores, and create a new one.

        Raises:
            TeacherSetupError: The folder cannot be used.
        """
        return self._folder

    @cached_property
    def _folder(self) -> Path:
        root, about = self._settings.folder, self._settings.about()
        probe_T, prefix = self._settings.probe_T, _digest(about.encode(), 8)
        try:
            root.mkdir(parents=True, exist_ok=True)
            for folder in sorted(root.glob(f"{prefix}-*")):
                if _has_probe(folder, probe_T):
                    return folder
            folder = root / f"{prefix}-{_digest(probe_T.tobytes(), 4)}"
            replace_file(folder / ABOUT, memoryview(f"{about}\n".encode()))
            content = io.BytesIO()
            np.save(content, probe_T)
            replace_file(folder / PROBE, content.getbuffer())
        except OSError as error:
            raise TeacherSetupError(
                f"{CACHE_DIR}={root} cannot be used: {type(error).__name__}: {error}",
                path=root,
                options=(CACHE_DIR,),
                remedy="correct its permissions, or choose another folder",
            ) from error
        return folder

    async def scores(
        self, sequences: Sequence[TeacherSequence], send_request: SendRequest
    ) -> tuple[list[ScoredSequence], list[bool]]:
        """Return the scores of sequences in their order, and which of them were in the cache.

        Args:
            send_request: Function that scores the sequences that are not in the cache.

        Raises:
            TeacherError: The request failed. ``sequence`` is the index in ``sequences``.
            TeacherSetupError: The folder cannot be used.
        """
        paths, found = await asyncio.to_thread(self._read, sequences)
        is_cached = [scored is not None for scored in found]
        missing = [i for i, known in enumerate(is_cached) if not known]
        if missing:
            try:
                requested = await send_request([sequences[i] for i in missing])
            except TeacherError as error:
                if error.sequence is None or error.sequence >= len(missing):
                    raise
                raise error.replaced(sequence=missing[error.sequence]) from error
            kept = await asyncio.to_thread(self._write, [paths[i] for i in missing], requested)
            for i, scored in zip(missing, kept, strict=True):
                found[i] = scored
        return [scored for scored in found if scored is not None], is_cached

    def _read(self, sequences: Sequence[TeacherSequence]) -> tuple[list[Path], list[ScoredSequence | None]]:
        paths = [self._path(sequence) for sequence in sequences]
        return paths, [self._files.read(path) for path in paths]

    def _write(self, paths: Sequence[Path], scored: Sequence[ScoredSequence]) -> list[ScoredSequence]:
        """Write scores, and return them as they will be read."""
        written = []
        for path, scores in zip(paths, scored, strict=True):
            support_TJ = getattr(scores, "support_logps_TJ", None)  # a user's class may return other records
            record = ScoredSequence(scores.topk_logps_TK, scores.topk_ids_TK, scores.sampled_logps_T, support_TJ)
            written.append(record.reduced(0, self._settings.wire_dtype))
            self._files.write(path, written[-1])
        return written

    def _path(self, sequence: TeacherSequence) -> Path:
        ids_TJ = sequence.support_ids_TJ
        digest = hashlib.blake2b(digest_size=16)
        digest.update(np.asarray([sequence.prompt_len, sequence.n_support, sequence.with_top_k], np.int64).tobytes())
        digest.update(np.ascontiguousarray(sequence.token_ids, np.int32).tobytes())
        if sequence.scored_ranges is not None:
            digest.update(b"ranges" + np.ascontiguousarray(sequence.scored_ranges, np.int32).tobytes())
        if ids_TJ is not None:
            digest.update(np.ascontiguousarray(ids_TJ, np.int32).tobytes())
        name = digest.hexdigest()
        return self._folder / name[:2] / f"{name[2:]}{SUFFIX}"


def _digest(content: bytes, n_bytes: int) -> str:
    return hashlib.blake2b(content, digest_size=n_bytes).hexdigest()


def _has_probe(folder: Path, probe_T: np.ndarray) -> bool:
    """Return True if a folder has scores of the same weights."""
    try:
        kept_T = np.load(folder / PROBE)
    except (OSError, ValueError, EOFError):  # incomplete, or damaged
        return False
    return kept_T.shape == probe_T.shape and probe_difference(kept_T, probe_T) <= SAME_WEIGHTS

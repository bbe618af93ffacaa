"""`ScoreCache`: known responses are not requested again, in any mixture; other settings and weights are separate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipe_gkd.teachers.cache.scores import CACHE_DIR, CacheSettings, ScoreCache
from teacher.errors import TeacherRequestError, TeacherSetupError
from teacher.records import ScoredSequence, TeacherInfo, TeacherSequence
from tests._support.errors import raises
from tests._support.fake_teachers import fake_scores
from tests._support.fake_worker import INFO

TEACHER = TeacherInfo(**vars(INFO), protocol_version=1, n_workers=1)
REFUSED = 9
PROBE_T = np.array([-1.5, -2.5, -np.inf], np.float32)


class CountingTeacher:
    """Function that scores sequences, and keeps how many of each request it scored."""

    def __init__(self, offset: int = 0) -> None:
        self.offset, self.requests = offset, [0]

    async def __call__(self, sequences: Sequence[TeacherSequence]) -> list[ScoredSequence]:
        self.requests.append(len(sequences))
        for index, sequence in enumerate(sequences):
            if REFUSED in sequence.token_ids[sequence.prompt_len :]:
                raise TeacherRequestError("refused", sequence=index)
        return [_with_support(sequence, fake_scores(sequence, self.offset)) for sequence in sequences]

    @property
    def n_scored(self) -> int:
        """Number of sequences since the last call."""
        self.requests, found = [0], sum(self.requests)
        return found


def _with_support(sequence: TeacherSequence, scored: ScoredSequence) -> ScoredSequence:
    ids_TJ = sequence.support_ids_TJ
    return scored if ids_TJ is None else replace(scored, support_logps_TJ=-ids_TJ.astype(np.float32))


def settings(folder: Path, **changes: object) -> CacheSettings:
    known = CacheSettings(
        info=TEACHER,
        probe_T=PROBE_T,
        folder=folder,
        max_bytes=1 << 20,
        top_k=None,
        wire_dtype="float32",
        temperature=1.0,
        n_ids=0,
    )
    return replace(known, **changes)  # type: ignore[arg-type]


def sequence(*response: int, prompt: Sequence[int] = (5, 6), **options: object) -> TeacherSequence:
    return TeacherSequence([*prompt, *response], len(prompt), **options)  # type: ignore[arg-type]


def scores(
    cache: ScoreCache, teacher: CountingTeacher, sequences: Sequence[TeacherSequence]
) -> tuple[list[ScoredSequence], list[bool]]:
    return asyncio.run(cache.scores(sequences, teacher))


def assert_scored(sequences: Sequence[TeacherSequence], found: Sequence[ScoredSequence], offset: int = 0) -> None:
    for each, scored in zip(sequences, found, strict=True):
        expected = _with_support(each, fake_scores(each, offset))
        for name, array in vars(expected).items():
            np.testing.assert_array_equal(getattr(scored, name), array)


def test_only_unknown_sequences_are_requested(tmp_path: Path) -> None:
    teacher, known = CountingTeacher(), [sequence(1, 2, 3), sequence(4), sequence(7, 7)]
    found, is_cached = scores(ScoreCache(settings(tmp_path)), teacher, known)
    assert teacher.n_scored == 3 and is_cached == [False] * 3
    assert_scored(known, found)

    later = ScoreCache(settings(tmp_path))  # of another process
    mixed = [sequence(8), known[2], sequence(4, 4), known[0], sequence(1, 2), known[1]]
    found, is_cached = scores(later, teacher, mixed)
    assert teacher.n_scored == 3 and is_cached == [False, True] * 3
    assert_scored(mixed, found)
    found, is_cached = scores(later, teacher, mixed)
    assert teacher.n_scored == 0 and all(is_cached)
    assert_scored(mixed, found)


def test_division_into_prompt_and_response_and_support_are_parts_of_a_sequence(tmp_path: Path) -> None:
    others = [
        sequence(1, 2, 3),
        sequence(2, 3, prompt=(5, 6, 1)),
        sequence(1, 2, 3, support_ids_TJ=[[1, 2], [3, 4], [5, 6]]),
        sequence(1, 2, 3, support_ids_TJ=[[1, 2], [3, 4], [5, 7]]),
        sequence(1, 2, 3, support_ids_TJ=[[1], [3], [5]]),
        sequence(1, 2, 3, support_ids_TJ=[[1], [3], [5]], with_top_k=False),
    ]
    cache, teacher = ScoreCache(settings(tmp_path)), CountingTeacher()
    for number, each in enumerate(others):
        found, is_cached = scores(cache, teacher, [each])
        assert is_cached == [False], number
        assert_scored([each], found)
    found, is_cached = scores(cache, teacher, others)
    assert all(is_cached)
    assert_scored(others, found)


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 2.0},
        {"top_k": 2},
        {"wire_dtype": "float16"},
        {"n_ids": 20},
        {"info": replace(TEACHER, model_name="other")},
        {"info": replace(TEACHER, tokenizer_fingerprint="sha256:other")},
        {"info": replace(TEACHER, engine="other 1.0, bfloat16")},
    ],
    ids=str,
)
def test_scores_of_other_settings_are_not_used(tmp_path: Path, other: dict[str, object]) -> None:
    teacher, known = CountingTeacher(), [sequence(1, 2, 3)]
    scores(ScoreCache(settings(tmp_path)), teacher, known)
    assert scores(ScoreCache(settings(tmp_path, **other)), teacher, known)[1] == [False]
    assert scores(ScoreCache(settings(tmp_path)), teacher, known)[1] == [True]


def test_other_weights_under_the_same_name_have_their_own_scores(tmp_path: Path) -> None:
    """The weights change back and forth. A difference by rounding is none."""
    known, folders = [sequence(1, 2, 3)], []
    for number, (offset, change, expected) in enumerate(
        [(0, 0.0, False), (1, 0.01, False), (0, 1e-5, True), (1, 0.01, True), (2, -0.01, False)]
    ):
        cache = ScoreCache(settings(tmp_path, probe_T=PROBE_T + np.float32(change)))
        found, is_cached = scores(cache, CountingTeacher(offset), known)
        assert is_cached == [expected], number
        assert_scored(known, found, offset)
        folders.append(cache.open())
    assert folders[0] == folders[2] and folders[1] == folders[3] and len(set(folders)) == 3


def test_incomplete_folder_is_not_used(tmp_path: Path) -> None:
    teacher, known = CountingTeacher(), [sequence(1)]
    cache = ScoreCache(settings(tmp_path))
    scores(cache, teacher, known)
    (cache.open() / "probe.npy").write_bytes(b"")
    assert scores(ScoreCache(settings(tmp_path)), teacher, known)[1] == [True]  # the same name, written again
    assert np.array_equal(np.load(cache.open() / "probe.npy"), PROBE_T)


def test_scores_have_the_type_of_the_wire(tmp_path: Path) -> None:
    """Requests of the driver return float32, whatever the service sends."""
    teacher, known = CountingTeacher(), [sequence(1, 2)]
    cache = ScoreCache(settings(tmp_path, wire_dtype="float16"))
    for _ in range(2):  # requested, and read
        [found], _ = scores(cache, teacher, known)
        assert found.topk_logps_TK.dtype == np.float16 and found.sampled_logps_T.dtype == np.float32


def test_error_of_a_request_has_the_index_of_the_sequence(tmp_path: Path) -> None:
    cache, teacher = ScoreCache(settings(tmp_path)), CountingTeacher()
    scores(cache, teacher, [sequence(1), sequence(2)])
    with pytest.raises(TeacherRequestError) as caught:
        scores(cache, teacher, [sequence(1), sequence(3), sequence(2), sequence(REFUSED)])
    assert caught.value.sequence == 3


@pytest.mark.parametrize("place", ["", "below"])
def test_unusable_folder_is_reported_with_its_key(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / "file" / place
    with raises(TeacherSetupError, options=(CACHE_DIR,), path=folder):
        ScoreCache(settings(folder)).open()

"""`ScoreCache`: known responses are not requested again, in any mixture; other settings and weights are separate."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from recipe_gkd.teachers.cache.scores import CACHE_DIR, CacheSettings, ScoreCache
from teacher.errors import TeacherChanged, TeacherRequestError, TeacherSetupError
from teacher.records import ScoredSequence, TeacherInfo, TeacherSequence
from tests._support.errors import raises
from tests._support.fake_teachers import fake_scores
from tests._support.fake_worker import INFO

TEACHER = TeacherInfo(**vars(INFO), protocol_version=1, n_workers=1)
REFUSED = 9


class CountingTeacher:
    """Function that scores sequences, and keeps how many of each request it scored."""

    def __init__(self, offset: int = 0) -> None:
        self.offset, self.requests = offset, [0]

    async def __call__(self, sequences: Sequence[TeacherSequence]) -> list[ScoredSequence]:
        self.requests.append(len(sequences))
        for index, sequence in enumerate(sequences):
            if REFUSED in sequence.token_ids[sequence.prompt_len :] and len(sequence.token_ids) < 12:
                raise TeacherRequestError("refused", sequence=index)
        return [_with_support(sequence, fake_scores(sequence, self.offset)) for sequence in sequences]

    @property
    def n_scored(self) -> int:
        """Number of sequences since the last call. The probe is one of them."""
        self.requests, found = [0], sum(self.requests)
        return found


def _with_support(sequence: TeacherSequence, scored: ScoredSequence) -> ScoredSequence:
    ids_TJ = sequence.support_ids_TJ
    return scored if ids_TJ is None else replace(scored, support_logps_TJ=-ids_TJ.astype(np.float32))


def settings(folder: Path, **changes: object) -> CacheSettings:
    known = CacheSettings(
        info=TEACHER,
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
    assert teacher.n_scored == 1 + 3 and is_cached == [False] * 3
    assert_scored(known, found)

    later = ScoreCache(settings(tmp_path))  # of another process
    mixed = [sequence(8), known[2], sequence(4, 4), known[0], sequence(1, 2), known[1]]
    found, is_cached = scores(later, teacher, mixed)
    assert teacher.n_scored == 1 + 3 and is_cached == [False, True] * 3
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


def test_other_weights_under_the_same_name_are_refused(tmp_path: Path) -> None:
    known = [sequence(1, 2, 3)]
    cache = ScoreCache(settings(tmp_path))
    scores(cache, CountingTeacher(), known)
    with raises(TeacherChanged, options=(CACHE_DIR,)) as caught:
        scores(ScoreCache(settings(tmp_path)), CountingTeacher(offset=1), known)
    assert f"{cache.folder} has scores of other weights of fake" in str(caught.value)


def test_error_of_a_request_has_the_index_of_the_sequence(tmp_path: Path) -> None:
    cache, teacher = ScoreCache(settings(tmp_path)), CountingTeacher()
    scores(cache, teacher, [sequence(1), sequence(2)])
    with pytest.raises(TeacherRequestError) as caught:
        scores(cache, teacher, [sequence(1), sequence(3), sequence(2), sequence(REFUSED)])
    assert caught.value.sequence == 3


def test_concurrent_requests_score_the_probe_once(tmp_path: Path) -> None:
    cache, teacher = ScoreCache(settings(tmp_path)), CountingTeacher()

    async def several() -> None:
        await asyncio.gather(*(cache.scores([sequence(number)], teacher) for number in range(8)))

    asyncio.run(several())
    assert teacher.n_scored == 1 + 8


@pytest.mark.parametrize("damage", ["a file in place of the folder", "a damaged probe"])
def test_unusable_folder_is_reported_with_its_key(tmp_path: Path, damage: str) -> None:
    cache = ScoreCache(settings(tmp_path))
    if damage == "a damaged probe":
        cache.folder.mkdir(parents=True)
        (cache.folder / "probe.npy").write_bytes(b"")
    else:
        cache.folder.write_text("")
    with raises(TeacherSetupError, options=(CACHE_DIR,), path=cache.folder):
        scores(cache, CountingTeacher(), [sequence(1)])

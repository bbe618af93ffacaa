"""Files of the cache: scores return as they were written, damage is found, and the size is limited."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from recipe_gkd.teachers.cache import files as files_module
from recipe_gkd.teachers.cache.files import SCAN_SHARE, ScoreFiles
from teacher.records import ScoredSequence

GIB = 1 << 30
GROUP = "0123456789abcdef-01234567"


def scores(seed: int = 0, *, n_rows: int = 5, dtype: str = "float32", n_support: int = 0) -> ScoredSequence:
    rng = np.random.default_rng(seed)
    support_TJ = rng.normal(size=(n_rows, n_support)).astype(dtype) if n_support else None
    return ScoredSequence(
        rng.normal(size=(n_rows, 4)).astype(dtype),
        rng.integers(0, 99, (n_rows, 4), dtype=np.int32),
        rng.normal(size=n_rows).astype(np.float32),
        support_TJ,
    )


def assert_equal(found: ScoredSequence | None, expected: ScoredSequence) -> None:
    assert found is not None
    for name, array in vars(expected).items():
        got = getattr(found, name)
        assert (got is None) == (array is None)
        if array is not None:
            assert got.dtype == array.dtype and np.array_equal(got, array)


def file_of(root: Path, number: int = 0) -> Path:
    return root / GROUP / f"{number % 7:02x}" / f"{number:030x}.npz"


def total_size(root: Path) -> int:
    return sum(path.stat().st_size for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("n_support", [0, 3])
def test_read_returns_what_write_was_given(tmp_path: Path, dtype: str, n_support: int) -> None:
    files, expected = ScoreFiles(tmp_path, GIB), scores(dtype=dtype, n_support=n_support)
    assert files.read(file_of(tmp_path)) is None
    files.write(file_of(tmp_path), expected)
    assert_equal(ScoreFiles(tmp_path, GIB).read(file_of(tmp_path)), expected)


@pytest.mark.parametrize("cut", ["a flipped bit", "half of the file", "an empty file", "another file"])
def test_damaged_file_has_no_scores_and_is_deleted(tmp_path: Path, cut: str, caplog: pytest.LogCaptureFixture) -> None:
    files, path = ScoreFiles(tmp_path, GIB), file_of(tmp_path)
    files.write(path, scores())
    content = bytearray(path.read_bytes())
    content[len(content) // 4] ^= 4
    damaged = {
        "a flipped bit": content,
        "half of the file": content[: len(content) // 2],
        "an empty file": b"",
        "another file": b"hello",
    }
    path.write_bytes(damaged[cut])
    assert files.read(path) is None
    assert not path.exists() and "is damaged" in caplog.text
    files.write(path, scores(1))
    assert_equal(files.read(path), scores(1))


def test_size_is_limited_and_scores_in_use_are_kept(tmp_path: Path) -> None:
    """Two processes write 20 times the maximum. Scores that are read all the time stay."""
    size, n_files = 1000, 64
    both, limit = [ScoreFiles(tmp_path, n_files * size) for _ in range(2)], n_files * size
    for number in range(20 * n_files):
        path = file_of(tmp_path, number)
        both[number % 2].write(path, scores(number))
        assert 900 < path.stat().st_size < size
        os.utime(path, (number, number))  # the times of the system are too coarse
        assert total_size(tmp_path) <= limit * (1 + 2 * SCAN_SHARE)
        if number:
            assert both[1].read(file_of(tmp_path, 0)) is not None
    assert total_size(tmp_path) > limit / 2
    newest = [both[0].read(file_of(tmp_path, 20 * n_files - 1 - back)) for back in range(n_files // 2)]
    assert all(found is not None for found in newest)


def test_scores_that_would_replace_much_of_the_cache_are_not_kept(tmp_path: Path) -> None:
    ScoreFiles(tmp_path, 32_000).write(file_of(tmp_path), scores(n_rows=50))
    assert not file_of(tmp_path).exists()


def test_folder_that_cannot_be_written_is_reported_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / GROUP).write_text("a file in place of the folder")
    files = ScoreFiles(tmp_path, GIB)
    for number in range(3):
        files.write(file_of(tmp_path, number), scores())
    assert caplog.text.count("scores are not written to the cache") == 1


def test_each_changed_byte_gives_the_scores_or_none(tmp_path: Path) -> None:
    files, path, expected = ScoreFiles(tmp_path, GIB), file_of(tmp_path), scores()
    files.write(path, expected)
    content = path.read_bytes()
    for position in range(len(content)):
        for bits in (1, 128, 255):
            damaged = bytearray(content)
            damaged[position] ^= bits
            path.write_bytes(damaged)
            if (found := files.read(path)) is not None:
                assert_equal(found, expected)


def test_files_of_others_are_not_deleted(tmp_path: Path) -> None:
    """The folder may be one in which a user has other data."""
    others = [
        tmp_path / "project" / "run" / "embeddings.npz",
        tmp_path / "0123456789abcdef" / "00" / f"{0:030x}.npz",
        tmp_path / GROUP / "00" / "notes.npz",
        tmp_path / GROUP / "probe.npy",
    ]
    for path in others:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(5000))
        os.utime(path, (0, 0))
    files = ScoreFiles(tmp_path, 64_000)
    for number in range(300):
        files.write(file_of(tmp_path, number), scores(number))
    assert all(path.stat().st_size == 5000 for path in others)
    assert len(list(tmp_path.glob(f"{GROUP}/*/*.npz"))) < 80


def test_draft_of_a_killed_process_is_deleted(tmp_path: Path) -> None:
    draft = tmp_path / GROUP / "00" / f"draft-{7:032x}.npz"
    draft.parent.mkdir(parents=True)
    draft.write_bytes(bytes(63_000))
    os.utime(draft, (0, 0))
    ScoreFiles(tmp_path, 64_000).write(file_of(tmp_path), scores())
    assert not draft.exists() and file_of(tmp_path).exists()


def test_file_that_cannot_be_deleted_does_not_stop_the_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, n_scans = ScoreFiles(tmp_path, 64_000), 0
    original = files_module._files

    def counted(root: Path) -> list[tuple[float, int, Path]]:
        nonlocal n_scans
        n_scans += 1
        return original(root)

    def refuse(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError(str(path))

    monkeypatch.setattr(files_module, "_files", counted)
    monkeypatch.setattr(Path, "unlink", refuse)
    for number in range(200):
        files.write(file_of(tmp_path, number), scores(number))
    assert len(list(tmp_path.glob(f"{GROUP}/*/*.npz"))) == 200 and n_scans < 150

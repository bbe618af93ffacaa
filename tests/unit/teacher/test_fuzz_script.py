"""The fuzzing script: decoders refuse all mutated inputs in order; planted defects are found and can be replayed."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
from fuzzing.decoders import FunctionTarget, decoders
from fuzzing.loop import Fuzzer, Report, load_finding, replay
from fuzzing.seeds import from_clients
from fuzzing.targets import Frames, Hang

from teacher.errors import TeacherProtocolError
from teacher.wire.frames import unpack_header
from tests._support.repository import REPO


def target(function: Callable[[Frames], object]) -> FunctionTarget:
    return FunctionTarget("planted", function, from_clients(), folder=str(Path(__file__).parent))


def run(planted: FunctionTarget, folder: Path, n_inputs: int) -> Report:
    return Fuzzer(planted, seed=0, folder=folder).run(n_inputs)


@pytest.mark.parametrize("name", sorted(decoders()))
def test_decoder_mutated_inputs_reach_new_arcs_without_findings(name: str, tmp_path: Path) -> None:
    decoder = decoders()[name]()
    report = Fuzzer(decoder, seed=0, folder=tmp_path).run(400)
    assert report.findings == {}
    assert report.accepted + report.rejected == report.inputs == 400
    assert report.rejected > 50 and report.accepted > 10
    assert report.corpus > 3, "no mutated input reached a new arc"


def two_steps(frames: Frames) -> None:
    """Raise KeyError for a header with two changed values, which one mutation cannot reach."""
    header = unpack_header(frames[0] if frames else b"")
    if header.get("timeout_s") is None:
        return
    if header["timeout_s"] == 604800.0:
        if header.get("id") == 2**53:
            header["absent"]
        raise TeacherProtocolError("only one of two")


def test_fuzzer_planted_key_error_is_found_and_replayed(tmp_path: Path) -> None:
    planted = target(lambda frames: unpack_header(frames[0] if frames else b"")["kind"])
    report = run(planted, tmp_path, 2000)
    assert list(report.findings) == ["KeyError in test_fuzz_script.py:<lambda>"]
    (file,) = report.files
    assert isinstance(replay(planted, load_finding(Path(file))), KeyError)


def test_fuzzer_defect_behind_two_values_is_found_by_coverage_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guided, blind = target(two_steps), target(two_steps)
    assert list(run(guided, tmp_path, 6000).findings) == ["KeyError in test_fuzz_script.py:two_steps"]
    monkeypatch.setattr(blind, "n_arcs", lambda: 0)  # no input is regarded as new
    assert run(blind, tmp_path, 6000).findings == {}


def test_fuzzer_planted_hang_is_found_once_and_ended(tmp_path: Path) -> None:
    def hang_once(frames: Frames) -> None:
        if len(frames) == 0 and not list(tmp_path.iterdir()):
            time.sleep(60)
        raise TeacherProtocolError("refused")

    began = time.monotonic()
    report = Fuzzer(target(hang_once), seed=0, folder=tmp_path, hang_s=0.3).run(300)
    assert list(report.findings) == ["Hang in test_fuzz_script.py:hang_once"]
    assert time.monotonic() - began < 30
    assert load_finding(Path(report.files[0])).frames == []
    moved = Path(report.files[0]).rename(tmp_path.parent / "moved.json")  # the next input hangs again
    assert isinstance(replay(target(hang_once), load_finding(moved), hang_s=0.3), Hang)


def test_fuzzer_planted_allocation_is_found(tmp_path: Path) -> None:
    def allocate(frames: Frames) -> None:
        n_bytes = (80 << 20) if len(frames) == 0 else 1
        b"x" * n_bytes  # freed at once, so that only the peak shows it

    report = run(target(allocate), tmp_path, 150)
    assert len(report.findings) == 1 and "allocated" in next(iter(report.findings))


def test_fuzzer_same_seed_repeats_the_inputs(tmp_path: Path) -> None:
    seen: list[list[Frames]] = [[], []]
    for inputs in seen:
        run(target(inputs.append), tmp_path, 200)
    assert seen[0] == seen[1] and len(seen[0]) == 200


def test_script_documents_every_target() -> None:
    text = (REPO / "benchmarks" / "fuzz.py").read_text(encoding="utf-8").split('"""')[1]
    assert all(name in text for name in decoders())

"""Recordings of a teacher's scores: rows on disk equal the samples', and damage or other data are refused."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer, Qwen2ForCausalLM

from recipe_gkd.commands import record as record_command
from recipe_gkd.commands.record import main
from recipe_gkd.data.samples import Prompt, Response, Sample, TeacherTopK
from recipe_gkd.errors import DataError
from recipe_gkd.model_files import Student
from recipe_gkd.teachers.hf_teacher import HfTeacher
from recipe_gkd.teachers.recorded import writer as writer_module
from recipe_gkd.teachers.recorded.layout import MANIFEST, RecordingSource, read_manifest
from recipe_gkd.teachers.recorded.teacher import RecordedTeacher
from recipe_gkd.teachers.recorded.writer import RecordingWriter
from recipe_gkd.teachers.vocabularies import check_vocabulary
from teacher.common.fingerprint import count_ids, tokenizer_fingerprint
from teacher.errors import TeacherError, TeacherRequestError, TeacherSetupError, TeacherUnavailable
from teacher.records import ScoredSequence, TeacherSequence
from tests._support.base_config import CONFIG_NAME
from tests._support.errors import raises
from tests._support.teacher_service import VOCAB_SIZE
from tests._support.waiting import PATIENCE_S

K = 4
N_SAMPLES = 11
SOURCE = RecordingSource(
    model_name="m",
    engine="e",
    vocab_size=50,
    n_tokens=50,
    tokenizer_fingerprint="f",
    max_model_len=64,
    eos_token_ids=(1,),
    temperature=1.0,
    top_k=K,
    dtype="float32",
    prompts="p",
    references="r",
    teacher_prompts="",
    n_responses=N_SAMPLES,
)


def make_samples() -> list[Sample]:
    """Return samples of several lengths. The first two have the same prompt."""
    rng = np.random.default_rng(0)
    samples = []
    for uid in range(N_SAMPLES):
        n_prompt, n_response = (3, 5) if uid < 2 else (int(rng.integers(1, 9)), int(rng.integers(1, 20)))
        prompt = np.arange(3, dtype=np.int32) if uid < 2 else rng.integers(0, 50, n_prompt, dtype=np.int32)
        ids = rng.integers(0, 50, n_response, dtype=np.int32)
        logps_TK = -np.sort(rng.exponential(size=(n_response, K)).astype(np.float32), axis=1)
        ids_TK = np.stack([rng.permutation(50)[:K] for _ in ids]).astype(np.int32)
        zeros_T = np.zeros(n_response, np.float32)
        response = Response(
            uid=uid, ids=ids, logprobs=zeros_T, finish_reason="stop", weights_version=0, versions_T=zeros_T.astype(int)
        )
        scores = TeacherTopK(logps_TK=logps_TK, ids_TK=ids_TK, sampled_logps_T=rng.normal(size=n_response).astype("f4"))
        samples.append(Sample(prompt=Prompt(uid=uid, ids=prompt, row=uid), response=response, teacher=scores))
    return samples


SAMPLES = make_samples()


def sequence_of(sample: Sample, n_response: int | None = None) -> TeacherSequence:
    ids = np.concatenate([sample.prompt.ids, sample.response.ids[:n_response]])
    return TeacherSequence(ids, len(sample.prompt.ids))


def record(folder: Path, source: RecordingSource = SOURCE, n_samples: int = N_SAMPLES, rows_per_file: int = 4) -> Path:
    writer = RecordingWriter(folder, source)
    for start in range(writer.n_done, n_samples, rows_per_file):
        writer.write(SAMPLES[start : min(start + rows_per_file, n_samples)])
    return folder


def read(folder: Path, *sequences: TeacherSequence, top_k: int | None = None) -> list[ScoredSequence]:
    teacher = RecordedTeacher(folder, top_k=top_k)
    try:
        return teacher.submit(sequences).result(PATIENCE_S)
    finally:
        teacher.close()


@pytest.fixture(autouse=True)
def small_row_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_module, "ROW_GROUP_BYTES", 1000)


class TestRows:
    def test_rows_equal_samples_in_any_order(self, tmp_path: Path) -> None:
        order = np.random.default_rng(1).permutation(N_SAMPLES)
        found = read(record(tmp_path / "r"), *(sequence_of(SAMPLES[i]) for i in order))
        for result, sample in zip(found, (SAMPLES[i] for i in order), strict=True):
            assert isinstance(sample.teacher, TeacherTopK)
            np.testing.assert_array_equal(result.topk_logps_TK, sample.teacher.logps_TK)
            np.testing.assert_array_equal(result.topk_ids_TK, sample.teacher.ids_TK)
            np.testing.assert_array_equal(result.sampled_logps_T, sample.teacher.sampled_logps_T)
            assert result.topk_logps_TK.dtype == np.float32

    def test_beginning_of_a_response_has_its_rows(self, tmp_path: Path) -> None:
        [result] = read(record(tmp_path / "r"), sequence_of(SAMPLES[1], 2), top_k=2)
        assert isinstance(SAMPLES[1].teacher, TeacherTopK)
        np.testing.assert_array_equal(result.topk_ids_TK, SAMPLES[1].teacher.ids_TK[:2, :2])
        assert result.sampled_logps_T.shape == (2,)

    def test_float16_keeps_11_bits(self, tmp_path: Path) -> None:
        folder = record(tmp_path / "r", replace(SOURCE, dtype="float16"))
        for result, sample in zip(read(folder, *map(sequence_of, SAMPLES)), SAMPLES, strict=True):
            assert isinstance(sample.teacher, TeacherTopK)
            np.testing.assert_allclose(result.topk_logps_TK, sample.teacher.logps_TK, rtol=2**-11)

    def test_files_are_readable_with_pyarrow_alone(self, tmp_path: Path) -> None:
        folder = record(tmp_path / "r")
        manifest = json.loads((folder / MANIFEST).read_text())
        tables = [pq.read_table(folder / shard["file"]).to_pylist() for shard in manifest["shards"]]
        rows = [row for table in tables for row in table]
        assert [len(row["response_ids"]) for row in rows] == [len(sample.response.ids) for sample in SAMPLES]
        assert all(len(row["topk_ids"]) == K * len(row["response_ids"]) for row in rows)


class TestMissing:
    @pytest.mark.parametrize("changed", [0, -1], ids=["prompt", "response"])
    def test_other_sequence_is_refused_with_its_position(self, tmp_path: Path, changed: int) -> None:
        sequence = sequence_of(SAMPLES[3])
        ids = sequence.token_ids.copy()
        ids[changed] = 49 - ids[changed]
        with raises(TeacherRequestError, sequence=1):
            read(record(tmp_path / "r"), sequence, TeacherSequence(ids, sequence.prompt_len))

    def test_longer_response_is_refused(self, tmp_path: Path) -> None:
        ids = np.append(sequence_of(SAMPLES[3]).token_ids, np.int32(4))
        with raises(TeacherRequestError, sequence=0):
            read(record(tmp_path / "r"), TeacherSequence(ids, len(SAMPLES[3].prompt.ids)))

    def test_incomplete_recording_is_refused_with_both_numbers(self, tmp_path: Path) -> None:
        with raises(TeacherSetupError) as caught:
            RecordedTeacher(record(tmp_path / "r", n_samples=8))
        assert "8 of 11" in caught.value.what

    def test_folder_without_recording_is_refused(self, tmp_path: Path) -> None:
        with raises(TeacherSetupError, path=tmp_path):
            RecordedTeacher(tmp_path)

    @pytest.mark.parametrize("options", [{"top_k": K + 1}, {"temperature": 2.0}])
    def test_other_settings_are_refused(self, tmp_path: Path, options: dict[str, int]) -> None:
        with raises(TeacherSetupError):
            RecordedTeacher(record(tmp_path / "r"), **options)


class TestInterrupted:
    def test_recording_continues_after_its_last_complete_file(self, tmp_path: Path) -> None:
        folder = record(tmp_path / "r", n_samples=8)
        (folder / "part-00002.parquet").write_bytes(b"incomplete")
        written = (folder / "part-00000.parquet").stat().st_mtime_ns
        assert RecordingWriter(folder, SOURCE).n_done == 8
        record(folder)
        assert (folder / "part-00000.parquet").stat().st_mtime_ns == written
        assert len(read(folder, *map(sequence_of, SAMPLES))) == N_SAMPLES

    @pytest.mark.parametrize("name", ["tokenizer_fingerprint", "references", "model_name", "prompts"])
    def test_other_data_or_teacher_is_refused_with_both_values(self, tmp_path: Path, name: str) -> None:
        folder = record(tmp_path / "r", n_samples=8)
        with raises(DataError) as caught:
            RecordingWriter(folder, replace(SOURCE, **{name: "other"}))
        assert f"{name} is '{getattr(SOURCE, name)}', expected 'other'" in caught.value.what

    def test_folder_with_other_files_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with raises(DataError):
            RecordingWriter(tmp_path, SOURCE)
        assert (tmp_path / "notes.txt").exists()


class TestDamage:
    def test_truncated_file_is_refused_at_the_start(self, tmp_path: Path) -> None:
        file = record(tmp_path / "r") / "part-00001.parquet"
        file.write_bytes(file.read_bytes()[:-10])
        with raises(TeacherSetupError, path=file):
            RecordedTeacher(tmp_path / "r")

    def test_flipped_bytes_are_found_when_they_are_read(self, tmp_path: Path) -> None:
        folder = record(tmp_path / "r")
        file = folder / "part-00000.parquet"
        chunk = pq.ParquetFile(file).metadata.row_group(0).column(4)
        content = bytearray(file.read_bytes())
        content[chunk.data_page_offset + chunk.total_compressed_size - 3] ^= 0xFF
        file.write_bytes(content)
        with pytest.raises(TeacherError):
            read(folder, sequence_of(SAMPLES[0]))

    @pytest.mark.parametrize("text", ["{", '{"format_version": 1}', '{"format_version": 99}'])
    def test_invalid_manifest_is_refused(self, tmp_path: Path, text: str) -> None:
        (record(tmp_path / "r") / MANIFEST).write_text(text)
        with raises(TeacherSetupError, path=tmp_path / "r" / MANIFEST):
            RecordedTeacher(tmp_path / "r")


class TestCommand:
    @pytest.fixture
    def arguments(self, tiny_qwen2: Path, tmp_path: Path) -> list[str]:
        """Arguments that record 40 rows in ``tmp_path / "recording"``."""
        data = tmp_path / "data.jsonl"
        rows = [{"prompt": "ab" * (i % 5 + 1), "answer": "xyz"[i % 3] * (i % 7 + 1)} for i in range(40)]
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return [
            *("--config-name", CONFIG_NAME, "--out", str(tmp_path / "recording"), "--rows-per-file", "16"),
            *(f"data.train_files={data}", "data.response_key=answer", "data.max_prompt_length=16"),
            *("data.max_response_length=16", f"actor_rollout_ref.model.path={tiny_qwen2}", "trainer.device=cpu"),
            *("actor_rollout_ref.teacher.backend=hf", f"actor_rollout_ref.teacher.model_path={tiny_qwen2}"),
            "actor_rollout_ref.teacher.top_k=8",
        ]

    def test_scored_rows_are_kept_if_the_teacher_fails(
        self, arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original = record_command._score

        async def score(data: Any, teachers: Any, start: int) -> list[Sample]:
            if start >= 32:
                raise TeacherUnavailable("gone")
            return await original(data, teachers, start)

        with monkeypatch.context() as patch:
            patch.setattr(record_command, "_score", score)
            patch.setattr(record_command, "REQUESTS_PER_WORKER", 1)
            assert main([*arguments, "--rows-per-file", "100"]) == 1
        recorded = read_manifest(tmp_path / "recording")
        assert recorded is not None and recorded.n_rows == 32
        assert main(arguments) == 0
        RecordedTeacher(tmp_path / "recording", top_k=8).close()

    def test_recorded_rows_equal_the_teachers(self, arguments: list[str], tiny_qwen2: Path, tmp_path: Path) -> None:
        folder = tmp_path / "recording"
        assert main(arguments) == 0
        assert len(list(folder.glob("*.parquet"))) == 3
        table = pq.read_table(folder)
        sequences = [
            TeacherSequence(np.array(row["prompt_ids"] + row["response_ids"], np.int32), len(row["prompt_ids"]))
            for row in table.select(["prompt_ids", "response_ids"]).to_pylist()
        ]
        live = HfTeacher(str(tiny_qwen2), top_k=8, device="cpu")
        try:
            expected = live.submit(sequences, PATIENCE_S).result(PATIENCE_S)
        finally:
            live.close()
        for result, reference in zip(read(folder, *sequences), expected, strict=True):
            np.testing.assert_allclose(result.topk_logps_TK, reference.topk_logps_TK, atol=1e-5)
            np.testing.assert_allclose(result.sampled_logps_T, reference.sampled_logps_T, atol=1e-5)
        written = {file: file.stat().st_mtime_ns for file in folder.glob("*.parquet")}
        assert main(arguments) == 0  # nothing is left to do
        assert {file: file.stat().st_mtime_ns for file in folder.glob("*.parquet")} == written

    def test_recording_of_compatible_teacher_fits_the_student(
        self, arguments: list[str], tiny_qwen2: Path, tmp_path: Path
    ) -> None:
        """The teacher's tokenizer has two further tokens, and one of them ends a turn."""
        folder, teacher = tmp_path / "recording", tmp_path / "teacher"
        shutil.copytree(tiny_qwen2, teacher)
        tokenizer, model = AutoTokenizer.from_pretrained(teacher), Qwen2ForCausalLM.from_pretrained(teacher)
        own = Student(tiny_qwen2, VOCAB_SIZE, tokenizer, tokenizer_fingerprint(tokenizer), count_ids(tokenizer))
        model.resize_token_embeddings(own.n_tokens + 2)
        model.generation_config.eos_token_id = [1, own.n_tokens + 1]
        model.save_pretrained(teacher)
        further = AutoTokenizer.from_pretrained(teacher)
        further.add_tokens(["<think>", "</think>"])
        further.save_pretrained(teacher)
        key = "actor_rollout_ref.teacher"
        assert main([*arguments, f"{key}.model_path={teacher}", f"{key}.vocabulary=compatible"]) == 0
        recording = RecordedTeacher(folder)
        info = recording.hello()
        recording.close()
        assert check_vocabulary("recording", info, own, "equal") == 0 and info.eos_token_ids == (1,)
        ids = pq.read_table(folder, columns=["topk_ids"]).column(0).combine_chunks().flatten().to_numpy()
        assert ids.max() < own.n_tokens

    @pytest.mark.parametrize(
        "overrides",
        [
            ["data.response_key=null"],
            ["actor_rollout_ref.teacher.on_failure=skip_samples"],
            ["+actor_rollout_ref.teacher.teachers.a=h:1", "+actor_rollout_ref.teacher.teachers.b=h:2"],
        ],
        ids=["no responses", "skips", "two teachers"],
    )
    def test_unusable_configuration_is_one_error(
        self, overrides: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        given = ["data.train_files=x", "actor_rollout_ref.model.path=x", "data.response_key=answer"]
        assert main(["--config-name", CONFIG_NAME, "--out", str(tmp_path / "r"), *given, *overrides]) == 1
        assert capsys.readouterr().err.count("error: ") == 1

"""Checks of samples before an update: what is accepted, and which sample and position an error names."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from recipe_gkd.actor.batch import sample_checks
from recipe_gkd.actor.batch.sample_checks import check_samples
from recipe_gkd.commands.gpu_smoke.tiny_models import make_sample
from recipe_gkd.data.samples import Sample, TeacherTopK
from recipe_gkd.errors import DataError
from tests._support.errors import raises
from tests._support.tiny_models import make_samples

SAMPLES = make_samples(12)


def with_row(sample: Sample, row: int, logps_K: list[float]) -> Sample:
    logps_TK: np.ndarray = sample.teacher.logps_TK.copy()
    logps_TK[row] = logps_K + [-np.inf] * (logps_TK.shape[1] - len(logps_K))
    return replace(sample, teacher=replace(sample.teacher, logps_TK=logps_TK))


class TestCheckSamples:
    def test_check_samples_of_valid_samples_computes_no_float64(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(sample_checks, "_check_sample", pytest.fail)
        unscored = replace(SAMPLES[0], teacher=TeacherTopK.absent(len(SAMPLES[0].response.ids)))
        check_samples([*SAMPLES, unscored, make_sample(99, [1], [], np.zeros((0, 0)), np.zeros((0, 0)))])
        check_samples([])

    @pytest.mark.parametrize("n_ids", [2, 200, 20_000, 150_000, 1 << 18])
    @pytest.mark.parametrize("dtype", [np.float16, np.float32])
    def test_check_samples_with_float16_log_probabilities_succeeds(self, n_ids: int, dtype: type) -> None:
        """Uniform distributions are the worst case: all their log-probabilities may be rounded up."""
        logps_TK: np.ndarray = np.full((1, n_ids), -np.log(n_ids)).astype(np.float16).astype(dtype)
        sample = make_sample(7, [1], [2], logps_TK, np.arange(n_ids)[None])
        check_samples([replace(sample, teacher=replace(sample.teacher, logps_TK=logps_TK))])

    @pytest.mark.parametrize("logps", [[0.0, 0.0], [np.nan, -1.0], [0.1], [-0.001, -4.8]])
    @pytest.mark.parametrize("block_elements", [1, 20, 1 << 16])
    def test_check_samples_with_invalid_row_names_sample_and_position(
        self, monkeypatch: pytest.MonkeyPatch, logps: list[float], block_elements: int
    ) -> None:
        monkeypatch.setattr(sample_checks, "BLOCK_ELEMENTS", block_elements)
        longest = max(range(len(SAMPLES)), key=lambda i: len(SAMPLES[i].response.ids))
        invalid = with_row(SAMPLES[longest], len(SAMPLES[longest].response.ids) - 1, logps)
        position = len(invalid.response.ids) - 1
        with raises(DataError, uid=invalid.prompt.uid, position=position):
            check_samples([*SAMPLES[:longest], invalid, *SAMPLES[longest + 1 :]])

    @pytest.mark.parametrize("block_elements", [1, 20, 1 << 16])
    def test_blocks_have_every_row_once(self, monkeypatch: pytest.MonkeyPatch, block_elements: int) -> None:
        monkeypatch.setattr(sample_checks, "BLOCK_ELEMENTS", block_elements)
        unscored = replace(SAMPLES[3], teacher=TeacherTopK.absent(len(SAMPLES[3].response.ids)))
        samples = [*SAMPLES[:3], unscored, *SAMPLES[4:]]
        blocks = list(sample_checks._blocks(samples))
        rows = [row_K.tolist() for pieces in blocks for piece_RK in pieces for row_K in piece_RK]
        assert rows == [row_K.tolist() for sample in samples for row_K in sample.teacher.logps_TK]
        for pieces in blocks:
            assert len({piece.shape[1] for piece in pieces}) == 1
            assert sum(piece.size for piece in pieces) <= max(block_elements, pieces[0].shape[1])

    def test_check_samples_without_prompt_names_sample(self) -> None:
        with raises(DataError, uid=7, position=None):
            check_samples([*SAMPLES, make_sample(7, [], [2], [[-1.0]], [[3]])])

    @pytest.mark.parametrize("value", [0.1, np.nan, np.inf])
    @pytest.mark.parametrize("model", ["teacher", "student"])
    def test_check_samples_with_invalid_token_log_probability_names_position(self, value: float, model: str) -> None:
        sample, logps_T = make_sample(7, [1], [2, 3], [[-1.0]] * 2, [[3]] * 2), np.array([-1, value], np.float32)
        if model == "teacher":
            sample = replace(sample, teacher=replace(sample.teacher, sampled_logps_T=logps_T))
        else:
            sample = replace(sample, response=replace(sample.response, logprobs=logps_T))
        with raises(DataError, uid=7, position=1):
            check_samples([*SAMPLES, sample])

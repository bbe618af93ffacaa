"""The Triton kernels against dense float64, with small blocks in the interpreter, and on a GPU if there is one."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from recipe_gkd.errors import ConfigError
from recipe_gkd.losses import torch_kernels
from recipe_gkd.losses.kernel_backend import select_backend
from recipe_gkd.losses.logits_query import GradientSpec
from tests._support.errors import raises
from tests._support.triton_interpreter import Run
from tests.unit.losses.kernel_cases import KINDS, Case, check_gradient, check_kernels, check_sums, make_chunk

pytest.importorskip("triton", reason="needs triton")
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
QWEN: dict[str, Any] = {"width": 152064, "real_columns": 151936}


@pytest.fixture(scope="module")
def small_blocks(interpreted: Run) -> None:
    """Make rows of 200 columns have multiple blocks, groups and splits, in the process with the interpreter."""
    interpreted(use_small_blocks)


def use_small_blocks() -> None:
    from recipe_gkd.losses import triton_backend

    triton_backend.BLOCK_COLUMNS, triton_backend.BLOCK_IDS = 64, 64


def check_nan() -> None:
    chunk = make_chunk(Case(temperature=2.0, k=0))
    chunk.logits_RW[1, 100] = float("nan")
    chunk.logits_RW[2] = float("nan")
    sums_RH3 = select_backend(chunk.logits_RW, "triton").tail_sums(chunk.logits_RW, chunk.softmaxes, torch.float32)
    assert sums_RH3[0].isfinite().all()
    assert sums_RH3[1:].isnan().all()


def check_float64() -> None:
    from recipe_gkd.losses import triton_backend

    chunk = make_chunk(Case())
    with pytest.raises(TypeError, match=r"got torch\.float64 logits.*expected one of"):
        triton_backend.tail_sums(chunk.logits_RW.double(), chunk.softmaxes, torch.float64)


# All combinations of dtype, temperature and slope. Each k occurs with each value of the others.
COMBINATIONS = [
    (dtype, (0, 1, 17)[(number + (temperature > 1) + 2 * has_slope) % 3], temperature, has_slope)
    for number, dtype in enumerate((HALF, BRAIN, SINGLE))
    for temperature in (1.0, 2.5)
    for has_slope in (False, True)
]


@pytest.mark.usefixtures("small_blocks")
class TestInterpreted:
    @pytest.mark.parametrize(("dtype", "k", "temperature", "has_slope"), COMBINATIONS)
    def test_sums_and_gradient_equal_dense_float64(
        self, interpreted: Run, dtype: torch.dtype, k: int, temperature: float, has_slope: bool
    ) -> None:
        interpreted(check_kernels, Case(dtype=dtype, k=k, temperature=temperature, has_slope=has_slope))

    @pytest.mark.parametrize("kind", KINDS[1:])
    def test_unusual_logits_equal_dense_float64(self, interpreted: Run, kind: str) -> None:
        for dtype in (BRAIN, SINGLE):
            for has_slope in (False, True):  # the kernels also compute the sums at temperature 1
                interpreted(check_kernels, Case(kind=kind, dtype=dtype, temperature=0.7, has_slope=has_slope))

    @pytest.mark.parametrize(
        "shape",
        [
            pytest.param({"k": 193}, id="empty tail"),
            pytest.param({"k": 193, "temperature": 1.0}, id="empty tail, one softmax"),
            pytest.param({"k": 192, "real_columns": 192, "width": 192}, id="empty tail, no padding"),
            pytest.param({"real_columns": 0}, id="rank with padding only"),
            pytest.param({"real_columns": -40}, id="rank after one with padding only"),
            pytest.param({"real_columns": 200}, id="no padding"),
            pytest.param({"real_columns": 64, "width": 128}, id="padding from the end of a block"),
            pytest.param({"real_columns": 33, "width": 33, "k": 33}, id="one id more than a word of the mask"),
            pytest.param({"width": 1, "real_columns": 1, "k": 1}, id="one column"),
            pytest.param({"rows": 1}, id="one position"),
            pytest.param({"rows": 17, "width": 130, "real_columns": 129}, id="more positions than programs"),
            pytest.param({"rows": 0}, id="no positions"),
        ],
    )
    def test_shape_equals_dense_float64(self, interpreted: Run, shape: dict[str, Any]) -> None:
        interpreted(check_kernels, Case(**{"temperature": 2.0, **shape}))

    def test_nan_logit_makes_sums_nan(self, interpreted: Run) -> None:
        interpreted(check_nan)

    def test_float64_is_refused(self, interpreted: Run) -> None:
        interpreted(check_float64)


@pytest.mark.parametrize("kind", KINDS)
def test_torch_kernels_equal_dense_float64(kind: str) -> None:
    for temperature in (1.0, 2.5):
        for k in (0, 17, 193):
            for has_slope in (False, True):
                chunk = make_chunk(Case(kind=kind, k=k, temperature=temperature, has_slope=has_slope))
                check_sums(torch_kernels, chunk)
                check_gradient(torch_kernels, chunk)


class TestSelectBackend:
    def test_auto_selects_torch_on_cpu(self) -> None:
        assert select_backend(torch.zeros(1, 4)) is torch_kernels

    def test_triton_on_cpu_is_refused(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.delenv("TRITON_INTERPRET", raising=False)
        with raises(ConfigError, keys=("gkd.kernel_backend",)):
            select_backend(torch.zeros(1, 4), "triton")

    def test_triton_with_float64_is_refused(self) -> None:
        with raises(ConfigError, keys=("gkd.kernel_backend",)):
            select_backend(torch.zeros(1, 4).double(), "triton")

    def test_unknown_choice_is_refused(self) -> None:
        with raises(ConfigError, keys=("gkd.kernel_backend",)):
            select_backend(torch.zeros(1, 4), "cuda")


@needs_gpu
@pytest.mark.gpu
class TestOnGpu:
    @pytest.mark.parametrize("has_slope", [False, True])
    @pytest.mark.parametrize("temperature", [1.0, 2.5])
    @pytest.mark.parametrize("kind", KINDS)
    @pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
    def test_real_sizes_equal_dense_float64(
        self, dtype: torch.dtype, kind: str, temperature: float, has_slope: bool
    ) -> None:
        case = Case(**QWEN, dtype=dtype, kind=kind, temperature=temperature, has_slope=has_slope)
        for rows, k in ((300, 64), (2, 1024), (2, QWEN["real_columns"])):
            check_kernels(replace(case, rows=rows, k=k), "cuda")
        check_kernels(replace(case, rows=40, width=50257, real_columns=50257), "cuda")

    def test_more_than_2_31_logits_equal_small_batch(self) -> None:
        """Compare a bfloat16 batch of more than 2^31 logits, with an in-place gradient, with 16 of its positions.

        The 16 positions are a separate batch.
        """
        alone = make_chunk(Case(rows=16, k=64, dtype=BRAIN, temperature=2.0, **QWEN), "cuda")
        repeats = 900
        logits_RW = alone.logits_RW.repeat(repeats, 1)
        softmaxes = [
            replace(
                softmax,
                columns_TK=softmax.columns_TK.repeat(repeats, 1),
                is_local_TK=softmax.is_local_TK.repeat(repeats, 1),
            )
            for softmax in alone.softmaxes
        ]
        backend = select_backend(logits_RW)
        sums_RH3 = backend.tail_sums(logits_RW, softmaxes, torch.float32)
        torch.testing.assert_close(sums_RH3[-16:].double(), alone.sums_RH3, rtol=5e-6, atol=1e-6)
        tensors = {each.name: getattr(alone.gradient, each.name) for each in fields(GradientSpec)}
        repeated = {name: t.repeat(repeats, 1) for name, t in tensors.items() if isinstance(t, torch.Tensor)}
        backend.write_gradient(logits_RW, logits_RW, replace(alone.gradient, softmaxes=softmaxes, **repeated))
        expected = torch.empty_like(alone.logits_RW)
        backend.write_gradient(expected, alone.logits_RW, alone.gradient)
        for start in range(0, len(logits_RW), 16):
            assert torch.equal(logits_RW[start : start + 16], expected)

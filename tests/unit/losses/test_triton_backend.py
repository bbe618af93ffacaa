"""The Triton kernels compute what float64 does: in Triton's interpreter, and on a GPU where there is one."""

from __future__ import annotations

import multiprocessing
import os
import re
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from recipe_gkd.errors import ConfigError
from recipe_gkd.losses import torch_kernels as torch_chunk
from recipe_gkd.losses.kernel_backend import CHOICE, select_backend
from recipe_gkd.losses.logits_query import Backward
from tests.unit.losses.dense_tail import KINDS, Case, check_gradient, check_rounded_once, check_sums, make

pytest.importorskip("triton", reason="needs triton")
Run = Callable[..., Any]
HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
no_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
QWEN: dict[str, Any] = {"width": 152064, "real_columns": 151936}


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Run]:
    """Runs a function in a process of its own: Triton decides at its import whether it interprets."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("TRITON_INTERPRET", "1")
        pool = ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))
        pool.submit(small_blocks).result(timeout=120)
    yield lambda job, *arguments: pool.submit(job, *arguments).result(timeout=120)
    for process in pool._processes.values():
        process.kill()
    pool.shutdown()


def small_blocks() -> None:
    """Several blocks, groups and splits in rows of a few hundred columns."""
    from recipe_gkd.losses import triton_backend

    os.environ[CHOICE] = "triton"
    torch.set_num_threads(1)
    triton_backend.COLUMNS, triton_backend.ENTRIES = 64, 64


def check(case: Case, device: str = "cpu") -> None:
    chunk = make(case, device)
    backend = select_backend(chunk.logits_CW)
    assert backend is not torch_chunk
    check_sums(backend, chunk)
    grad_CW = check_gradient(backend, chunk)
    check_rounded_once(backend, chunk, grad_CW, truncates=device == "cpu")  # as the interpreter does with bfloat16


@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("k", [0, 1, 17])
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
def test_sums_and_gradient_are_those_of_float64(
    interpreted: Run, dtype: torch.dtype, k: int, temperature: float
) -> None:
    interpreted(check, Case(dtype=dtype, k=k, temperature=temperature))


@pytest.mark.parametrize("temperature", [1.0, 0.7])
@pytest.mark.parametrize("kind", KINDS[1:])
def test_unusual_logits_make_no_nan(interpreted: Run, kind: str, temperature: float) -> None:
    for dtype in (BRAIN, SINGLE):
        interpreted(check, Case(kind=kind, dtype=dtype, temperature=temperature))


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param({"k": 193}, id="a support that leaves no tail"),
        pytest.param({"k": 193, "temperature": 1.0}, id="a support that leaves no tail, one head"),
        pytest.param({"k": 192, "real_columns": 192, "width": 192}, id="the same, without padding"),
        pytest.param({"real_columns": 0}, id="a rank that has padding only"),
        pytest.param({"real_columns": -40}, id="a rank beyond one that has padding only"),
        pytest.param({"real_columns": 200}, id="no padding"),
        pytest.param({"real_columns": 64, "width": 128}, id="padding from a block's end on"),
        pytest.param({"real_columns": 33, "width": 33, "k": 33}, id="one id more than a word of the mask"),
        pytest.param({"width": 1, "real_columns": 1, "k": 1}, id="one column"),
        pytest.param({"rows": 1}, id="one position"),
        pytest.param({"rows": 17, "width": 130, "real_columns": 129}, id="more positions than programs"),
        pytest.param({"rows": 0}, id="no positions"),
    ],
)
def test_shapes(interpreted: Run, shape: dict[str, Any]) -> None:
    interpreted(check, Case(**{"temperature": 2.0, **shape}))


def check_nan() -> None:
    chunk = make(Case(temperature=2.0, k=0))
    chunk.logits_CW[1, 100] = float("nan")
    chunk.logits_CW[2] = float("nan")
    sums_CH3 = select_backend(chunk.logits_CW).tail_sums(chunk.logits_CW, chunk.softmaxes, torch.float32)
    assert sums_CH3[0].isfinite().all()
    assert sums_CH3[1:].isnan().all()


def test_a_nan_among_the_logits_is_not_hidden(interpreted: Run) -> None:
    interpreted(check_nan)


def check_float64() -> None:
    from recipe_gkd.losses import triton_backend

    chunk = make(Case())
    with pytest.raises(TypeError, match=r"got torch\.float64 logits.*expected one of"):
        triton_backend.tail_sums(chunk.logits_CW.double(), chunk.softmaxes, torch.float64)


def test_float64_is_refused(interpreted: Run) -> None:
    interpreted(check_float64)


@pytest.mark.parametrize("kind", KINDS)
def test_pytorch_on_a_cpu_computes_the_same(kind: str) -> None:
    for temperature in (1.0, 2.5):
        for k in (0, 17, 193):
            chunk = make(Case(kind=kind, k=k, temperature=temperature))
            check_sums(torch_chunk, chunk)
            check_gradient(torch_chunk, chunk)


def test_the_arithmetic_is_chosen_by_device_and_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CHOICE, raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    logits = torch.zeros(1, 4)
    assert select_backend(logits) is torch_chunk
    with pytest.raises(ConfigError, match="the logits are on cpu, expected a GPU"):
        select_backend(logits, "triton")
    with pytest.raises(ConfigError, match=r"the logits are torch\.float64"):
        select_backend(logits.double(), "triton")
    monkeypatch.setenv(CHOICE, "cuda")
    with pytest.raises(ConfigError, match="got 'cuda', expected 'auto', 'torch' or 'triton'"):
        select_backend(logits)


TYPES = {"columns": "*i64", "own": "*u8", "picked_columns": "*i64", "words": "*i32", "logits": "*bf16", "out": "*bf16"}
POINTERS = ("parts", "sums", "values", "top", "grad_tail", "grad_support", "grad_picked")
ALIGNED = ("row_stride", "out_stride", "width", "columns_per_split")


@pytest.mark.parametrize(
    ("name", "constants", "warps"),
    [
        ("mark_support", {"BLOCK": 512}, 4),
        ("sum_tails", {"HEADS": 2, "SUPPORT": True, "BLOCK": 4096, "LANES": 8}, 8),
        ("merge_splits", {"HEADS": 2, "SPLITS": 64}, 1),
        ("find_special", {"HEADS": 2, "BLOCK": 512}, 4),
        ("write_tails", {"HEADS": 2, "BLOCK": 4096}, 8),
        ("write_special", {"BLOCK": 512}, 4),
    ],
)
def test_the_compiler_accepts_what_the_interpreter_does(
    name: str, constants: dict[str, int], warps: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For Hopper GPUs, without one: logits and gradient move 16 bytes at a time."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from recipe_gkd.losses import triton_kernels

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = getattr(triton_kernels, name)
    types = {argument: "i32" for argument in kernel.arg_names}
    types |= {argument: "fp32" for argument in types if argument.endswith("temperature")}
    types |= {argument: "*fp32" for argument in types if argument in POINTERS}
    types |= {argument: kind for argument, kind in TYPES.items() if argument in types}
    types |= dict.fromkeys(constants, "constexpr")
    aligned = [n for n, (argument, kind) in enumerate(types.items()) if kind[0] == "*" or argument in ALIGNED]
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs={(kernel.arg_names.index(constant),): value for constant, value in constants.items()},
        attrs={(n,): [["tt.divisibility", 16]] for n in aligned},
    )
    options = {"num_warps": warps, "enable_fp_fusion": name not in ("find_special", "write_tails")}
    code = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ptx"]
    if name in ("sum_tails", "write_tails"):
        assert re.search(r"ld\.global\S*\.v4\.b32", code)
        assert "ld.global.b16" not in code
    if name == "write_tails":
        assert re.search(r"st\.global\S*\.v4\.b32", code)
        assert "fma." not in code


@no_gpu
@pytest.mark.gpu
@pytest.mark.parametrize("temperature", [1.0, 2.5])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [HALF, BRAIN, SINGLE])
def test_real_sizes_on_a_gpu(dtype: torch.dtype, kind: str, temperature: float) -> None:
    for shape in ({"rows": 300, "k": 64}, {"rows": 2, "k": 1024}, {"rows": 2, "k": QWEN["real_columns"]}):
        check(Case(**QWEN, **shape, dtype=dtype, kind=kind, temperature=temperature), "cuda")
    check(Case(rows=40, width=50257, real_columns=50257, dtype=dtype, kind=kind, temperature=temperature), "cuda")


@no_gpu
@pytest.mark.gpu
def test_more_than_two_to_the_31_logits_on_a_gpu() -> None:
    """In place, in bfloat16: the last positions are computed as if they were alone."""
    whole = make(Case(rows=16, k=64, dtype=BRAIN, temperature=2.0, **QWEN), "cuda")
    repeats = 900
    logits_CW = whole.logits_CW.repeat(repeats, 1)
    softmaxes = [
        replace(head, columns_TK=head.columns_TK.repeat(repeats, 1), own_TK=head.own_TK.repeat(repeats, 1))
        for head in whole.softmaxes
    ]
    backend = select_backend(logits_CW)
    sums_CH3 = backend.tail_sums(logits_CW, softmaxes, torch.float32)
    torch.testing.assert_close(sums_CH3[-16:].double(), whole.sums_CH3, rtol=5e-6, atol=1e-6)
    tensors = {name: value.repeat(repeats, 1) for name, value in vars(whole.wanted).items() if name != "heads"}
    backend.write_gradient(logits_CW, logits_CW, Backward(softmaxes=softmaxes, **tensors))
    expected = torch.empty_like(whole.logits_CW)
    backend.write_gradient(expected, whole.logits_CW, whole.wanted)
    for start in range(0, len(logits_CW), 16):
        assert torch.equal(logits_CW[start : start + 16], expected)

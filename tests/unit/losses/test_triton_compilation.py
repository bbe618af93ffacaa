"""The Triton kernels of the loss, compiled for the supported GPU architectures without a GPU."""

from __future__ import annotations

from typing import Any

import pytest

from tests._support.triton_compiler import TARGETS, CompiledKernel, KernelCompiler

pytest.importorskip("triton", reason="needs triton")

LANES = {"bf16": 8, "fp16": 8, "fp32": 4}
"""Logits of a 16-byte access."""
POINTERS = ("partials", "sums", "values", "max_logit", "grad_tail", "grad_slope", "grad_support", "grad_sampled")
TYPES = {"columns": "*i64", "is_local": "*u8", "sampled_columns": "*i64", "words": "*i32"}
TYPES |= dict.fromkeys(POINTERS, "*fp32") | dict.fromkeys(("inverse_temperature", "second_inverse_temperature"), "fp32")
ALIGNED = ("row_stride", "out_stride", "width", "columns_per_split")

Constants = dict[str, int]

KERNELS: list[tuple[str, Constants, int]] = [
    ("mark_support", {"BLOCK": 512}, 4),
    *(("sum_tails", {"N_SOFTMAXES": n, "HAS_SUPPORT": True, "BLOCK": 4096}, 8) for n in (1, 2)),
    *(("merge_splits", {"N_SOFTMAXES": n, "MAX_SPLITS": 64}, 1) for n in (1, 2)),
    *(
        (name, {"N_SOFTMAXES": n, "HAS_SLOPE": has_slope, "BLOCK": block}, num_warps)
        for name, block, num_warps in (("compute_id_gradients", 512, 4), ("write_tails", 4096, 8))
        for n in (1, 2)
        for has_slope in (False, True)
    ),
    ("write_id_gradients", {"BLOCK": 512}, 4),
    # A launch compiles a separate variant for an argument with the value 1. Without a support, the mask has one word.
    *(("sum_tails", {"N_SOFTMAXES": n, "HAS_SUPPORT": False, "BLOCK": 4096, "n_words": 1}, 8) for n in (1, 2)),
    ("sum_tails", {"N_SOFTMAXES": 2, "HAS_SUPPORT": True, "BLOCK": 4096, "real_columns": 1}, 8),
    ("mark_support", {"BLOCK": 512, "n_words": 1, "n_support": 1}, 4),
    ("merge_splits", {"N_SOFTMAXES": 2, "MAX_SPLITS": 64, "n_splits": 1}, 1),
    ("compute_id_gradients", {"N_SOFTMAXES": 2, "HAS_SLOPE": True, "BLOCK": 512, "n_support": 1}, 4),
    ("write_id_gradients", {"BLOCK": 512, "n_support": 1}, 4),
]
"""Names with constants and numbers of warps."""


def compile_kernel(
    compiler: KernelCompiler, kernel: tuple[str, Constants, int], capability: int, dtype: str, **changes: Any
) -> CompiledKernel:
    from recipe_gkd.losses import triton_kernels

    name, constants, num_warps = kernel
    arguments: dict[str, Any] = {
        "types": TYPES | dict.fromkeys(("logits", "out"), f"*{dtype}"),
        "constants": constants | ({"LANES": LANES[dtype]} if name == "sum_tails" else {}),
        "aligned": ALIGNED,
        "num_warps": num_warps,
        "enable_fp_fusion": name in ("mark_support", "sum_tails", "merge_splits"),
    }
    return compiler.compile(getattr(triton_kernels, name), capability=capability, **(arguments | changes))


@pytest.mark.parametrize(("capability", "dtype"), TARGETS)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: "-".join(map(str, (kernel[0], *kernel[1].values()))))
def test_kernel_compiles_with_16_byte_accesses_and_without_spills(
    compiler: KernelCompiler, kernel: tuple[str, Constants, int], capability: int, dtype: str
) -> None:
    compiled = compile_kernel(compiler, kernel, capability, dtype)
    name = kernel[0]
    assert compiled.spilled_bytes == 0
    if name in ("sum_tails", "write_tails"):
        assert compiled.reads(16)
        assert not compiled.reads(2)
    if name == "write_tails":
        assert compiled.writes(16)
        assert not compiled.writes(2)
    if name in ("compute_id_gradients", "write_tails"):
        assert "fma." not in compiled.ptx


@pytest.mark.parametrize(("capability", "dtype"), TARGETS)
@pytest.mark.parametrize("name", ["sum_tails", "write_tails"])
def test_kernel_compiles_for_odd_width_and_64_bit_stride(
    compiler: KernelCompiler, name: str, capability: int, dtype: str
) -> None:
    """A vocabulary of 50257 has unaligned rows; a launch passes a stride from 2^31 as a 64-bit number."""
    kernel = next(kernel for kernel in reversed(KERNELS) if kernel[0] == name)
    types = TYPES | dict.fromkeys(("logits", "out"), f"*{dtype}") | dict.fromkeys(("row_stride", "out_stride"), "i64")
    assert compile_kernel(compiler, kernel, capability, dtype, types=types, aligned=()).spilled_bytes == 0

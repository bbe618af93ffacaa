"""The Triton kernels of the loss with the blocks of a GPU and the sizes of real vocabularies, in the interpreter."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from tests._support.triton_interpreter import Run
from tests.unit.losses.kernel_cases import KINDS, Case, check_kernels

pytest.importorskip("triton", reason="needs triton")

HALF, BRAIN, SINGLE = torch.float16, torch.bfloat16, torch.float32
GPT2, QWEN, QWEN_SHARD = 50257, 151936, 75968  # the shard is that of 2 tensor-parallel ranks
BLOCK = 4096

CASES = {
    "one column less than a block": Case(width=BLOCK - 1, real_columns=BLOCK - 1, k=1, dtype=HALF),
    "one block": Case(width=BLOCK, real_columns=BLOCK, k=1024, dtype=BRAIN, temperature=0.3, has_slope=True),
    "one column more than a block": Case(width=BLOCK + 1, real_columns=BLOCK + 1, k=256, dtype=SINGLE),
    "one column more than two blocks": Case(width=2 * BLOCK + 1, real_columns=2 * BLOCK + 1, k=1024, temperature=2.5),
    "padding of one column": Case(width=2 * BLOCK, real_columns=2 * BLOCK - 1, k=17, dtype=BRAIN, temperature=2.5),
    "padding of one column after a block": Case(width=BLOCK + 1, real_columns=BLOCK, k=512, dtype=BRAIN),
    "padding from one column after a block": Case(width=3 * BLOCK, real_columns=BLOCK + 1, dtype=HALF, temperature=2.5),
    "two ids more than a block": Case(width=BLOCK + 1, real_columns=BLOCK, k=514, dtype=HALF, temperature=2.5),
    "GPT-2": Case(width=GPT2, real_columns=GPT2, k=17, dtype=HALF, temperature=2.5, has_slope=True),
    "GPT-2, no support": Case(width=GPT2, real_columns=GPT2, k=0, dtype=SINGLE, has_slope=True),
    "shard of Qwen": Case(width=QWEN_SHARD, real_columns=QWEN_SHARD, k=1024, dtype=BRAIN),
    "shard of Qwen, one padding column": Case(
        width=QWEN_SHARD, real_columns=QWEN_SHARD - 1, dtype=HALF, has_slope=True
    ),
    "shard of Qwen, half padding": Case(width=QWEN_SHARD, real_columns=QWEN_SHARD // 2, k=256, temperature=0.3),
    "shard of padding": Case(width=QWEN_SHARD, real_columns=0, k=17, dtype=BRAIN, temperature=2.5, has_slope=True),
    "shard after one of padding": Case(width=BLOCK + 1, real_columns=-QWEN_SHARD, k=256, temperature=2.5),
    "Qwen": Case(width=QWEN, real_columns=QWEN, k=256, dtype=BRAIN, temperature=2.5, has_slope=True),
    "Qwen, one position": Case(rows=1, width=QWEN, real_columns=QWEN - 1, k=1024, dtype=SINGLE, temperature=0.3),
}
LONG_CASES = ("one column less than a block", "Qwen", "shard of Qwen", "shard of Qwen, half padding")
EXTREME_SHAPES = (
    Case(rows=2, width=GPT2, real_columns=GPT2 - 1, k=256, dtype=BRAIN, temperature=0.3, has_slope=True),
    Case(rows=2, width=2 * BLOCK + 1, real_columns=2 * BLOCK, k=1024, dtype=HALF, temperature=2.5, has_slope=True),
    Case(rows=2, width=BLOCK, real_columns=BLOCK, k=0, dtype=SINGLE),
)


def sweep_case(seed: int) -> Case:
    """Return a random combination of sizes and logits."""
    choose = random.Random(seed).choice
    width = choose([1, 2, 31, 32, 33, 63, 100, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK + 1, GPT2, QWEN_SHARD, QWEN])
    real_columns = choose([width, width, width - 1, width // 2, 0, -5])
    return Case(
        rows=choose([1, 2, 3] if width > 2 * BLOCK + 1 else [1, 2, 3, 9]),
        width=width,
        real_columns=real_columns,
        k=min(choose([0, 1, 2, 17, 256, 1024]), real_columns if real_columns > 0 else 1024),
        dtype=choose([HALF, BRAIN, SINGLE]),
        temperature=choose([0.3, 1.0, 2.5]),
        has_slope=choose([False, True]),
        kind=choose(KINDS),
        seed=seed,
    )


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in LONG_CASES else ()) for name in CASES]
)
def test_sums_and_gradient_equal_dense_float64(interpreted: Run, name: str) -> None:
    interpreted(check_kernels, CASES[name])


@pytest.mark.parametrize("kind", KINDS[1:])
def test_extreme_logits_equal_dense_float64(interpreted: Run, kind: str) -> None:
    for shape in EXTREME_SHAPES:
        interpreted(check_kernels, replace(shape, kind=kind))


@pytest.mark.slow
@pytest.mark.parametrize("first_seed", range(0, 200, 20))
def test_random_cases_equal_dense_float64(interpreted: Run, first_seed: int) -> None:
    for seed in range(first_seed, first_seed + 20):
        case = sweep_case(seed)
        try:
            interpreted(check_kernels, case)
        except AssertionError as error:
            raise AssertionError(f"{case}") from error

"""Peak memory of a phase."""

from __future__ import annotations

import pytest
import torch

from recipe_gkd.runtime.phase_memory import peak_bytes, reset_peak

SIZE = 64 << 20


def test_peak_on_cpu_is_that_of_the_phase() -> None:
    reset_peak("cpu")
    before = peak_bytes("cpu")
    memory = bytearray(SIZE)
    del memory
    assert peak_bytes("cpu") >= before + SIZE * 0.9
    reset_peak("cpu")
    assert peak_bytes("cpu") < before + SIZE / 2


@pytest.mark.gpu
def test_peak_on_gpu_includes_memory_that_was_returned() -> None:
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    reset_peak("cuda")
    before = peak_bytes("cuda:0")
    memory = torch.empty(SIZE, dtype=torch.uint8, device="cuda")
    del memory
    torch.cuda.empty_cache()  # as when states of the actor leave
    assert peak_bytes("cuda") >= before + SIZE
    reset_peak("cuda")
    assert peak_bytes("cuda") < before + SIZE

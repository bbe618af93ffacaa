"""Output layer with float32 logits from 16-bit weights: exactness, gradients, and the use of memory."""

from __future__ import annotations

import pytest
import torch

from recipe_gkd.losses import float32_head
from recipe_gkd.losses.float32_head import float32_logits, matmul_float32, round_in_place


def inputs(n: int = 9, width: int = 33, d: int = 16) -> tuple[torch.Tensor, torch.Tensor]:
    """Return hidden states and weights in bfloat16 whose logits are about 20, where bfloat16 has steps of 1/8."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(n, d, generator=generator) * 5
    weight = torch.randn(width, d, generator=generator)
    return hidden.bfloat16().requires_grad_(), weight.bfloat16().requires_grad_()


class TestMatmulFloat32:
    def test_matmul_16_bit_inputs_has_no_rounding_of_the_logits(self) -> None:
        hidden, weight = inputs()
        exact = hidden.detach().double() @ weight.detach().double().T
        logits = matmul_float32(hidden.detach(), weight.detach())
        assert logits.dtype == torch.float32
        assert (logits - exact).abs().max() < 1e-5
        assert ((hidden @ weight.T).double() - exact).abs().max() > 1e-2

    def test_matmul_weight_larger_than_a_block_equals_one_product(self, monkeypatch: pytest.MonkeyPatch) -> None:
        hidden, weight = (x.detach() for x in inputs())
        expected = matmul_float32(hidden, weight)
        monkeypatch.setattr(float32_head, "_CPU_BLOCK_ELEMENTS", 7 * 16)
        torch.testing.assert_close(matmul_float32(hidden, weight), expected)
        out = torch.empty_like(expected)
        assert matmul_float32(hidden, weight, out) is out
        torch.testing.assert_close(out, expected)


class TestRoundInPlace:
    @pytest.mark.parametrize("n_rows", [0, 1, 2, 3, 8, 13])
    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_round_in_place_equals_conversion_in_the_same_memory(self, n_rows: int, dtype: torch.dtype) -> None:
        values = torch.randn(n_rows, 5)
        expected, pointer = values.to(dtype), values.data_ptr()
        rounded = round_in_place(values, dtype)
        assert rounded.data_ptr() == pointer
        torch.testing.assert_close(rounded, expected, rtol=0, atol=0)


class TestFloat32Logits:
    def test_gradients_are_those_of_float64_up_to_one_rounding(self) -> None:
        hidden, weight = inputs()
        grad = torch.randn(9, 33)
        reference = [x.detach().double().requires_grad_() for x in (hidden, weight)]
        (reference[0] @ reference[1].T).backward(grad.double())
        float32_logits(hidden, weight).backward(grad.clone())
        for got, expected in zip((hidden, weight), reference, strict=True):
            assert got.grad is not None and expected.grad is not None and got.grad.dtype == torch.bfloat16
            error = (got.grad.double() - expected.grad).norm() / expected.grad.norm()
            assert error < 2**-8

    def test_log_probability_error_is_far_below_that_of_a_16_bit_head(self) -> None:
        hidden, weight = inputs(n=64, width=512)
        exact = (hidden.detach().double() @ weight.detach().double().T).log_softmax(1)
        float32_error = (float32_logits(hidden, weight).log_softmax(1) - exact).abs().max()
        bfloat16_error = ((hidden @ weight.T).float().log_softmax(1) - exact).abs().max()
        assert float32_error < 1e-4 * bfloat16_error

    def test_float32_model_equals_plain_product(self) -> None:
        hidden, weight = (x.detach().float().requires_grad_() for x in inputs())
        float32_logits(hidden, weight).square().sum().backward()
        got = [x.grad.clone() for x in (hidden, weight) if x.grad is not None]
        hidden.grad = weight.grad = None
        (hidden @ weight.T).square().sum().backward()
        assert len(got) == 2
        torch.testing.assert_close(got, [hidden.grad, weight.grad])


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_matmul_float32_on_cuda_equals_float64() -> None:
    hidden, weight = (x.detach().cuda() for x in inputs(n=64, width=512))
    exact = hidden.double() @ weight.double().T
    out = torch.empty(64, 512, device="cuda")
    assert (matmul_float32(hidden, weight, out) - exact).abs().max() < 1e-3

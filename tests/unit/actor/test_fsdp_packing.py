"""Several sequences in one forward pass of a model of transformers: the results are those of each sequence alone."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache, wraps
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from recipe_gkd.actor import stored_scores
from recipe_gkd.actor.attention_kernels import AttentionKernel
from recipe_gkd.actor.batch.device_batch import DeviceBatch, to_device
from recipe_gkd.actor.batch.packing import pack
from recipe_gkd.actor.batch.staging import stage
from recipe_gkd.actor.fsdp import packed_attention, style_check
from recipe_gkd.actor.fsdp.packed_attention import AttentionUse, attending
from recipe_gkd.actor.fsdp.packing import RowStyle, model_input
from recipe_gkd.actor.fsdp.style_check import StyleChoice, choose_style
from recipe_gkd.commands.gpu_smoke.tiny_models import make_sample
from recipe_gkd.errors import ModelError
from tests._support.causal_models import random_causal_lm
from tests._support.errors import raises

CPU, SINGLE = torch.device("cpu"), torch.float32
PACKED, PADDED = RowStyle.PACKED, RowStyle.PADDED
BLOCKS = AttentionKernel.SDPA_BLOCKS
VOCAB = 61
WINDOW = 4
LENGTHS = {"ragged": [7, 3, 12, 5, 1], "uniform": [9, 9, 9], "short": [3, 2, 3]}
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "initializer_range": 0.3,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
GROUPED: dict[str, Any] = SMALL | {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.3}
MISTRAL = GROUPED | {"sliding_window": WINDOW}
SWITCHED_WINDOW = MISTRAL | {"use_sliding_window": True, "max_window_layers": 1}
ALIBI = {"vocab_size": VOCAB, "hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3}
OPT = SMALL | {"ffn_dim": 48, "word_embed_proj_dim": 32, "init_std": 0.3, "max_position_embeddings": 64}
GEMMA2 = GROUPED | {"sliding_window": WINDOW, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8}
CHUNKED = GROUPED | {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": WINDOW}
MODELS: dict[str, tuple[str, dict[str, Any], RowStyle]] = {
    "gpt2": ("GPT2LMHeadModel", GPT2, PACKED),
    "opt": ("OPTForCausalLM", OPT, PACKED),
    "phi": ("PhiForCausalLM", SMALL | {"intermediate_size": 48}, PACKED),
    "gemma": ("GemmaForCausalLM", GROUPED, PACKED),
    "gemma2": ("Gemma2ForCausalLM", GEMMA2, PACKED),
    "mistral": ("MistralForCausalLM", MISTRAL, PACKED),
    "olmo2": ("Olmo2ForCausalLM", GROUPED, PACKED),
    "qwen2": ("Qwen2ForCausalLM", SWITCHED_WINDOW, PACKED),
    "llama": ("LlamaForCausalLM", GROUPED, PACKED),
    "gpt_oss": ("GptOssForCausalLM", MISTRAL | {"num_local_experts": 2, "num_experts_per_tok": 1}, PACKED),
    "bloom": ("BloomForCausalLM", ALIBI, PADDED),
    "falcon": ("FalconForCausalLM", SMALL | {"alibi": True}, PADDED),
    "llama4": ("Llama4ForCausalLM", CHUNKED, PADDED),
    "lfm2": ("Lfm2ForCausalLM", GROUPED | {"layer_types": ["conv", "full_attention"]}, PADDED),
}


def fresh(name: str, **more: Any) -> Any:
    """Return a random model."""
    class_name, options, _ = MODELS[name]
    return random_causal_lm(class_name, options | more)


@cache
def tiny_model(name: str) -> tuple[Any, StyleChoice]:
    """Return a random model after :func:`choose_style`."""
    model = fresh(name)
    return model, choose_style(model, device=CPU, dtype=SINGLE)


def make_batch(lengths: list[int], kernel: AttentionKernel = BLOCKS, device: torch.device = CPU) -> DeviceBatch:
    """Return a micro-batch of sequences of the given lengths, whose first token is the prompt."""
    random = np.random.default_rng(0)
    samples = []
    for uid, length in enumerate(lengths):
        ids = random.integers(3, VOCAB, length + 1)
        samples.append(make_sample(uid, ids[:1], ids[1:], np.zeros((length, 0)), np.zeros((length, 0))))
    return to_device(stage(pack(samples, with_teacher=False), {}, device, attention=kernel), device)


def together(model: Any, batch: DeviceBatch, choice: StyleChoice) -> tuple[Tensor, list[Tensor]]:
    """Return the logits of all rows with a loss, and the gradients of a function of them."""
    given = model_input(batch, choice.style)
    with attending(batch.row, choice.kernel):
        logits = model(**given.inputs).logits.flatten(0, 1)[given.rows_T]
        return logits, gradients_of(model, logits)


def one_by_one(model: Any, batch: DeviceBatch) -> tuple[Tensor, list[Tensor]]:
    """Return the same, computed with each sequence alone and the attention of transformers."""
    before = model.config._attn_implementation
    if before.startswith("recipe_gkd"):
        model.set_attn_implementation("eager")
    ids = batch.token_ids_1N[0].split(np.diff(batch.row.boundaries.cpu()).tolist())
    logits = torch.cat([model(input_ids=each[None], use_cache=False).logits[0] for each in ids])
    gradients = gradients_of(model, logits)
    model.set_attn_implementation(before)
    return logits, gradients


def gradients_of(model: Any, logits: Tensor) -> list[Tensor]:
    slopes = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1)).to(logits)
    gradients = torch.autograd.grad((logits * slopes).sum(), list(model.parameters()), allow_unused=True)
    return [each for each in gradients if each is not None]


def assert_equal(values: Tensor, wanted: Tensor, tolerance: float = 1e-5, *, least: float = 0.0) -> None:
    """Compare relative to the largest value, or to ``least`` if all are smaller."""
    torch.testing.assert_close(values, wanted, rtol=0, atol=tolerance * max(least, float(wanted.detach().abs().max())))


def assert_same_gradients(gradients: list[Tensor], wanted: list[Tensor], tolerance: float = 1e-5) -> None:
    """Compare each relative to its largest value. The gradient of the bias of keys is 0 in exact arithmetic."""
    assert len(gradients) == len(wanted) > 2
    largest = max(float(each.abs().max()) for each in wanted)
    for one, other in zip(gradients, wanted, strict=True):
        assert_equal(one, other, tolerance, least=0.1 * largest)


class TestModelInput:
    @pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
    @pytest.mark.parametrize("name", MODELS)
    def test_model_on_micro_batch_equals_each_sequence_alone(self, name: str, lengths: list[int]) -> None:
        """Logits and gradients. The window of the models that have one is shorter than most sequences."""
        model, choice = tiny_model(name)
        batch = make_batch(lengths)
        logits, gradients = together(model, batch, choice)
        wanted, exact = one_by_one(model, batch)
        assert_equal(logits, wanted)
        assert_same_gradients(gradients, exact)

    @pytest.mark.parametrize("style", RowStyle)
    def test_model_input_of_empty_micro_batch_has_a_row_without_loss(self, style: RowStyle) -> None:
        batch = to_device(stage(pack([], with_teacher=False), {}, CPU), CPU)
        given = model_input(batch, style)
        assert given.inputs["input_ids"].shape == (1, 1) and given.rows_T.shape == (0,)
        model, _ = tiny_model("llama")
        with attending(batch.row, BLOCKS):
            model(**given.inputs).logits[:, given.rows_T].sum().backward()

    def test_padded_input_has_sequences_on_the_left(self) -> None:
        batch = make_batch([3, 1])
        given = model_input(batch, PADDED)
        first, second = batch.token_ids_1N[0].split([3, 1])
        assert given.inputs["input_ids"].tolist() == [first.tolist(), [*second.tolist(), 0, 0]]
        assert given.rows_T.tolist() == [0, 1, 2, 3]


class TestPackedAttention:
    def test_backward_pass_in_another_thread_computes_checkpointed_attention_again(self) -> None:
        """The autograd engine of a GPU has its own threads, which have no context variables of the caller."""
        model, choice = tiny_model("gemma2")
        batch = make_batch(LENGTHS["ragged"])
        arguments = model_input(batch, PACKED).inputs
        with attending(batch.row, BLOCKS), ThreadPoolExecutor(1) as thread:
            logits = checkpoint(lambda: model(**arguments).logits[0], use_reentrant=False)
            gradients = thread.submit(gradients_of, model, logits).result(timeout=60)
        assert_same_gradients(gradients, together(model, batch, choice)[1])

    def test_scores_in_parts_equal_all_at_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, choice = tiny_model("gemma2")
        batch = make_batch(LENGTHS["ragged"])
        whole = together(model, batch, choice)
        monkeypatch.setattr(stored_scores, "MAX_SCORES", 100)
        parts = together(model, batch, choice)
        assert_equal(parts[0], whole[0])
        assert_same_gradients(parts[1], whole[1])

    def test_packed_attention_outside_of_its_context_is_an_error(self) -> None:
        model, _ = tiny_model("llama")
        with pytest.raises(RuntimeError, match="attending"):
            model(**model_input(make_batch([3]), PACKED).inputs)

    @pytest.mark.parametrize(
        "option",
        [{"position_bias": torch.zeros(1)}, {"is_causal": False}, {"cache": object()}],
        ids=lambda option: next(iter(option)),
    )
    def test_unsupported_option_is_refused_with_its_name(self, option: dict[str, Any]) -> None:
        heads = torch.zeros(1, 2, 3, 8)
        with attending(make_batch([3]).row, BLOCKS), raises(ModelError) as caught:
            packed_attention.packed_attention(torch.nn.Identity(), heads, heads, heads, None, **option)
        [name] = caught.value.names
        assert name.split("=")[0] == next(iter(option))

    def test_own_mask_of_the_model_is_refused(self) -> None:
        heads = torch.zeros(1, 2, 3, 8)
        with attending(make_batch([3]).row, BLOCKS), raises(ModelError, names=("attention_mask",)):
            packed_attention.packed_attention(torch.nn.Identity(), heads, heads, heads, torch.zeros(1, 1, 3, 3))

    def test_varlen_receives_window_and_values_as_wide_as_queries(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel is torch's, on the device "meta"."""
        import torch.nn.attention.varlen as varlen

        calls: list[tuple[Any, ...]] = []
        original = varlen.varlen_attn

        @wraps(original)
        def record(*arguments: Any, **options: Any) -> Any:
            calls.append((arguments, options))
            return original(*arguments, **options)

        monkeypatch.setattr(varlen, "varlen_attn", record)
        query, key, value = (
            torch.empty(1, n, 8, width, dtype=torch.bfloat16, device="meta") for n, width in ((4, 24), (2, 24), (2, 16))
        )
        row = make_batch([5, 3], AttentionKernel.VARLEN).row
        with attending(row, AttentionKernel.VARLEN):
            output, _ = packed_attention.packed_attention(
                torch.nn.Identity(), query, key, value, None, scaling=0.5, sliding_window=WINDOW
            )
        assert output.shape == (1, 8, 4, 16)
        [((_, _, values, *_), options)] = calls
        assert values.shape == (8, 2, 24)
        assert options == {"scale": 0.5, "window_size": (WINDOW - 1, 0), "enable_gqa": True}


class TestChooseStyle:
    @pytest.mark.parametrize("name", MODELS)
    def test_choice_of_architecture(self, name: str) -> None:
        model, choice = tiny_model(name)
        assert choice.style is MODELS[name][2], choice
        assert (model.config._attn_implementation == packed_attention.PACKED_ATTENTION) == (choice.style is PACKED)
        assert choice.kernel is BLOCKS and len(choice.warnings) == (choice.style is PADDED)

    @pytest.mark.parametrize(
        ("name", "reason"),
        [("bloom", "do not use the attention functions"), ("llama4", "distances"), ("lfm2", "after another one")],
    )
    def test_warning_names_the_reason_for_padding(self, name: str, reason: str) -> None:
        [warning] = tiny_model(name)[1].warnings
        assert MODELS[name][0] in warning and reason in warning

    @pytest.mark.parametrize("dtype", [SINGLE, torch.bfloat16])
    def test_layers_that_mix_all_tokens_are_refused(self, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
        model = fresh("llama").to(dtype)
        layer = model.model.layers[0].mlp
        monkeypatch.setattr(layer, "forward", lambda x: x - x.mean(dim=(0, 1), keepdim=True))
        with raises(ModelError) as caught:
            choose_style(model, device=CPU, dtype=dtype)
        forms = [line.split(":")[0] for line in caught.value.details]
        assert (forms[0], forms[-1]) == (PACKED.value, f"{PADDED.value} (eager)")

    @pytest.mark.parametrize(
        ("name", "options", "style"),
        [("mistral", {"sliding_window": 4096}, PACKED), ("llama4", {"attention_chunk_size": 4096}, PADDED)],
    )
    def test_mask_at_distances_beyond_the_check_is_recognized(
        self, name: str, options: dict[str, Any], style: RowStyle
    ) -> None:
        assert choose_style(fresh(name, **options), device=CPU, dtype=SINGLE).style is style

    def test_layers_that_raise_an_error_for_packed_rows_get_padded_ones(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def fail(*_: Any, **__: Any) -> None:
            raise KeyError("alibi")

        monkeypatch.setattr(packed_attention, "attend", fail)
        model = fresh("llama")
        choice = choose_style(model, device=CPU, dtype=SINGLE)
        assert choice.style is PADDED and "KeyError: 'alibi'" in choice.warnings[0]
        assert model.config._attn_implementation == "sdpa"

    def test_all_ranks_compute_the_same_rows_and_choose_the_same(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A rank that finds a difference first completes the forward passes, which are collective."""
        n_rows: list[list[int]] = []
        for is_wrong in (False, True):
            model = fresh("llama")
            rows: list[int] = []
            model.register_forward_pre_hook(lambda *_, rows=rows: rows.append(1))

            def agree(failed: Tensor, _: Any, rows: list[int] = rows) -> None:
                """Take the part of the all-reduce among two ranks. Packed rows fail on one of them."""
                n_rows.append(rows.copy())
                failed.fill_(len(rows) == 5 or 0)

            with monkeypatch.context() as patch:
                patch.setattr(torch.distributed, "is_initialized", lambda: True)
                patch.setattr(torch.distributed, "all_reduce", agree)
                if is_wrong:
                    patch.setattr(packed_attention, "attend", lambda kernel, query, *_: query + 1)
                assert choose_style(model, device=CPU, dtype=SINGLE).style is PADDED
        assert n_rows[:3] == n_rows[3:]

    @pytest.mark.parametrize(
        ("head_dims", "options", "kernel"),
        [
            ({128}, set(), AttentionKernel.VARLEN),
            ({128, 512}, set(), BLOCKS),
            ({128, 20}, set(), BLOCKS),
            ({128}, {"softcap"}, BLOCKS),
            ({128}, {"s_aux"}, BLOCKS),
        ],
    )
    def test_kernel_on_gpu_supports_all_layers(
        self, head_dims: set[int], options: set[str], kernel: AttentionKernel
    ) -> None:
        use = AttentionUse(head_dims=head_dims, windows={WINDOW}, options=options)
        assert style_check._choose_kernel(use, (9, 0), torch.bfloat16) is kernel

    def test_infinite_logits_are_an_error_about_the_weights(self) -> None:
        model = fresh("llama")
        with torch.no_grad():
            model.lm_head.weight[0, 0] = torch.inf
        with raises(ModelError, details=()):
            choose_style(model, device=CPU, dtype=SINGLE)

    @pytest.mark.parametrize("kind", ["dynamic", "longrope"])
    def test_frequencies_that_depend_on_the_micro_batch_are_reported(self, kind: str) -> None:
        factors = {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4, "original_max_position_embeddings": 32}
        rope = {"rope_type": kind, "rope_theta": 1e4, "factor": 2.0} | (factors if kind == "longrope" else {})
        [warning] = choose_style(fresh("llama", rope_parameters=rope), device=CPU, dtype=SINGLE).warnings
        assert f"rope_type={kind}" in warning

    def test_half_precision_is_packed(self) -> None:
        model = fresh("llama").to(torch.bfloat16)
        assert choose_style(model, device=CPU, dtype=torch.bfloat16).style is PACKED


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
class TestOnGpu:
    @pytest.mark.parametrize(
        ("name", "kernel"), [("mistral", AttentionKernel.VARLEN), ("qwen2", AttentionKernel.VARLEN), ("gemma2", BLOCKS)]
    )
    def test_packed_bfloat16_equals_each_sequence_alone(self, name: str, kernel: AttentionKernel) -> None:
        device = torch.device("cuda")
        model = fresh(name).to(device, torch.bfloat16)
        choice = choose_style(model, device=device, dtype=torch.bfloat16)
        assert (choice.style, choice.kernel) == (PACKED, kernel)
        batch = make_batch(LENGTHS["ragged"], kernel, device)
        logits, _ = together(model, batch, choice)
        assert_equal(logits, one_by_one(model, batch)[0], 5e-2)

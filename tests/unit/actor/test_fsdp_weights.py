"""Names and tensors that the FSDP backend exports."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from recipe_gkd.actor.fsdp.folder_tensors import StoredTensor, stored_tensors
from recipe_gkd.actor.fsdp.weights import export_weights, weights_meta
from recipe_gkd.errors import ModelError
from teacher.common.weight_files import weight_shapes
from tests._support.causal_models import random_causal_lm
from tests._support.errors import raises

SIZES: dict[str, Any] = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 16,
}  # fmt: skip
TIED_LLAMA = SIZES | {"tie_word_embeddings": True}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 1, "n_head": 4, "n_positions": 16}
EXPERTS = SIZES | {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
BUFFER = "model.layers.0.mlp.act_fn.beta"
"""Persistent buffer of Apertus."""


def saved(folder: Path, class_name: str, options: dict[str, Any], change: Callable[[str], str | None] = str) -> Any:
    """Return a model that was loaded from ``folder``, after its tensors were renamed there, or removed for None."""
    random_causal_lm(class_name, options).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    renamed = {change(name): tensor for name, tensor in state.items()}
    save_file({name: tensor for name, tensor in renamed.items() if name is not None}, folder / "model.safetensors")
    return getattr(transformers, class_name).from_pretrained(folder)


def stored(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "model.safetensors")


def forms_of(model: Any, folder: Path) -> dict[str, StoredTensor]:
    return stored_tensors(model, folder, weight_shapes(folder))


@pytest.mark.parametrize(
    ("class_name", "options", "change", "name", "exported"),
    [
        ("LlamaForCausalLM", SIZES, str, "lm_head.weight", "lm_head.weight"),
        ("GPTNeoXForCausalLM", SIZES, str, "lm_head.weight", "embed_out.weight"),
        (
            "GPT2LMHeadModel", GPT2, lambda name: name.removeprefix("transformer."),
            "transformer.h.0.ln_1.bias", "h.0.ln_1.bias",
        ),
        (
            "LlamaForCausalLM", TIED_LLAMA, lambda name: name.replace("model.embed_tokens", "lm_head"),
            "lm_head.weight", "lm_head.weight",
        ),
        ("ApertusForCausalLM", SIZES, str, BUFFER, BUFFER),
    ],
    ids=["same names", "other name", "without the prefix", "tied, only the head is stored", "with a buffer"],
)  # fmt: skip
def test_export_has_the_tensors_of_the_folder(
    class_name: str,
    options: dict[str, Any],
    change: Callable[[str], str | None],
    name: str,
    exported: str,
    tmp_path: Path,
) -> None:
    model = saved(tmp_path, class_name, options, change)
    forms = forms_of(model, tmp_path)
    assert list(forms[name].shapes) == [exported]
    found = dict(export_weights(model, forms, torch.float32, is_first_rank=True))
    assert found.keys() == stored(tmp_path).keys()
    for key, tensor in stored(tmp_path).items():
        assert torch.equal(found[key], tensor), key
    meta = [entry for tensors in weights_meta(model, forms, torch.bfloat16) for entry in tensors]
    assert [(key, tuple(tensor.shape)) for key, tensor in found.items()] == [entry[:2] for entry in meta]
    buffers = dict(model.named_buffers()).keys() & found.keys()
    assert {key for key, _, dtype in meta if dtype == "float32"} == buffers and bool(buffers) == (name == BUFFER)
    assert {dtype for key, _, dtype in meta if key not in buffers} == {"bfloat16"}
    halves = dict(export_weights(model, forms, torch.bfloat16, is_first_rank=True))
    assert [str(halves[key].dtype) for key, *_ in meta] == [f"torch.{dtype}" for *_, dtype in meta]


def test_joined_experts_are_exported_one_by_one(tmp_path: Path) -> None:
    model = saved(tmp_path, "MixtralForCausalLM", EXPERTS)
    forms = forms_of(model, tmp_path)
    form = forms["model.layers.1.mlp.experts.gate_up_proj"]
    assert form.is_joined and len(form.shapes) == 2 * EXPERTS["num_local_experts"]
    found = dict(export_weights(model, forms, torch.float32, is_first_rank=True))
    assert found.keys() == stored(tmp_path).keys()
    for key, tensor in stored(tmp_path).items():
        assert torch.equal(found[key], tensor) and found[key].is_contiguous(), key
    assert list(export_weights(model, forms, torch.float32, is_first_rank=False)) == []
    groups = weights_meta(model, forms, torch.bfloat16)
    assert [entry[:2] for entries in groups for entry in entries] == [(k, tuple(t.shape)) for k, t in found.items()]
    for first, group in enumerate(groups):
        part = dict(export_weights(model, forms, torch.bfloat16, is_first_rank=True, first=first, last=first + 1))
        assert list(part) == [name for name, *_ in group]


def test_experts_that_are_joined_in_the_folder_are_exported_joined(tmp_path: Path) -> None:
    random_causal_lm("MixtralForCausalLM", EXPERTS).save_pretrained(tmp_path, save_original_format=False)
    model = transformers.MixtralForCausalLM.from_pretrained(tmp_path)
    found = dict(export_weights(model, forms_of(model, tmp_path), torch.float32, is_first_rank=True))
    assert "model.layers.1.mlp.experts.gate_up_proj" in found and found.keys() == stored(tmp_path).keys()


def test_folder_that_lacks_an_expert_is_refused(tmp_path: Path) -> None:
    lacking = "model.layers.1.block_sparse_moe.experts.3.w2.weight"
    random_causal_lm("MixtralForCausalLM", EXPERTS).save_pretrained(tmp_path)
    state = stored(tmp_path)
    del state[lacking]
    save_file(state, tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = random_causal_lm("MixtralForCausalLM", EXPERTS)
    with raises(ModelError, names=("model.layers.1.mlp.experts.down_proj",)) as caught:
        forms_of(model, tmp_path)
    assert lacking in str(caught.value)


def test_buffer_that_is_not_stored_is_not_exported(tmp_path: Path) -> None:
    model = saved(tmp_path, "ApertusForCausalLM", SIZES, lambda name: None if name == BUFFER else name)
    assert BUFFER in model.state_dict() and BUFFER not in forms_of(model, tmp_path)


def test_folder_that_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    """Without this check, transformers warns, and gives the weight random values."""
    model = saved(tmp_path, "LlamaForCausalLM", SIZES, lambda name: None if name == "model.norm.weight" else name)
    with raises(ModelError, path=tmp_path, names=("model.norm.weight",)):
        forms_of(model, tmp_path)

"""Replaced functions of vLLM, with vLLM's own classes around them."""

from __future__ import annotations

import ast
import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode


class LayerWithBuffer(nn.Module):
    """Layer with a parameter that a checkpoint has, and a persistent buffer that it may not have."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4), requires_grad=False)
        self.register_buffer("slope", torch.tensor([3.0, 5.0]))


@pytest.fixture
def filled_memory() -> Any:
    """Let torch fill new memory with NaN, so that values that were never set are visible."""
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.usefixtures("filled_memory")
@pytest.mark.parametrize("loaded", [[3.0, 5.0], [7.0, 8.0]], ids=["not loaded", "loaded"])
def test_reload_keeps_persistent_buffer_unless_it_is_loaded(loaded: list[float]) -> None:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    from recipe_gkd.rollout.vllm.compat import finalize_layerwise_reload, initialize_layerwise_reload

    model = nn.Sequential(LayerWithBuffer())
    record_metadata_for_reloading(model)
    layer: Any = model[0]
    addresses = layer.weight.data_ptr(), layer.slope.data_ptr()
    initialize_layerwise_reload(model)
    layer.weight.weight_loader(layer.weight, torch.ones(4))
    if loaded != [3.0, 5.0]:
        layer.slope.weight_loader(layer.slope, torch.tensor(loaded))
    finalize_layerwise_reload(model, None)
    assert layer.weight.tolist() == [1.0] * 4 and layer.slope.tolist() == loaded
    assert (layer.weight.data_ptr(), layer.slope.data_ptr()) == addresses


class _Sizes(TorchDispatchMode):
    """Number of elements of the largest tensor that an operation returned."""

    largest = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.largest = max(self.largest, found.numel())
        return found


@pytest.mark.parametrize("adapters", [[1] * 6, [1, 0, 1, 1, 0, 1], [1]], ids=["one adapter", "two", "one token"])
def test_tokens_of_one_adapter_do_not_copy_it(adapters: list[int]) -> None:
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu

    import recipe_gkd.rollout.vllm.compat  # noqa: F401 - applies the patches

    assert punica_cpu.bgmv_shrink is lora_ops.bgmv_shrink and punica_cpu.bgmv_expand is lora_ops.bgmv_expand
    n_tokens, chosen = len(adapters), torch.tensor(adapters)
    a_RI, b_OR, inputs = torch.randn(2, 1, 4, 32), torch.randn(2, 1, 24, 4), torch.randn(n_tokens, 32)
    shrunk, expanded, base = torch.zeros(n_tokens, 4), torch.zeros(n_tokens, 24), torch.randn(n_tokens, 40)
    sliced, lengths = base.clone(), torch.ones(n_tokens, dtype=torch.long)
    metadata = (lengths, lengths, chosen, n_tokens, 1, n_tokens)
    with _Sizes() as sizes:
        lora_ops.sgmv_shrink(inputs, a_RI, shrunk, *metadata, 0.5)
        lora_ops.bgmv_expand(shrunk, b_OR, expanded, chosen, add_inputs=False)
        lora_ops.bgmv_expand_slice(shrunk, b_OR, sliced, chosen, 8, 24, add_inputs=True)
    expected = torch.stack([0.5 * b_OR[i, 0] @ (a_RI[i, 0] @ row) for i, row in zip(adapters, inputs, strict=True)])
    torch.testing.assert_close(expanded, expected)
    torch.testing.assert_close(sliced[:, 8:32] - base[:, 8:32], expected)
    assert torch.equal(sliced[:, 32:], base[:, 32:])
    if len(set(adapters)) == 1:
        assert sizes.largest <= max(a_RI.numel(), base.numel())


def test_compile_cache_is_complete_whenever_another_process_reads_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import recipe_gkd.rollout.vllm.compat as vllm

    manager: Any = object.__new__(vllm.CompilerManager)
    file = tmp_path / "vllm_compile_cache.py"
    manager.disable_cache, manager.is_cache_updated, manager.cache_file_path = False, True, str(file)
    manager.cache = {(1, 0, "inductor"): {"graph_handle": ("a", "b"), "cache_key": "c"}}
    manager.save_to_file()
    first = ast.literal_eval(file.read_text())
    assert first == manager.cache

    read, opened = [], builtins.open

    def open_and_read(path: Any, *args: Any, **named: Any) -> Any:
        stream = opened(path, *args, **named)  # mode "w" has emptied the file that vLLM writes
        read.append(ast.literal_eval(file.read_text()))
        return stream

    manager.cache |= {(2, 0, "inductor"): {"graph_handle": ("d", "e"), "cache_key": "f"}}
    with monkeypatch.context() as patched:
        patched.setattr(builtins, "open", open_and_read)
        manager.save_to_file()
    assert read == [first] and ast.literal_eval(file.read_text()) == manager.cache
    assert manager.cache_file_path == str(file) and list(tmp_path.iterdir()) == [file]

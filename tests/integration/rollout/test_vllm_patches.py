"""Replaced functions of vLLM, with vLLM's own classes around them."""

from __future__ import annotations

import ast
import builtins
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn


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

"""VllmEngine on a GPU: steps of several chunks in vLLM's V2 runner, float32 logits from bfloat16 weights, sleep."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from recipe_gkd.commands.gpu_smoke.reference import response_logits
from tests._support.qwen2 import random_qwen2, save_word_tokenizer
from tests._support.teacher_service import REPO
from tests._support.waiting import PATIENCE_S
from tests.integration.teacher.engine_script import DISCARDED, N_TOKENS, VOCAB_SIZE
from tests.integration.teacher.gpu_engine_script import LONG

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]


def run_script(name: str, folder: Path) -> tuple[torch.nn.Module, dict[str, np.ndarray]]:
    """Run a script on a random model in a separate process. Return the model and the arrays that it has written."""
    model = random_qwen2(seed=0, vocab_size=VOCAB_SIZE, max_position_embeddings=1024, hidden_size=128)
    model_folder, out = folder / "model", folder / "found.npz"
    model.save_pretrained(model_folder)
    save_word_tokenizer(model_folder, [f"t{i}" for i in range(3, N_TOKENS)])
    command = [sys.executable, "-m", f"tests.integration.teacher.{name}", str(model_folder), str(out)]
    environment = os.environ | {"PYTHONPATH": str(REPO)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return model, dict(np.load(out))


def test_engine_on_gpu_returns_float32_scores_of_all_chunks(tmp_path: Path) -> None:
    model, scored = run_script("gpu_engine_script", tmp_path)
    assert scored["model/dtype"] == "torch.bfloat16" and scored["model/error"] > 1e-2
    assert scored["auto/dtype"] == "torch.float32" and scored["auto/error"] < 1e-3
    for key in set(range(len(LONG))) - {DISCARDED}:
        with torch.no_grad():
            logits_TV = response_logits(model, LONG[key].token_ids, LONG[key].prompt_len)[:, :N_TOKENS]
        logps_TV = logits_TV.double().log_softmax(-1).numpy()
        ids_TK = scored[f"auto/{key}/topk_ids_TK"]
        error_TK = np.abs(scored[f"auto/{key}/topk_logps_TK"] - np.take_along_axis(logps_TV, ids_TK, 1))
        assert error_TK.mean() < 0.05, "expected the rounding errors of bfloat16 layers"


def test_engine_on_gpu_releases_its_memory_and_is_verified(tmp_path: Path) -> None:
    _, found = run_script("gpu_sleep_script", tmp_path)
    assert found["released"] > 0.9 * found["kv cache"], "expected the memory of the KV cache"
    assert abs(found["restored"] - found["released"]) < 0.1 * found["kv cache"]
    for name in [name for name in found if name.startswith("before/")]:
        np.testing.assert_allclose(found[name.replace("before/", "after/")], found[name], atol=0.05)
    error = json.loads(str(found["wake error"]))
    assert error["type"] == "TeacherModelDamaged" and error["tensors"]

"""Maximum length of a teacher's sequences, by the rule of the installed vLLM."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from teacher.engines.base import EngineConfig
from teacher.engines.vllm_internals import plan_engine
from teacher.errors import TeacherSetupError
from tests._support.errors import raises

LONGEST, WITHOUT_REQUEST = 131_072, 4096


@pytest.fixture
def long_rope_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the configuration of a model like Phi-3 with 128k tokens."""
    monkeypatch.setenv("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "0")
    factors = [1.0] * 24
    config = {
        "architectures": ["Phi3ForCausalLM"],
        "model_type": "phi3",
        "vocab_size": 32064,
        "hidden_size": 96,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": LONGEST,
        "original_max_position_embeddings": WITHOUT_REQUEST,
        "torch_dtype": "bfloat16",
        "rope_scaling": {"type": "longrope", "short_factor": factors, "long_factor": factors},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def engine_length(folder: Path, requested: int) -> int:
    """Return the longest sequence of the engine for a teacher with this ``MAX_MODEL_LEN``."""
    args, _, _ = plan_engine(EngineConfig(str(folder), 256, max_model_len=requested), 32064, on_cpu=True)
    return int(args.max_model_len) - 1


@pytest.mark.parametrize(
    ("requested", "expected"), [(0, WITHOUT_REQUEST), (100, 100), (32_768, 32_768), (LONGEST, LONGEST)]
)
def test_long_rope_length_is_the_requested_one(long_rope_model: Path, requested: int, expected: int) -> None:
    assert engine_length(long_rope_model, requested) == expected


def test_length_above_the_maximum_of_vllm_raises_with_it(long_rope_model: Path) -> None:
    with raises(TeacherSetupError, options=("MAX_MODEL_LEN",), path=long_rope_model):
        engine_length(long_rope_model, LONGEST + 1)

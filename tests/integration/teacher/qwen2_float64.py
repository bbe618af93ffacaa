"""Qwen2 in float64 with numpy, as a reference for rounding errors. transformers always computes parts in float32.

Shape suffixes: N tokens, H heads, D dimensions of a head, E hidden size, V vocabulary.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file


def logits_NV(folder: Path, token_ids: np.ndarray) -> np.ndarray:
    """Return the logits after each token of one sequence."""
    config = json.loads((folder / "config.json").read_text())
    weights = {name: array.astype(np.float64) for name, array in load_file(folder / "model.safetensors").items()}
    eps = config["rms_norm_eps"]
    x_NE = weights["model.embed_tokens.weight"][token_ids]
    for layer in range(config["num_hidden_layers"]):
        own = {
            name.removeprefix(f"model.layers.{layer}."): array
            for name, array in weights.items()
            if name.startswith(f"model.layers.{layer}.")
        }
        x_NE = x_NE + _attention(own, _norm(x_NE, own["input_layernorm.weight"], eps), config)
        y_NE = _norm(x_NE, own["post_attention_layernorm.weight"], eps)
        gate, up = y_NE @ own["mlp.gate_proj.weight"].T, y_NE @ own["mlp.up_proj.weight"].T
        x_NE = x_NE + (gate / (1 + np.exp(-gate)) * up) @ own["mlp.down_proj.weight"].T
    return _norm(x_NE, weights["model.norm.weight"], eps) @ weights["lm_head.weight"].T


def _norm(x_NE: np.ndarray, weight_E: np.ndarray, eps: float) -> np.ndarray:
    return weight_E * x_NE / np.sqrt((x_NE**2).mean(axis=1, keepdims=True) + eps)


def _attention(own: dict[str, np.ndarray], x_NE: np.ndarray, config: dict[str, int]) -> np.ndarray:
    n_heads, n_kv_heads = config["num_attention_heads"], config["num_key_value_heads"]

    def project(name: str, heads: int) -> np.ndarray:
        weight, bias = own[f"self_attn.{name}_proj.weight"], own[f"self_attn.{name}_proj.bias"]
        return (x_NE @ weight.T + bias).reshape(len(x_NE), heads, -1)

    q_NHD, k_NHD, v_NHD = project("q", n_heads), project("k", n_kv_heads), project("v", n_kv_heads)
    q_NHD, k_NHD = _rotate(q_NHD, config), _rotate(k_NHD, config)
    k_NHD, v_NHD = (np.repeat(array, n_heads // n_kv_heads, axis=1) for array in (k_NHD, v_NHD))
    scores_HNN = np.einsum("nhd,mhd->hnm", q_NHD, k_NHD) / np.sqrt(q_NHD.shape[2])
    scores_HNN[:, ~np.tri(len(x_NE), dtype=bool)] = -np.inf
    p_HNN = np.exp(scores_HNN - scores_HNN.max(axis=2, keepdims=True))
    p_HNN /= p_HNN.sum(axis=2, keepdims=True)
    return np.einsum("hnm,mhd->nhd", p_HNN, v_NHD).reshape(len(x_NE), -1) @ own["self_attn.o_proj.weight"].T


def _rotate(x_NHD: np.ndarray, config: dict[str, int]) -> np.ndarray:
    half = x_NHD.shape[2] // 2
    theta = config.get("rope_theta") or config["rope_parameters"]["rope_theta"]  # type: ignore[index]
    angles_N1D = (np.arange(len(x_NHD))[:, None] * theta ** (-np.arange(half) / half))[:, None]
    first, second = x_NHD[..., :half], x_NHD[..., half:]
    cos, sin = np.cos(angles_N1D), np.sin(angles_N1D)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=2)

"""The table of memory in docs/actor.md, as ``plan`` computes it."""

from __future__ import annotations

import json
from pathlib import Path

from recipe_gkd.commands.plan.estimate import estimate_run
from tests._support.base_config import base_config
from tests._support.repository import REPO

GIB = 1 << 30
MEGATRON = "actor_rollout_ref.actor.megatron"
MODELS = {
    "Qwen2.5-1.5B": (1536, 28, 8960, 12, 2, 151936, True),
    "Qwen2.5-7B": (3584, 28, 18944, 28, 4, 152064, False),
    "Qwen2.5-32B": (5120, 64, 27648, 40, 8, 152064, False),
}
"""Hidden size, layers, feed-forward columns, heads, key heads, ids, and if the output layer is tied."""
ROWS = (
    ("Qwen2.5-1.5B", 1, 1, 1), ("Qwen2.5-1.5B", 2, 1, 2), ("Qwen2.5-7B", 2, 1, 2), ("Qwen2.5-7B", 4, 1, 2),
    ("Qwen2.5-7B", 4, 2, 2), ("Qwen2.5-32B", 8, 1, 2), ("Qwen2.5-32B", 8, 2, 2),
)  # fmt: skip
COLUMNS = ((8192, False), (16384, False), (16384, True), (32768, True))
RECOMPUTE = "{recompute_granularity: full, recompute_method: uniform, recompute_num_layers: 1}"


def write_config(folder: Path, name: str) -> None:
    sizes = [
        "hidden_size",
        "num_hidden_layers",
        "intermediate_size",
        "num_attention_heads",
        "num_key_value_heads",
        "vocab_size",
    ]
    *values, tied = MODELS[name]
    config = dict(zip(sizes, values, strict=True)) | {"tie_word_embeddings": tied, "max_position_embeddings": 32768}
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", **config})
    )


def actor_gib(folder: Path, tp: int, pp: int, dp: int, tokens: int, *, recompute: bool) -> float:
    config = base_config(
        f"actor_rollout_ref.model.path={folder}",
        f"trainer.n_gpus_per_node={tp * pp * dp}",
        f"{MEGATRON}.tensor_model_parallel_size={tp}",
        f"{MEGATRON}.pipeline_model_parallel_size={pp}",
        f"{MEGATRON}.sequence_parallel={str(tp > 1).lower()}",
        f"{MEGATRON}.transformer_impl=local",
        f"actor_rollout_ref.actor.max_token_len={tokens}",
        *([f"{MEGATRON}.override_transformer_config={RECOMPUTE}"] if recompute else []),
    )
    (actor,) = (pool for pool in estimate_run(config, "cuda", None).pools if pool.name == "actor")
    return actor.total / GIB


def test_documentation_has_the_computed_table(tmp_path: Path) -> None:
    titles = [f"{tokens // 1024}k{', recompute' if recompute else ''}" for tokens, recompute in COLUMNS]
    lines = [f"| model | TP x PP x DP | {' | '.join(titles)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for name, tp, pp, dp in ROWS:
        write_config(tmp_path / name, name)
        cells = [f"{actor_gib(tmp_path / name, tp, pp, dp, n, recompute=again):.0f}" for n, again in COLUMNS]
        lines.append(f"| {name} | {tp} x {pp} x {dp} | {' | '.join(cells)} |")
    table = "\n".join(lines)
    assert table in (REPO / "docs" / "actor.md").read_text(encoding="utf-8"), f"docs/actor.md lacks:\n{table}"

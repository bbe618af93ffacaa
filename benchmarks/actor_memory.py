"""Compute the GPU memory of an actor rank from the dimensions of a dense model. Nothing is measured.

    python benchmarks/actor_memory.py                          print the table of docs/actor.md
    python benchmarks/actor_memory.py --model DIR --tp 2 --pp 1 --dp 2 --max-token-len 16384 [--recompute]

The formula counts, in bytes per rank, for bfloat16 with the distributed optimizer:

- weights 2, float32 gradients 4, and float32 master weights and two moments 12 / DP, times the parameters of the rank;
- activations that the backward pass needs, per token and layer: 8 H + 4 Q + 4 G + 6 F, where H is the hidden size, Q
  and G are the widths of all query heads and of all key (or value) heads, and F is the number of feed-forward columns.
  These are two inputs and two outputs of norms (2 H each), queries and the output of the attention (2 Q each), keys and
  values (2 G each), and gate, up and their product (2 F each). Tensor parallelism divides all of it if
  sequence_parallel=true, and all but the 8 H otherwise. With full recomputation only 2 H per token and layer remain,
  and one whole layer;
- the first pipeline stage holds the activations of PP micro-batches, the last one those of 1, and float32 logits of
  response tokens, 4 V / TP. The table is for micro-batches of response tokens only. gkd.fuse_lm_head=true removes them.

Not counted: CUDA's context and NCCL's buffers (1 to 3 GiB), fragmentation, temporary tensors of one layer, and other
processes on the GPU. With actor_rollout_ref.hybrid_engine=true these include a rollout engine: a run then logs what
actor and engine hold in each phase (recipe_gkd/memory_budget), and is refused if that alone does not fit.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass

from recipe_gkd.actor.megatron.model_dims import ModelDims, read_model_dims
from teacher.common.sizes import GIB


@dataclass(frozen=True, kw_only=True)
class ActorLayout:
    """Layout of the actor ranks.

    Attributes:
        tp: Tensor-parallel size.
        pp: Pipeline-parallel size.
        dp: Data-parallel size.
        cp: Context-parallel size.
        sequence_parallel: ``megatron.sequence_parallel``.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    cp: int = 1
    sequence_parallel: bool = True


def layer_parameters(dims: ModelDims) -> int:
    """Return the number of parameters of a dense layer, without biases."""
    query, key = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    return dims.hidden * (2 * query + 2 * key + 3 * dims.ffn + 2)


def state_bytes(n_parameters: float, layout: ActorLayout) -> float:
    """Return the bytes of weights, gradients and optimizer state of ``n_parameters`` of one rank."""
    return n_parameters * (2 + 4 + 12 / (layout.dp * layout.cp))


def activation_bytes(dims: ModelDims, layout: ActorLayout) -> float:
    """Return the bytes that the backward pass of one layer needs per token of a rank."""
    query, key = dims.heads * dims.head_dim, dims.kv_heads * dims.head_dim
    norms = 8 * dims.hidden / (layout.tp if layout.sequence_parallel else 1)
    return norms + (4 * query + 4 * key + 6 * dims.ffn) / layout.tp


def rank_bytes(dims: ModelDims, layout: ActorLayout, max_token_len: int, *, recompute: bool) -> float:
    """Return the memory of the rank that needs most, of the first and of the last pipeline stage.

    Args:
        dims: A dense model.
        max_token_len: Tokens of a micro-batch.
        recompute: True for full recomputation of each layer.
    """
    if dims.moe is not None:
        raise ValueError("the formula is for dense models; this model has experts")
    layers, tokens = dims.layers / layout.pp, max_token_len / layout.cp
    whole = activation_bytes(dims, layout)
    kept = 2 * dims.hidden / (layout.tp if layout.sequence_parallel else 1) if recompute else whole
    embedding = dims.vocab_size * dims.hidden

    def stage(n_embeddings: int, in_flight: int, logits: bool) -> float:
        parameters = (layers * layer_parameters(dims) + n_embeddings * embedding) / layout.tp
        activations = tokens * (in_flight * layers * kept + (whole if recompute else 0))
        return state_bytes(parameters, layout) + activations + logits * tokens * 4 * dims.vocab_size / layout.tp

    if layout.pp == 1:
        return stage(1 if dims.tied else 2, 1, True)
    return max(stage(1, layout.pp, False), stage(1, 1, True))


def dense(hidden: int, layers: int, ffn: int, heads: int, kv_heads: int, *, tied: bool = False) -> ModelDims:
    """Return the dimensions of a Qwen2.5 model."""
    return ModelDims(
        family="qwen2",
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=128,
        vocab_size=151936 if hidden < 3584 else 152064,
        tied=tied,
        qkv_bias=True,
        qk_norm=False,
        norm_eps=1e-6,
        max_positions=32768,
        rope_base=1e6,
        rope_llama3_factor=None,
    )


MODELS = {
    "Qwen2.5-1.5B": dense(1536, 28, 8960, 12, 2, tied=True),
    "Qwen2.5-7B": dense(3584, 28, 18944, 28, 4),
    "Qwen2.5-32B": dense(5120, 64, 27648, 40, 8),
}
ROWS = (
    ("Qwen2.5-1.5B", ActorLayout(tp=1, dp=1)),
    ("Qwen2.5-1.5B", ActorLayout(tp=2, dp=2)),
    ("Qwen2.5-7B", ActorLayout(tp=2, dp=2)),
    ("Qwen2.5-7B", ActorLayout(tp=4, dp=2)),
    ("Qwen2.5-7B", ActorLayout(tp=4, pp=2, dp=2)),
    ("Qwen2.5-32B", ActorLayout(tp=8, dp=2)),
    ("Qwen2.5-32B", ActorLayout(tp=8, pp=2, dp=2)),
)
COLUMNS = ((8192, False), (16384, False), (16384, True), (32768, True))


def table() -> str:
    """Return the table of docs/actor.md as Markdown."""
    titles = [f"{tokens // 1024}k{', recompute' if recompute else ''}" for tokens, recompute in COLUMNS]
    lines = [f"| model | TP x PP x DP | {' | '.join(titles)} |", "|---|---|" + "---|" * len(COLUMNS)]
    for name, layout in ROWS:
        cells = [f"{rank_bytes(MODELS[name], layout, n, recompute=again) / GIB:.0f}" for n, again in COLUMNS]
        lines.append(f"| {name} | {layout.tp} x {layout.pp} x {layout.dp} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    """Print the table, or the memory for one model and layout."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="Hugging Face folder of the student; without it the table is printed")
    for name in ("tp", "pp", "dp", "cp"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--max-token-len", type=int, default=16384, help="actor_rollout_ref.actor.max_token_len")
    parser.add_argument("--recompute", action="store_true", help="full recomputation of each layer")
    given = parser.parse_args()
    if given.model is None:
        print(table())
        return
    layout = ActorLayout(tp=given.tp, pp=given.pp, dp=given.dp, cp=given.cp)
    needed = rank_bytes(read_model_dims(given.model), layout, given.max_token_len, recompute=given.recompute)
    print(f"{needed / GIB:.1f} GiB per GPU (computed, not measured)")


if __name__ == "__main__":
    main()

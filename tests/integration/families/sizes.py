"""Write the table of sizes of ``docs/models.md``: ``python -m tests.integration.families.sizes``, in about a minute.

It has the memory of an actor GPU for released models, as ``python -m recipe_gkd plan`` computes it.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from recipe_gkd.commands.plan.estimate import estimate_run
from recipe_gkd.config import load_config
from teacher.common.sizes import GIB
from tests._support.released_models import RELEASED_MODELS, ReleasedModel
from tests.integration.families.table import PAGE, with_block

BEGIN, END = "<!-- table of sizes: begin -->", "<!-- table of sizes: end -->"
ACTOR = "actor_rollout_ref.actor"
MAX_TOKENS = 8192
H100_GIB = 79
"""Memory of an H100 of 80 GB that a program gets."""
SETTINGS = (
    f"{ACTOR}.strategy=fsdp",
    f"{ACTOR}.fsdp_config.gradient_checkpointing=true",
    "gkd.fuse_lm_head=true",
    f"{ACTOR}.max_token_len={MAX_TOKENS}",
)
COLUMNS = {"all weights": (), "LoRA": (f"{ACTOR}.lora.rank=16",)}
_UNUSED = (
    "data.train_files=unused", "trainer.device=cuda", "data.max_prompt_length=1024",
    f"data.max_response_length={MAX_TOKENS - 1024}",
)  # fmt: skip


def sizes_table() -> str:
    """Return the table."""
    lines = ["| model | parameters | " + " | ".join(COLUMNS) + " |", "|" + "---|" * (2 + len(COLUMNS))]
    for model in RELEASED_MODELS:
        cells = [_cell(model, settings) for settings in COLUMNS.values()]
        lines.append(f"| {model.name} | {model.billions:g} B | {' | '.join(cells)} |")
    return "\n".join(lines)


def page(text: str) -> str:
    """Return the page with the table of this version."""
    return with_block(text, BEGIN, sizes_table(), END)


def _cell(model: ReleasedModel, settings: tuple[str, ...]) -> str:
    """Return the GiB of a GPU if one is enough; else also the smallest power of 2 of GPUs, with the GiB of each."""
    n_gpus, gib = 1, actor_gib(model, settings, 1)
    if gib <= H100_GIB:
        return f"{gib:.0f}"
    while n_gpus < 64 and actor_gib(model, settings, n_gpus) > H100_GIB:
        n_gpus *= 2
    return f"no ({gib:.0f}); {n_gpus} GPUs: {actor_gib(model, settings, n_gpus):.0f}"


def actor_gib(model: ReleasedModel, settings: tuple[str, ...], n_gpus: int) -> float:
    """Return the memory of each actor GPU in GiB."""
    with TemporaryDirectory() as folder:
        path = model.write(Path(folder) / "model")
        overrides = [*_UNUSED, *SETTINGS, *settings, f"trainer.n_gpus_per_node={n_gpus}"]
        config = load_config("on_policy_distill_trainer", [*overrides, f"actor_rollout_ref.model.path={path}"])
        estimate = estimate_run(config, "cuda", None)
    return next(pool.total for pool in estimate.pools if pool.name == "actor") / GIB


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")

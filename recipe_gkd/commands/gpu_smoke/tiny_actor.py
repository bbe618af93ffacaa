"""An actor on a tiny model, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from recipe_gkd.commands.gpu_smoke.reference import BETAS, LR, MAX_NORM
from recipe_gkd.config import Config, load_config
from recipe_gkd.config.keys import ACTOR
from recipe_gkd.weight_sync.store import open_store

if TYPE_CHECKING:
    from recipe_gkd.actor.ranks import Rendezvous
    from recipe_gkd.actor.student_actor import StudentActor


def actor_config(folder: Path, device: str, *overrides: str) -> Config:
    """Return the configuration of a one-rank actor for the model in ``folder``."""
    keys = [
        "data.train_files=unused", f"actor_rollout_ref.model.path={folder}", f"trainer.device={device}",
        "actor_rollout_ref.nccl_timeout=60", f"{ACTOR}.timeout_s=60", f"{ACTOR}.max_token_len=64",
        f"{ACTOR}.optim.lr={LR}", f"{ACTOR}.optim.betas=[{BETAS[0]},{BETAS[1]}]",
        f"{ACTOR}.optim.weight_decay=0", f"{ACTOR}.optim.clip_grad={MAX_NORM}",
    ]  # fmt: skip
    return load_config("on_policy_distill_trainer", [*keys, *overrides])


@contextmanager
def running_actor(
    config: Config,
    *,
    rank: int = 0,
    world_size: int = 1,
    rendezvous: Rendezvous | None = None,
    total_steps: int = 10,
    n_token_ids: int | None = None,
) -> Iterator[StudentActor]:
    """Set up an actor in this process, and destroy its process groups at the end.

    Args:
        rank: Rank of this process, and its GPU.
        world_size: Number of ranks.
        rendezvous: Store that all ranks use, or its address. None opens one.
        total_steps: Step at which the decay of the learning rate ends.
        n_token_ids: Number of token ids; None for all ids of the model's vocabulary.
    """
    from recipe_gkd.actor.ranks import RankSpec
    from recipe_gkd.actor.student_actor import StudentActor

    rendezvous = rendezvous or open_store("127.0.0.1", config.actor_rollout_ref.nccl_timeout)
    device = config.trainer.device
    spec = RankSpec(rank=rank, world_size=world_size, local_rank=rank, device=device, rendezvous=rendezvous)
    actor = StudentActor(config, spec, total_steps=total_steps, n_token_ids=n_token_ids)
    actor.setup()
    try:
        yield actor
    finally:
        actor.backend.shutdown()


def exported(actor: StudentActor) -> dict[str, Tensor]:
    """Return copies of all weights on the CPU by name on rank 0; an empty dict elsewhere."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in actor.export_weights()}

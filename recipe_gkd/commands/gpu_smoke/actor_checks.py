"""The actor on one device: an update against float64, and a checkpoint round trip."""

from __future__ import annotations

import math
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from recipe_gkd.commands.gpu_smoke.outcome import CheckFailed, Context
from recipe_gkd.commands.gpu_smoke.peer_process import running_peer
from recipe_gkd.commands.gpu_smoke.reference import Update, reference_update
from recipe_gkd.commands.gpu_smoke.tiny_actor import actor_config, exported, running_actor
from recipe_gkd.commands.gpu_smoke.tiny_models import make_samples, write_model
from recipe_gkd.config import Config
from recipe_gkd.config.keys import ACTOR
from recipe_gkd.data.samples import Sample
from recipe_gkd.weight_sync.store import open_store

if TYPE_CHECKING:
    from recipe_gkd.actor.student_actor import StudentActor

_LENGTHS = (5, 17, 1, 30, 24, 9)
# Accepted errors of the loss and the gradient norm (relative), and of the direction of the step (1 - cosine). The first
# step of Adam is nearly the sign of the gradient, which rounding changes where the gradient is close to 0.
_LIMITS = {"float32": (1e-4, 1e-3, 0.02), "bfloat16": (0.02, 0.05, 0.15)}


def check_actor(context: Context) -> str:
    """Compare an update in bfloat16, with the layers of a real run, with a reference in float64."""
    return _check_dtype(context, "bfloat16")


def check_actor_float32(context: Context) -> str:
    """Compare an update in float32. Transformer Engine is not used, because it multiplies float32 matrices in TF32."""
    return _check_dtype(context, "float32", f"{ACTOR}.megatron.transformer_impl=local")


def check_actor_fsdp(context: Context) -> str:
    """Compare an update in bfloat16 with the FSDP backend."""
    return _check_dtype(context, "bfloat16", f"{ACTOR}.strategy=fsdp")


def check_actor_lora(context: Context) -> str:
    """Compare the loss of a new adapter, which does not change the model, and check that an update changes it."""
    folder, samples = write_model(context.folder / "model", seed=0), make_samples(_LENGTHS)
    reference = reference_update(folder, samples)
    dtype = "bfloat16"
    overrides = (f"{ACTOR}.strategy=fsdp", f"{ACTOR}.fsdp_config.dtype={dtype}", f"{ACTOR}.lora.rank=4")
    with running_actor(actor_config(folder, context.device, *overrides)) as actor:
        found = _update(actor, samples)
        metrics = actor.update(samples, 1)
    loss_limit, *_ = _LIMITS[dtype]
    context.compare("loss of a new adapter", abs(found.loss / reference.loss - 1), loss_limit)
    changed = sorted(name for name, step in found.step.items() if bool(step.any()))
    if not changed or any("proj" not in name for name in changed):
        raise CheckFailed(f"an update of adapters changed {', '.join(changed) or 'no weight'}, expected linear layers")
    if not metrics["actor/kl_loss"] < found.loss:
        raise CheckFailed(f"the loss after an update is {metrics['actor/kl_loss']:.4f}, before {found.loss:.4f}")
    return f"{len(changed)} merged weights changed; loss {found.loss:.4f}, then {metrics['actor/kl_loss']:.4f}"


def _check_dtype(context: Context, dtype: str, *overrides: str) -> str:
    folder, samples = write_model(context.folder / "model", seed=0), make_samples(_LENGTHS)
    reference = reference_update(folder, samples)
    dtypes = (f"{ACTOR}.megatron.dtype={dtype}", f"{ACTOR}.fsdp_config.dtype={dtype}")
    for fused in (False, True):
        config = actor_config(folder, context.device, *dtypes, *overrides, f"gkd.fuse_lm_head={str(fused).lower()}")
        with running_actor(config) as actor:
            found = _update(actor, samples)
        _compare(context, f"{dtype}{', fused' if fused else ''}", found, reference, dtype)
    return f"{len(samples)} samples; in float64 loss {reference.loss:.4f}, gradient norm {reference.grad_norm:.3f}"


def check_actor_offload(context: Context) -> str:
    """Check that updates with and without offloading give equal weights."""
    folder, dtype = write_model(context.folder / "model", seed=0), "bfloat16"
    layers = (f"{ACTOR}.megatron.dtype={dtype}", f"{ACTOR}.megatron.transformer_impl=local")
    keys = [f"{ACTOR}.megatron.{state}_offload=true" for state in ("param", "grad", "optimizer")]
    weights = []
    for overrides in ([], keys):
        with running_actor(actor_config(folder, context.device, *layers, *overrides)) as actor:
            for step in range(2):
                actor.update(make_samples(_LENGTHS, seed=step), step)
            weights.append(exported(actor))
            if overrides and context.device == "cuda":
                _check_released(context, actor)
    context.compare("weights after two updates", _distance(*weights), 0.0)
    return "weights after two updates are equal with and without offload"


def _check_released(context: Context, actor: StudentActor) -> None:
    """Check that the memory of a GPU shrinks by the size of the states when they leave."""
    with actor.backend.states.on_device("params", "grads", "optimizer", read_only=True):
        n_bytes, allocated = sum(actor.state_sizes().values()), torch.cuda.memory_allocated()
    released = allocated - torch.cuda.memory_allocated()
    context.figures["bytes of the states, and released"] = [n_bytes, released]
    if released < n_bytes:
        raise CheckFailed(f"the states have {n_bytes} bytes, but only {released} were released")


def check_actor_tp2(context: Context) -> str:
    """Compare an update of two ranks with the reference."""
    folder, samples = write_model(context.folder / "model", seed=0), make_samples(_LENGTHS)
    megatron = f"{ACTOR}.megatron"
    config = actor_config(
        folder, context.device, f"{megatron}.dtype=bfloat16", f"{megatron}.tensor_model_parallel_size=2",
        f"{megatron}.sequence_parallel=true", "trainer.n_gpus_per_node=2",
    )  # fmt: skip
    store = open_store("127.0.0.1", config.actor_rollout_ref.nccl_timeout)
    with running_peer(_second_rank, config, store.port, timeout_s=context.deadline_s) as peer:
        with running_actor(config, rank=0, world_size=2, rendezvous=store) as actor:
            found = _update(actor, samples)
        metrics = peer.receive()
    if metrics != found.loss:
        raise CheckFailed(f"the ranks report the losses {found.loss} and {metrics}, expected the same number")
    reference = reference_update(folder, samples)
    _compare(context, "two ranks", found, reference, "bfloat16")
    return f"loss {found.loss:.4f} and gradient norm {found.grad_norm:.3f}; in float64 {reference.loss:.4f}"


def _second_rank(connection: Connection, config: Config, port: int) -> None:
    """Process of rank 1: send its loss."""
    with running_actor(config, rank=1, world_size=2, rendezvous=("127.0.0.1", port)) as actor:
        connection.send(_update(actor, make_samples(_LENGTHS)).loss)


def _update(actor: StudentActor, samples: Sequence[Sample]) -> Update:
    """Run the first update."""
    before = exported(actor)
    metrics = actor.update(samples, 0)
    return Update(metrics["actor/kl_loss"], metrics["actor/grad_norm"], _difference(exported(actor), before))


def _compare(context: Context, name: str, found: Update, expected: Update, dtype: str) -> None:
    loss_limit, norm_limit, step_limit = _LIMITS[dtype]
    context.compare(f"{name}: loss", abs(found.loss / expected.loss - 1), loss_limit)
    context.compare(f"{name}: norm", abs(found.grad_norm / expected.grad_norm - 1), norm_limit)
    context.compare(f"{name}: step", 1 - _cosine(found.step, expected.step), step_limit)


def _cosine(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the cosine of the angle between two steps. The bias of the keys has no gradient, so it is left out."""
    names = [name for name in found if not name.endswith("k_proj.bias")]
    if missing := sorted({*names} - {*expected}):
        raise CheckFailed(f"the actor exported {', '.join(missing)}, which the model does not have")
    a, b = (torch.cat([step[name].flatten() for name in names]) for step in (found, expected))
    return float(a @ b / (a.norm() * b.norm()))


def check_checkpoint(context: Context) -> str:
    """Compare an actor that continues with a new one that loads its checkpoint."""
    folder, dtype = write_model(context.folder / "model", seed=0), "bfloat16"
    first, second = make_samples(_LENGTHS), make_samples(_LENGTHS, seed=1)
    config = actor_config(folder, context.device, f"{ACTOR}.megatron.dtype={dtype}")
    path = context.folder / "checkpoint"
    with running_actor(config) as actor:
        actor.update(first, 0)
        actor.save_checkpoint(path)
        actor.save_hf(context.folder / "hf")
        saved = exported(actor)
        metrics = actor.update(second, 1)
        expected = exported(actor)
    with running_actor(config) as actor:
        step = actor.load_checkpoint(path)
        context.compare("weights after the load", _distance(exported(actor), saved), 0.0)
        resumed = actor.update(second, 1)
        # Relative to the step. Without the optimizer's state it is 0.85; rounding on a GPU changes single weights.
        step_size = _mean_distance(expected, saved)
        context.compare("next update", _mean_distance(exported(actor), expected) / step_size, 0.05)
        context.compare("loss of the next update", abs(resumed["actor/kl_loss"] - metrics["actor/kl_loss"]), 1e-3)
    if step != 1:
        raise CheckFailed(f"the checkpoint is of step {step}, expected 1")
    with running_actor(actor_config(context.folder / "hf", context.device, f"{ACTOR}.megatron.dtype={dtype}")) as actor:
        context.compare("weights of the Hugging Face folder", _distance(exported(actor), saved), 0.0)
    n_bytes = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
    return f"weights and next update after a checkpoint of {n_bytes / 1e6:.1f} MB; weights of the Hugging Face folder"


def _difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the difference of two sets of weights with the same names, in float64."""
    return {name: found[name].double() - expected[name].double() for name in expected}


def _distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest difference of two sets of weights; infinity if their names differ."""
    if found.keys() != expected.keys():
        return math.inf
    return max(float(difference.abs().max()) for difference in _difference(found, expected).values())


def _mean_distance(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the mean difference of two sets of weights with the same names."""
    return float(torch.cat([each.abs().flatten() for each in _difference(found, expected).values()]).mean())

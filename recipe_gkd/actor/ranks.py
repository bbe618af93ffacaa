"""Rendezvous of the actor's ranks, and the coordinates of each."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from recipe_gkd.config.schema import Config
from recipe_gkd.config.startup import startup_timeout_s
from recipe_gkd.errors import DeadlineError
from recipe_gkd.runtime.interfaces import interface_toward

COLLECTIVE_GRACE_S = 60.0
"""Time by which collectives of the actor time out later than other deadlines; see :func:`collective_timeout_s`."""


Rendezvous = dist.Store | tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """One process of the actor pool.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        local_rank: Index of the CUDA device; unused on a CPU.
        device: ``"cpu"`` or ``"cuda"``.
        rendezvous: Store through which all ranks connect, or its host and port (for example torchrun's master address
            and port). None if it is not known yet; see :meth:`~recipe_gkd.actor.student_actor.StudentActor.setup`.
    """

    rank: int
    world_size: int
    local_rank: int
    device: str
    rendezvous: Rendezvous | None

    @property
    def torch_device(self) -> torch.device:
        """Device of the model and of the collectives."""
        return torch.device("cuda", self.local_rank) if self.device == "cuda" else torch.device(self.device)


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Coordinates of this rank in the parallel layout.

    Megatron numbers the ranks stage by stage. Within a stage, a tensor-parallel group consists of consecutive ranks.
    Ranks with the same place in consecutive tensor-parallel groups form a context-parallel group. They share each
    sequence, so they get the same samples. The same ranks have a second numbering for experts: consecutive ranks form
    an expert tensor-parallel group, and consecutive groups of this kind form an expert-parallel group.

    The FSDP backend has data parallelism only.

    Attributes:
        rank: Global rank.
        world_size: Number of ranks.
        tp_rank: Tensor-parallel rank.
        tp_size: Tensor-parallel size.
        pp_rank: Pipeline stage.
        pp_size: Number of pipeline stages.
        cp_rank: Context-parallel rank: index of the part of each sequence that this rank computes.
        cp_size: Context-parallel size.
        dp_rank: Data-parallel rank.
        dp_size: Data-parallel size, without the context-parallel ranks.
        ep_rank: Expert-parallel rank: index of the part of the experts that this rank holds.
        ep_size: Expert-parallel size: number of equal parts of the experts.
        etp_rank: Expert tensor-parallel rank: index of this rank's shard of each of its experts.
        etp_size: Expert tensor-parallel size.
    """

    rank: int
    world_size: int
    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    cp_rank: int
    cp_size: int
    dp_rank: int
    dp_size: int
    ep_rank: int
    ep_size: int
    etp_rank: int
    etp_size: int

    @classmethod
    def data_parallel(cls, rank: int, world_size: int) -> Layout:
        """Return the coordinates of a rank that holds or computes the whole model."""
        whole = {
            f"{kind}_{what}": int(what == "size")
            for kind in ("tp", "pp", "cp", "ep", "etp")
            for what in ("rank", "size")
        }
        return cls(rank=rank, world_size=world_size, dp_rank=rank, dp_size=world_size, **whole)

    @property
    def is_last_stage(self) -> bool:
        """True on the last pipeline stage, which computes the loss."""
        return self.pp_rank == self.pp_size - 1

    @property
    def counts_tokens(self) -> bool:
        """True on one rank of each group of ranks with the same loss rows, so that a sum over them counts a token once.

        Each context-parallel rank has its own loss rows.
        """
        return self.is_last_stage and self.tp_rank == 0

    @property
    def counts_samples(self) -> bool:
        """True on one rank of each group of ranks with the same samples, so that a sum over whole samples is exact."""
        return self.counts_tokens and self.cp_rank == 0

    def __str__(self) -> str:
        experts = f"expert {self.ep_size} x expert tensor {self.etp_size}"
        # Without context parallelism the text equals the text in earlier checkpoints, which are compared with it.
        context = f" x context {self.cp_size}" if self.cp_size > 1 else ""
        return f"tensor {self.tp_size}{context} x pipeline {self.pp_size} x data {self.dp_size}, {experts}"


@dataclass(frozen=True, kw_only=True)
class RankReport:
    """Report of a rank after its set-up.

    Attributes:
        rank: Global rank.
        dp_rank: Data-parallel rank.
        dp_size: Data-parallel size.
        tp_rank: Tensor-parallel rank.
        pp_rank: Pipeline stage.
        n_parameters: Number of parameters on this rank.
        device_name: Name of the device, such as ``NVIDIA H100 80GB HBM3`` or ``cpu``.
        seconds: Duration of the set-up.
        summary: Description of the model and its layers, for the log. Empty on other ranks than 0.
        warnings: Warnings for the log.
    """

    rank: int
    dp_rank: int
    dp_size: int
    tp_rank: int
    pp_rank: int
    n_parameters: int
    device_name: str
    seconds: float
    summary: str = ""
    warnings: Sequence[str] = ()


def collective_timeout_s(config: Config, device: str) -> float:
    """Return the timeout of the actor's collectives, in seconds.

    It is later than the deadline of a weight sync. During a sync, the other ranks wait in the export while rank 0
    waits for the receivers, and the error of rank 0, which names the missing receiver, must be raised first.

    On a CPU, a collective raises an error at the timeout. On CUDA, NCCL's watchdog ends the process instead. Its
    timeout is therefore also later than the driver's deadlines of all calls, so that a diagnosis of the hanging ranks
    finds their processes.

    Args:
        device: ``"cpu"`` or ``"cuda"``.
    """
    settings = config.actor_rollout_ref
    deadlines = [settings.nccl_timeout]
    if device == "cuda":
        deadlines += [settings.actor.timeout_s, startup_timeout_s(config, device)]
    return max(deadlines) + COLLECTIVE_GRACE_S


def find_store(spec: RankSpec, timeout_s: float) -> dist.Store:
    """Return the store for the rendezvous of all ranks.

    If ``spec.rendezvous`` is an address, connect to the store there. Rank 0 opens the store if torchrun or its own
    worker has not opened it yet.

    Raises:
        DeadlineError: The store did not answer within ``timeout_s``.
    """
    if isinstance(spec.rendezvous, dist.Store):
        return spec.rendezvous
    if spec.rendezvous is None:
        raise ValueError("RankSpec.rendezvous is None; pass a store or its address to StudentActor.setup")
    host, port = spec.rendezvous
    try:
        store, _, _ = next(
            dist.rendezvous(f"tcp://{host}:{port}", spec.rank, spec.world_size, timeout=timedelta(seconds=timeout_s))
        )
    except dist.DistError as error:
        raise DeadlineError(
            f"not all ranks connected to {host}:{port} within {timeout_s:g} s ({error})",
            remedy="find the rank that failed to start, check that this port is open between the machines, or raise "
            "actor_rollout_ref.nccl_timeout",
            worker=_label(spec.rank, spec.world_size),
            waited_s=timeout_s,
        ) from error
    return store


def wait_for_all_ranks(store: dist.Store, rank: int, world_size: int, timeout_s: float) -> None:
    """Wait until all ranks have reached this call.

    Raises:
        DeadlineError: A rank did not reach the call within ``timeout_s``. ``missing`` has its label.
    """
    keys = [f"here/{peer}" for peer in range(world_size)]
    try:
        store.set(keys[rank], "")
        store.wait(keys, timedelta(seconds=timeout_s))
    except dist.DistError as error:
        missing: list[int] = []
        with contextlib.suppress(dist.DistError):  # rank 0, whose process holds the store, may have ended
            missing = [peer for peer, key in enumerate(keys) if not store.check([key])]
        missing = missing or [0]
        raise DeadlineError(
            f"rank {', '.join(map(str, missing))} did not reach the rendezvous within {timeout_s:g} s ({error})",
            remedy="find out why it failed to start, or raise actor_rollout_ref.nccl_timeout",
            worker=_label(rank, world_size),
            missing=tuple(_label(peer, world_size) for peer in missing),
            waited_s=timeout_s,
        ) from error


def _label(rank: int, world_size: int) -> str:
    return f"actor rank {rank} of {world_size}"


def join_ranks(config: Config, spec: RankSpec) -> None:
    """Wait for all ranks, create the default process group, and seed torch's random generator.

    Args:
        config: Configuration of the run. ``nccl_timeout`` is the deadline of the rendezvous, ``data.seed`` the seed.
        spec: This process.

    Raises:
        DeadlineError: A rank did not reach the rendezvous. ``missing`` has its label.
    """
    timeout_s = config.actor_rollout_ref.nccl_timeout
    store = find_store(spec, timeout_s)
    wait_for_all_ranks(store, spec.rank, spec.world_size, timeout_s)
    device = spec.torch_device
    if device.type == "cpu":
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
        _choose_gloo_interface(spec.rendezvous)
    else:
        torch.cuda.set_device(device)
    dist.init_process_group(
        "nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore("groups", store),
        rank=spec.rank,
        world_size=spec.world_size,
        timeout=timedelta(seconds=collective_timeout_s(config, spec.device)),
        device_id=device if device.type == "cuda" else None,
    )
    torch.manual_seed(config.data.seed)


def _choose_gloo_interface(rendezvous: Rendezvous | None) -> None:
    """Let gloo use the interface that leads to the store, if the user has not chosen one.

    By itself gloo takes the address of the host name, which may be 127.0.1.1. Later groups need the choice too, so it
    is an environment variable.
    """
    host = rendezvous[0] if isinstance(rendezvous, tuple) else getattr(rendezvous, "host", None)
    if host and (name := interface_toward(host)):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def leave_ranks() -> None:
    """Destroy all process groups. The process can then join again."""
    if dist.is_initialized():
        dist.destroy_process_group()

"""The student in training: one rank of it, in any process (a Ray worker, torchrun, a test)."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from recipe_gkd.actor import megatron_patches
from recipe_gkd.actor.checkpoint import StateWriter, TrainingState, check, load
from recipe_gkd.actor.export import export_weights, stages_of_weights, weights_meta
from recipe_gkd.actor.hf_load import load_hf, own_parameters
from recipe_gkd.actor.hf_names import weights
from recipe_gkd.actor.hf_save import save_hf_folder
from recipe_gkd.actor.loss_metrics import metrics, names_of_sums
from recipe_gkd.actor.loss_terms import GlobalDenominators
from recipe_gkd.actor.microbatch import PackedBatch, micro_batches, pack
from recipe_gkd.actor.model import build_chunks, transformer_config
from recipe_gkd.actor.model_dims import read_model_dims
from recipe_gkd.actor.objective import Objective
from recipe_gkd.actor.optimizer import (
    clip_and_step,
    gradient_norm,
    learning_rate,
    set_hyperparameters,
    wrap_and_optimize,
)
from recipe_gkd.actor.padding_rows import keep_padding_rows
from recipe_gkd.actor.parallel import check_world_size, find_store, init_parallel, leave_parallel, tensor_group
from recipe_gkd.actor.parallel_write import ParallelWrite
from recipe_gkd.actor.step import run_micro_batches
from recipe_gkd.config.schema import Config
from recipe_gkd.config.teachers import names as teacher_names
from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import CheckpointError, DataError, SecondaryFailure, WorkerError
from recipe_gkd.weight_sync.bucket_plan import TensorMeta

UIDS_IN_MESSAGE = 8


class MegatronActor:
    """Lifecycle, the same calls in the same order on every rank: ``setup``; then ``update``, ``export_weights``,
    ``save_*`` and ``load_checkpoint`` in any order; ``shutdown``.

    A collective that not every rank joins ends with an error, ``COLLECTIVE_GRACE_S`` after
    ``actor_rollout_ref.nccl_timeout``.
    After an error in ``update`` that says the weights are unchanged, or a :class:`CheckpointError`, the actor can be
    used on, as the methods tell; after any other, not.
    """

    def __init__(
        self,
        config: Config,
        *,
        total_steps: int,
        rank: int,
        world_size: int,
        local_rank: int,
        meeting: dist.Store | tuple[str, int],
        device: str,
        n_tokens: int | None = None,
    ) -> None:
        """``device``: `cpu`, or `cuda` (``local_rank`` is its number). ``total_steps``: where the rate's decay ends.

        ``n_tokens``: ids of the output layer from there on are padding, and belong to no distribution; None: none is.

        ``meeting``: the store where all ranks meet, or its address (torchrun's master address and port, say).

        Raises :class:`ConfigError` for a layout that cannot work; nothing has been started then.
        """
        self._config = config
        self._actor, self._gkd = config.actor_rollout_ref.actor, config.gkd
        check_world_size(self._actor.megatron, world_size)
        self._total_steps, self._n_tokens = total_steps, n_tokens
        self._teachers = teacher_names(config.actor_rollout_ref.teacher)
        self._rank, self._world_size = rank, world_size
        self._meeting = meeting
        self.device = torch.device("cuda", local_rank) if device == "cuda" else torch.device(device)
        self._timeout_s = config.actor_rollout_ref.nccl_timeout
        self._model_path = Path(config.actor_rollout_ref.model.path)
        self._writer = StateWriter(self._actor.timeout_s)
        self._step = 0
        self._partly_loaded: Path | None = None

    # ---------------------------------------------------------------- start and end

    def setup(self) -> dict[str, Any]:
        """Join the group, build the model, read its weights, make the optimizer.

        Returns this rank's place (`rank`, `dp_rank`, `dp_size`, `tp_rank`, `pp_rank`), `parameters` (held by this
        rank) and `seconds`.
        Raises :class:`ModelError`, :class:`ConfigError` or :class:`DeadlineError`.
        """
        started = time.monotonic()
        megatron = self._actor.megatron
        shape = self.shape = read_model_dims(
            self._model_path, trust_remote_code=self._config.actor_rollout_ref.model.trust_remote_code
        )
        megatron_patches.install()
        with megatron_patches.on_host():
            transformer = transformer_config(shape, megatron, self.device)
            self.layout = layout = init_parallel(
                megatron,
                rank=self._rank,
                world_size=self._world_size,
                store=self._store(),
                device=self.device,
                timeout_s=self._timeout_s,
                seed=self._config.data.seed,
            )
            self._chunks = build_chunks(shape, transformer, self.device)
            load_hf(self._model_path, self._chunks, shape, layout)
            self._wrapped, self._optimizer = wrap_and_optimize(
                self._chunks, transformer, self._actor.optim, distributed=megatron.use_distributed_optimizer
            )
            self._dtype = transformer.params_dtype
            self._parameters = own_parameters(self._chunks, shape, layout)
            self._stages = stages_of_weights(self._parameters, layout, self.device)
        self._loss = Objective(
            gkd=self._gkd,
            vocab_size=self._n_tokens or shape.vocab_size,
            tp_group=tensor_group(layout),
            n_teachers=len(self._teachers),
        )
        return {
            "rank": layout.rank,
            "dp_rank": layout.dp_rank,
            "dp_size": layout.dp_size,
            "tp_rank": layout.tp_rank,
            "pp_rank": layout.pp_rank,
            "parameters": sum(p.numel() for chunk in self._chunks for p in chunk.parameters()),
            "seconds": time.monotonic() - started,
        }

    def _store(self) -> dist.Store:
        if isinstance(self._meeting, tuple):
            self._meeting = find_store(
                self._meeting, rank=self._rank, world_size=self._world_size, timeout_s=self._timeout_s
            )
        return self._meeting

    def shutdown(self) -> None:
        """Finish a background save and leave the group; the process may set up another actor afterwards."""
        try:
            self.finish_saves()
        finally:
            leave_parallel()

    def set_total_steps(self, total_steps: int) -> None:
        """Set the step where the decay of the learning rate ends, if the run resumes from another step than planned."""
        self._total_steps = total_steps

    # ---------------------------------------------------------------- training

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """One optimizer step on this data-parallel rank's shard (see :func:`shard_batch`) of the global batch.

        ``step`` counts from 0; it sets the learning rate, and brings the weights from version ``step`` to ``step + 1``.

        Returns, the same on every rank: those of :func:`recipe_gkd.actor.loss_metrics.metrics`, `actor/grad_norm` (before
        clipping), `actor/lr`, `actor/micro_batches` (of each rank), `perf/max_memory_allocated_gb` (the most that any
        rank has had so far, up to this backward pass). A batch without any response token leaves the weights as they
        are.

        Raises :class:`DataError` for a sample that cannot be trained on (:class:`SecondaryFailure` on the other ranks), and
        :class:`WorkerError` if the loss or the gradient is not finite; the weights are unchanged then.
        """
        self._check_usable()
        self._step = step
        lr = learning_rate(step, self._total_steps, self._actor.optim)
        with megatron_patches.on_host():
            batches, denominators = self._plan(samples)
            for chunk in self._wrapped:
                chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
            reports = run_micro_batches(
                self._wrapped,
                batches,
                self._loss,
                denominators=denominators,
                gkd=self._gkd,
                tp_group=tensor_group(self.layout),
                device=self.device,
            )
            sums, peak_bytes = self._sum_over_ranks(reports)
            if not math.isfinite(sums["loss"]):
                culprits = [uid for report in reports for uid in report["uids_T"][_not_finite(report["loss_T"])]]
                raise self._not_finite_error("loss", culprits)
            norm = gradient_norm(self._optimizer)
            if not math.isfinite(norm):
                raise self._not_finite_error("gradient", [sample.prompt.uid for sample in samples])
            if sums["n_tokens"]:
                set_hyperparameters(self._optimizer, lr, self._actor.optim)
                n_tokens = self._n_tokens or self.shape.vocab_size
                with keep_padding_rows(self._chunks, self._optimizer, self.layout.tp_rank, n_tokens):
                    clip_and_step(self._optimizer, norm, self._actor.optim.clip_grad)
        self._step = step + 1
        return metrics(self._gkd, self._teachers, sums) | {
            "actor/grad_norm": norm,
            "actor/lr": lr,
            "actor/micro_batches": float(len(batches)),
            "perf/max_memory_allocated_gb": peak_bytes / 2**30,
        }

    def _plan(self, samples: Sequence[Sample]) -> tuple[list[PackedBatch], GlobalDenominators]:
        """This rank's micro-batches, as many as every other rank has: empty ones make up for missing ones.

        And the totals of the global batch.
        """
        multiple_of = self.layout.tp_size if self._actor.megatron.sequence_parallel else 1
        refusal: DataError | None = None
        batches: list[PackedBatch] = []
        try:
            batches = [
                pack(group, multiple_of=multiple_of)
                for group in micro_batches(
                    samples,
                    micro_batch_size=self._actor.micro_batch_size,
                    max_token_len=self._actor.max_token_len if self._actor.use_dynamic_bsz else None,
                )
            ]
        except DataError as error:  # told to the others first, or they would wait for this rank in the forward pass
            refusal = error
        counts = torch.tensor([len(batches), int(refusal is not None)], device=self.device)
        dist.all_reduce(counts, op=dist.ReduceOp.MAX)
        most, any_refused = counts.tolist()
        if refusal is not None:
            raise refusal
        if any_refused:
            raise SecondaryFailure(f"update {self._step}: another rank refused a sample; its error says which, and why")
        mine = GlobalDenominators.counts(batches)
        counted_here = self.layout.is_last_stage and self.layout.tp_rank == 0  # by one rank of those with these samples
        sums = torch.tensor(mine, dtype=torch.float64, device=self.device) * counted_here
        dist.all_reduce(sums)
        # Interleaved pipeline stages take micro-batches in rounds of the number of stages.
        interleaved = self._actor.megatron.virtual_pipeline_model_parallel_size is not None
        most = math.ceil(max(most, 1) / self.layout.pp_size) * self.layout.pp_size if interleaved else max(most, 1)
        return batches + [pack([], multiple_of=multiple_of)] * (most - len(batches)), GlobalDenominators.of(sums.tolist())

    def _sum_over_ranks(self, reports: Sequence[dict[str, Any]]) -> tuple[dict[str, float], float]:
        """Sums over the global batch, and the most bytes that any rank has had; the same on every rank."""
        names = names_of_sums(self._gkd, self._teachers)
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.device)
        if self.layout.is_last_stage and self.layout.tp_rank == 0:  # each token is counted by one rank of its group
            for report in reports:
                sums += torch.stack([report["sums"][name] for name in names])
        peaks = torch.zeros(self._world_size, dtype=torch.float64, device=self.device)
        peaks[self._rank] = _peak_memory_bytes(self.device)
        both = torch.cat([sums, peaks])  # one entry a rank, so that one sum over ranks carries the maximum as well
        dist.all_reduce(both)
        return dict(zip(names, both.tolist(), strict=False)), both[len(names) :].max().item()

    def _not_finite_error(self, what: str, uids: Sequence[int]) -> WorkerError:
        """The same on every rank, although only some know the samples. Collective."""
        own = torch.full((UIDS_IN_MESSAGE,), -1, device=self.device)
        known = sorted(set(map(int, uids)))[:UIDS_IN_MESSAGE]
        own[: len(known)] = torch.tensor(known, dtype=own.dtype, device=self.device)
        gathered = [torch.empty_like(own) for _ in range(self._world_size)]
        dist.all_gather(gathered, own)
        named = sorted({uid for uids_U in gathered for uid in uids_U.tolist() if uid >= 0})
        of = "sample" if what == "loss" else "the batch of sample"
        return WorkerError(
            f"update {self._step}: the {what} is not finite, in {of} {', '.join(map(str, named[:UIDS_IN_MESSAGE]))}"
            f"{', ...' if len(named) > UIDS_IN_MESSAGE else ''}; the weights were left as they are. Look at the "
            "teacher's log-probabilities there, or lower actor_rollout_ref.actor.optim.lr"
        )

    # ---------------------------------------------------------------- weights

    def weights_meta(self) -> list[TensorMeta]:
        """Hugging Face name, full shape and dtype of what :meth:`export_weights` yields, in its order."""
        return weights_meta(weights(self.shape), self._dtype)

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Collective generator: ``(name, whole tensor)`` on global rank 0 alone; the other ranks run it to its end.

        See :func:`recipe_gkd.actor.export.export_weights`. No update may run in between.
        """
        self._check_usable()
        return export_weights(self._parameters, self._stages, self.shape, self.layout, self.device, self._dtype)

    def save_hf(self, path: str | Path) -> None:
        """Write an ordinary Hugging Face folder. It may take ``actor.timeout_s``, and is complete at the return.

        Raises:
            CheckpointError: It could not be written. Raised on all ranks; the actor can be used on.
        """
        self._check_usable()
        limit_s = self._actor.timeout_s
        deadline = time.monotonic() + limit_s

        def export(first: int, last: int) -> Iterator[tuple[str, Tensor]]:
            parameters, stages = self._parameters[first:last], self._stages[first:last]
            return export_weights(parameters, stages, self.shape, self.layout, self.device, self._dtype)

        def run(function: Callable[[], None], failure: str | None) -> None:
            functions = [function] if self.layout.rank == 0 else []
            ParallelWrite(
                f"the save of the Hugging Face folder {path}",
                functions,
                deadline=deadline,
                limit_s=limit_s,
                device=self.device,
                failure=failure,
            ).wait()

        metas = [weights_meta([weight], self._dtype) for weight, _ in self._parameters]
        with megatron_patches.on_host():
            save_hf_folder(Path(path), self._model_path, metas, export, run)

    # ---------------------------------------------------------------- checkpoints

    def save_checkpoint(self, path: str | Path) -> None:
        """Write those of ``checkpoint.save_contents`` that serve to resume (`model`, `optimizer`, `extra`) to ``path``.

        With ``checkpoint.async_save`` it is complete only after :meth:`finish_saves`. A save may take
        ``actor.timeout_s`` from its start.

        Raises:
            CheckpointError: This save failed, or an earlier one in the background. Raised on all ranks. Nothing is
                written any more, except by a killed process that waits for a hung disk; the actor can be used on.
        """
        self.finish_saves()
        self._check_usable()
        options = self._actor.checkpoint
        contents = [part for part in options.save_contents if part != "hf_model"]  # for which there is save_hf
        with megatron_patches.on_host():
            self._writer.save(Path(path), self._state(), self._step, contents)
            if not options.async_save:
                self._writer.finish()

    def finish_saves(self, wait: bool = True) -> bool:
        """Complete what :meth:`save_checkpoint` started; return True if no save is in progress any more.

        Args:
            wait: Wait for the writers, until ``actor.timeout_s`` from the start of the save.

        Raises:
            CheckpointError: The save failed or is overdue. Raised on all ranks, once. Nothing is written any more,
                except by a killed process that waits for a hung disk; the actor can be used on.
        """
        with megatron_patches.on_host():
            if wait:
                self._writer.finish()
            return self._writer.finish_if_written()

    def load_checkpoint(self, path: str | Path) -> int:
        """Restore ``checkpoint.load_contents`` from what :meth:`save_checkpoint` wrote, in this layout or another.

        Returns the number of updates behind it (0 if `extra` is not among the contents).

        Raises:
            CheckpointError: It is missing, incomplete or damaged, or is not of this model. Raised on all ranks. Another
                checkpoint can be loaded next. If the damage was found inside of the shards, nothing else is possible.
        """
        self.finish_saves()
        path, contents = Path(path), self._actor.checkpoint.load_contents
        with megatron_patches.on_host():
            common = check(path, self._state(), contents)
            self._partly_loaded = path
            self._step = load(path, self._state(), contents, common)
            self._partly_loaded = None
        return self._step

    def _check_usable(self) -> None:
        if self._partly_loaded is not None:
            raise CheckpointError(
                f"the weights are partly those of {self._partly_loaded}, which is damaged; load another checkpoint"
            )

    def _state(self) -> TrainingState:
        return TrainingState(
            chunks=self._chunks,
            optimizer=self._optimizer,
            shape=self.shape,
            layout=self.layout,
            dtype=self._actor.megatron.dtype,
            device=self.device,
        )


def _not_finite(loss_T: Tensor) -> Any:
    return (~loss_T.isfinite()).cpu().numpy()


def _peak_memory_bytes(device: torch.device) -> int:
    """Of PyTorch's allocations on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

"""One rank of the student in training, in any process (a Ray worker, torchrun, a test)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor

from recipe_gkd.actor.backend import Backend
from recipe_gkd.actor.checkpoint.hf_save import save_hf_folder
from recipe_gkd.actor.checkpoint.writer import CheckpointWriter
from recipe_gkd.actor.objective.log_probs import Continuation, continuation_log_probs
from recipe_gkd.actor.objective.token_kl import TokenKl, token_kl
from recipe_gkd.actor.offload import state_sizes
from recipe_gkd.actor.profile import profiled
from recipe_gkd.actor.ranks import Layout, RankReport, RankSpec, Rendezvous
from recipe_gkd.actor.strategy import build_backend
from recipe_gkd.actor.update import Updater
from recipe_gkd.config.conditions import sends_adapters
from recipe_gkd.config.data_types import with_data_types
from recipe_gkd.config.schema import Config
from recipe_gkd.config.schema.actor import ActorState
from recipe_gkd.data.samples import Sample
from recipe_gkd.errors import CheckpointError
from recipe_gkd.runtime.out_of_memory import MemoryPhase, out_of_memory_explained
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from teacher.common.memory_trim import MemoryTrimmer

P = ParamSpec("P")
R = TypeVar("R")


def _memory_explained(
    phase: MemoryPhase,
) -> Callable[[Callable[Concatenate[StudentActor, P], R]], Callable[Concatenate[StudentActor, P], R]]:
    """Decorate a method: running out of memory in it raises an error with the keys to change."""

    def decorate(method: Callable[Concatenate[StudentActor, P], R]) -> Callable[Concatenate[StudentActor, P], R]:
        @wraps(method)
        def explained(self: StudentActor, *args: P.args, **kwargs: P.kwargs) -> R:
            label = f"actor rank {self.rank}"
            with out_of_memory_explained(pool="actor", phase=phase, label=label, sizes=self.state_sizes):
                return method(self, *args, **kwargs)

        return explained

    return decorate


class StudentActor:
    """One rank of the student in training.

    Every rank must make the same calls in the same order::

        actor = StudentActor(config, rank_spec, total_steps=100)
        actor.setup()                      # process groups, model, weights, optimizer; once
        actor.update(samples, step)        # then these in any order:
        for name, tensor in actor.export_weights(): ...
        actor.save_checkpoint(path); actor.load_checkpoint(path); actor.save_hf(path)
        actor.shutdown()

    The states of ``ActorConfig.offloaded_states`` are on the device only during the calls that need them.

    On a CPU, a collective that not all ranks reach raises an error after
    :func:`~recipe_gkd.actor.ranks.collective_timeout_s`. On CUDA nothing is raised: NCCL's watchdog ends the process
    after this time, which is later than the deadlines of the driver. The actor remains usable only after the errors
    that :meth:`update` documents, and after a :class:`CheckpointError`.

    Args:
        rank_spec: This process.
        total_steps: Step at which the decay of the learning rate ends.
        n_token_ids: Number of token ids. Larger ids are padding of the output layer and belong to no distribution.
            None: the size of the model's vocabulary.

    Attributes:
        rank: Global rank.
        writer: Writer of checkpoints. Its ``timeout_s`` is the deadline of all files.
    """

    backend: Backend
    """Model, optimizer and checkpoints. Available after :meth:`setup`."""
    updater: Updater
    """Computes updates. Available after :meth:`setup`."""

    def __init__(
        self, config: Config, rank_spec: RankSpec, *, total_steps: int, n_token_ids: int | None = None
    ) -> None:
        config = with_data_types(config, rank_spec.device)
        self._config, self._actor_config = config, config.actor_rollout_ref.actor
        self._rank_spec, self._total_steps, self._n_token_ids = rank_spec, total_steps, n_token_ids
        self.rank, self.device = rank_spec.rank, rank_spec.torch_device
        self._sends_adapters = sends_adapters(config)
        self.writer, self._trimmer = CheckpointWriter(self._actor_config.timeout_s), MemoryTrimmer()
        self._step = 0
        self._partially_loaded: Path | None = None

    @_memory_explained("start")
    def setup(self, rendezvous: Rendezvous | None = None) -> RankReport:
        """Join the process groups, build the model, load its weights and create the optimizer.

        Args:
            rendezvous: Store through which all ranks connect, or its address. None: the one of ``rank_spec``.

        Raises:
            ModelError: The model folder cannot be read or is not supported.
            ConfigError: The parallel layout does not fit the model.
            DeadlineError: A rank did not reach the rendezvous within ``actor_rollout_ref.nccl_timeout``.
        """
        started = time.monotonic()
        spec = self._rank_spec if rendezvous is None else replace(self._rank_spec, rendezvous=rendezvous)
        self.backend = build_backend(self._config, spec)
        self.updater = Updater(self.backend, self._config, self._n_token_ids or self.backend.vocab_size)
        self.backend.states.leave()
        layout, report = self.layout, self.backend.report()
        return RankReport(
            rank=layout.rank,
            dp_rank=layout.dp_rank,
            dp_size=layout.dp_size,
            tp_rank=layout.tp_rank,
            pp_rank=layout.pp_rank,
            n_parameters=report.n_parameters,
            device_name="cpu" if self.device.type == "cpu" else torch.cuda.get_device_name(self.device),
            seconds=time.monotonic() - started,
            summary=report.summary,
            warnings=report.warnings,
        )

    @property
    def layout(self) -> Layout:
        """Coordinates of this rank. Available after :meth:`setup`."""
        return self.backend.layout

    def state_sizes(self) -> dict[str, int]:
        """Return the bytes of each state that is on the device, by name. Empty before the model is built."""
        backend = getattr(self, "backend", None)
        return {} if backend is None else state_sizes(backend.state_tensors, self.device)

    def shutdown(self) -> None:
        """Complete a background save and destroy the process groups. The process may set up another actor after it."""
        try:
            self.finish_saves()
        finally:
            self.backend.shutdown()

    def set_total_steps(self, total_steps: int) -> None:
        """Set the step at which the decay of the learning rate ends."""
        self._total_steps = total_steps

    @_memory_explained("update")
    def prepare_update(self) -> None:
        """Begin to move offloaded weights and gradients to the device, while the next batch is not ready."""
        self.backend.states.prefetch("params", "grads")

    def release_states(self) -> None:
        """Release all memory of the device that this rank does not need between two calls.

        Offloaded states leave it, if :meth:`prepare_update` was not followed by an update, and cached memory of
        activations is returned to the device, where a rollout engine needs it.
        """
        self.backend.states.leave()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def update(self, samples: Sequence[Sample], step: int) -> dict[str, float]:
        """Run one optimizer step, which changes the weights from version ``step`` to ``step + 1``.

        Args:
            samples: Shard of this data-parallel rank; see :func:`~recipe_gkd.data.sharding.Sharding`. If the
                global batch has no response token, the weights remain unchanged.
            step: Optimizer step, counted from 0. It determines the learning rate.

        Returns:
            Metrics of the global batch, equal on all ranks: the metrics of
            :func:`~recipe_gkd.actor.objective.loss_metrics.compute_loss_metrics`, ``actor/grad_norm`` before clipping,
            ``actor/lr``, ``actor/micro_batches`` per rank, and ``perf/max_memory_allocated_gb``, the largest peak of a
            rank so far. With ``trainer.oom=split`` also ``actor/oom_splits``, the number of failed attempts of all
            updates, and ``actor/max_token_len``.

        Raises:
            DataError: A sample of this rank is invalid. The weights are unchanged and the actor remains usable, also
                after the following errors.
            SecondaryFailure: A sample of another rank is invalid, or it ran out of memory.
            WorkerError: The loss or the gradient is not finite, or this rank ran out of memory. After the latter the
                actor is usable only with ``trainer.oom=split``, if the optimizer step had not begun.
        """
        self._ensure_usable()
        samples = self.fetch_rows(samples)
        self._step, trainer = step, self._config.trainer
        # Weights are changed, and the optimizer state is needed, only within the step at the end of the update.
        with self.backend.in_use(), self.backend.states.on_device("params", "grads", read_only=True):
            try:
                with profiled(trainer.profile, Path(trainer.default_local_dir), step=step + 1, rank=self.layout.rank):
                    metrics = self.updater.update(samples, step, self._total_steps)
            finally:
                self.backend.free_gradients()
        self._step = step + 1
        self._trimmer.trim_if_due()
        return metrics

    def fetch_rows(self, samples: Sequence[Sample]) -> Sequence[Sample]:
        """Return the samples with the teacher's rows. Here they have them; workers of a cluster fetch them."""
        return samples

    def weights_meta(self) -> list[TensorMeta]:
        """Return Hugging Face name, full shape and dtype of each tensor of :meth:`export_weights`, in order."""
        if self._sends_adapters:
            return self.backend.adapters_meta()
        return [meta for metas in self.backend.weights_meta() for meta in metas]

    def export_weights(self) -> Iterator[tuple[str, Tensor]]:
        """Return an iterator over names and complete tensors; see :class:`recipe_gkd.actor.backend.Backend`.

        With ``lora.sync=adapter`` they are the adapters only.

        It yields nothing on ranks other than global rank 0, which must exhaust it as well. No update may run meanwhile.
        Offloaded weights leave the device when the iterator is exhausted or closed.
        """
        self._ensure_usable()
        return self._export()

    def _export(self) -> Iterator[tuple[str, Tensor]]:
        states = self.backend.states
        with states.on_device("params", read_only=True):
            exported = self.backend.export_adapters() if self._sends_adapters else self.backend.export_weights()
            for name, tensor in exported:
                # The receiver may hold memory on the host longer, or share it with NumPy, so that it cannot leave.
                is_copied = self.device.type == "cpu" and states.is_offloaded("params")
                yield name, tensor.clone() if is_copied else tensor

    @_memory_explained("log-probabilities")
    def log_probs(self, continuations: Sequence[Continuation]) -> list[list[float]]:
        """Return the log-probability of each token of each continuation, at temperature 1.

        It needs no memory for gradients or optimizer state.

        Args:
            continuations: Contexts and continuations, equal on all ranks.

        Returns:
            Float32 values, [T] for each continuation, equal on all ranks.

        Raises:
            DataError: A part is empty, or an id is not a token id. Raised on all ranks; the actor remains usable.
            SecondaryFailure, WorkerError: A rank ran out of memory; see :meth:`token_kl`.
        """
        self._ensure_usable()
        n_token_ids = self._n_token_ids or self.backend.vocab_size
        with self.backend.in_use(), self.backend.states.on_device("params", read_only=True):
            return continuation_log_probs(
                self.backend, self.updater, self._config.gkd, continuations, self._step, n_token_ids
            )

    @_memory_explained("validation")
    def token_kl(self, samples: Sequence[Sample], step: int) -> TokenKl:
        """Return the KL divergences to the teacher at the tokens that this rank computes.

        It needs no memory for gradients or optimizer state.

        Args:
            samples: Scored samples of this data-parallel rank.
            step: Number of optimizer steps of the weights, for messages.

        Returns:
            See :class:`~recipe_gkd.actor.objective.token_kl.TokenKl`. All ranks together have all tokens.

        Raises:
            DataError: A sample of this rank is invalid. The actor remains usable, also after the next errors.
            SecondaryFailure: A sample of another rank is invalid, or it ran out of memory.
            WorkerError: This rank ran out of memory. With ``trainer.oom=split`` it has tried smaller micro-batches.
        """
        self._ensure_usable()
        n_token_ids = self._n_token_ids or self.backend.vocab_size
        with self.backend.in_use(), self.backend.states.on_device("params", read_only=True):
            return token_kl(self.updater, self._config.gkd, self.fetch_rows(samples), step, n_token_ids)

    @_memory_explained("save")
    def save_hf(self, path: str | Path, stop_token_ids: Sequence[int] = ()) -> None:
        """Write a Hugging Face folder, which is complete when this method returns.

        Args:
            path: Folder to create or replace.
            stop_token_ids: Ids that ended responses in training, which the folder declares.

        Raises:
            CheckpointError: It was not written within ``actor.timeout_s``. Raised on all ranks; the actor remains
                usable.
        """
        self._ensure_usable()
        source = Path(self._config.actor_rollout_ref.model.path)
        with self.backend.in_use(), self.backend.states.on_device("params", read_only=True):
            save_hf_folder(self.backend, Path(path), source, self.writer.timeout_s, stop_token_ids=stop_token_ids)

    @_memory_explained("save")
    def save_checkpoint(self, path: str | Path) -> None:
        """Write the parts of ``checkpoint.save_contents`` that a resumed run needs (all but ``hf_model``).

        With ``checkpoint.async_save`` the checkpoint is complete only after :meth:`finish_saves`.

        Args:
            path: Folder to create or replace.

        Raises:
            CheckpointError: This save or an earlier one in the background failed, or was not complete
                ``actor.timeout_s`` after its start. Raised on all ranks. No process writes to the folder any more,
                except a killed one that waits for a hung disk. The actor remains usable.
        """
        self.finish_saves()
        self._ensure_usable()
        options = self._actor_config.checkpoint
        contents = [part for part in options.save_contents if part != "hf_model"]  # written by save_hf
        with self.backend.in_use():
            # The processes that write have their own view of the memory, so the states may leave at once.
            with self.backend.states.on_device(*_states_of(contents), read_only=True):
                self.writer.save(Path(path), self.backend, self._step, contents)
            if not options.async_save:
                self.writer.finish()

    def finish_saves(self, wait: bool = True) -> bool:
        """Complete the save in the background. Return True if no save is in progress any more.

        Args:
            wait: Wait for the writers, at most until ``actor.timeout_s`` after the start of the save.

        Raises:
            CheckpointError: The save failed; see :meth:`save_checkpoint`. Raised on all ranks, once.
        """
        with self.backend.in_use():
            if wait:
                self.writer.finish()
            return self.writer.finish_if_written()

    @_memory_explained("load")
    def load_checkpoint(self, path: str | Path) -> int:
        """Restore ``checkpoint.load_contents`` from a checkpoint of this or another parallel layout.

        Args:
            path: Folder that :meth:`save_checkpoint` wrote.

        Returns:
            Number of completed updates; 0 if ``extra`` is not among the contents.

        Raises:
            CheckpointError: The checkpoint is missing, incomplete, damaged, or of another model. Raised on all ranks.
                Another checkpoint can be loaded. If the damage was found while the weights were restored, the actor
                cannot be used until this is done.
        """
        self.finish_saves()
        path, contents = Path(path), self._actor_config.checkpoint.load_contents
        with self.backend.in_use():
            common = self.backend.check_checkpoint(path, contents)
            self._partially_loaded = path
            # Also without `optimizer` among the contents: its float32 weights are then the loaded model's.
            with self.backend.states.on_device("params", "optimizer"):
                self._step = self.backend.load_checkpoint(path, contents, common)
            self._partially_loaded = None
        return self._step

    def _ensure_usable(self) -> None:
        if self._partially_loaded is not None:
            raise CheckpointError(
                f"the weights were partly restored from {self._partially_loaded}, which is damaged",
                remedy="load another checkpoint",
                path=self._partially_loaded,
            )


def _states_of(contents: Sequence[str]) -> list[ActorState]:
    """Return the states that a save of these parts of a checkpoint reads."""
    return ["params", "optimizer"] if "optimizer" in contents else ["params"]

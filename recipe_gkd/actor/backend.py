"""Interface of a training backend: the model, its optimizer and its checkpoints on one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from recipe_gkd.actor.attention_kernels import AttentionKernel
from recipe_gkd.actor.batch.device_batch import DeviceBatch
from recipe_gkd.actor.offload import OffloadedStates
from recipe_gkd.actor.ranks import Layout
from recipe_gkd.config.schema import OptimConfig
from recipe_gkd.config.schema.actor import ActorState
from recipe_gkd.losses.student_output import StudentOutput
from recipe_gkd.weight_sync.bucket_plan import TensorMeta

if TYPE_CHECKING:
    from torch.distributed.checkpoint.storage import WriteResult  # its import takes half a second in the driver

    from recipe_gkd.actor.batch.micro_batch_plan import MicroBatchPlan
    from recipe_gkd.actor.objective.objective import MicroBatchLosses

LossFunction = Callable[[StudentOutput, DeviceBatch], "MicroBatchLosses"]
"""Function that computes the losses of the rows that predict a response token."""


@dataclass(frozen=True, kw_only=True)
class BackendReport:
    """Description of a model in training.

    Attributes:
        n_parameters: Number of parameters on this rank.
        summary: One line about the layers, for the log.
        warnings: Lines about slow or unsuitable choices.
    """

    n_parameters: int
    summary: str
    warnings: Sequence[str] = field(default_factory=list)


class ShardedSave(Protocol):
    """Planned save of one checkpoint. Its functions run in forked writer processes."""

    def shard_functions(self) -> list[Callable[[], list[WriteResult]]]:
        """Copy tensors from a GPU to the host, and return the functions that write this rank's files.

        Raises:
            OSError, RuntimeError, MemoryError: The copy failed.
        """

    def metadata_function(self, results: Sequence[Sequence[WriteResult]]) -> Callable[[], None]:
        """Return the function of rank 0 that completes the checkpoint after all shards are written.

        Args:
            results: Results of all shard functions of each rank.
        """


class Backend(Protocol):
    """The student in training on one rank. All methods are collective unless they state otherwise.

    Attributes:
        layout: Coordinates of this rank.
        device: Device of the parameters and of the collectives.
        dtype: Data type of the exported weights.
        logits_dtype: Data type of the logits.
        vocab_size: Rows of the output layer.
        attention: Kernel of the attention layers, for which micro-batches are prepared.
        row_multiple: The rows of a micro-batch are padded to a multiple of this.
        micro_batch_multiple: The number of micro-batches is rounded up to a multiple of this, with empty ones.
        tp_group: Group that divides the vocabulary; None if it is whole.
        cp_group: Group that divides the sequences; None if they are whole.
        states: States that leave the device between the calls that need them. :meth:`step` needs those that the caller
            does not bring back.
    """

    layout: Layout
    device: torch.device
    dtype: torch.dtype
    logits_dtype: torch.dtype
    vocab_size: int
    attention: AttentionKernel
    row_multiple: int
    micro_batch_multiple: int
    tp_group: ProcessGroup | None
    cp_group: ProcessGroup | None
    states: OffloadedStates

    def report(self) -> BackendReport:
        """Describe the model. Not collective."""

    def in_use(self) -> AbstractContextManager[None]:
        """Return the context in which all other methods must be called. Not collective."""

    def accumulate(self, plan: MicroBatchPlan, loss: LossFunction) -> list[dict[str, Any]]:
        """Compute the gradient of the objective over all micro-batches of all data-parallel ranks, starting at zero.

        Args:
            plan: Micro-batches of this rank. Each is packed in a thread while the one before it is computed.
            loss: Computes the losses of one micro-batch.

        Returns:
            ``sums``, ``maxima``, ``loss_T`` and ``uids_T`` of each micro-batch where the loss is computed; else an
            empty list.
        """

    def evaluate(self, plan: MicroBatchPlan, loss: LossFunction) -> list[dict[str, Any]]:
        """Compute the losses of all micro-batches without a gradient, with the arguments and result of `accumulate`.

        It needs the weights, but not the gradient buffers.
        """

    def free_gradients(self) -> None:
        """Free gradients that are not in permanent buffers. Call it after an update. Not collective."""

    def gradient_norm(self) -> float:
        """Return the global norm of the gradient, the same on every rank."""

    def step(self, norm: float, *, lr: float, optim: OptimConfig, n_token_ids: int) -> None:
        """Clip the gradient and update the weights.

        Args:
            norm: Result of :meth:`gradient_norm`.
            optim: Other hyperparameters.
            n_token_ids: Number of token ids. Rows of the vocabulary from this index on remain bitwise unchanged.
        """

    def state_tensors(self, state: ActorState) -> Iterable[Tensor]:
        """Return the tensors of a state on this rank, without scalars and without tensors of another state.

        Tensors may share storages. A storage has tensors of one state only. Not collective.

        Args:
            state: ``params``, ``grads`` or ``optimizer``. ``grads`` are permanent buffers only.
        """

    def weights_meta(self, dtype: torch.dtype | None = None) -> list[list[TensorMeta]]:
        """Return Hugging Face name, complete shape and dtype of the tensors of each weight, in order.

        Args:
            dtype: Data type in place of the exported parameters' one. Buffers are exported in the data type of their
                computation, such as a router's correction in float32.
        """

    def export_weights(self, first: int = 0, last: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield names and complete tensors of a range of weights on rank 0, and nothing on other ranks.

        All ranks must exhaust the iterator. A tensor may share memory with the model: it must not be written to, and
        not be used after the next update.
        """

    def adapters_meta(self) -> list[TensorMeta]:
        """Return name, complete shape and dtype of each tensor of :meth:`export_adapters`, in order."""

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the complete factors of the adapters on rank 0 under peft's names, as :meth:`export_weights`.

        They have the dtype of training. The factors B are multiplied by the scale, alpha / rank.
        """

    def extra_files(self) -> dict[str, bytes]:
        """Return content by relative path of files beside the weights of a Hugging Face folder; only on rank 0."""

    def plan_save(self, path: Path, step: int, contents: Sequence[str]) -> ShardedSave:
        """Prepare the save of a checkpoint into an empty folder.

        Args:
            path: Folder of the checkpoint.
            step: Number of completed updates.
            contents: Parts to write: ``model``, ``optimizer``, ``extra``.
        """

    def check_checkpoint(self, path: Path, contents: Sequence[str]) -> dict[str, Any]:
        """Check that a checkpoint can be loaded, without changing the model, and return its common part.

        Raises:
            CheckpointError: The checkpoint is missing, incomplete or damaged. Raised on all ranks.
            CheckpointMismatch: It is of another model, or lacks one of ``contents``. Raised on all ranks.
        """

    def load_checkpoint(self, path: Path, contents: Sequence[str], common: dict[str, Any]) -> int:
        """Restore a checkpoint, and return the number of completed updates; 0 without ``extra``.

        Args:
            path: Folder of the checkpoint.
            contents: Parts to load: ``model``, ``optimizer``, ``extra``.
            common: Result of :meth:`check_checkpoint`.

        Raises:
            CheckpointError: The content is damaged. Raised on all ranks. The model is then partly overwritten.
        """

    def shutdown(self) -> None:
        """Destroy the process groups. Not collective."""

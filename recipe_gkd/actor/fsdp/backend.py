"""The FSDP backend: data parallelism with sharded weights, for the causal language models of transformers."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from recipe_gkd.actor.backend import BackendReport, LossFunction
from recipe_gkd.actor.batch.micro_batch_plan import MicroBatchPlan
from recipe_gkd.actor.fsdp.checkpoint_load import check_checkpoint, load_checkpoint
from recipe_gkd.actor.fsdp.checkpoint_save import FsdpSave
from recipe_gkd.actor.fsdp.forward_backward import evaluate_micro_batches, run_micro_batches
from recipe_gkd.actor.fsdp.fsdp_model import FsdpModel
from recipe_gkd.actor.fsdp.loading import load_sharded, model_name
from recipe_gkd.actor.fsdp.lora import (
    adapted_layers,
    adapter_dropout,
    adapter_factors,
    adapter_files,
    export_adapters,
)
from recipe_gkd.actor.fsdp.model_dims import read_causal_lm_dims
from recipe_gkd.actor.fsdp.offloaded_tensors import state_tensors
from recipe_gkd.actor.fsdp.optimizer import clip_and_step, gradient_norm, keep_padding_rows, make_optimizer
from recipe_gkd.actor.fsdp.output_layer import ensure_output_layer_is_last
from recipe_gkd.actor.fsdp.packing import RowStyle
from recipe_gkd.actor.fsdp.routing_replay import add_replay
from recipe_gkd.actor.fsdp.style_check import choose_style
from recipe_gkd.actor.fsdp.weights import export_weights, weights_meta
from recipe_gkd.actor.offload import OffloadedStates
from recipe_gkd.actor.ranks import Layout, RankSpec, join_ranks, leave_ranks
from recipe_gkd.config.schema import Config, OptimConfig
from recipe_gkd.config.schema.actor import ActorState
from recipe_gkd.errors import ModelError
from recipe_gkd.weight_sync.bucket_plan import TensorMeta
from teacher.common.head_dtype import wants_float32_head


class FsdpBackend:
    """The student in training on PyTorch FSDP2; see :class:`~recipe_gkd.actor.backend.Backend`.

    Args:
        spec: This process.

    Attributes:
        model: Sharded model and optimizer.

    Raises:
        ConfigError: The settings do not fit the model or the number of ranks.
        ModelError: The model folder cannot be read, or the model cannot compute several sequences at a time.
        DeadlineError: A rank did not reach the rendezvous.
    """

    tp_group: ProcessGroup | None = None
    cp_group: ProcessGroup | None = None
    row_multiple = micro_batch_multiple = 1

    def __init__(self, config: Config, spec: RankSpec) -> None:
        self._gkd, self._actor = config.gkd, config.actor_rollout_ref.actor
        fsdp, student = self._actor.fsdp_config, config.actor_rollout_ref.model
        self._path = student.path
        self.layout, self.device = Layout.data_parallel(spec.rank, spec.world_size), spec.torch_device
        self.dtype = getattr(torch, fsdp.dtype)
        read_causal_lm_dims(student.path, trust_remote_code=student.trust_remote_code)  # refuses unsupported models
        join_ranks(config, spec)
        mesh = _mesh(spec, fsdp.fsdp_size)
        module, self._stored = load_sharded(
            Path(student.path),
            fsdp,
            mesh,
            self.device,
            trust_remote_code=student.trust_remote_code,
            lora=self._actor.lora,
            seed=config.data.seed,
        )
        torch.manual_seed(config.data.seed + spec.rank)  # each rank has its own dropout of the adapters
        self.vocab_size = module.get_output_embeddings().weight.shape[0]
        if config.gkd.fuse_lm_head:
            ensure_output_layer_is_last(module, self.device)
        choice = choose_style(module, device=self.device, dtype=self.dtype)
        if config.actor_rollout_ref.rollout.routing_replay:
            _ensure_packed(choice.style)
            add_replay(module)
        self.attention, self._warnings = choice.kernel, choice.warnings
        is_half = fsdp.dtype != "float32"
        self.model = FsdpModel(
            module=module,
            layout=self.layout,
            device=self.device,
            dtype=self.dtype,
            mesh=mesh,
            float32_head=is_half and wants_float32_head(student.head_dtype, fsdp.dtype, self.device.type),
            style=choice.style,
            optimizer=make_optimizer(module, self._actor.optim),
        )
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # what the comparison of row styles used
        self.logits_dtype = torch.float32 if self.model.float32_head else self.dtype
        self.states = OffloadedStates(self.state_tensors, self._actor.offloaded_states, self.device)

    def report(self) -> BackendReport:
        """Describe the model."""
        model, dims = self.model, " x ".join(f"{name} {size}" for name, size in _sizes(self.model.mesh).items())
        summary = (
            f"{model_name(model.module)} of transformers, FSDP ({dims}), sequences {model.style.value}, attention: "
            f"{self.attention.value}"
        )
        if layers := adapted_layers(model.module):
            summary += f", LoRA of rank {self._actor.lora.rank} on {len(layers)} layers"
        n_parameters = sum(parameter.numel() for parameter in _local(model.module))
        return BackendReport(n_parameters=n_parameters, summary=summary, warnings=self._warnings)

    def in_use(self) -> AbstractContextManager[None]:
        """Return the context in which all other methods must be called."""
        return nullcontext()

    def accumulate(self, plan: MicroBatchPlan, loss: LossFunction) -> list[dict[str, Any]]:
        """Compute the gradient of the objective; see :class:`~recipe_gkd.actor.backend.Backend`."""
        self.model.optimizer.zero_grad(set_to_none=True)
        with adapter_dropout(self.model.module):
            return run_micro_batches(self.model, plan, loss, gkd=self._gkd, timeout_s=self._actor.timeout_s)

    def evaluate(self, plan: MicroBatchPlan, loss: LossFunction) -> list[dict[str, Any]]:
        """Compute the losses without a gradient; see :class:`~recipe_gkd.actor.backend.Backend`."""
        return evaluate_micro_batches(self.model, plan, loss, gkd=self._gkd)

    def free_gradients(self) -> None:
        """Free the gradients, none of which is in a permanent buffer."""
        self.model.optimizer.zero_grad(set_to_none=True)

    def gradient_norm(self) -> float:
        """Return the global norm of the gradient, the same on every rank."""
        return gradient_norm(self.model.optimizer)

    def step(self, norm: float, *, lr: float, optim: OptimConfig, n_token_ids: int) -> None:
        """Clip the gradient and update the weights; see :class:`~recipe_gkd.actor.backend.Backend`."""
        with self.states.on_device("params", "optimizer"), keep_padding_rows(self.model.module, n_token_ids):
            clip_and_step(self.model.optimizer, norm, lr, optim)

    def state_tensors(self, state: ActorState) -> Iterable[Tensor]:
        """Return the tensors of a state on this rank; see :class:`~recipe_gkd.actor.backend.Backend`."""
        return state_tensors(self.model, state)

    def weights_meta(self, dtype: torch.dtype | None = None) -> list[list[TensorMeta]]:
        """Return the tensors of each weight, in order; see :class:`~recipe_gkd.actor.backend.Backend`."""
        return weights_meta(self.model.module, self._stored, dtype or self.dtype)

    def export_weights(self, first: int = 0, last: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield complete tensors on rank 0; see :func:`recipe_gkd.actor.fsdp.weights.export_weights`."""
        is_first_rank = self.layout.rank == 0
        return export_weights(
            self.model.module, self._stored, self.dtype, is_first_rank=is_first_rank, first=first, last=last
        )

    def adapters_meta(self) -> list[TensorMeta]:
        """Return name, complete shape and dtype of each tensor of :meth:`export_adapters`, in order."""
        dtype = str(self.dtype).removeprefix("torch.")
        return [(name, tuple(factor.shape), dtype) for name, factor in adapter_factors(self.model.module)]

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield complete factors on rank 0; see :func:`recipe_gkd.actor.fsdp.lora.export_adapters`."""
        is_first_rank = self.layout.rank == 0
        return export_adapters(self.model.module, self._actor.lora, self.dtype, is_first_rank=is_first_rank)

    def extra_files(self) -> dict[str, bytes]:
        """Return the files of the folder ``adapter`` on rank 0, which peft loads; nothing without LoRA."""
        content = adapter_files(self.model.module, self._path)
        return {f"adapter/{name}": data for name, data in content.items()} if self.layout.rank == 0 else {}

    def plan_save(self, path: Path, step: int, contents: Sequence[str]) -> FsdpSave:
        """Prepare the save of a checkpoint; see :class:`~recipe_gkd.actor.backend.Backend`."""
        return FsdpSave(self.model, path, step, contents)

    def check_checkpoint(self, path: Path, contents: Sequence[str]) -> dict[str, Any]:
        """Check that a checkpoint can be loaded; see :class:`~recipe_gkd.actor.backend.Backend`."""
        return check_checkpoint(path, self.model, contents)

    def load_checkpoint(self, path: Path, contents: Sequence[str], common: dict[str, Any]) -> int:
        """Restore a checkpoint of any number of ranks; see :class:`~recipe_gkd.actor.backend.Backend`."""
        return load_checkpoint(path, self.model, contents, common)

    def shutdown(self) -> None:
        """Free host memory and destroy the process groups."""
        self.states.close()
        leave_ranks()


def _mesh(spec: RankSpec, fsdp_size: int) -> DeviceMesh:
    """Return the mesh of all ranks: ``shard``, or ``replicate`` x ``shard`` for several copies of the model."""
    if fsdp_size in (-1, spec.world_size):
        return init_device_mesh(spec.device, (spec.world_size,), mesh_dim_names=("shard",))
    sizes = (spec.world_size // fsdp_size, fsdp_size)
    return init_device_mesh(spec.device, sizes, mesh_dim_names=("replicate", "shard"))


def _ensure_packed(style: RowStyle) -> None:
    if style is not RowStyle.PACKED:
        raise ModelError(
            "actor_rollout_ref.rollout.routing_replay=true, but this model cannot compute sequences packed in one row",
            remedy="set it to false",
        )


def _sizes(mesh: DeviceMesh) -> dict[str, int]:
    return dict(zip(mesh.mesh_dim_names or (), mesh.shape, strict=True))


def _local(module: torch.nn.Module) -> Iterator[Tensor]:
    """Yield this rank's shard of each parameter."""
    return (parameter.to_local() for parameter in module.parameters())  # type: ignore[attr-defined]

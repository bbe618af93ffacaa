"""The Megatron backend: any parallel layout, for the families of :mod:`~recipe_gkd.actor.megatron.model_dims`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from recipe_gkd.actor.backend import BackendReport, LossFunction
from recipe_gkd.actor.batch.micro_batch_plan import MicroBatchPlan
from recipe_gkd.actor.lora import adapter_files, peft_options, synced_factors
from recipe_gkd.actor.megatron import patches
from recipe_gkd.actor.megatron.checkpoint_load import check_checkpoint, load_checkpoint
from recipe_gkd.actor.megatron.checkpoint_save import MegatronSave
from recipe_gkd.actor.megatron.data_parallel import complete_weights
from recipe_gkd.actor.megatron.export import export_adapters, export_weights, weights_meta
from recipe_gkd.actor.megatron.forward_backward import run_micro_batches
from recipe_gkd.actor.megatron.layer_report import layer_report
from recipe_gkd.actor.megatron.megatron_model import build_megatron_model
from recipe_gkd.actor.megatron.offloaded_tensors import state_tensors
from recipe_gkd.actor.megatron.optimizer import clip_and_step, gradient_norm, set_hyperparameters
from recipe_gkd.actor.megatron.padding_rows import keep_padding_rows
from recipe_gkd.actor.megatron.parallel import check_world_size, context_group, destroy_parallel, tensor_group
from recipe_gkd.actor.megatron.transformer_impl import impl_setting
from recipe_gkd.actor.offload import OffloadedStates
from recipe_gkd.actor.peft_patches import empty_model, is_converted
from recipe_gkd.actor.ranks import RankSpec
from recipe_gkd.config.schema import Config, OptimConfig
from recipe_gkd.config.schema.actor import ActorState
from recipe_gkd.losses.kernel_backend import choose_layer_kernels
from recipe_gkd.weight_sync.bucket_plan import TensorMeta


class MegatronBackend:
    """The student in training on Megatron-core; see :class:`~recipe_gkd.actor.backend.Backend`.

    Args:
        spec: This process.
        is_overwritten: See :func:`~recipe_gkd.actor.strategy.build_backend`.

    Attributes:
        model: Megatron's model chunks, optimizer and weight table of this rank.

    Raises:
        ConfigError: The ranks cannot hold complete copies of the model, or the layout does not fit it.
        ModelError: The model folder cannot be read or is not supported.
        DeadlineError: A rank did not reach the rendezvous.
    """

    def __init__(self, config: Config, spec: RankSpec, *, is_overwritten: bool = False) -> None:
        self._gkd, self._actor = config.gkd, config.actor_rollout_ref.actor
        self._path, megatron = config.actor_rollout_ref.model.path, self._actor.megatron
        check_world_size(megatron, spec.world_size)
        patches.install()
        choose_layer_kernels(config.gkd.kernel_backend)
        with self.in_use():
            self.model = build_megatron_model(config, spec, is_overwritten=is_overwritten)
        if spec.device == "cuda":
            # Memory that only the loading needed, such as the weights before the gradient buffers contained them, is
            # still cached. A rollout engine that starts later may share the GPU.
            torch.cuda.empty_cache()
        self.layout, self.device, self.dtype = self.model.layout, self.model.device, self.model.dtype
        self.logits_dtype = torch.float32 if self.model.float32_head else self.dtype
        self.vocab_size, self.attention = self.model.dims.vocab_size, self.model.attention
        self.tp_group, self.cp_group = tensor_group(self.layout), context_group(self.layout)
        self.row_multiple = self.layout.tp_size if megatron.sequence_parallel else 1
        # Interleaved stages process micro-batches in rounds of `pp_size`.
        self.micro_batch_multiple = self.layout.pp_size if megatron.virtual_pipeline_model_parallel_size else 1
        self.states = OffloadedStates(self.state_tensors, self._actor.offloaded_states, self.device)

    def report(self) -> BackendReport:
        """Describe the model."""
        feature = self.model.dims.needs_local_layers
        layers, summary = layer_report(self.model.chunks[0].config, impl_setting(self._actor), feature), ""
        if (lora := self.model.lora) is not None:
            summary = f"; LoRA of rank {lora.config.rank} on {len(lora.layers)} layers"
        return BackendReport(
            n_parameters=self.model.n_parameters, summary=layers.summary + summary, warnings=layers.warnings
        )

    def in_use(self) -> AbstractContextManager[None]:
        """Return the context in which Megatron requests no CUDA device on a CPU."""
        return patches.on_host()

    def accumulate(self, plan: MicroBatchPlan, loss: LossFunction) -> list[dict[str, Any]]:
        """Compute the gradient of the objective; see :class:`~recipe_gkd.actor.backend.Backend`."""
        for chunk in self.model.wrapped:
            chunk.zero_grad_buffer()
        self.model.optimizer.zero_grad()
        with nullcontext() if self.model.lora is None else self.model.lora.dropout():
            return run_micro_batches(self.model, plan, loss, gkd=self._gkd, timeout_s=self._actor.timeout_s)

    def evaluate(self, plan: MicroBatchPlan, loss: LossFunction) -> list[dict[str, Any]]:
        """Compute the losses without a gradient; see :class:`~recipe_gkd.actor.backend.Backend`."""
        options: dict[str, Any] = {"gkd": self._gkd, "timeout_s": self._actor.timeout_s}
        with torch.no_grad():
            return run_micro_batches(self.model, plan, loss, **options, forward_only=True)

    def free_gradients(self) -> None:
        """Free the float32 copies of gradients that ``grad_reduce_in_fp32=false`` creates."""
        self.model.optimizer.zero_grad()  # it leaves the buffers unchanged

    def gradient_norm(self) -> float:
        """Return the global norm of the gradient, the same on every rank."""
        return gradient_norm(self.model.optimizer)

    def step(self, norm: float, *, lr: float, optim: OptimConfig, n_token_ids: int) -> None:
        """Clip the gradient and update the weights; see :class:`~recipe_gkd.actor.backend.Backend`."""
        set_hyperparameters(self.model.optimizer, lr, optim)
        with self.states.on_device("params", "grads", "optimizer"):
            with keep_padding_rows(self.model, n_token_ids):
                clip_and_step(self.model.optimizer, norm, optim.clip_grad)
            if self.states.is_offloaded("params"):
                complete_weights(self.model.wrapped)  # before the host copy is made

    def state_tensors(self, state: ActorState) -> Iterable[Tensor]:
        """Return the tensors of a state on this rank; see :class:`~recipe_gkd.actor.backend.Backend`."""
        return state_tensors(self.model, state)

    def weights_meta(self, dtype: torch.dtype | None = None) -> list[list[TensorMeta]]:
        """Return the tensors of each weight, in order; see :class:`~recipe_gkd.actor.backend.Backend`."""
        return [weights_meta([weight], dtype or self.dtype) for weight, _ in self.model.weights]

    def export_weights(self, first: int = 0, last: int | None = None) -> Iterator[tuple[str, Tensor]]:
        """Yield complete tensors on rank 0; see :func:`recipe_gkd.actor.megatron.export.export_weights`."""
        return export_weights(self.model, first, last)

    def adapters_meta(self) -> list[TensorMeta]:
        """Return name, complete shape and dtype of each tensor of :meth:`export_adapters`, in order."""
        assert self.model.lora is not None
        return weights_meta((factor for _, factor, _ in self.model.lora.factors()), self.dtype)

    def export_adapters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield complete factors on rank 0; see :func:`recipe_gkd.actor.megatron.export.export_adapters`."""
        return synced_factors(export_adapters(self.model), self._actor.lora, self.dtype)

    def extra_files(self) -> dict[str, bytes]:
        """Return the files of the folder ``adapter`` on rank 0, which peft loads; nothing without LoRA."""
        factors = {name: tensor.cpu() for name, tensor in export_adapters(self.model)}
        if not factors or self.model.lora is None:
            return {}
        options = peft_options(self._actor.lora, self.model.lora.layers)
        if is_converted(options, empty_model(self._path)):
            return {}
        content = adapter_files(options, factors, self._path)
        return {f"adapter/{name}": data for name, data in content.items()}

    def plan_save(self, path: Path, step: int, contents: Sequence[str]) -> MegatronSave:
        """Prepare the save of a checkpoint; see :class:`~recipe_gkd.actor.backend.Backend`."""
        return MegatronSave(self.model, path, step, contents)

    def check_checkpoint(self, path: Path, contents: Sequence[str]) -> dict[str, Any]:
        """Check that a checkpoint can be loaded; see :class:`~recipe_gkd.actor.backend.Backend`."""
        return check_checkpoint(path, self.model, contents)

    def load_checkpoint(self, path: Path, contents: Sequence[str], common: dict[str, Any]) -> int:
        """Restore a checkpoint of any layout; see :class:`~recipe_gkd.actor.backend.Backend`."""
        return load_checkpoint(path, self.model, contents, common)

    def shutdown(self) -> None:
        """Free host memory and destroy the process groups."""
        self.states.close()
        destroy_parallel()

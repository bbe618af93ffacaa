"""Choice of the form in which a model gets several sequences, by a comparison with each sequence alone.

Shape suffixes: R sequences, S length of each, N tokens of a packed row, V vocabulary.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from recipe_gkd.actor.attention_kernels import AttentionKernel, Capability, choose_attention
from recipe_gkd.actor.fsdp.loading import model_class, model_name, resharded
from recipe_gkd.actor.fsdp.packed_attention import (
    PACKED_ATTENTION,
    RECORDED_ATTENTION,
    AttentionUse,
    attending,
    register_packed_attention,
)
from recipe_gkd.actor.fsdp.packing import RowStyle, packed_arguments, padded_arguments
from recipe_gkd.actor.packed_row import PackedRow
from recipe_gkd.errors import ModelError

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_Result = TypeVar("_Result")
_LENGTH = 6
_N_PADDING = 3


@dataclass(frozen=True, kw_only=True)
class StyleChoice:
    """Form in which a model gets several sequences.

    Attributes:
        style: Form of a micro-batch.
        kernel: Kernel of the packed attention, for which micro-batches are prepared.
        warnings: Lines about a slower form, or about results that depend on the other sequences of a micro-batch.
    """

    style: RowStyle
    kernel: AttentionKernel
    warnings: list[str]


@dataclass(frozen=True, kw_only=True)
class _Tolerances:
    """Largest relative difference of the logits of a row.

    Attributes:
        alone: To the same sequence alone, whose matrix products have other shapes and other rounding errors.
        neighbor: If only another sequence in the row changes.
    """

    alone: float
    neighbor: float


_FLOAT32 = _Tolerances(alone=1e-4, neighbor=1e-4)
_HALF = _Tolerances(alone=0.2, neighbor=0.03)


@dataclass(frozen=True, kw_only=True)
class _Probe:
    """Random sequences and their logits.

    Attributes:
        ids_RS: Token ids of three sequences.
        alone: Logits of the first and of the second sequence alone, [S, V].
        tolerances: Limits of the comparison.
        use: Requirements of the attention layers, recorded by :func:`_check_packed`.
    """

    model: PreTrainedModel
    ids_RS: Tensor
    alone: list[Tensor]
    tolerances: _Tolerances
    use: AttentionUse = field(default_factory=AttentionUse)


def choose_style(model: PreTrainedModel, *, device: torch.device, dtype: torch.dtype) -> StyleChoice:
    """Return the fastest form in which a model computes each sequence as if it were alone. Collective.

    The attention implementation of the model is set accordingly. The check takes up to seven forward passes of short
    rows. It fails for a packed row if the model mixes the sequences (recurrent and convolution layers), ignores the
    positions, or needs an option that packed attention does not have.

    Args:
        model: Model of transformers in evaluation mode, sharded or not, with the implementation of attention that it
            was loaded with.
        device: Device of the parameters.
        dtype: Data type of the forward pass.

    Raises:
        ModelError: The model computes neither form correctly. Raised on all ranks.
    """
    register_packed_attention()
    loaded_with, is_switchable = model.config._attn_implementation, _is_switchable(model)
    reasons = {}
    with torch.no_grad(), resharded(model):
        # `eager` is the only implementation that supports all options.
        probe = _probe(model, device, dtype, "eager" if is_switchable else loaded_with)
        is_finite, reason = _on_all_ranks(device, lambda: _check_finite(probe))
        if not is_finite:
            raise ModelError(
                f"{model_name(model)} in {dtype}: {reason}",
                remedy="check the weights, or set actor_rollout_ref.actor.fsdp_config.dtype=float32",
            )
        if is_switchable:
            kernel, reason = _on_all_ranks(device, lambda: _check_packed(probe, device, dtype))
            if kernel is not None:
                return StyleChoice(style=RowStyle.PACKED, kernel=kernel, warnings=_rope_warnings(model))
        else:
            reason = "its attention layers do not use the attention functions of transformers"
        reasons[RowStyle.PACKED.value] = reason
        candidates = [loaded_with] if not is_switchable else ["eager"] if probe.use.options else ["sdpa", "eager"]
        for name in candidates:
            is_equal, reason = _on_all_ranks(device, lambda name=name: _check_padded(probe, name))  # type: ignore[misc]
            if is_equal:
                slower = f"{model_name(model)} gets padded sequences, which is slower: {reasons[RowStyle.PACKED.value]}"
                warnings = [slower, *_rope_warnings(model)]
                return StyleChoice(style=RowStyle.PADDED, kernel=AttentionKernel.SDPA_BLOCKS, warnings=warnings)
            reasons[f"{RowStyle.PADDED.value} ({name})"] = reason
    raise ModelError(
        f"{model_name(model)} cannot be trained with actor_rollout_ref.actor.strategy=fsdp, because several sequences "
        "at a time give other results than each of them alone",
        remedy="use another student",
        details=tuple(f"{form}: {reason}" for form, reason in reasons.items()),
    )


def _probe(model: PreTrainedModel, device: torch.device, dtype: torch.dtype, implementation: str) -> _Probe:
    """Draw three sequences, and compute the first two alone."""
    generator = torch.Generator().manual_seed(0)  # the same on all ranks
    vocab_size = model.config.get_text_config().vocab_size
    ids_RS = torch.randint(vocab_size, (3, _LENGTH), generator=generator).to(device)
    _set_attention(model, implementation)
    alone = [_logits(model, padded_arguments(ids_RS[index : index + 1]))[0] for index in range(2)]
    return _Probe(model=model, ids_RS=ids_RS, alone=alone, tolerances=_FLOAT32 if dtype == torch.float32 else _HALF)


def _check_finite(probe: _Probe) -> bool:
    if not all(bool(logits.isfinite().all()) for logits in probe.alone):
        raise ModelError("the logits of random tokens are not finite")
    return True


def _check_packed(probe: _Probe, device: torch.device, dtype: torch.dtype) -> AttentionKernel:
    """Return the kernel for packed rows.

    Raises:
        ModelError: Packed rows give other results than single sequences.
    """
    if "position_ids" not in inspect.signature(probe.model.forward).parameters:
        raise ModelError("its forward function has no argument position_ids")
    _set_attention(probe.model, RECORDED_ATTENTION)
    single = _packed(probe, [0], AttentionKernel.SDPA_BLOCKS, record=True)
    use = probe.use
    if not use.head_dims:
        raise ModelError("it has no attention layer that calls the attention functions of transformers")
    if use.windows != use.mask_windows:
        raise ModelError(
            f"it masks keys at the distances {sorted(use.mask_windows)}, but passes the windows {sorted(use.windows)} "
            "to its attention functions"
        )
    kernel = _choose_kernel(use, torch.cuda.get_device_capability(device) if device.type == "cuda" else None, dtype)
    _set_attention(probe.model, PACKED_ATTENTION)
    first, other = (_packed(probe, order, kernel) for order in ([0, 1], [2, 1]))
    # Not before the last forward pass: a rank with another result must not leave the others alone in a collective.
    _compare(single, probe.alone[0], probe.tolerances.alone, "a row of one sequence")
    _compare(other[_LENGTH:], first[_LENGTH:], probe.tolerances.neighbor, "the same sequence after another one")
    _compare(first[:_LENGTH], probe.alone[0], probe.tolerances.alone, "the first sequence of a row")
    _compare(first[_LENGTH:], probe.alone[1], probe.tolerances.alone, "the second sequence of a row")
    return kernel


def _choose_kernel(use: AttentionUse, capability: Capability | None, dtype: torch.dtype) -> AttentionKernel:
    """Return the fastest kernel that supports all layers. The fused ones have no options but windows."""
    kernels = {
        choose_attention(with_transformer_engine=False, capability=capability, dtype=dtype, head_dim=head_dim)
        for head_dim in use.head_dims
    }
    fused = kernels == {AttentionKernel.VARLEN} and not use.options
    return AttentionKernel.VARLEN if fused else AttentionKernel.SDPA_BLOCKS


def _check_padded(probe: _Probe, implementation: str) -> bool:
    """Return True. Random tokens take the place of the padding.

    Raises:
        ModelError: Padded rows give other results than single sequences.
    """
    _set_attention(probe.model, implementation)
    padding = probe.ids_RS[2].expand(2, -1)[:, :_N_PADDING]
    output = _logits(probe.model, padded_arguments(torch.cat([probe.ids_RS[:2], padding], dim=1)))
    for index, alone in enumerate(probe.alone):
        _compare(output[index, :_LENGTH], alone, probe.tolerances.alone, "a padded sequence")
    return True


def _packed(probe: _Probe, order: list[int], kernel: AttentionKernel, *, record: bool = False) -> Tensor:
    """Return the logits of a packed row of the given sequences, [N, V]."""
    device, n_sequences = probe.ids_RS.device, len(order)
    position_ids_N = torch.arange(_LENGTH, device=device).repeat(n_sequences)
    bounds = _LENGTH * torch.arange(n_sequences + 1, dtype=torch.int32, device=device)
    row = PackedRow(boundaries=bounds, max_length=_LENGTH, position_ids_N=position_ids_N, uniform_length=_LENGTH)
    with attending(row, kernel, probe.use if record else None):
        return _logits(probe.model, packed_arguments(probe.ids_RS[order].reshape(1, -1), position_ids_N[None]))[0]


def _logits(model: PreTrainedModel, arguments: dict[str, Any]) -> Tensor:
    output: Tensor = model(**arguments).logits
    return output.float()


def _compare(values_SV: Tensor, wanted_SV: Tensor, tolerance: float, what: str) -> None:
    """Raise an error if the logits of a row differ by more than a fraction of their spread."""
    spread = (wanted_SV - wanted_SV.mean(dim=-1, keepdim=True)).norm(dim=-1)
    difference = float(((values_SV - wanted_SV).norm(dim=-1) / spread.clamp(min=1e-30)).max())
    if not difference <= tolerance:  # also for NaN
        raise ModelError(f"{what} differs by {difference:.1e} relative to its logits; the limit is {tolerance:.0e}")


def _on_all_ranks(device: torch.device, check: Callable[[], _Result]) -> tuple[_Result | None, str]:
    """Return the result of a check, or None and the reason if it failed on any rank."""
    result, reason = None, ""
    try:
        result = check()
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 - code of any model, which may not be prepared for the arguments
        reason = error.what if isinstance(error, ModelError) else f"{type(error).__name__}: {error}"
    failed = torch.tensor(float(result is None), device=device)
    if dist.is_initialized():
        dist.all_reduce(failed, dist.ReduceOp.MAX)
    return (None, reason or "another rank has another result") if failed else (result, "")


def _is_switchable(model: PreTrainedModel) -> bool:
    """Return True if the attention implementation of a loaded model can be set.

    transformers inspects the module of the class, which must not be the class that ``fully_shard`` derives from it.
    """
    return bool(model_class(model)._can_set_attn_implementation())


def _set_attention(model: PreTrainedModel, name: str) -> None:
    if name != model.config._attn_implementation:
        model.set_attn_implementation(name)


def _rope_warnings(model: PreTrainedModel) -> list[str]:
    """Return a warning if the rotary frequencies of a sequence depend on the longest one of its micro-batch."""
    config = model.config.get_text_config()
    parameters = getattr(config, "rope_parameters", None) or {}
    candidates = [parameters, *(each for each in parameters.values() if isinstance(each, dict))]
    kinds = sorted({each["rope_type"] for each in candidates if each.get("rope_type") in ("dynamic", "longrope")})
    return [
        f"rope_type={kind}: transformers derives the frequencies of all sequences of a micro-batch from its longest "
        "one if that exceeds the original context length; keep prompts and responses within it"
        for kind in kinds
    ]

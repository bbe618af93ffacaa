"""Reading of a model folder's configuration, in which no field is ignored."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from recipe_gkd.actor.megatron.families import FAMILIES
from recipe_gkd.actor.megatron.families.blocks import rope
from recipe_gkd.actor.megatron.families.family import Family
from recipe_gkd.actor.megatron.model_dims import ModelDims
from recipe_gkd.actor.student_dims import check_not_quantized, load_hf_config, read_config_json
from recipe_gkd.errors import ModelError

if TYPE_CHECKING:
    from transformers import PretrainedConfig

REMEDY = "actor_rollout_ref.actor.strategy=fsdp trains models with the code of transformers"
REQUIRED: dict[str, tuple[Any, ...]] = {"hidden_act": ("silu",), "attention_dropout": (0.0, None)}
"""Supported values of fields of several families."""
WITHOUT_EFFECT = frozenset({
    "initializer_range", "use_cache", "bos_token_id", "eos_token_id", "pad_token_id", "output_router_logits",
    "router_aux_loss_coef",
})  # fmt: skip
"""Fields without an effect on the logits of a text model. The objective has no auxiliary loss of the router."""
ROPE_FIELDS = {
    "default": {"rope_type", "rope_theta", "partial_rotary_factor"},
    "linear": {"factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"},
    "yarn": {
        "factor", "attention_factor", "beta_fast", "beta_slow", "original_max_position_embeddings", "mscale",
        "mscale_all_dim", "truncate",
    },
}  # fmt: skip
"""Fields of each supported ``rope_type``; those of ``default`` are fields of all types."""


class RecordedConfig:
    """Configuration of transformers that records which of its fields were read."""

    def __init__(self, hf: PretrainedConfig) -> None:
        self.hf = hf
        self.read: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        mapped = (getattr(self.hf, "attribute_map", None) or {}).get(name, name)
        self.read |= {name, mapped}
        return getattr(self.hf, name)


def read_model_dims(path: str | Path, *, trust_remote_code: bool = False) -> ModelDims:
    """Return the dimensions of a Hugging Face model.

    Args:
        path: Model folder with a ``config.json``.
        trust_remote_code: Passed to transformers.

    Raises:
        ModelError: The folder has no readable ``config.json``, or the model is not supported.
    """
    content = read_config_json(path)
    model_type = content.get("model_type")
    # The family is compared first, because transformers raises an error for a type that it does not support.
    family = FAMILIES.get(str(model_type))
    if family is None:
        raise ModelError(
            f"{path} is a {model_type!r} model; the actor supports: {', '.join(FAMILIES)}",
            remedy="for another causal language model set actor_rollout_ref.actor.strategy=fsdp",
            path=Path(path),
            names=("model_type",),
        )
    check_not_quantized(content, path)
    hf = load_hf_config(path, trust_remote_code=trust_remote_code)
    recorded = RecordedConfig(hf)
    try:
        _check_values(hf, family)
        _check_rope(hf)
        _check_problem(recorded, family)
        dims = _dims(recorded, family)
        _check_nothing_is_ignored(recorded, family)
    except ModelError as error:
        raise ModelError(f"{path}: {error.what}", remedy=REMEDY, path=Path(path), names=error.names) from None
    return dims


def _dims(hf: Any, family: Family) -> ModelDims:
    special = family.numbers(hf)
    hidden, heads = hf.hidden_size, hf.num_attention_heads
    head_dim = special.get("head_dim")
    if head_dim is None:
        head_dim = getattr(hf, "head_dim", None) or hidden // heads
    numbers: dict[str, Any] = dict(
        family=family.model_type,
        layers=hf.num_hidden_layers,
        hidden=hidden,
        ffn=hf.intermediate_size,
        heads=heads,
        head_dim=head_dim,
        vocab_size=hf.vocab_size,
        tied=bool(hf.tie_word_embeddings),
        norm_eps=hf.rms_norm_eps,
        max_positions=hf.max_position_embeddings,
    )
    if "kv_heads" not in special:
        numbers["kv_heads"] = hf.num_key_value_heads
    if "ropes" not in special:
        numbers["ropes"] = (rope(hf, hf.rope_parameters, head_dim),)
    return ModelDims(**numbers | special)


def _check_values(hf: PretrainedConfig, family: Family) -> None:
    """Check the fields of which not all values are supported."""
    required = _required(family)
    wrong = tuple(name for name, values in required.items() if getattr(hf, name, values[0]) not in values)
    if wrong:
        found = ", ".join(f"{name}={getattr(hf, name)}" for name in wrong)
        wanted = ", ".join(f"{name}={' or '.join(str(value) for value in required[name][:1])}" for name in wrong)
        raise ModelError(
            f"{found} in config.json is not supported for a {hf.model_type} student; expected {wanted}", names=wrong
        )


def _check_problem(hf: Any, family: Family) -> None:
    if (problem := family.problem(hf)) is not None:
        reason, names = problem
        found = ", ".join(f"{name}={getattr(hf, name)}" for name in names)
        raise ModelError(f"{found} in config.json is not supported: {reason}", names=names)


def _check_rope(hf: PretrainedConfig) -> None:
    """Check the scalings of the rotary embedding, by their fields too."""
    parameters: dict[str, Any] = hf.rope_parameters
    is_nested = all(isinstance(each, dict) for each in parameters.values())
    for each in parameters.values() if is_nested else [parameters]:
        kind = each.get("rope_type", "default")
        known = ROPE_FIELDS["default"] | ROPE_FIELDS.get(kind, set()) | {"type", "max_position_embeddings"}
        ignored = [name for name, value in each.items() if name not in known and value is not None]
        if kind not in ROPE_FIELDS or ignored:
            reason = f"its {', '.join(ignored)}" if kind in ROPE_FIELDS else f"rope_type={kind}"
            raise ModelError(
                f"the rotary embedding {each} in config.json is not supported because of {reason}; expected one of the "
                f"types {', '.join(ROPE_FIELDS)}",
                names=("rope_parameters",),
            )


@dataclass(frozen=True, kw_only=True)
class FieldLists:
    """Fields of a model's configuration class.

    Attributes:
        read: Fields that the description of the family reads.
        required: Supported values of fields that only some values are supported of.
        without_effect: Fields without an effect on a text model in training.
        ignored: Remaining fields, with their defaults. A model is refused if it sets one.
    """

    read: frozenset[str]
    required: dict[str, tuple[Any, ...]]
    without_effect: frozenset[str]
    ignored: dict[str, Any]


def field_lists(path: str | Path) -> FieldLists:
    """Return how the configuration fields of a supported model are used.

    Args:
        path: Model folder.
    """
    recorded = RecordedConfig(load_hf_config(path, trust_remote_code=False))
    family = FAMILIES[recorded.model_type]
    family.problem(recorded)
    _dims(recorded, family)
    return _field_lists(recorded, family)


def _field_lists(recorded: RecordedConfig, family: Family) -> FieldLists:
    fields = _own_fields(recorded.hf)
    read = frozenset((recorded.read | {"rope_parameters"}) & fields.keys())
    required = {name: values for name, values in _required(family).items() if name in fields}
    without_effect = (WITHOUT_EFFECT | family.without_effect) & fields.keys()
    known = read | required.keys() | without_effect
    ignored = {name: default for name, default in fields.items() if name not in known}
    return FieldLists(read=read, required=required, without_effect=without_effect, ignored=ignored)


def _required(family: Family) -> dict[str, tuple[Any, ...]]:
    common = {name: values for name, values in REQUIRED.items() if name not in family.without_effect}
    return common | dict(family.required)


def _check_nothing_is_ignored(recorded: RecordedConfig, family: Family) -> None:
    """Check that fields which nothing here reads have the default of transformers.

    A later version of transformers may have a new field. If a model sets it, its effect is unknown.
    """
    hf = recorded.hf
    ignored = _field_lists(recorded, family).ignored
    names = tuple(name for name, default in ignored.items() if getattr(hf, name) != default)
    if names:
        found = ", ".join(f"{name}={getattr(hf, name)}" for name in names)
        raise ModelError(
            f"{found} in config.json is not known for a {hf.model_type} student, so its effect would be ignored",
            names=names,
        )


def _own_fields(hf: PretrainedConfig) -> dict[str, Any]:
    """Return the fields of a configuration that not all configurations have, with their defaults."""
    from transformers import PretrainedConfig

    common = {field.name for field in dataclasses.fields(PretrainedConfig)}
    found = {}
    for each in dataclasses.fields(hf):
        if each.name in common:
            continue
        factory = each.default_factory
        found[each.name] = each.default if factory is dataclasses.MISSING else factory()
    return found

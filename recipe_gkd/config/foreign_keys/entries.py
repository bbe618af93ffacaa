"""Rows of the tables of other projects' keys."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from recipe_gkd.config.keys import ACTOR, FSDP, MEGATRON, ROLLOUT, TEACHER

SERVICE = f"the teacher is a separate service, started by `teacher/start_server.sh`; `{TEACHER}.server_ip` names it"
PACKED = "remove it: sequences are always packed without padding"
RECOMPUTE = (
    f"`{FSDP}.gradient_checkpointing`, or with Megatron `{MEGATRON}.override_transformer_config.recompute_granularity`"
)
DTYPE = f"`{MEGATRON}.dtype` or `{FSDP}.dtype`, and `{ROLLOUT}.dtype`"
BATCH = (
    f"`data.train_batch_size` is the number of prompts of an optimizer step, over all GPUs; `{ACTOR}.max_token_len` "
    "limits a micro-batch"
)

ANY = ("*",)
"""Values of :attr:`ForeignKey.fixed` for a key whose value makes no difference here."""
_EMPTY = ("", "null", "none", "{}", "[]")


@dataclass(frozen=True, kw_only=True)
class ForeignKey:
    """Keys of another project that have one answer.

    Attributes:
        names: Their names. An asterisk matches any part of a name.
        key: Our key with the same meaning and unit, with which an override is accepted, except for ``values``. None if
            there is none.
        advice: What to write or to consider, as Markdown that reads well in a terminal.
        values: Value of the other project, in lower case -> our overrides with the same meaning, separated by spaces.
        fixed: Values, in lower case, that describe what happens here anyway. The override is left out with a warning.
    """

    names: tuple[str, ...]
    key: str | None = None
    advice: str = ""
    values: Mapping[str, str] = field(default_factory=dict)
    fixed: tuple[str, ...] = ()

    def translate(self, value: str) -> tuple[str, ...] | None:
        """Return our overrides for a value.

        Args:
            value: The value as it is written in an override.

        Returns:
            Overrides, none if the value changes nothing here. None if the value cannot be taken over.
        """
        plain = value.strip().strip("'\"").lower()
        if plain in self.values:
            return tuple(self.values[plain].split())
        if self.key is not None:
            return (f"{self.key}={value}",)
        if self.fixed == ANY or plain in self.fixed or plain in _EMPTY:
            return ()
        return None


@dataclass(frozen=True, kw_only=True)
class Project:
    """Keys of one project, in the order of docs/migration.md.

    Attributes:
        name: Name of the project, which heads its table.
        keys: Rows of the table.
    """

    name: str
    keys: tuple[ForeignKey, ...]


def same(*names: str, key: str, advice: str = "", values: Mapping[str, str] | None = None) -> ForeignKey:
    """Return a row of keys that are accepted as our ``key``. ``values`` translates values."""
    return ForeignKey(names=names, key=key, advice=advice, values=values or {})


def other(*names: str, advice: str, values: Mapping[str, str] | None = None, fixed: tuple[str, ...] = ()) -> ForeignKey:
    """Return a row of keys whose values are not ours."""
    return ForeignKey(names=names, advice=advice, values=values or {}, fixed=fixed)

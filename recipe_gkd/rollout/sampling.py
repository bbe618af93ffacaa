"""How the tokens of an answer are drawn: which parameters, which seed, and where an answer ends. No vLLM here."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from recipe_gkd.config import Config
from recipe_gkd.errors import ModelError
from teacher.engines.eos import declared_eos_ids

SamplingName = Literal["train", "validation"]
"""``actor_rollout_ref.rollout`` has the parameters of training itself, and those of validation in ``val_kwargs``."""
VALIDATION_STEP = -1
"""Stands for the step in the seeds of validation: the same at every step, and none of training."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """The parameters that all requests of a batch share."""

    temperature: float
    top_p: float
    top_k: int
    """-1: all tokens."""
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    """Ascending. The one that ends an answer is part of it."""
    seed: int
    """``data.seed``; see :func:`request_seed`."""
    fixed_step: int | None = None
    """Enters the seeds instead of the step."""

    def for_request(self, uid: int, step: int) -> dict[str, Any]:
        """Keyword arguments of vLLM's ``SamplingParams`` for the prompt ``uid`` at training step ``step``."""
        shared = {"max_tokens": self.max_tokens, "stop_token_ids": list(self.stop_token_ids)}
        if self.temperature == 0:
            return {"temperature": 0.0, **shared}
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": request_seed(self.seed, uid, step if self.fixed_step is None else self.fixed_step),
            **shared,
        }


def request_seed(seed: int, uid: int, step: int) -> int:
    """The seed of one answer: the first 63 bits of BLAKE2b over (``data.seed``, ``prompt.uid``, step) as int64s.

    Nothing else enters, so an answer does not depend on the worker that generates it, on the other prompts of its
    batch, or on a restart. Neighboring triples give unrelated seeds.
    """
    digest = hashlib.blake2b(struct.pack("<qqq", seed, uid, step), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sampling_from(config: Config, name: SamplingName = "train", *, also_stop_at: Sequence[int] = ()) -> Sampling:
    """From ``actor_rollout_ref.rollout`` (``validation``: its ``val_kwargs``) and ``data``.

    An answer ends at the student's own end-of-sequence ids and at ``also_stop_at``, which are the teacher's: a base
    student and an instruct teacher end a turn with different tokens, and what the teacher thinks of tokens behind its
    own end of turn is noise.
    """
    rollout = config.actor_rollout_ref.rollout
    chosen = rollout.val_kwargs if name == "validation" else rollout
    return Sampling(
        temperature=chosen.temperature,
        top_p=chosen.top_p,
        top_k=chosen.top_k,
        max_tokens=config.data.max_response_length,
        stop_token_ids=tuple(sorted({*stop_token_ids(config.actor_rollout_ref.model.path), *also_stop_at})),
        seed=config.data.seed,
        fixed_step=VALIDATION_STEP if name == "validation" else None,
    )


def stop_token_ids(folder: str) -> tuple[int, ...]:
    """Return every EOS id that a model's ``generation_config.json`` or ``config.json`` declares, ascending.

    vLLM cannot read them itself, because the engine runs without a tokenizer.

    Args:
        folder: Hugging Face model folder. A missing file counts as one without EOS ids.

    Raises:
        ModelError: A file is not valid JSON, or its ``eos_token_id`` is not a token id.
    """
    generation_config, config = (_read_json(Path(folder) / name) for name in ("generation_config.json", "config.json"))
    try:
        return tuple(sorted({token_id for ids in declared_eos_ids(generation_config, config) for token_id in ids}))
    except ValueError as error:
        raise ModelError(f"{folder} has {error}; correct its generation_config.json or config.json") from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ModelError(f"{path} is not valid JSON ({error}); copy the model folder again") from error

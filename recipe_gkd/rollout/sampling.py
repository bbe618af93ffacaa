"""How the tokens of an answer are drawn: which parameters, which seed, and where an answer ends. No vLLM here."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from recipe_gkd.config import Config
from recipe_gkd.errors import ModelError


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

    def for_request(self, uid: int, step: int) -> dict[str, Any]:
        """Keyword arguments of vLLM's ``SamplingParams`` for the prompt ``uid`` at training step ``step``."""
        shared = {"max_tokens": self.max_tokens, "stop_token_ids": list(self.stop_token_ids)}
        if self.temperature == 0:
            return {"temperature": 0.0, **shared}
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": request_seed(self.seed, uid, step),
            **shared,
        }


def request_seed(seed: int, uid: int, step: int) -> int:
    """The seed of one answer: the first 63 bits of BLAKE2b over (``data.seed``, ``prompt.uid``, step) as int64s.

    Nothing else enters, so an answer does not depend on the worker that generates it, on the other prompts of its
    batch, or on a restart. Neighbouring triples give unrelated seeds.
    """
    digest = hashlib.blake2b(struct.pack("<qqq", seed, uid, step), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sampling_from(config: Config, *, greedy: bool = False, also_stop_at: Sequence[int] = ()) -> Sampling:
    """From ``actor_rollout_ref.rollout`` and ``data``; ``greedy`` overrides the temperature, for validation.

    An answer ends at the student's own end-of-sequence ids and at ``also_stop_at``, which are the teacher's: a base
    student and an instruct teacher end a turn with different tokens, and what the teacher thinks of tokens behind its
    own end of turn is noise.
    """
    rollout = config.actor_rollout_ref.rollout
    return Sampling(
        temperature=0.0 if greedy else rollout.temperature,
        top_p=rollout.top_p,
        top_k=rollout.top_k,
        max_tokens=config.data.max_response_length,
        stop_token_ids=tuple(sorted({*stop_token_ids(config.actor_rollout_ref.model.path), *also_stop_at})),
        seed=config.data.seed,
    )


def stop_token_ids(folder: str) -> tuple[int, ...]:
    """Every end-of-sequence id that ``generation_config.json`` or ``config.json`` of a model names; may be none.

    The engine runs without a tokenizer, and so does not know them by itself.
    """
    found: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        path = Path(folder) / name
        if not path.is_file():
            continue
        try:
            values = json.loads(path.read_text())
        except ValueError as error:
            raise ModelError(f"{path} is not valid JSON ({error}); copy the model folder again") from error
        for section in (values, values.get("text_config") or {}):
            ids = section.get("eos_token_id")
            found.update([ids] if isinstance(ids, int) else ids or [])
    return tuple(sorted(found))

"""Sampling parameters, seeds and stop tokens of responses. This module does not import vLLM."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from recipe_gkd.config import Config
from recipe_gkd.config.conditions import validates_kl
from recipe_gkd.config.support import Support
from recipe_gkd.errors import ModelError
from teacher.common.eos import declared_eos_ids

SamplingName = Literal["train", "validation", "probe"]
"""Parameters of training (``actor_rollout_ref.rollout``), of validation (its ``val_kwargs``), and of the tokens with
which an engine is verified after a weight sync (:mod:`recipe_gkd.hybrid.sync_probe`)."""
PROBE_TOKENS = 4
VALIDATION_STEP = -1
"""Step in the seeds of validation. It makes them equal at every step, and different from the seeds of training."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """Sampling parameters of all requests of a batch.

    Attributes:
        temperature: Softmax temperature; 0 is greedy.
        top_p: Probability mass of nucleus sampling.
        top_k: Number of most likely tokens; -1 for all tokens.
        max_tokens: Maximum length of a response, in tokens.
        stop_token_ids: Ids that end a response, ascending. The id is part of the response.
        seed: ``data.seed``; see :func:`request_seed`.
        fixed_step: Step in the seeds in place of the training step. None selects the training step.
        n_student_ids: Number of the student's likeliest ids that the engine returns with each token.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    seed: int
    fixed_step: int | None = None
    n_student_ids: int = 0

    def for_request(self, uid: int, step: int, *, turn: int = 0, max_tokens: int | None = None) -> dict[str, Any]:
        """Return the keyword arguments of vLLM's ``SamplingParams`` for one prompt.

        Args:
            uid: Uid of the sample.
            step: Training step.
            turn: Turn of a conversation.
            max_tokens: Maximum length of the turn. None: that of a response.
        """
        shared = {
            "max_tokens": self.max_tokens if max_tokens is None else min(max_tokens, self.max_tokens),
            "stop_token_ids": list(self.stop_token_ids),
            "logprobs": self.n_student_ids,  # besides the sampled token's
        }
        if self.temperature == 0:
            return {"temperature": 0.0, **shared}
        return {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "seed": request_seed(self.seed, uid, step if self.fixed_step is None else self.fixed_step, turn),
            **shared,
        }


def request_seed(seed: int, uid: int, step: int, turn: int = 0) -> int:
    """Return the seed of one response: the upper 63 bits of the 8-byte BLAKE2b digest of the arguments as int64.

    The first turn of a conversation has the seed of a response without further turns.

    A response therefore does not depend on the worker that generates it, on the other prompts of its batch, or on a
    restart. Neighboring triples give unrelated seeds.

    Args:
        seed: ``data.seed``.
        uid: Uid of the sample.
        step: Training step, or ``VALIDATION_STEP``.
        turn: Turn of a conversation, starting at 0.
    """
    later = struct.pack("<q", turn) if turn else b""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, uid, step) + later, digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def sampling_from(config: Config, name: SamplingName = "train", *, also_stop_at: Sequence[int] = ()) -> Sampling:
    """Return the sampling parameters of a configuration.

    Args:
        name: ``"train"`` for ``actor_rollout_ref.rollout``, ``"validation"`` for its ``val_kwargs``, ``"probe"`` for
            few tokens from the unchanged distribution.
        also_stop_at: EOS ids of the teachers, at which a response ends in addition to the student's own EOS ids. A base
            student and an instruct teacher end a turn with different tokens, and a teacher's distribution after its own
            end of turn is noise.

    Raises:
        ModelError: See :func:`stop_token_ids`.
    """
    rollout = config.actor_rollout_ref.rollout
    chosen = rollout.val_kwargs if name == "validation" else rollout
    is_probe = name == "probe"
    needs_ids = name == "train" or (name == "validation" and validates_kl(config))
    return Sampling(
        temperature=1.0 if is_probe else chosen.temperature,
        top_p=1.0 if is_probe else chosen.top_p,
        top_k=-1 if is_probe else chosen.top_k,
        max_tokens=PROBE_TOKENS if is_probe else config.data.max_response_length,
        stop_token_ids=tuple(sorted({*stop_token_ids(config.actor_rollout_ref.model.path), *also_stop_at})),
        seed=config.data.seed,
        fixed_step=VALIDATION_STEP if name == "validation" else None,
        n_student_ids=Support.of(config).n_student_ids if needs_ids else 0,
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
        raise ModelError(
            f"{folder} has {error}",
            remedy="correct its generation_config.json or config.json",
            path=Path(folder),
            names=("eos_token_id",),
        ) from error


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        return dict(json.loads(path.read_text()))
    except (ValueError, TypeError) as error:
        raise ModelError(
            f"{path} is not valid JSON ({error})", remedy="copy the model folder again", path=path
        ) from error

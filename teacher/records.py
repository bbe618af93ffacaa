"""What travels: a sequence to score, its answer, and what the service says about itself.

Shape suffixes: N tokens of a whole sequence, T response positions, K = the request's `top_k`, or all `n_logprobs`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class TeacherSequence:
    """One prompt with its response.

    Attributes:
        token_ids: int32 [N], prompt followed by response.
        prompt_len: number of prompt tokens, 1 <= prompt_len < N; the T = N - prompt_len others are scored.
    """

    token_ids: np.ndarray
    prompt_len: int


@dataclass(frozen=True, eq=False)
class ScoredSequence:
    """The teacher's distributions at the response positions of one sequence.

    Row r is log_softmax(logits / temperature) over all tokens, in fp32, for the logits that predict response
    token r given everything before it, after whatever the model itself does to them (soft cap, scale). `temperature` is
    the request's, 1 by default, and applies to all three arrays: `sampled_logps_T` too.

    Attributes:
        topk_logps_TK: float32 [T, K], natural logarithms, highest first.
        topk_ids_TK: int32 [T, K], the token each of them belongs to.
        sampled_logps_T: float32 [T], logprob of the token that stood in the sequence (it need not be in the top k).
    """

    topk_logps_TK: np.ndarray
    topk_ids_TK: np.ndarray
    sampled_logps_T: np.ndarray


@dataclass(frozen=True)
class ModelInfo:
    """What all workers of one service must agree on.

    Attributes:
        model_name: name the worker was started with; a proxy accepts only workers of the same name.
        vocab_size: size of the model's output layer.
        n_tokens: ids of the tokenizer, 0 to n_tokens - 1. The rest of the output layer, if any, is padding: it has
            probability 0 and is never returned, and a sequence that contains it is refused.
        tokenizer_fingerprint: see `teacher.fingerprint`.
        max_model_len: longest sequence (prompt and response, in tokens) that is scored.
        n_logprobs: K, the largest `top_k` of a request.
        engine: engine, version and dtype, for people.
        eos_token_ids: the ids that end a turn for this model, ascending; empty if its files name none.
    """

    model_name: str
    vocab_size: int
    n_tokens: int
    tokenizer_fingerprint: str
    max_model_len: int
    n_logprobs: int
    engine: str
    eos_token_ids: tuple[int, ...]

    @property
    def identity(self) -> str:
        """What a client relies on once it has met a service: one of another identity does not answer it."""
        return (
            f"{self.model_name}, {self.n_tokens} tokens of tokenizer {self.tokenizer_fingerprint[:23]}, "
            f"top {self.n_logprobs}, up to {self.max_model_len} tokens long"
        )


@dataclass(frozen=True)
class TeacherInfo(ModelInfo):
    """`ModelInfo` of the running service, with the proxy's protocol version and the workers it knows now."""

    protocol_version: int
    n_workers: int

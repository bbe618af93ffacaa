"""A teacher backend that returns the same distribution at each position: the token frequencies in ``counts.npy``.

Set ``actor_rollout_ref.teacher.backend=docs/examples/custom_teacher.py:UnigramTeacher`` and
``actor_rollout_ref.teacher.model_path`` to a folder with a tokenizer and ``counts.npy``, float [V].
"""

from concurrent.futures import Future
from pathlib import Path

import numpy as np
from transformers import AutoTokenizer

from teacher import ScoredSequence, TeacherInfo, tokenizer_fingerprint


class UnigramTeacher:
    """Implementation of ``recipe_gkd.teachers.backends.TeacherBackend``."""

    def __init__(self, config):
        self.counts_V = np.load(Path(config.model_path) / "counts.npy") + 1.0
        self.k = config.top_k or 16
        self.fingerprint = tokenizer_fingerprint(AutoTokenizer.from_pretrained(config.model_path))

    def hello(self, timeout_s):
        """Return model and limits."""
        size = len(self.counts_V)
        return TeacherInfo(
            model_name="unigram",
            vocab_size=size,
            n_tokens=size,
            tokenizer_fingerprint=self.fingerprint,
            max_model_len=1 << 20,
            n_logprobs=self.k,
            engine="numpy",
            eos_token_ids=(),
            protocol_version=0,
            n_workers=1,
        )

    def submit(self, sequences, timeout_s=None, *, temperature=1.0):
        """Return a future that is done already."""
        logps_V = np.log(self.counts_V) / temperature
        logps_V -= np.log(np.exp(logps_V).sum())
        ids_K = np.argsort(-logps_V)[: self.k].astype(np.int32)
        scored = []
        for sequence in sequences:
            response_T = sequence.scored_ids_T
            rows = (len(response_T), 1)
            topk_TK = np.tile(logps_V[ids_K].astype(np.float32), rows)
            scored.append(ScoredSequence(topk_TK, np.tile(ids_K, rows), logps_V[response_T].astype(np.float32)))
        result = Future()
        result.set_result(scored)
        return result

    def close(self):
        """Free nothing."""

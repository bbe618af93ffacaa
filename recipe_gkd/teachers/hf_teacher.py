"""In-process teacher: a transformers model in a thread of the driver, for small teachers, tests and debugging.

States of a request::

    state    | transition
    ---------|---------------------------------------------------------------------------
    queued   | scored, in order of arrival; or failed at its deadline; or canceled
    scoring  | done; or failed at its deadline; or canceled: its remaining batches are skipped
    done     | final: the future has a result or an error
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from recipe_gkd.config.keys import TEACHER, key_name
from recipe_gkd.teachers.chunked_model import ChunkedModel
from teacher import PROTOCOL_VERSION, check_sequences, check_temperature
from teacher.common.checkpoint import read_checkpoint
from teacher.common.data_types import is_fast
from teacher.common.fingerprint import last_tokens, tokenizer_fingerprint
from teacher.common.position_limit import position_limit
from teacher.common.tokenizer import count_tokens, load_tokenizer
from teacher.errors import TeacherClosed, TeacherError, TeacherRequestError, TeacherSetupError, TeacherTimeout
from teacher.records import ScoredSequence, TeacherInfo, TeacherSequence

log = logging.getLogger(__name__)

DEFAULT_TOP_K = 256  # like N_LOGPROBS of the teacher service
MAX_LOGITS_BYTES = 1 << 30
"""Maximum memory for logits and their log-probabilities at the same time."""
CLOSE_TIMEOUT_S = 30.0
_MODEL_KEY = key_name(lambda config: config.actor_rollout_ref.teacher.model_path)
_BYTES_PER_LOGIT = 12  # float32 logits and log-probabilities, and logits before a scale or cap


@dataclass(eq=False)
class _Request:
    sequences: Sequence[TeacherSequence]
    temperature: float
    timeout_s: float
    deadline: float
    future: Future[list[ScoredSequence]] = field(default_factory=Future)

    @property
    def operation(self) -> str:
        return f"scoring {len(self.sequences)} sequences"


class HfTeacher:
    """A transformers causal language model that implements `TeacherBackend`.

    The model runs on the device of the driver: a GPU if ``device`` allows it and one is visible, else the CPU. Its
    memory is not reserved in Ray, so use it for small models only. Requests are scored one after the other. Logits are
    computed for response positions only, in chunks of at most :data:`MAX_LOGITS_BYTES`. Hidden states are computed for
    all tokens of a batch at once.

    Lifecycle::

        teacher = HfTeacher("/models/teacher", top_k=64)   # loads the model
        info = teacher.hello()
        scored = teacher.submit(sequences, 60.0, temperature=1.0).result()
        teacher.close()
    """

    def __init__(
        self, model_path: str, *, top_k: int | None = None, timeout_s: float = 600.0, device: str = "auto"
    ) -> None:
        """Load the model.

        Args:
            model_path: Local folder in Hugging Face format, with its tokenizer.
            top_k: Log-probabilities per position. None selects 256, or the vocabulary size if that is smaller.
            timeout_s: Default time limit of a request, in seconds.
            device: ``"cpu"``, or ``"auto"`` or ``"cuda"`` for a GPU if one is visible.

        Raises:
            TeacherSetupError: The folder is not a complete checkpoint, or ``top_k`` exceeds its vocabulary.
        """
        import transformers

        folder = Path(model_path)
        checkpoint = read_checkpoint(folder, _MODEL_KEY)
        tokenizer = load_tokenizer(str(folder), _MODEL_KEY)
        self._device = torch.device("cuda" if device != "cpu" and torch.cuda.is_available() else "cpu")
        try:
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
        except (OSError, ValueError, KeyError) as error:
            what = f"{_MODEL_KEY}={folder} cannot be loaded: {error}"
            raise TeacherSetupError(what, path=folder, options=(_MODEL_KEY,)) from error
        dtype = str(model.dtype).removeprefix("torch.")
        if not is_fast(dtype, self._device.type):
            model, dtype = model.float(), "float32"
        self._model = ChunkedModel(model.to(self._device).eval())
        n_tokens = count_tokens(tokenizer, checkpoint.vocab_size)
        k = min(DEFAULT_TOP_K, n_tokens) if top_k is None else top_k
        if k > n_tokens:
            what = f"{TEACHER}.top_k={k} exceeds the {n_tokens} tokens of {folder}"
            raise TeacherSetupError(what, options=(f"{TEACHER}.top_k",), remedy="lower it")
        text_config = model.config.get_text_config()
        self._info = TeacherInfo(
            model_name=folder.resolve().name,
            vocab_size=checkpoint.vocab_size,
            n_tokens=n_tokens,
            tokenizer_fingerprint=tokenizer_fingerprint(tokenizer),
            max_model_len=position_limit(text_config),
            n_logprobs=k,
            engine=f"transformers {transformers.__version__} {dtype} on {self._device.type}",
            eos_token_ids=checkpoint.eos_token_ids,
            last_tokens=last_tokens(tokenizer),
            protocol_version=PROTOCOL_VERSION,
            n_workers=1,
        )
        self._batch_tokens = max(1, MAX_LOGITS_BYTES // (_BYTES_PER_LOGIT * checkpoint.vocab_size))
        self._timeout_s, self.n_ids = timeout_s, n_tokens
        self._queue: queue.SimpleQueue[_Request | None] = queue.SimpleQueue()
        self._open: set[_Request] = set()
        self._changed = threading.Condition()  # of `_open` and `_closed`
        self._closed = False
        self._threads = [
            threading.Thread(target=target, name=f"hf-teacher-{name}", daemon=True)
            for name, target in (("scorer", self._score_requests), ("deadlines", self._expire_requests))
        ]
        for thread in self._threads:
            thread.start()

    def hello(self, timeout_s: float | None = None) -> TeacherInfo:
        """Return the model and limits. ``timeout_s`` is not used: the model is already loaded."""
        return self._info

    def restrict_ids(self, n_ids: int) -> None:
        """Exclude the ids from ``n_ids`` on from the distributions; see `TeacherClient.restrict_ids`.

        Raises:
            TeacherRequestError: The model has fewer ids, or returns more log-probabilities.
        """
        if not self._info.n_logprobs <= n_ids <= self._info.n_tokens:
            raise TeacherRequestError(
                f"{n_ids} ids with a probability, expected {self._info.n_logprobs} (top_k) to {self._info.n_tokens}",
                argument="n_ids",
            )
        self.n_ids = n_ids

    def submit(
        self, sequences: Sequence[TeacherSequence], timeout_s: float | None = None, *, temperature: float = 1.0
    ) -> Future[list[ScoredSequence]]:
        """Queue sequences for scoring.

        Args:
            sequences: Prompts with their responses.
            timeout_s: Time limit in seconds. At its end the future fails with `TeacherTimeout`.
            temperature: Divisor of the logits.

        Returns:
            Future of one result per sequence. It fails with `TeacherRequestError` if a sequence is invalid.

        Raises:
            TeacherError: The teacher is closed.
        """
        limit_s = self._timeout_s if timeout_s is None else timeout_s
        request = _Request(sequences, temperature, limit_s, time.monotonic() + limit_s)
        try:
            self._check(request)
        except TeacherRequestError as error:
            request.future.set_exception(error)
            return request.future
        with self._changed:
            if self._closed:
                raise TeacherClosed("the in-process teacher is closed", remedy="make a new HfTeacher")
            self._open.add(request)
            self._changed.notify_all()
            self._queue.put(request)
        return request.future

    def close(self) -> None:
        """Fail the open requests and wait up to `CLOSE_TIMEOUT_S` for the batch in progress. May be called twice."""
        with self._changed:
            self._closed = True
            open_requests = list(self._open)
            self._changed.notify_all()
        for request in open_requests:
            closed = TeacherClosed("the in-process teacher was closed before the request was scored")
            self._resolve(request, closed.replaced(operation=request.operation))
        self._queue.put(None)
        for thread in self._threads:
            thread.join(CLOSE_TIMEOUT_S)

    def _check(self, request: _Request) -> None:
        check_sequences(request.sequences)
        check_temperature(request.temperature)
        for i, sequence in enumerate(request.sequences):
            ids = sequence.token_ids
            if len(ids) > self._info.max_model_len:
                raise TeacherRequestError(
                    f"{len(ids)} tokens, the teacher {self._info.model_name} takes at most {self._info.max_model_len}",
                    sequence=i,
                    argument="token_ids",
                    remedy="shorten prompt and response",
                )
            largest = max(ids.max(), -1 if sequence.support_ids_TJ is None else sequence.support_ids_TJ.max())
            if ids.min() < 0 or largest >= self.n_ids:
                raise TeacherRequestError(
                    f"token ids {ids.min()} to {largest}, the teacher {self._info.model_name} has ids 0 to "
                    f"{self.n_ids - 1}: student and teacher must share one tokenizer",
                    sequence=i,
                    argument="token_ids" if largest == ids.max() else "support_ids_TJ",
                )

    def _resolve(self, request: _Request, result: list[ScoredSequence] | BaseException) -> None:
        """Set the result or the error of a request, once. Later calls have no effect."""
        with self._changed:
            if request not in self._open:
                return
            self._open.discard(request)
            self._changed.notify_all()
        if not request.future.set_running_or_notify_cancel():
            return
        if isinstance(result, BaseException):
            request.future.set_exception(result)
        else:
            request.future.set_result(result)

    # --- threads ---

    def _expire_requests(self) -> None:
        while True:
            with self._changed:
                if self._closed:
                    return
                now = time.monotonic()
                expired = [request for request in self._open if request.deadline <= now]
                if not expired:
                    next_deadline = min((request.deadline for request in self._open), default=None)
                    self._changed.wait(None if next_deadline is None else next_deadline - now)
                    continue
            for request in expired:
                late = TeacherTimeout(
                    f"the in-process teacher {self._info.model_name} did not finish within {request.timeout_s:g} s",
                    operation=request.operation,
                    options=(f"{TEACHER}.timeout_s",),
                    stage="scoring",
                    remedy=f"raise {TEACHER}.timeout_s, or use a teacher service",
                )
                self._resolve(request, late)

    def _score_requests(self) -> None:
        while (request := self._queue.get()) is not None:
            try:
                scored = self._score(request)
            except Exception as error:  # of any type, such as out of memory: the future must not stay open
                log.exception("the in-process teacher failed")
                what = f"the in-process teacher failed: {type(error).__name__}: {error}"
                self._resolve(request, TeacherError(what, operation=request.operation))
            else:
                self._resolve(request, scored)

    def _score(self, request: _Request) -> list[ScoredSequence]:
        scored: dict[int, ScoredSequence] = {}
        lengths = [len(sequence.token_ids) for sequence in request.sequences]
        for batch in _batches(lengths, self._batch_tokens):
            if request not in self._open or request.future.cancelled():
                break
            results = self._score_batch([request.sequences[i] for i in batch], request.temperature)
            scored.update(zip(batch, results, strict=True))
        return [scored[i] for i in sorted(scored)]

    @torch.inference_mode()
    def _score_batch(self, sequences: Sequence[TeacherSequence], temperature: float) -> list[ScoredSequence]:
        n_columns = max(len(sequence.token_ids) for sequence in sequences)
        ids_RS = torch.zeros((len(sequences), n_columns), dtype=torch.long)
        mask_RS = torch.zeros_like(ids_RS)
        for row, sequence in enumerate(sequences):  # padding on the right does not change causal attention
            ids_RS[row, : len(sequence.token_ids)] = torch.from_numpy(sequence.token_ids)
            mask_RS[row, : len(sequence.token_ids)] = 1
        ids_RS, mask_RS = ids_RS.to(self._device), mask_RS.to(self._device)
        hidden_RSD = self._model.hidden_states(ids_RS, mask_RS)
        results = []
        for row, sequence in enumerate(sequences):
            before_T = torch.from_numpy(sequence.scored_positions_T - 1).to(self._device)
            results.append(self._score_row(hidden_RSD[row, before_T], sequence, temperature))
        return results

    def _score_row(self, hidden_TD: torch.Tensor, sequence: TeacherSequence, temperature: float) -> ScoredSequence:
        """Return the scores of one sequence from the hidden states that predict its scored tokens, in chunks."""
        ids_T1 = torch.from_numpy(sequence.scored_ids_T[:, None].astype(np.int64)).to(self._device)
        support_TJ = torch.empty(len(ids_T1), 0, dtype=torch.int64, device=self._device)
        if sequence.support_ids_TJ is not None:
            support_TJ = torch.from_numpy(sequence.support_ids_TJ.astype(np.int64)).to(self._device)
        ids_TX = torch.cat([ids_T1, support_TJ], dim=1)
        k, n_rows = self._info.n_logprobs if sequence.with_top_k else 0, self._batch_tokens
        chunks = zip(hidden_TD.split(n_rows), ids_TX.split(n_rows), strict=True)
        scores = [self._score_chunk(hidden, ids, k, temperature) for hidden, ids in chunks]
        logps_TK, ids_TK, columns = (torch.cat(parts).cpu().numpy() for parts in zip(*scores, strict=True))
        return ScoredSequence(
            topk_logps_TK=logps_TK,
            topk_ids_TK=ids_TK.astype(np.int32),
            sampled_logps_T=np.ascontiguousarray(columns[:, 0]),
            support_logps_TJ=columns[:, 1:] if sequence.n_support else None,
        )

    def _score_chunk(
        self, hidden_TD: torch.Tensor, ids_TX: torch.Tensor, k: int, temperature: float
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return log-probabilities and ids of the top k, and the log-probabilities of ``ids_TX``, -inf for id -1."""
        logits_TV = self._model.logits(hidden_TD)[:, : self.n_ids].float()
        logps_TV = logits_TV.div_(temperature).log_softmax(dim=-1)
        topk = logps_TV.topk(k, dim=-1)
        return topk.values, topk.indices, logps_TV.gather(1, ids_TX.clamp(min=0)).where(ids_TX >= 0, float("-inf"))


def _batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield indices of sequences of similar length, with at most ``max_tokens`` tokens including padding."""
    batch: list[int] = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and lengths[batch[0]] * (len(batch) + 1) > max_tokens:
            yield batch
            batch = []
        batch.append(i)
    yield batch

"""What the teacher service adds to its engine, what its wire format costs, and how soon a lost worker's work is done.

    python benchmarks/teacher_service.py [--quick] [--json FILE] [--rounds 9] [--sequences 64] [--positions 512] [-k 256]

Real processes: a proxy and vLLM workers, started by teacher/start_server.sh and join_server.sh, on a tiny random Qwen2
that is made here; one `TeacherClient` in this process; and the same engine with the same settings alone in a process
of its own. A round measures each way once, one after the other, and a ratio is the median of the rounds' ratios, so
that a noisy machine troubles all of them alike:

    engine     all sequences given to the engine at once, until its last answer
    service    `submit` of the same sequences, until the future has their answers; logprobs travel as float32
    float16    the same, logprobs travel as float16
    codec      encode and decode of the answers, against torch.save and torch.load of the same arrays

Then a second worker joins and `service` is measured again. At last one of the two is killed in the middle of a load:
`kill_recovery_s` is the time from there until the last of the requests that were with the workers is answered.
"""

from __future__ import annotations

import argparse
import io
import json
import multiprocessing
import os
import signal
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
from teacher_processes import TIMEOUT_S, Service

from teacher import ScoredSequence, TeacherClient, TeacherSequence
from teacher.wire import protocol
from teacher.wire.messages import ScoreReply, WireDtype

MAX_MODEL_LEN = 1024
MIN_KILL_REQUESTS = 512
"""Requests of the kill measurement, so that both workers still have some when one is killed."""


@dataclass(frozen=True, kw_only=True)
class Case:
    sequences: int
    positions: int
    k: int
    vocabulary: int
    threads: int

    @property
    def tokens(self) -> int:
        return self.sequences * (self.positions + 1)

    def make(self, seed: int) -> list[TeacherSequence]:
        """The shortest prompt, so that all else is scored."""
        rng = np.random.default_rng(seed)
        size = (self.sequences, self.positions + 1)
        return [TeacherSequence(ids, prompt_len=1) for ids in rng.integers(0, self.vocabulary, size, dtype=np.int32)]


def make_model(folder: Path, vocabulary: int) -> None:
    import torch
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=vocabulary,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=MAX_MODEL_LEN,
        initializer_range=0.1,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    Qwen2ForCausalLM(config).float().save_pretrained(folder)
    ids = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"t{i}": i for i in range(3, vocabulary)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(ids, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    ).save_pretrained(folder)


# ---- the processes


class EngineAlone:
    """The engine of a worker, in a process that does nothing else."""

    def __init__(self, model: Path, case: Case) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve_engine, args=(str(model), case, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._answer()

    def seconds(self, seed: int) -> float:
        self._ours.send(seed)
        return self._answer()

    def _answer(self) -> float:
        try:
            if self._ours.poll(TIMEOUT_S):
                return float(self._ours.recv())
        except EOFError:
            raise RuntimeError("the engine's process failed; what it said stands above") from None
        raise RuntimeError(f"the engine's process said nothing for {TIMEOUT_S:g} s")

    def close(self) -> None:
        with suppress(OSError):  # it has ended already
            self._ours.send(None)
        self._process.join(timeout=10)
        self._process.kill()
        self._process.join()


def _serve_engine(model: str, case: Case, pipe: Connection) -> None:
    """A seed in, the seconds of its round out; a 0 says that the engine is there, None ends it."""
    from teacher.engines.base import EngineConfig
    from teacher.engines.vllm_engine import VllmEngine

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C: the parent ends this process
    engine = VllmEngine(EngineConfig(model, case.k, dtype="float32"))
    pipe.send(0.0)
    while (seed := pipe.recv()) is not None:
        sequences = case.make(seed)
        began = time.perf_counter()
        for key, sequence in enumerate(sequences):
            engine.check(sequence, 1.0)
            engine.add(key, sequence)
        while engine.has_work():
            engine.step()
        pipe.send(time.perf_counter() - began)


@contextmanager
def running(case: Case) -> Iterator[tuple[EngineAlone, Service]]:
    """Whatever happens, Ctrl-C and SIGTERM included, nothing is left running."""
    with tempfile.TemporaryDirectory(prefix="teacher-benchmark-") as folder:
        model = Path(folder) / "model"
        make_model(model, case.vocabulary)
        service = Service(Path(folder), model, case.k)
        engine = EngineAlone(model, case)
        try:
            service.start()
            yield engine, service
        finally:
            engine.close()
            service.stop()


# ---- one worker


def service_seconds(client: TeacherClient, sequences: list[TeacherSequence]) -> tuple[float, list[ScoredSequence]]:
    began = time.perf_counter()
    answers = client.submit(sequences).result(timeout=TIMEOUT_S)
    return time.perf_counter() - began, answers


def codec_seconds(answers: list[ScoredSequence], wire_dtype: WireDtype) -> float:
    """From arrays to frames to arrays. What traveled as float16 is float32 again at the end, as the client has it."""
    began = time.perf_counter()
    decoded = protocol.decode(protocol.encode_score_reply(1, answers, wire_dtype=wire_dtype))
    assert isinstance(decoded, ScoreReply)
    for answer in decoded.scored:
        answer.topk_logps_TK.astype(np.float32, copy=False)
    return time.perf_counter() - began


def torch_seconds(answers: list[ScoredSequence]) -> float:
    """torch.save and torch.load of the same arrays, in memory."""
    import torch

    tensors = [[torch.from_numpy(array) for array in vars(answer).values()] for answer in answers]
    began = time.perf_counter()
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    buffer.seek(0)
    torch.load(buffer)
    return time.perf_counter() - began


def bytes_per_position(answers: list[ScoredSequence], wire_dtype: WireDtype) -> float:
    frames = protocol.encode_score_reply(1, answers, wire_dtype=wire_dtype)
    return sum(memoryview(frame).nbytes for frame in frames) / sum(len(answer.sampled_logps_T) for answer in answers)


def measure_rounds(engine: EngineAlone, service: Service, case: Case, n_rounds: int) -> dict[str, float]:
    rounds: list[dict[str, float]] = []
    with (
        TeacherClient(server_port=service.port, timeout_s=TIMEOUT_S) as client,
        TeacherClient(server_port=service.port, timeout_s=TIMEOUT_S, wire_dtype="float16") as client16,
    ):
        for number in range(-1, n_rounds):
            sequences, found = case.make(number + 1), {}
            found["engine"] = engine.seconds(number + 1)
            proxy_s = service.proxy_cpu_s()
            found["service"], answers = service_seconds(client, sequences)
            found["proxy"] = service.proxy_cpu_s() - proxy_s
            found["float16"], _ = service_seconds(client16, sequences)
            found["codec"] = codec_seconds(answers, "float32")
            found["codec16"] = codec_seconds(answers, "float16")
            found["torch"] = torch_seconds(answers)
            if number >= 0:  # the first warms up
                rounds.append(found)
                print(round_line(number, found), flush=True)

    def median(of: Callable[[dict[str, float]], float]) -> float:
        return statistics.median(of(found) for found in rounds)

    return {
        "service_over_engine": median(lambda found: found["service"] / found["engine"]),
        "service_over_engine_float16": median(lambda found: found["float16"] / found["engine"]),
        "proxy_cpu_over_service": median(lambda found: found["proxy"] / found["service"]),
        "codec_over_torch_save": median(lambda found: found["codec"] / found["torch"]),
        "codec_over_torch_save_float16": median(lambda found: found["codec16"] / found["torch"]),
        "engine_s": median(lambda found: found["engine"]),
        "service_s": median(lambda found: found["service"]),
        "service_float16_s": median(lambda found: found["float16"]),
        "codec_s": median(lambda found: found["codec"]),
        "codec_float16_s": median(lambda found: found["codec16"]),
        "torch_save_load_s": median(lambda found: found["torch"]),
        "tokens_per_second_engine": case.tokens / median(lambda found: found["engine"]),
        "tokens_per_second_1_workers": case.tokens / median(lambda found: found["service"]),
        "bytes_per_position": bytes_per_position(answers, "float32"),
        "bytes_per_position_float16": bytes_per_position(answers, "float16"),
    }


HEADER = (
    f"{'round':>5} | {'engine':>8} {'service':>8} {'float16':>8} {'proxy':>8} | "
    f"{'codec':>7} {'codec16':>7} {'torch':>7} | {'/engine':>7} {'16/eng.':>7} {'/torch':>7}"
)


def round_line(number: int, found: dict[str, float]) -> str:
    in_ms = {name: f"{1000 * seconds:.1f}" for name, seconds in found.items()}
    times = " ".join(f"{in_ms[name]:>8}" for name in ("engine", "service", "float16", "proxy"))
    codecs = " ".join(f"{in_ms[name]:>7}" for name in ("codec", "codec16", "torch"))
    return (
        f"{number + 1:>5} | {times} | {codecs} | {found['service'] / found['engine']:>7.3f} "
        f"{found['float16'] / found['engine']:>7.3f} {found['codec'] / found['torch']:>7.4f}"
    )


# ---- two workers


def two_workers_seconds(service: Service, case: Case, n_rounds: int) -> float:
    with TeacherClient(server_port=service.port, timeout_s=TIMEOUT_S) as client:
        assert client.hello().n_workers == 2
        seconds = [service_seconds(client, case.make(number))[0] for number in range(n_rounds + 1)]
    return statistics.median(seconds[1:])


def kill_recovery_seconds(service: Service, case: Case) -> float:
    """Each sequence a request of its own. The service takes them in order: those that are with the workers at the kill
    are the first of the unanswered ones, as many as the service says; the survivor's own are among them.
    """
    answered_at: dict[Future[Any], float] = {}
    enough = threading.Event()
    sequences = case.make(0) * max(4, -(-MIN_KILL_REQUESTS // case.sequences))

    def note(future: Future[Any]) -> None:
        answered_at[future] = time.perf_counter()
        if len(answered_at) >= len(sequences) // 4:
            enough.set()

    with TeacherClient(server_port=service.port, timeout_s=TIMEOUT_S) as client:
        futures = [client.submit([sequence]) for sequence in sequences]
        for future in futures:
            future.add_done_callback(note)
        if not enough.wait(TIMEOUT_S):
            raise RuntimeError(f"{len(answered_at)} of {len(futures)} requests answered after {TIMEOUT_S:g} s")
        with_workers = sum(worker.requests for worker in client.status().workers)
        killed_at = time.perf_counter()
        service.kill_joined()
        unanswered = [future for future in futures if answered_at.get(future, killed_at) >= killed_at]
        wait(futures, timeout=TIMEOUT_S)
        for future in futures:
            future.result(timeout=0)
        deadline = time.monotonic() + TIMEOUT_S
        while client.hello().n_workers != 1:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the service has not noticed the end of the killed worker after {TIMEOUT_S:g} s")
            time.sleep(0.05)
    if not with_workers or len(unanswered) < with_workers:
        raise RuntimeError("the workers had nothing to do when one was killed; ask for more with --sequences")
    return max(answered_at[future] for future in unanswered[:with_workers]) - killed_at


# ---- the whole


def measure(case: Case, n_rounds: int) -> dict[str, float]:
    with running(case) as (engine, service):
        print(HEADER, flush=True)
        found = measure_rounds(engine, service, case, n_rounds)
        service.join()
        found["tokens_per_second_2_workers"] = case.tokens / two_workers_seconds(service, case, n_rounds)
        found["kill_recovery_s"] = kill_recovery_seconds(service, case)
    return found


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("-k", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="of each engine (default: 1)")
    parser.add_argument("--quick", action="store_true", help="a small size and two rounds, to see that it works")
    parser.add_argument("--json", type=Path, help="write the figures there")
    given = parser.parse_args(argv)
    if given.quick:
        given.sequences, given.positions, given.k, given.vocabulary, given.rounds = 16, 64, 16, 96, 2
    if not 1 <= given.positions < MAX_MODEL_LEN:
        parser.error(f"--positions must be 1 to {MAX_MODEL_LEN - 1}, got {given.positions}")
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # of all processes that are started here
    signal.signal(signal.SIGTERM, _interrupt)
    names = ("sequences", "positions", "k", "vocabulary", "threads")
    case = Case(**{name: getattr(given, name) for name in names})
    print(f"{case.sequences} sequences x {case.positions} positions x k = {case.k}; milliseconds", flush=True)
    found = measure(case, given.rounds)
    print(json.dumps(found, indent=1))
    if given.json:
        given.json.write_text(json.dumps(found | {"case": vars(case), "rounds": given.rounds}, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Benchmark of the teacher service: overhead over the engine, cost of the wire format, recovery from a lost worker.

    python benchmarks/teacher_service.py [--quick] [--json FILE] [--sequences 64] [--positions 512] [-k 256]

The processes are a proxy and vLLM workers (teacher/start_server.sh and join_server.sh) on a tiny random Qwen2, one
`TeacherClient` in this process, and the same engine with the same settings in a separate process. A round measures each
variant once. Ratios are medians over the rounds' ratios, so that noise of the machine affects all variants:

    engine     all sequences are added to the engine at once, until its last result
    service    `submit` of the same sequences, until the future is done; log-probabilities travel as float32
    float16    the same, log-probabilities travel as float16
    codec      encoding and decoding of the results, compared with torch.save and torch.load of the same arrays

Then a second worker joins, and `service` is measured again. Finally one of the two workers is killed under load.
`kill_recovery_s` is the time until the last request that was at the workers is done.
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
from teacher_processes import START_TIMEOUT_S, TIMEOUT_S, Service

from teacher import ScoredSequence, TeacherClient, TeacherSequence
from teacher.records import LogitSettings
from teacher.wire import protocol
from teacher.wire.limits import WireDtype
from teacher.wire.messages import ScoreReply

MAX_MODEL_LEN = 1024
MIN_KILL_REQUESTS = 512  # enough for both workers to be busy when one is killed


@dataclass(frozen=True, kw_only=True)
class Case:
    """Size of the measured load.

    Attributes:
        sequences: Number of sequences.
        positions: Scored positions per sequence.
        k: Log-probabilities per position.
        vocabulary: Vocabulary size of the model.
        threads: CPU threads of each engine.
        dtype: Data type of the model.
    """

    sequences: int
    positions: int
    k: int
    vocabulary: int
    threads: int
    dtype: str = "float32"

    @property
    def tokens(self) -> int:
        """Tokens of all sequences."""
        return self.sequences * (self.positions + 1)

    def make(self, seed: int) -> list[TeacherSequence]:
        """Return random sequences with prompts of one token, so that all other positions are scored."""
        rng = np.random.default_rng(seed)
        size = (self.sequences, self.positions + 1)
        return [TeacherSequence(ids, prompt_len=1) for ids in rng.integers(0, self.vocabulary, size, dtype=np.int32)]


def make_model(folder: Path, vocabulary: int) -> None:
    """Save a random two-layer Qwen2 in float32 with a tokenizer of this vocabulary size."""
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

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
    save_tokenizer(folder, vocabulary)


def save_tokenizer(folder: Path, vocabulary: int) -> None:
    """Save a tokenizer of words with this vocabulary size."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    ids = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"t{i}": i for i in range(3, vocabulary)}
    PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(models.WordLevel(ids, unk_token="<unk>")),
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
    ).save_pretrained(folder)


# ---- the processes


class EngineAlone:
    """The engine of a worker in a separate process, without the service."""

    def __init__(self, model: Path, case: Case) -> None:
        """Start the process and wait until the engine is loaded."""
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve_engine, args=(str(model), case, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._receive(START_TIMEOUT_S)

    def seconds(self, seed: int) -> float:
        """Return the duration of one round, in seconds."""
        self._ours.send(seed)
        return self._receive(TIMEOUT_S)

    def _receive(self, timeout_s: float) -> float:
        try:
            if self._ours.poll(timeout_s):
                return float(self._ours.recv())
        except EOFError:
            raise RuntimeError("the engine's process failed; see its output above") from None
        raise RuntimeError(f"the engine's process sent no result within {timeout_s:g} s")

    def close(self) -> None:
        """End the process."""
        with suppress(OSError):  # the process has already ended
            self._ours.send(None)
        self._process.join(timeout=10)
        self._process.kill()
        self._process.join()


def _serve_engine(model: str, case: Case, pipe: Connection) -> None:
    """Receive seeds and send the seconds of their rounds, after a first 0 for the loaded engine. None ends the loop."""
    from teacher.engines.base import EngineConfig
    from teacher.engines.vllm_engine import VllmEngine

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # after Ctrl-C the parent ends this process
    engine = VllmEngine(EngineConfig(model, case.k, dtype=case.dtype))
    pipe.send(0.0)
    while (seed := pipe.recv()) is not None:
        sequences = case.make(seed)
        began = time.perf_counter()
        for key, sequence in enumerate(sequences):
            engine.check(sequence, LogitSettings())
            engine.add(key, sequence)
        while engine.has_work():
            engine.step()
        pipe.send(time.perf_counter() - began)


@contextmanager
def running(case: Case) -> Iterator[tuple[EngineAlone, Service]]:
    """Start the engine and the service, and stop both at the end, also after Ctrl-C or SIGTERM."""
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
    """Return the duration of one request in seconds, and its results."""
    began = time.perf_counter()
    scored = client.submit(sequences).result(timeout=TIMEOUT_S)
    return time.perf_counter() - began, scored


def codec_seconds(scored: list[ScoredSequence], wire_dtype: WireDtype) -> float:
    """Return the duration of encoding and decoding, in seconds, including the client's conversion to float32."""
    began = time.perf_counter()
    decoded = protocol.decode(protocol.encode(ScoreReply(1, [one.reduced(0, wire_dtype) for one in scored])))
    assert isinstance(decoded, ScoreReply)
    for result in decoded.scored:
        result.topk_logps_TK.astype(np.float32, copy=False)
    return time.perf_counter() - began


def torch_seconds(scored: list[ScoredSequence]) -> float:
    """Return the duration of torch.save and torch.load of the same arrays in memory, in seconds."""
    import torch

    tensors = [[torch.from_numpy(array) for array in vars(result).values()] for result in scored]
    began = time.perf_counter()
    buffer = io.BytesIO()
    torch.save(tensors, buffer)
    buffer.seek(0)
    torch.load(buffer)
    return time.perf_counter() - began


def bytes_per_position(scored: list[ScoredSequence], wire_dtype: WireDtype) -> float:
    """Return the bytes on the wire per scored position."""
    frames = protocol.encode(ScoreReply(1, [one.reduced(0, wire_dtype) for one in scored]))
    return sum(memoryview(frame).nbytes for frame in frames) / sum(len(result.sampled_logps_T) for result in scored)


def measure_rounds(engine: EngineAlone, service: Service, case: Case, n_rounds: int) -> dict[str, float]:
    """Return the figures of one worker: medians over the rounds, after a warm-up round."""
    rounds: list[dict[str, float]] = []
    with (
        TeacherClient(server_port=service.port, timeout_s=TIMEOUT_S) as client,
        TeacherClient(server_port=service.port, timeout_s=TIMEOUT_S, wire_dtype="float16") as client16,
    ):
        for number in range(-1, n_rounds):
            sequences, found = case.make(number + 1), {}
            found["engine"] = engine.seconds(number + 1)
            proxy_s = service.proxy_cpu_s()
            found["service"], scored = service_seconds(client, sequences)
            found["proxy"] = service.proxy_cpu_s() - proxy_s
            found["float16"], _ = service_seconds(client16, sequences)
            found["codec"] = codec_seconds(scored, "float32")
            found["codec16"] = codec_seconds(scored, "float16")
            found["torch"] = torch_seconds(scored)
            if number >= 0:  # the first round is a warm-up
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
        "bytes_per_position": bytes_per_position(scored, "float32"),
        "bytes_per_position_float16": bytes_per_position(scored, "float16"),
    }


HEADER = (
    f"{'round':>5} | {'engine':>8} {'service':>8} {'float16':>8} {'proxy':>8} | "
    f"{'codec':>7} {'codec16':>7} {'torch':>7} | {'/engine':>7} {'16/eng.':>7} {'/torch':>7}"
)


def round_line(number: int, found: dict[str, float]) -> str:
    """Return one row of the table."""
    in_ms = {name: f"{1000 * seconds:.1f}" for name, seconds in found.items()}
    times = " ".join(f"{in_ms[name]:>8}" for name in ("engine", "service", "float16", "proxy"))
    codecs = " ".join(f"{in_ms[name]:>7}" for name in ("codec", "codec16", "torch"))
    return (
        f"{number + 1:>5} | {times} | {codecs} | {found['service'] / found['engine']:>7.3f} "
        f"{found['float16'] / found['engine']:>7.3f} {found['codec'] / found['torch']:>7.4f}"
    )


# ---- two workers


def two_workers_seconds(service: Service, case: Case, n_rounds: int) -> float:
    """Return the median duration of the load with two workers, in seconds."""
    with TeacherClient(server_port=service.port, timeout_s=TIMEOUT_S) as client:
        assert client.hello().n_workers == 2
        seconds = [service_seconds(client, case.make(number))[0] for number in range(n_rounds + 1)]
    return statistics.median(seconds[1:])


def kill_recovery_seconds(service: Service, case: Case) -> float:
    """Return the time from the kill of a worker to the last result of the requests at the workers, in seconds.

    Each sequence is one request. The service dispatches them in order, so the requests at the workers are the first
    open ones, and the status tells their number. They include requests of the surviving worker.
    """
    done_at: dict[Future[Any], float] = {}
    enough = threading.Event()
    sequences = case.make(0) * max(4, -(-MIN_KILL_REQUESTS // case.sequences))

    def note(future: Future[Any]) -> None:
        done_at[future] = time.perf_counter()
        if len(done_at) >= len(sequences) // 4:
            enough.set()

    with TeacherClient(server_port=service.port, timeout_s=TIMEOUT_S) as client:
        futures = [client.submit([sequence]) for sequence in sequences]
        for future in futures:
            future.add_done_callback(note)
        if not enough.wait(TIMEOUT_S):
            raise RuntimeError(f"{len(done_at)} of {len(futures)} requests done after {TIMEOUT_S:g} s")
        with_workers = sum(worker.requests for worker in client.status().workers)
        killed_at = time.perf_counter()
        service.kill_joined()
        open_requests = [future for future in futures if done_at.get(future, killed_at) >= killed_at]
        wait(futures, timeout=TIMEOUT_S)
        for future in futures:
            future.result(timeout=0)
        deadline = time.monotonic() + TIMEOUT_S
        while client.hello().n_workers != 1:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the service did not detect the killed worker within {TIMEOUT_S:g} s")
            time.sleep(0.05)
    if not with_workers or len(open_requests) < with_workers:
        raise RuntimeError("the workers were idle when one was killed; raise --sequences")
    return max(done_at[future] for future in open_requests[:with_workers]) - killed_at


# ---- command


def measure(case: Case, n_rounds: int) -> dict[str, float]:
    """Run all measurements and return the figures."""
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
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--positions", type=int, default=512)
    parser.add_argument("-k", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each engine (default: 1)")
    parser.add_argument("--quick", action="store_true", help="small sizes and two rounds, as a smoke test")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args(argv)
    if given.quick:
        given.sequences, given.positions, given.k, given.vocabulary, given.rounds = 16, 64, 16, 96, 2
    if not 1 <= given.positions < MAX_MODEL_LEN:
        parser.error(f"--positions must be 1 to {MAX_MODEL_LEN - 1}, got {given.positions}")
    os.environ["OMP_NUM_THREADS"] = str(given.threads)  # for all child processes
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

"""Cost of a scored token with each teacher backend, on the same model and sequences.

    python benchmarks/teacher_backends.py [--quick] [--json FILE] [--sequences 32] [--positions 256] [-k 64 256]

    zmq      a teacher service with one worker, `TeacherClient`
    gateway  the same service behind `python -m teacher gateway`, `HttpTeacherClient`
    http     a server of vLLM (vllm.entrypoints.openai.api_server), `HttpTeacherClient`
    hf       a transformers model in this process, `HfTeacher`
    cache    scores of the service that ``teacher.cache_dir`` has, `ScoreCache`

The model is a tiny random Qwen2, so that the cost of the way dominates. A round measures each backend once; figures are
medians over the rounds. `client cpu` is the CPU time of this process, in which results are decoded: a training has it
in its scoring workers, or, with `hf`, in its driver.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from teacher_processes import START_TIMEOUT_S, TIMEOUT_S, Service, free_port
from teacher_service import MAX_MODEL_LEN, Case, make_model

from recipe_gkd.teachers.cache.scores import CacheSettings, ScoreCache
from recipe_gkd.teachers.hf_teacher import HfTeacher
from teacher import ScoredSequence, TeacherClient, TeacherSequence
from teacher.client.http import Endpoint, HttpClientSpec

VOCABULARY = 512


@contextmanager
def process(command: list[str], url: str) -> Iterator[None]:
    """Run a server until it answers at ``url``, and stop it with its children at the end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("VLLM_")}
    environment["VLLM_CPU_KVCACHE_SPACE"] = "1"
    server = subprocess.Popen(
        command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        deadline = time.monotonic() + START_TIMEOUT_S
        while not _answers(url):
            if server.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{' '.join(command)} does not serve {url}")
            time.sleep(0.5)
        yield
    finally:
        with suppress(ProcessLookupError):
            os.killpg(server.pid, signal.SIGINT)
        try:
            server.wait(TIMEOUT_S)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGKILL)


def _answers(url: str) -> bool:
    with suppress(urllib.error.URLError, OSError):
        return urllib.request.urlopen(url, timeout=5).status == 200
    return False


class CacheClient:
    """Client of a cache, into which `prepare` brings the scores of sequences."""

    def __init__(self, teacher: TeacherClient, folder: Path, k: int) -> None:
        info = replace(teacher.hello(TIMEOUT_S), last_tokens=())
        settings = dict(probe_T=np.zeros(1, np.float32), top_k=k, wire_dtype="float32", temperature=1.0, n_ids=0)
        self._cache = ScoreCache(CacheSettings(info=info, folder=folder, max_bytes=1 << 32, **settings))
        self._teacher = teacher

    def hello(self, timeout_s: float) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""

    def prepare(self, sequences: Sequence[TeacherSequence]) -> None:
        """Score the sequences."""

        async def send(missing: Sequence[TeacherSequence]) -> list[ScoredSequence]:
            return await asyncio.wrap_future(self._teacher.submit(missing, TIMEOUT_S))

        asyncio.run(self._cache.scores(sequences, send))

    def submit(self, sequences: Sequence[TeacherSequence], timeout_s: float) -> Future[list[ScoredSequence]]:
        """Return the scores of sequences that were prepared."""

        async def send(missing: Sequence[TeacherSequence]) -> list[ScoredSequence]:
            raise AssertionError(f"{len(missing)} sequences are not in the cache")

        scored: Future[list[ScoredSequence]] = Future()
        scored.set_result(asyncio.run(self._cache.scores(sequences, send))[0])
        return scored


@contextmanager
def backends(model: Path, folder: Path, ks: list[int]) -> Iterator[Mapping[str, dict[int, Any]]]:
    """Start all servers and yield the clients by backend and k."""
    service, served, gateway = Service(folder, model, max(ks)), free_port(), free_port()
    vllm = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "float32"]
    vllm += ["--port", str(served), "--max-logprobs", str(max(ks)), "--enforce-eager"]
    of_gateway = [sys.executable, "-m", "teacher", "gateway", "--port", str(service.port), "--http-port", str(gateway)]
    urls = {"gateway": f"http://127.0.0.1:{gateway}", "http": f"http://127.0.0.1:{served}"}
    with ExitStack() as stack:
        stack.callback(service.stop)
        service.start()
        stack.enter_context(process(of_gateway, f"{urls['gateway']}/health"))
        stack.enter_context(process(vllm, f"{urls['http']}/health"))
        clients: dict[str, dict[int, Any]] = {"zmq": {}, "gateway": {}, "http": {}, "hf": {}, "cache": {}}
        for k in ks:
            clients["zmq"][k] = TeacherClient(server_port=service.port, timeout_s=TIMEOUT_S, top_k=k)
            clients["cache"][k] = CacheClient(clients["zmq"][k], folder / "cache", k)
            clients["hf"][k] = HfTeacher(str(model), top_k=k, device="cpu")
            for name, url in urls.items():
                spec = HttpClientSpec((Endpoint(url),), str(model), requires_same_tokenizer=False, top_k=k)
                clients[name][k] = spec.open()
        for of_backend in clients.values():
            for client in of_backend.values():
                stack.enter_context(closing(client))
                client.hello(TIMEOUT_S)
        yield clients


def measure(clients: Mapping[str, dict[int, Any]], case: Case, rounds: int) -> dict[str, dict[str, float]]:
    """Return microseconds per token of each backend: elapsed time and CPU time of this process."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in clients}
    for number in range(-1, rounds):  # the first round is a warm-up
        sequences = case.make(number + 1)
        for name, of_backend in clients.items():
            if isinstance(client := of_backend[case.k], CacheClient):
                client.prepare(sequences)
            began, cpu_began = time.perf_counter(), time.process_time()
            client.submit(sequences, TIMEOUT_S).result(TIMEOUT_S)
            elapsed = time.perf_counter() - began, time.process_time() - cpu_began
            if number >= 0:
                found[name].append(elapsed)
    n_tokens = case.sequences * case.positions
    results = {}
    for name, times in found.items():
        wall_us, cpu_us = (1e6 * statistics.median(values) / n_tokens for values in zip(*times, strict=True))
        results[name] = {"us_per_token": wall_us, "client_cpu_us_per_token": cpu_us}
    return results


def main(argv: list[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--positions", type=int, default=256, help="scored tokens per sequence")
    parser.add_argument("-k", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="small sizes and one round, as a smoke test")
    parser.add_argument("--json", type=Path, help="file for the figures")
    given = parser.parse_args(argv)
    if given.quick:
        given.sequences, given.positions, given.k, given.rounds = 4, 32, [16], 1
    if not 1 <= given.positions < MAX_MODEL_LEN - 1 or max(given.k) > VOCABULARY:
        parser.error(f"--positions must be below {MAX_MODEL_LEN - 1}, and -k at most {VOCABULARY}")
    os.environ["OMP_NUM_THREADS"] = "1"  # for all child processes
    results: dict[int, dict[str, dict[str, float]]] = {}
    with tempfile.TemporaryDirectory(prefix="teacher-backends-") as temporary:
        folder = Path(temporary)
        make_model(folder / "model", VOCABULARY)
        with backends(folder / "model", folder, given.k) as clients:
            print(f"{given.sequences} sequences x {given.positions} tokens; microseconds per token")
            print(f"{'k':>4} {'backend':8} {'elapsed':>8} {'/ zmq':>6} {'client cpu':>10}")
            for k in given.k:
                case = Case(sequences=given.sequences, positions=given.positions, k=k, vocabulary=VOCABULARY, threads=1)
                results[k] = measure(clients, case, given.rounds)
                base = results[k]["zmq"]["us_per_token"]
                for name, values in results[k].items():
                    us, cpu_us = values["us_per_token"], values["client_cpu_us_per_token"]
                    print(f"{k:>4} {name:8} {us:>8.1f} {us / base:>6.2f} {cpu_us:>10.1f}", flush=True)
    if given.json:
        given.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

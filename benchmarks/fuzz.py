"""Coverage-guided fuzzing of everything in the teacher service that decodes bytes from a socket.

    python benchmarks/fuzz.py [--target NAME ...] [--inputs 100000] [--seed 0] [--json FILE] [--findings FOLDER]
    python benchmarks/fuzz.py --replay FILE

Inputs are mutations of valid messages: values of the msgpack header, frames, and single bytes. An input that reaches a
new arc (a pair of consecutive lines of ``teacher``) is mutated further. A target may refuse an input with its
documented error. Findings are any other exception, a hang (1 s, and 1 s more per 100 kB of the input), and a growth of
memory. The exit status is 1 if there are findings.

    header, frames, messages, status    decoding of one part
    protocol_client, protocol_replies,  decoding of whole messages, and what their receivers do with the values
    protocol_worker
    connection                          bytes below ZeroMQ, received by a client's connection
    client, worker                      messages received by a real client or worker
    proxy_client, proxy_worker          messages received by a real proxy process
    proxy_handshake, proxy_http         bytes on its client port and on its HTTP port
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from fuzzing import seeds
from fuzzing.connections import ConnectionTarget
from fuzzing.decoders import decoders
from fuzzing.loop import Fuzzer, Report, load_finding, replay
from fuzzing.proxy_targets import ClientSideTarget, HandshakeTarget, HttpTarget, WorkerSideTarget
from fuzzing.receivers import ClientTarget, WorkerTarget
from fuzzing.targets import Target

TARGETS: dict[str, Callable[[], Target]] = {
    **decoders(),
    **{kind.name: kind for kind in (ConnectionTarget, ClientTarget, WorkerTarget)},
    **{kind.name: kind for kind in (ClientSideTarget, WorkerSideTarget, HandshakeTarget, HttpTarget)},
}
_WORDS = {HttpTarget.name: tuple(seeds.HTTP_WORDS)}


def main() -> int:
    """Run the targets, print a table, and return the exit status."""
    args = _parse()
    if args.replay is not None:
        return _replay(args.replay)
    folder = args.findings or Path(tempfile.mkdtemp(prefix="fuzz-findings-"))
    reports = []
    print(_HEAD, flush=True)
    for name in args.target or TARGETS:
        reports.append(fuzz(name, args.inputs, args.seed, folder, args.max_seconds))
        print(_row(reports[-1]), flush=True)
    for report in reports:
        for key, count in report.findings.items():
            print(f"finding in {report.target}: {key} ({count} inputs)")
        for file in report.files:
            print(f"    python benchmarks/fuzz.py --replay {file}")
    if args.json is not None:
        text = json.dumps({report.target: report.to_dict() for report in reports}, indent=2)
        args.json.write_text(text + "\n", encoding="utf-8")
    return int(any(report.findings for report in reports))


def fuzz(name: str, n_inputs: int, seed: int, folder: Path, max_seconds: float = float("inf")) -> Report:
    """Run one target.

    Args:
        name: Name of the target.
        n_inputs: Number of inputs.
        seed: Seed of the mutations.
        folder: Folder for the findings.
        max_seconds: Time limit, in seconds.
    """
    target = TARGETS[name]()
    try:
        return Fuzzer(target, seed=seed, folder=folder, words=_WORDS.get(name, ())).run(n_inputs, max_seconds)
    finally:
        target.close()


_HEAD = (
    f"{'target':<17}{'inputs':>9}{'accepted':>10}{'rejected':>10}{'arcs':>7}{'corpus':>8}{'findings':>10}"
    f"{'inputs/s':>10}{'growth MiB':>12}"
)


def _row(report: Report) -> str:
    growth = "-" if report.growth_bytes is None else f"{report.growth_bytes / 2**20:.1f}"
    note = "  stopped at the time limit" if report.stopped_early else ""
    inputs_per_s = report.inputs / max(report.seconds, 1e-9)
    return (
        f"{report.target:<17}{report.inputs:>9}{report.accepted:>10}{report.rejected:>10}{report.arcs:>7}"
        f"{report.corpus:>8}{len(report.findings):>10}{inputs_per_s:>10.0f}{growth:>12}{note}"
    )


def _replay(path: Path) -> int:
    """Run the input of a finding again. Return 1 if it still fails."""
    finding = load_finding(path)
    target = TARGETS[finding.target]()
    try:
        error = replay(target, finding)
    finally:
        target.close()
    print(f"recorded: {finding.key}: {finding.error}")
    if error is None:
        print("now: no error")
        return 0
    print(f"now: {type(error).__name__}: {error}")
    return 1


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--target", action="append", choices=list(TARGETS), help="target; repeat for several")
    parser.add_argument("--inputs", type=int, default=100_000, help="inputs per target")
    parser.add_argument("--seed", type=int, default=0, help="seed of the mutations")
    parser.add_argument("--max-seconds", type=float, default=float("inf"), help="time limit per target, in seconds")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--findings", type=Path, help="folder for the findings; default: a temporary folder")
    parser.add_argument("--replay", type=Path, help="saved finding to run again")
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())

"""TCP relay that delays parts of a stream, as a link does that loses packets. A program, run between two nodes.

TCP sends a lost packet again after at least 200 ms, and the bytes behind it wait. The receiver sees a pause in the
stream. The relay makes the same pauses before a share of the chunks that it forwards, in both directions.

Usage::

    python -m tests._support.tcp_relay --listen 10.77.0.2:15555 --to 10.77.0.3:15555 --lost-share 0.3
"""

from __future__ import annotations

import argparse
import asyncio
import random
from contextlib import suppress
from dataclasses import dataclass, field

CHUNK_BYTES = 1448
"""Payload of a packet on Ethernet."""
RETRANSMISSION_S = 0.2


@dataclass
class Relay:
    """Forwarder of connections to one address.

    Attributes:
        host: Host of the destination.
        port: Port of the destination.
        lost_share: Share of the chunks that are delayed by a retransmission.
        delay_s: Delay of every chunk, in seconds.
        random: Generator of the losses.
        n_chunks: Number of forwarded chunks.
        n_delayed: Number of chunks that a retransmission has delayed.
    """

    host: str
    port: int
    lost_share: float
    delay_s: float = 0.0
    random: random.Random = field(default_factory=lambda: random.Random(0))
    n_chunks: int = 0
    n_delayed: int = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward a connection in both directions until both ends have closed it."""
        try:
            to_reader, to_writer = await asyncio.open_connection(self.host, self.port)
        except OSError:
            writer.close()
            return
        try:
            await asyncio.gather(self._forward(reader, to_writer), self._forward(to_reader, writer))
        except OSError:
            pass  # One end has closed or lost the connection. The other end is told below.
        finally:
            for end in (writer, to_writer):
                end.close()

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            is_lost = self.random.random() < self.lost_share
            self.n_chunks += 1
            self.n_delayed += is_lost
            if pause_s := self.delay_s + is_lost * RETRANSMISSION_S:
                await asyncio.sleep(pause_s)
            writer.write(chunk)
            await writer.drain()
        with suppress(OSError):
            writer.write_eof()


async def run(relay: Relay, host: str, port: int) -> None:
    """Serve connections to ``host:port``, and print the counts of chunks every second, until canceled."""
    async with await asyncio.start_server(relay.serve, host, port):
        print("ready", flush=True)
        while True:
            await asyncio.sleep(1)
            print(f"chunks {relay.n_chunks} delayed {relay.n_delayed}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--listen", required=True, help="HOST:PORT for clients")
    parser.add_argument("--to", required=True, help="HOST:PORT of the server")
    parser.add_argument("--lost-share", type=float, default=0.0, help="share of the chunks that are sent again")
    parser.add_argument("--delay-s", type=float, default=0.0, help="delay of every chunk")
    args = parser.parse_args()
    (own_host, own_port), (host, port) = (address.rsplit(":", 1) for address in (args.listen, args.to))
    asyncio.run(run(Relay(host, int(port), args.lost_share, args.delay_s), own_host, int(own_port)))


if __name__ == "__main__":
    main()

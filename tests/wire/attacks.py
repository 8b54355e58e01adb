"""Floods of small messages: the attacks of `test_attacks`, and their effect on another client.

    python -m tests.wire.attacks [NAME …] [--seconds 5]

measures another client's ping in quiet, and during the attack of ten connections. The test checks
how an attack ends and measures nothing.
"""

import argparse
import contextlib
import json
import select
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from tests.wire.process import ServerProcess

CONNECTIONS: Final = 10
DEADLINE_S: Final = 60.0
MASK: Final = bytes(4)
PING: Final = b'{"jsonrpc":"2.0","id":1,"method":"ping"}'
NOTE: Final = b'{"jsonrpc":"2.0","method":"notifications/x"}'
UPGRADE: Final = (
    b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"
    b"Sec-WebSocket-Protocol: mcp\r\n\r\n"
)
POST: Final = (
    b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Accept: application/json, text/event-stream\r\n"
)


def frame(first: int, payload: bytes = b"") -> bytes:
    """A short frame of a client; the mask is zeros, which change nothing."""
    return bytes([first, 0x80 | len(payload)]) + MASK + payload


class Attack(NamedTuple):
    """The bytes for each connection: first an opening, then a flood that is repeated."""

    is_websocket: bool
    first: bytes
    flood: bytes
    segment: int = 1 << 16  # bytes of one write
    code: int | None = None  # the close code that the server must send


ATTACKS: Final = {
    "fragments of a byte": Attack(True, frame(0x01, b"x"), frame(0x00, b"x"), code=1008),
    "empty fragments": Attack(True, frame(0x01), frame(0x00), code=1008),
    "empty binary fragments": Attack(True, frame(0x02), frame(0x00), code=1008),
    "pings": Attack(True, b"", frame(0x89), code=1008),
    "pings with a payload": Attack(True, b"", frame(0x89, b"x" * 125), code=1008),
    "pongs that nobody asked for": Attack(True, b"", frame(0x8A), code=1008),
    "pings between fragments": Attack(
        True, frame(0x01, b"x"), frame(0x89) + frame(0x00, b"x" * 64), code=1008
    ),
    "empty messages": Attack(True, b"", frame(0x81), code=1008),
    "messages of a line end": Attack(True, b"", frame(0x82, b"\n"), code=1008),
    "tiny messages": Attack(True, b"", frame(0x81, NOTE)),
    "tiny requests": Attack(True, b"", frame(0x81, PING)),
    "tiny garbage": Attack(True, b"", frame(0x81, b"x")),
    "segments of a byte": Attack(True, b"", frame(0x81, NOTE), segment=1),
    "chunks of a byte": Attack(False, POST + b"Transfer-Encoding: chunked\r\n\r\n", b"1\r\n \r\n"),
    "a head in drips": Attack(False, POST, b"X: y\r\n", segment=1),
    "pipelined requests": Attack(False, b"", b"GET /x HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n"),
    "pipelined messages": Attack(
        False, b"", POST + b"Content-Length: %d\r\n\r\n" % len(PING) + PING
    ),
}


class Attacker:
    """One connection of an attack, opened again and again."""

    def __init__(self, attack: Attack, port: int) -> None:
        self.attack = attack
        self.received = b""
        self._flood = attack.flood * (1 + (1 << 16) // len(attack.flood))
        self._socket = socket.create_connection(("127.0.0.1", port), DEADLINE_S)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if attack.is_websocket:
            self._socket.sendall(UPGRADE)
            while b"\r\n\r\n" not in self.received:
                self.received += self._socket.recv(1 << 16)
            self.received = self.received.partition(b"\r\n\r\n")[2]
        self._socket.sendall(attack.first)
        self._socket.setblocking(False)
        self._rest = memoryview(self._flood)
        self.sent = 0

    def go_on(self, wait_s: float = 0.0) -> bool:
        """Send and receive without waiting; False once the server has hung up."""
        readable, writable, _ = select.select([self._socket], [self._socket], [], wait_s)
        try:
            if writable:
                count = self._socket.send(self._rest[: self.attack.segment])
                self.sent += count
                self._rest = self._rest[count:] or memoryview(self._flood)
            if readable:
                data = self._socket.recv(1 << 16)
                self.received = (self.received + data)[-1024:]
                return bool(data)
        except BlockingIOError:
            pass
        except OSError:
            return False
        return True

    def close(self) -> None:
        self._socket.close()

    @property
    def close_code(self) -> int | None:
        """The code of the Close frame that came last."""
        found = self.received.rfind(b"\x88", 0, max(0, len(self.received) - 3))
        if found < 0:
            return None
        return int.from_bytes(self.received[found + 2 : found + 4], "big")


def attack_for(name: str, port: int, seconds: float) -> None:
    """Run ten connections; each is opened again a little after the server has closed it."""
    until = time.monotonic() + seconds
    attackers: list[Attacker | None] = [None] * CONNECTIONS
    opens_at = [0.0] * CONNECTIONS
    while (now := time.monotonic()) < until:
        for index, attacker in enumerate(attackers):
            if attacker is None:
                if now >= opens_at[index]:
                    with contextlib.suppress(OSError):
                        attackers[index] = Attacker(ATTACKS[name], port)
            elif not attacker.go_on():
                attacker.close()
                attackers[index], opens_at[index] = None, now + 0.1


class Times(NamedTuple):
    """The duration of a ping in milliseconds, and the server's work meanwhile.

    The work does not depend on the other load of the machine.
    """

    wall: float
    cpu: float


def ping_times(server: ServerProcess, seconds: float) -> Iterator[Times]:
    """The times of each ping of a client."""
    port, clock = server.port, (~server.pid << 3) | 2  # clock_getcpuclockid(3)
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(UPGRADE)
        while not connection.recv(1 << 16).endswith(b"\r\n\r\n"):
            pass
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            began, worked = time.perf_counter(), time.clock_gettime(clock)
            connection.sendall(frame(0x81, PING))
            connection.recv(1 << 16)
            cpu = time.clock_gettime(clock) - worked
            yield Times((time.perf_counter() - began) * 1000, cpu * 1000)
            time.sleep(0.005)


def measure(name: str, server: ServerProcess, seconds: float) -> dict[str, object]:
    quiet = list(ping_times(server, seconds))
    port = server.port if ATTACKS[name].is_websocket else server.http_port
    command = [sys.executable, "-m", "tests.wire.attacks", "--attack", name, str(port)]
    with subprocess.Popen([*command, "--seconds", str(seconds + 2)]) as attacking:
        time.sleep(1)
        times = list(ping_times(server, seconds))
        attacking.wait()
    return {"attack": name, **told("wall", quiet, times), **told("cpu", quiet, times)}


def told(which: str, quiet: list[Times], times: list[Times]) -> dict[str, object]:
    before, then = ([getattr(each, which) for each in found] for found in (quiet, times))
    quiet_p99, p99 = (statistics.quantiles(found, n=100)[98] for found in (before, then))
    return {
        f"{which} quiet p99": round(quiet_p99, 2),
        f"{which} p50": round(statistics.median(then), 2),
        f"{which} p99": round(p99, 2),
        f"{which} times": round(p99 / quiet_p99, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[*ATTACKS, []], metavar="NAME")
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--attack", nargs=2, metavar=("NAME", "PORT"))
    given = parser.parse_args()
    if given.attack:
        attack_for(given.attack[0], int(given.attack[1]), given.seconds)
        return
    with tempfile.TemporaryDirectory() as folder, ServerProcess(Path(folder)) as server:
        for name in given.names or ATTACKS:
            print(json.dumps(measure(name, server, given.seconds)), flush=True)


if __name__ == "__main__":
    main()

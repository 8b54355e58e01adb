"""The cost of watching a server, on the day of `benchmarks.soak`.

    python -m benchmarks.watched --minutes 10

Two servers have such a day side by side. One of them writes its log as JSON, sends spans and
metrics of OpenTelemetry, is scraped every 5 s, and has its page open. An action has the same cost
at both but for that: so the cost is the server's processor time for each action, and its memory.
The first quarter is a warm-up. The exit code is 1 where watching costs more than 5 % or 10 MiB, or
where a message was missing or out of place.
"""

import argparse
import logging
import os
import secrets
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import SystemRandom
from typing import Final

import msgspec
import trio

from benchmarks.flat import MIB, WARM_UP
from benchmarks.memory import resident_bytes
from benchmarks.servers import everywhere
from benchmarks.soak import APP
from benchmarks.soak_day import HABITS, Day
from streams.logs import log_to_stderr

COST_MAX: Final = 0.05
MEMORY_MAX: Final = 10 * MIB
SCRAPE_EVERY_S: Final = 5.0
SAMPLE_EVERY_S: Final = 1.0
WATCHED: Final = ("--log-format", "json", "--otel")
# Its own exporter writes to the log: a collector would be one more process on this machine.
TELEMETRY: Final = {
    "OTEL_TRACES_EXPORTER": "console",
    "OTEL_METRICS_EXPORTER": "console",
    "OTEL_SERVICE_NAME": "watched",
}
_TICKS_PER_S: Final = os.sysconf("SC_CLK_TCK")


class Cost(msgspec.Struct, frozen=True):
    """The actions of one server after the warm-up, and the resources that they have used."""

    actions: int
    cpu_s: float
    resident_bytes: int  # the median

    @property
    def cpu_per_action_s(self) -> float:
        """Processor time for each action."""
        return self.cpu_s / self.actions


class Report(msgspec.Struct, frozen=True):
    """A whole run."""

    minutes: float
    seed: int
    plain: Cost
    watched: Cost
    failures: list[str]

    @property
    def share(self) -> float:
        """How much more processor time an action costs at the watched server."""
        return self.watched.cpu_per_action_s / self.plain.cpu_per_action_s - 1

    @property
    def memory_bytes(self) -> int:
        """How much more memory the watched server has."""
        return self.watched.resident_bytes - self.plain.resident_bytes

    @property
    def is_good(self) -> bool:
        """Whether it costs no more than it may, and no action failed."""
        is_cheap = self.share <= COST_MAX and self.memory_bytes <= MEMORY_MAX
        return is_cheap and not self.failures


class _Subject:
    """A server that has its day, and its use of resources so far."""

    def __init__(self, day: Day) -> None:
        self.day = day
        self._pid = day.served["ws"].pid
        self._resident: list[int] = []
        self._cpu_s = self._actions = 0.0

    def begin(self) -> None:
        """The warm-up is over."""
        self._resident.clear()
        self._cpu_s, self._actions = cpu_s(self._pid), self.day.done.total()

    def sample(self) -> None:
        """Look at its memory."""
        self._resident.append(resident_bytes(self._pid))

    def cost(self) -> Cost:
        """Its actions since `begin`, and the resources that they have used."""
        actions = int(self.day.done.total() - self._actions)
        used_s = cpu_s(self._pid) - self._cpu_s
        return Cost(actions, used_s, int(statistics.median(self._resident)))


class Operators:
    """Scrapers of a server, and readers of its page, over a Unix socket."""

    def __init__(self, path: Path, token: str) -> None:
        self._path = path
        self._token = token

    def options(self) -> Sequence[str]:
        """The options of the server."""
        file = self._path.with_suffix(".token")
        file.touch(mode=0o600)
        file.write_text(self._token)
        return "--admin", f"unix:{self._path}", "--admin-token-file", str(file)

    async def scrape(self) -> None:
        """Read the metrics for ever, as Prometheus does."""
        while True:
            async with await self._ask("/metrics") as stream:
                answer = b"".join([part async for part in stream])
            if b"mcp_streams_commit_seconds_count" not in answer:
                raise RuntimeError(f"no metrics: {answer[:300]!r}")
            await trio.sleep(SCRAPE_EVERY_S)

    async def look(self) -> None:
        """Have the page open for ever, as a browser does."""
        async with await self._ask("/live") as stream:
            head = await stream.receive_some()
            if b"text/event-stream" not in head:
                raise RuntimeError(f"no live page: {head[:300]!r}")
            async for _ in stream:
                pass
        raise RuntimeError("the live page has ended")

    async def _ask(self, path: str) -> trio.SocketStream:
        stream = await trio.open_unix_socket(str(self._path))
        head = ("Host: localhost", f"Authorization: Bearer {self._token}", "Connection: close")
        await stream.send_all("\r\n".join((f"GET {path} HTTP/1.1", *head, "", "")).encode())
        return stream


def cpu_s(pid: int) -> float:
    """The processor time that a process has used, in seconds."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; the exit code."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.watched", description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--seed", type=int, help="throws the same dice again")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    chosen = parser.parse_args(arguments)
    if not 0 < chosen.minutes < float("inf"):
        parser.error("--minutes must be above 0")
    log_to_stderr(logging.CRITICAL)
    seed = SystemRandom().randrange(2**32) if chosen.seed is None else chosen.seed
    with tempfile.TemporaryDirectory() as folder:
        report = trio.run(_measure, Path(folder), chosen.minutes, seed)
    if chosen.json:
        print(msgspec.json.encode(report).decode())
    else:
        _print(report)
    return 0 if report.is_good else 1


async def _measure(folder: Path, minutes: float, seed: int) -> Report:
    operators = Operators(folder / "operators", secrets.token_urlsafe(32))
    async with (
        everywhere(APP, folder / "plain.db") as ours,
        everywhere(
            APP, folder / "watched.db", (*WATCHED, *operators.options()), TELEMETRY
        ) as theirs,
        trio.open_nursery() as nursery,
    ):
        subjects = [_Subject(Day(served, seed)) for served in (ours, theirs)]
        for subject in subjects:
            for name, habit in HABITS.items():
                for _ in range(habit.clients):
                    nursery.start_soon(subject.day.go_on, name)
        nursery.start_soon(operators.scrape)
        nursery.start_soon(operators.look)
        await trio.sleep(60 * minutes * WARM_UP)
        for subject in subjects:
            subject.begin()
        with trio.move_on_after(60 * minutes * (1 - WARM_UP)):
            while True:
                for subject in subjects:
                    subject.sample()
                await trio.sleep(SAMPLE_EVERY_S)
        plain, watched = (subject.cost() for subject in subjects)
        nursery.cancel_scope.cancel()
    failures = [failure for subject in subjects for failure in subject.day.failures]
    return Report(minutes, seed, plain, watched, failures)


def _print(report: Report) -> None:
    for name, cost in (("plain", report.plain), ("watched", report.watched)):
        told = f"{1000 * cost.cpu_per_action_s:.2f} ms each, {cost.resident_bytes / MIB:.1f} MiB"
        print(f"{name:8} {cost.actions:,} actions, {told}")
    memory = report.memory_bytes / MIB
    print(f"watching costs {report.share:.1%} and {memory:.1f} MiB; --seed {report.seed}")
    for failure in report.failures:
        print(failure)


if __name__ == "__main__":
    sys.exit(main())

"""Peers for the load tests, the sizes, and a process's use of resources meanwhile."""

import json
import os
import re
import threading
import time
from pathlib import Path
from typing import Final

import msgspec

from tests.wire.raw import Peer, WebSocketPeer
from tests.wire.verbs import STREAMS

SERVER: Final = f"{Path(__file__).parent / 'load_server.py'}:server"
PROBE_EVERY_S: Final = 0.005


class Scale(msgspec.Struct, frozen=True):
    """The sizes of the load tests.

    `SCALE=full` is for a quiet machine, by hand: it also checks times. Each figure can be set by
    itself, as `SCALE_STREAMS=2000`.
    """

    streams: int = 500
    given_up_after_s: tuple[int, ...] = (1, 2, 3)
    flood_bytes: int = 32 * 1024 * 1024
    stall_s: float = 0.0
    requests: int = 2_000
    connections: int = 200
    attached: int = 200
    is_timed: bool = False

    @classmethod
    def chosen(cls) -> "Scale":
        scale = FULL if os.environ.get("SCALE") == "full" else cls()
        settings = {
            name: json.loads(os.environ[key])
            for name in cls.__struct_fields__
            if (key := f"SCALE_{name.upper()}") in os.environ
        }
        fields = msgspec.to_builtins(scale) | settings
        return msgspec.convert(fields, cls)


FULL: Final = Scale(
    streams=10_000,
    given_up_after_s=(8, 12, 16, 20),
    flood_bytes=1024 * 1024 * 1024,
    stall_s=60.0,
    requests=100_000,
    connections=1_000,
    attached=9_900,
    is_timed=True,
)


def rss_mib(pid: int) -> int:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = re.search(r"VmRSS:\s+(\d+) kB", status)
    assert found is not None
    return int(found[1]) // 1024


def cpu_s(pid: int) -> float:
    """The processor time of a process since its start."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Highest(threading.Thread):
    """Measures the memory of a process every 0.1 s."""

    def __init__(self, pid: int) -> None:
        super().__init__()
        self.at_first = self.mib = rss_mib(pid)
        self._pid = pid
        self._is_over = threading.Event()

    def run(self) -> None:
        while not self._is_over.wait(0.1):
            self.mib = max(self.mib, rss_mib(self._pid))

    def stop(self) -> int:
        """The highest value, in MiB above the first."""
        self._is_over.set()
        self.join()
        return self.mib - self.at_first


class Probe(threading.Thread):
    """A second client that sends small requests one after the other and times each."""

    def __init__(self, url: str, method: str) -> None:
        super().__init__()
        self.method = method
        self.times: list[tuple[float, float]] = []  # start and duration of each request
        self.error: Exception | None = None
        self._url = url
        self._is_over = threading.Event()

    def run(self) -> None:
        try:
            with WebSocketPeer(self._url, ("mcp-streams.v1",)) as peer:
                peer.initialize(STREAMS)
                while not self._is_over.wait(PROBE_EVERY_S):
                    at = time.perf_counter()
                    self._once(peer, len(self.times))
                    self.times.append((at, time.perf_counter() - at))
        except Exception as error:
            self.error = error

    def _once(self, peer: Peer, number: int) -> None:
        if self.method == "ping":
            assert peer.ask("ping").result == {}
        else:
            response = peer.response(peer.call("echo", text=str(number)))
            assert response.result["content"][0]["text"] == str(number)

    def stop(self) -> None:
        """End, and raise any error of the thread."""
        self._is_over.set()
        self.join()
        if self.error is not None:
            raise self.error

    def percentile(self, share: float, begin: float, end: float) -> float:
        """The percentile, in milliseconds, of the requests that began in a span of time."""
        times = sorted(took for at, took in self.times if begin <= at < end)
        assert times, f"no {self.method} in {end - begin:.1f} s"
        return times[int(len(times) * share)] * 1000


class Flood:
    """Reads the messages of the tool `flood`, and checks that each comes once, in order.

    A regular expression reads each message: parsing a gigabyte of JSON would take minutes.
    """

    _NUMBER = re.compile(rb'"data":\[(\d+),')

    def __init__(self, peer: Peer, *, total_bytes: int, size: int, marks: Path) -> None:
        self.count = total_bytes // size
        self._peer = peer
        self._marks = marks
        self._call = peer.call("flood", count=self.count, size=size, marks=str(marks))

    def sent(self) -> str:
        """The number that the tool last reported as sent."""
        return self._marks.read_text().split("\n")[-2] if self._marks.exists() else "0"

    def read_all(self) -> None:
        read = 0
        while True:
            raw = self._peer.receive_raw()
            if found := self._NUMBER.search(raw, 0, 200):
                read += 1
                assert int(found[1]) == read
            elif json.loads(raw).get("id") == self._call:
                break
        assert read == self.count
        assert json.loads(raw)["result"]["content"][0]["text"] == f"sent {self.count}"

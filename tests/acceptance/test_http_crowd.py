"""Many HTTP clients of one real server process that stop reading.

Small by default; `SCALE=full pytest tests/acceptance/test_http_crowd.py -s --timeout 900` has them
stall for a minute, and checks times, which needs a quiet machine.
"""

import time
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.acceptance.load import SERVER, Highest, Probe, Scale
from tests.wire.httpclient import HttpClient
from tests.wire.process import ServerProcess
from tests.wire.rawhttp import BOTH, LINES, Exchange
from tests.wire.verbs import PLAIN, POSITIONS

SCALE: Final = Scale.chosen()
READERS: Final = 40
COUNT: Final = 2_000
SIZE: Final = 1_000  # so a stream is far larger than the kernel's buffers
READER_MIB: Final = 1
SHUTDOWN_S: Final = 5.0
# The newest segments stay in memory, however many readers there are: that is not what they cost.
NO_CACHE: Final = ("--limit", "journal_cache_bytes_max=0")


@pytest.mark.parametrize(
    ("accept", "capabilities"), [(BOTH, PLAIN), (LINES, POSITIONS)], ids=["events", "lines"]
)
def test_readers_that_stall_cost_little_and_hold_up_nobody(
    tmp_path: Path, accept: str, capabilities: dict[str, object]
) -> None:
    with ServerProcess(tmp_path, app=SERVER, options=NO_CACHE) as server, ExitStack() as stack:
        probe = Probe(server.url, "tools/call")
        probe.start()
        time.sleep(SCALE.stall_s / 6)
        memory, began = Highest(server.pid), time.perf_counter()
        memory.start()
        client = stack.enter_context(HttpClient(server.http_port, accept))
        client.initialize(capabilities)
        stalled = [_flooded(client, number, tmp_path) for number in range(READERS)]
        for number in range(READERS):
            _wait_until_flushed(_marks(tmp_path, number))
        flooded_by = time.perf_counter()
        time.sleep(SCALE.stall_s)
        ended = time.perf_counter()
        probe.stop()
        more_mib = memory.stop()
        print({"more_mib_each": more_mib / READERS, "stalled_s": ended - began})
        assert more_mib <= READERS * READER_MIB
        assert not any(exchange.is_over for exchange in stalled)
        asked_at = time.perf_counter()
        assert server.stop() == 0
        took_s = time.perf_counter() - asked_at
        print({"shutdown_s": took_s})
    if SCALE.is_timed:
        assert took_s < SHUTDOWN_S
        stalled_ms = probe.percentile(0.99, flooded_by, ended)
        assert stalled_ms < 2 * probe.percentile(0.99, 0.0, began)


def _marks(folder: Path, number: int) -> Path:
    return folder / f"marks-{number}"


def _flooded(client: HttpClient, number: int, folder: Path) -> Exchange:
    """A call whose response is not read at all."""
    marks = str(_marks(folder, number))
    return client.call("flood", number, count=COUNT, size=SIZE, marks=marks)


def _wait_until_flushed(marks: Path) -> None:
    give_up_at = time.monotonic() + 120
    while not (marks.exists() and marks.read_text().endswith("flushed\n")):
        assert time.monotonic() < give_up_at, marks
        time.sleep(0.1)

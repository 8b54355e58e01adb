"""Two hundred sessions of one wrapped command: few children at once, and nothing left of them."""

import json
import os
import sys
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

import pytest

from streams.cli.selftest import torture
from streams.cli.selftest.storm import children_of
from streams.cli.selftest.torture_child import CHILDREN
from tests.rigs.command import Following
from tests.wire.process import wait_until

SESSIONS: Final = 200
CHILDREN_MAX: Final = 8
AT_ONCE: Final = 4  # clients that make calls
FIRST: Final = 40  # sessions, after which memory is measured
SESSION_KIB_MAX: Final = 64  # of an idle session; it takes about 20

Json = dict[str, Any]

pytestmark = [
    pytest.mark.timeout(180, func_only=True),
    pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="reads /proc"),
]


class Client:
    """A session over HTTP, without a connection between its requests."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._session = ""
        self._id = 0

    def request(self, method: str, params: Json) -> Json:
        """The response to a request."""
        self._id += 1
        body = self._post({"id": self._id, "method": method, "params": params})
        lines = [line.removeprefix("data: ") for line in body.splitlines() if '"id"' in line]
        answer: Json = json.loads(lines[-1])
        return answer

    def _post(self, message: Json) -> str:
        request = urllib.request.Request(
            self._url,
            data=json.dumps({"jsonrpc": "2.0", **message}).encode(),
            headers={
                "Content-Type": "application/json",
                "Accept": "application/json, text/event-stream",
            },
        )
        if self._session:
            request.add_header("Mcp-Session-Id", self._session)
        with urllib.request.urlopen(request, timeout=60) as response:
            self._session = response.headers.get("Mcp-Session-Id") or self._session
            text: str = response.read().decode()
            return text

    def open(self) -> None:
        """Initialize."""
        hello = {"name": "sessions", "version": "1"}
        params = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": hello}
        assert "result" in self.request("initialize", params)
        self._post({"method": "notifications/initialized"})

    def call(self, name: str, notes: Path) -> None:
        """Make a call of a few messages."""
        arguments = {"name": name, "count": 2, "per_second": 0, "notes": str(notes)}
        answer = self.request("tools/call", {"name": "short", "arguments": arguments})
        assert answer["result"]["structuredContent"] == {"messages": 2}, answer


def proportional_kib(pid: int) -> int:
    """The memory of a process, in KiB."""
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("Pss:"))


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    (tmp_path / "notes" / CHILDREN).mkdir(parents=True)
    return tmp_path / "notes"


@pytest.fixture
def server(tmp_path: Path, notes: Path) -> Iterator[Following]:
    words = ["wrap", "--http", "127.0.0.1:0", "--journal", str(tmp_path / "journal.db")]
    words += ["--children-max", str(CHILDREN_MAX), "--child-idle", "1"]
    with Following(*words, "--", sys.executable, "-S", torture.CHILD, str(notes)) as server:
        yield server


def test_two_hundred_sessions_share_a_few_children(server: Following, notes: Path) -> None:
    url, pid = server.wait_for(r"http://127\.0\.0\.1:\d+/mcp"), server.process.pid
    at_first = descriptors(pid)
    most, clients, memory = 0, [], []
    with ThreadPoolExecutor(AT_ONCE) as pool:
        for start in range(0, SESSIONS, AT_ONCE):
            some = [Client(url) for _ in range(AT_ONCE)]
            clients += some
            list(pool.map(Client.open, some))
            most = max(most, len(children_of(notes)))
            names = [f"call-{start + number}" for number in range(AT_ONCE)]
            list(pool.map(lambda each: each[0].call(each[1], notes), zip(some, names, strict=True)))
            most = max(most, len(children_of(notes)))
            if len(clients) in (FIRST, SESSIONS):
                memory.append(proportional_kib(pid))
        # Sessions whose children have made room for others get new ones.
        list(pool.map(lambda each: each.call("again", notes), clients[:20]))
    each_kib = (memory[1] - memory[0]) / (SESSIONS - FIRST)
    print(f"{each_kib:.1f} KiB for each idle session; at most {most} children")
    assert 1 < most <= CHILDREN_MAX
    assert each_kib < SESSION_KIB_MAX
    wait_until("idle children end", lambda: not children_of(notes))
    wait_until("their pipes are closed", lambda: descriptors(pid) <= at_first + AT_ONCE)
    server.process.terminate()
    assert server.process.wait(20) == 0
    assert not children_of(notes)

"""The log of calls of a real server: what an operator finds in it after cuts, kills and signals."""

import json
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from streams.journal.ownership import log_path
from streams.messages import request
from tests.acceptance.launch import LINGER, Spawned, owner_pid, wait_for_end
from tests.rigs.command import run
from tests.wire.httpclient import HttpClient
from tests.wire.process import APP, CLI, Gate, ServerProcess, wait_until
from tests.wire.raw import DEADLINE_S, method_is
from tests.wire.verbs import PLAIN, POSITIONS, called, start

AS_JSON = ("--log-format", "json")
TRACE, OTHER_TRACE = "0af7651916cd43dd8448eb211c80319c", "b" * 32
SECRET = "an-argument-of-the-client"

RESTARTING = """
import trio
from streams import Call, Server

server = Server("restarting", resume_min_s=0)

@server.tool(restart=True)
async def again(call: Call) -> str:
    await call.progress(1)
    await trio.sleep_forever()

@server.tool
async def once(call: Call) -> str:
    await call.progress(1)
    await trio.sleep_forever()
"""


@pytest.fixture
def gate(tmp_path: Path) -> Any:
    gate = Gate(tmp_path / "gate")
    yield gate
    gate.close()


def lines(server: ServerProcess, logger: str = "calls") -> list[dict[str, Any]]:
    """The lines of a logger; each line of the log must be JSON, and name its logger."""
    found = [json.loads(line) for line in server.log if not line.startswith("(end")]
    assert all({"event", "level", "logger", "timestamp"} <= line.keys() for line in found)
    return [line for line in found if line["logger"] == logger]


def told(server: ServerProcess, event: str, **of: Any) -> dict[str, Any]:
    """Wait for the line of this event with these fields."""

    def found() -> list[dict[str, Any]]:
        return [
            line for line in lines(server) if line["event"] == event and of.items() <= line.items()
        ]

    wait_until(f"{event} {of}", found)
    return found()[0]


def test_the_log_tells_the_life_of_a_call(tmp_path: Path, gate: Gate) -> None:
    with ServerProcess(tmp_path, options=AS_JSON) as server:
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            called(peer, "count", n=1, pad=1)
            short = told(server, "call ended", tool="count")
            call = start(peer, "ask", gate=gate.path)
            peer.expect(method_is("elicitation/create"))
            told(server, "call asks", tool="ask", is_attached=True)
        told(server, "call detached", why="gone")
        with server.connect("http-lines") as peer:
            peer.initialize(POSITIONS)
            peer.request("stream/resume", {"after": 0, **call.with_token})
            asked = peer.expect(method_is("elicitation/create"))
            peer.answer(asked["id"], {"action": "accept", "content": {"color": SECRET}})
            gate.wait_for("answered")
            gate.release()
            resumed = told(server, "call resumed", tool="ask")
            told(server, "call answered", tool="ask")
            ended = told(server, "call ended", tool="ask")
        assert server.stop() == 0
    events = [line["event"] for line in lines(server) if line.get("tool") == "ask"]
    assert events == [
        f"call {what}" for what in ("began", "asks", "detached", "resumed", "answered", "ended")
    ]
    for each, messages in ((short, 2), (ended, 4)):
        told_of = each["transport"], each["messages"], each["outcome"]
        assert told_of == ("websocket", messages, "completed")
    assert (resumed["by"], resumed["missed"], resumed["questions"]) == ("http", 2, 1)
    assert ended["bytes"] > 300
    assert ended["duration_s"] >= resumed["away_s"] > 0
    text = "".join(server.log)
    for secret in (SECRET, call.token, call.stream, gate.path):
        assert secret not in text
    assert not re.search(r"[\x00-\x08\x0e-\x1f\x7f]", text)


def test_after_a_kill_each_call_is_named_that_did_not_survive(tmp_path: Path) -> None:
    app = tmp_path / "restarting.py"
    app.write_text(RESTARTING)
    with ServerProcess(tmp_path, app=f"{app}:server", options=AS_JSON) as server:
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            once = [start(peer, "once") for _ in range(3)]
            again = start(peer, "again")
            server.kill()
        server.log.clear()
        server.start()
        told(server, "call restarted", tool="again", stream=again.stream[:8])
        for each in once:
            line = told(server, "call interrupted", tool="once", stream=each.stream[:8])
            assert (line["level"], line["is_attached"]) == ("warning", False)
        assert len([each for each in lines(server) if each["event"] == "call interrupted"]) == 3


def test_a_shutdown_names_the_calls_that_it_ends_or_releases(tmp_path: Path) -> None:
    app = tmp_path / "restarting.py"
    app.write_text(RESTARTING)
    with (
        ServerProcess(tmp_path, app=f"{app}:server", options=AS_JSON) as server,
        server.connect("ws-streams") as peer,
    ):
        peer.initialize(POSITIONS)
        start(peer, "once")
        start(peer, "again")
        assert server.stop(signal.SIGTERM) == 0
    signalled = next(line for line in lines(server, "process") if "signal" in line)
    assert (signalled["event"], signalled["signal"]) == ("shutting down", "SIGTERM")
    by_event = {line["event"]: line["tool"] for line in lines(server)}
    assert by_event["call interrupted"] == "once"
    assert by_event["call released"] == "again"


def test_the_lines_before_a_kill_are_there(tmp_path: Path) -> None:
    """All but those of the last 50 ms: here the server was heard of since."""
    with (
        ServerProcess(tmp_path, options=AS_JSON) as server,
        server.connect("ws-streams") as peer,
    ):
        peer.initialize(PLAIN)
        for _ in range(100):
            called(peer, "add", a=1, b=2)
        wait_until("the lines", lambda: len(lines(server)) >= 100)
        server.kill()
    ended = [line for line in lines(server) if line["event"] == "call ended"]
    assert len(ended) == 100
    assert len({line["stream"] for line in ended}) > 90


def test_the_trace_of_a_call_is_in_its_line(tmp_path: Path) -> None:
    """That of `_meta` comes before that of the HTTP request."""
    with ServerProcess(tmp_path, options=AS_JSON) as server:
        by_http = {"traceparent": f"00-{OTHER_TRACE}-b7ad6b7169203331-01"}
        meta = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
        with HttpClient(server.http_port) as client:
            client.initialize(PLAIN)
            client.call("add", 1, more=by_http, a=1, b=2).body()
            params = {"name": "table", "arguments": {}, "_meta": meta}
            client.request("tools/call", params, id=2, more=by_http).body()
            client.call("blocks", 3).body()
        assert told(server, "call ended", tool="add")["trace_id"] == OTHER_TRACE
        assert told(server, "call ended", tool="table")["trace_id"] == TRACE
        assert "trace_id" not in told(server, "call ended", tool="blocks")


def test_each_logger_has_a_level_of_its_own(tmp_path: Path) -> None:
    options = (*AS_JSON, "--log-level", "debug,server=warning", "--log-level", "calls=warning")
    with ServerProcess(tmp_path, options=options) as server:
        with server.connect("ws-streams") as peer:
            peer.initialize(PLAIN)
            called(peer, "add", a=1, b=2)
        server.stop()
    assert lines(server) == []
    assert {"listening", "shutting down"} <= {each["event"] for each in lines(server, "process")}


def test_the_owner_behind_a_relay_logs_beside_its_journal(tmp_path: Path) -> None:
    journal = tmp_path / "journal.db"
    with Spawned(journal, *LINGER, *AS_JSON) as peer:
        peer.initialize(PLAIN)
        called(peer, "add", a=1, b=2)
        owner = owner_pid(journal)
    wait_for_end(owner)
    log = [json.loads(line) for line in log_path(journal).read_text().splitlines()]
    (ended,) = [line for line in log if line["event"] == "call ended"]
    assert (ended["tool"], ended["transport"]) == ("add", "relay")


def test_a_host_that_does_not_read_the_log_holds_up_no_call() -> None:
    """The log is more than a pipe takes. Only whole lines are lost."""
    calls, told = 2_000, b""
    host = subprocess.Popen(
        [*CLI, "serve", APP, "--stdio", *AS_JSON],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    with host:
        assert host.stdin is not None
        assert host.stdout is not None
        assert host.stderr is not None
        for number in range(calls):
            params = {"name": "add", "arguments": {"a": number, "b": 1}}
            host.stdin.write(request(number, "tools/call", params))
            host.stdin.flush()
            while json.loads(host.stdout.readline()).get("id") != number:
                pass  # a message of the tool
        host.stdin.close()
        told = host.stderr.read()
    found = [json.loads(line) for line in told.splitlines()]
    assert len(told) > 64 * 1024
    assert all(line["event"] == "call ended" for line in found if line["logger"] == "calls")


@pytest.mark.parametrize(
    ("level", "why"),
    [
        ("loud", "write one of debug, info"),
        ("nothing=info", "unknown logger nothing"),
        ("=info", "without a name"),
        ("calls=", "write one of debug"),
    ],
)
def test_a_level_that_is_none_is_refused(level: str, why: str) -> None:
    done = run("serve", APP, f"--log-level={level}", within_s=DEADLINE_S)
    assert done.returncode == 2
    assert why in done.stderr
    assert len(done.shown) == 1

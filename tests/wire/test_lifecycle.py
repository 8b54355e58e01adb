"""From `initialize` to the end of the process."""

import contextlib
import os
import select
import signal
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wire.conftest import Wire
from tests.wire.process import APP, CLI, Gate, ServerProcess
from tests.wire.raw import DEADLINE_S, PeerGone, PipePeer, WebSocketPeer, answers_to, method_is
from tests.wire.verbs import (
    COMPLETED,
    END,
    KINDS,
    POSITIONS,
    STREAMS,
    Reader,
    counted,
    opting_in,
    read_stream,
    refused,
    resume,
    start,
    up_to,
)

MANY_TOOLS = """
from streams import Call, Server

server = Server("many", version="1")

def named(name):
    async def tool(call: Call) -> str:
        return name
    tool.__name__ = name
    return tool

for n in range(500):
    server.tool(named(f"tool_{n:03}"))
"""


@pytest.mark.parametrize("revision", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
def test_the_clients_revision_is_spoken(wire: Wire, revision: str) -> None:
    """W§6: "revisions 2025-11-25, 2025-06-18, 2025-03-26 and 2024-11-05"; MCP, Lifecycle: a
    supported version is answered with the same."""
    response = wire.connect().initialize({}, revision=revision)
    assert set(response) == {"jsonrpc", "id", "result"}
    assert response.result["protocolVersion"] == revision
    assert response.result["serverInfo"]["name"] == "wire-tests"
    assert response.result["serverInfo"]["version"] == "1.2.3"
    assert "tools" in response.result["capabilities"]
    assert "logging" in response.result["capabilities"]


@pytest.mark.parametrize("revision", ["1999-01-01", "2099-01-01", ""])
def test_an_unknown_revision_is_answered_with_the_latest(wire: Wire, revision: str) -> None:
    """MCP, Lifecycle: "Otherwise, the server MUST respond with another protocol version it
    supports. This SHOULD be the latest"."""
    response = wire.connect().initialize({}, revision=revision)
    assert response.result["protocolVersion"] == "2025-11-25"


def test_the_server_advertises_itself(wire: Wire) -> None:
    """W§8: "The server advertises itself in `.extensions` and `.experimental`"."""
    capabilities = wire.connect().initialize({}).result["capabilities"]
    assert isinstance(capabilities["extensions"]["mcp-streams/v1"], dict)
    assert isinstance(capabilities["experimental"]["mcp-streams/v1"], dict)


@pytest.mark.parametrize("params", [None, {}, {"protocolVersion": 7}])
def test_initialize_without_its_params_is_refused(wire: Wire, params: object) -> None:
    """W§9: "bad params" -32602; one may try again."""
    peer = wire.connect()
    assert peer.ask("initialize", params).error["code"] == -32602
    assert peer.initialize({}).result["protocolVersion"] == "2025-11-25"


def test_a_ping_is_answered(wire: Wire) -> None:
    """MCP, Ping: "The receiver MUST respond promptly with an empty response"."""
    assert wire.plain().ask("ping").result == {}


def test_tools_are_described(wire: Wire) -> None:
    """MCP, Tools: name, description, inputSchema; the `call` is ours and no argument."""
    tools = {tool["name"]: tool for tool in wire.plain().ask("tools/list").result["tools"]}
    assert tools["count"]["description"] == "Send n messages, then wait at the gate."
    schema = tools["count"]["inputSchema"]
    assert schema["type"] == "object"
    assert set(schema["properties"]) == {"n", "gate", "pad"}
    assert schema["required"] == ["n"]
    assert set(tools["add"]["inputSchema"]["properties"]) == {"a", "b"}
    assert tools["forever"]["inputSchema"]["type"] == "object"


def test_many_tools_are_listed_in_pages(tmp_path: Path) -> None:
    """MCP, Pagination: `nextCursor` while there are more; each tool once, and an invalid cursor is
    -32602."""
    (tmp_path / "many.py").write_text(MANY_TOOLS)
    with (
        ServerProcess(tmp_path, app=f"{tmp_path / 'many.py'}:server") as server,
        server.connect("ws-mcp") as peer,
    ):
        peer.initialize({})
        pages = [peer.ask("tools/list").result]
        while "nextCursor" in pages[-1]:
            pages.append(peer.ask("tools/list", {"cursor": pages[-1]["nextCursor"]}).result)
        assert peer.ask("tools/list", {"cursor": "nonsense"}).error["code"] == -32602
    names = [tool["name"] for page in pages for tool in page["tools"]]
    assert len(pages) > 1
    assert sorted(names) == [f"tool_{n:03}" for n in range(500)]


def test_the_log_level_is_the_clients(wire: Wire) -> None:
    """MCP, Logging: "`logging/setLevel`": that level and above, on this connection."""
    peer, other = wire.plain(), wire.plain()
    levels = ["debug", "info", "notice", "warning", "error", "critical", "alert", "emergency"]
    assert peer.ask("logging/setLevel", {"level": "error"}).result == {}
    assert other.ask("logging/setLevel", {"level": "debug"}).result == {}
    for one, expected in ((peer, levels[4:]), (other, levels)):
        call_id = one.call("complain", levels=levels)
        *notes, _ = one.read_until(answers_to(call_id))
        assert [note.params["level"] for note in notes] == expected
        assert [note.params["data"] for note in notes] == [{"at": level} for level in expected]


@pytest.mark.parametrize("params", [None, {}, {"level": "loud"}, {"level": 3}])
def test_a_level_that_is_none_is_refused(wire: Wire, params: object) -> None:
    """MCP, Logging: "Invalid log level: -32602"."""
    assert wire.plain().ask("logging/setLevel", params).error["code"] == -32602


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("kind", KINDS)
def test_a_signal_ends_the_server_in_good_order(
    fresh: ServerProcess, gate: Gate, number: int, kind: str
) -> None:
    """W§7: "SIGTERM to the owner ends it in good order: running handlers end as `interrupted`";
    W§5: "A server that lets go (drain, shutdown) ends `stream/resume` with `released`", unless the
    stream is over by then and delivered to its end. Exit code 0 within 5 s."""
    with fresh.connect(kind) as maker, fresh.connect(kind) as peer:
        maker.initialize(opting_in(kind, POSITIONS))
        peer.initialize(opting_in(kind, POSITIONS))
        started = start(maker, "count", n=3, gate=gate.path)
        resume_id = peer.request("stream/resume", {**started.with_token, "after": 0})
        reader = Reader(peer)
        reader.until_seq(started.stream, 3)
        assert fresh.stop(number, within_s=5) == 0
        ended = reader.response(resume_id).result["_meta"]["mcp-streams/ended"]
        assert ended in ("released", "completed")
        with pytest.raises(PeerGone):
            peer.ask("ping")
    fresh.start()
    with fresh.connect(kind) as peer:
        peer.initialize(opting_in(kind, POSITIONS))
        after, reply = read_stream(peer, started.with_token, after=0)
    assert after.seqs(started.stream) == up_to(4)
    assert after.entries[started.stream][4].answers(started.id)
    refused(after.entries[started.stream][4], "interrupted", -32603)
    assert reply.result == COMPLETED


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("offered", ["mcp", "mcp-streams.v1"])
def test_a_peer_that_does_not_read_holds_up_no_shutdown(
    fresh: ServerProcess, number: int, offered: str
) -> None:
    """Page, Introduction: "Either the client or server may disconnect at any time": exit 0 within
    5 s with a peer that has stopped reading in the middle of 40 MB."""
    with WebSocketPeer(fresh.url, [offered], queue_max=1) as peer:
        peer.initialize(STREAMS)
        start(peer, "count", n=10_000, pad=4_000)
        peer.expect(method_is("notifications/message"))
        assert fresh.stop(number, within_s=5) == 0


def test_an_idle_server_ends_at_once(fresh: ServerProcess) -> None:
    """SIGTERM without a client: exit 0."""
    assert fresh.stop(signal.SIGTERM, within_s=5) == 0


def foreground(folder: Path) -> PipePeer:
    journal = str(folder / "journal.db")
    return PipePeer([*CLI, "serve", APP, "--stdio", "--foreground", "--journal", journal])


def in_memory() -> PipePeer:
    return PipePeer([*CLI, "serve", APP, "--stdio"])


@pytest.mark.parametrize("mode", ["relay", "foreground", "no journal"])
def test_after_the_end_of_input_what_is_owed_is_written(
    fresh: ServerProcess, tmp_path: Path, gate: Gate, mode: str
) -> None:
    """W§7: "End of input means no more requests: what is owed is still written until output fails;
    with nothing live the process ends"."""
    if mode == "relay":
        peer = fresh.connect("stdio")
    else:
        peer = foreground(tmp_path) if mode == "foreground" else in_memory()
    assert isinstance(peer, PipePeer)
    with peer:
        peer.initialize(STREAMS)
        started = start(peer, "count", n=3, gate=gate.path)
        gate.wait_for("sent")
        ping = peer.request("ping")
        peer.half_close()
        gate.release()
        messages = peer.read_to_the_end()
        assert peer.exit_code() == 0
    assert any(message.answers(ping) for message in messages)
    assert any(message.answers(started.id) for message in messages)
    assert counted(messages) == [1, 2, 3]
    assert messages[-1].method == END


@pytest.mark.parametrize("mode", ["relay", "foreground", "no journal"])
def test_with_nothing_live_the_process_ends(
    fresh: ServerProcess, tmp_path: Path, mode: str
) -> None:
    """W§7: "with nothing live the process ends": exit 0, at once, initialized or not."""
    for is_initialized in (False, True):
        if mode == "relay":
            peer = fresh.connect("stdio")
        else:
            peer = foreground(tmp_path) if mode == "foreground" else in_memory()
        assert isinstance(peer, PipePeer)
        with peer:
            if is_initialized:
                peer.initialize(STREAMS)
            peer.half_close()
            assert peer.read_to_the_end() == []
            assert peer.exit_code() == 0


def test_closed_pipes_are_a_disconnect_and_no_cancel(tmp_path: Path, gate: Gate) -> None:
    """W§7: "It is a disconnect, not a cancel: announced streams run on […], their results are
    journaled, and the next process on the same journal serves the resume"; here with
    `--foreground`, where the process itself is the journal's owner."""
    with foreground(tmp_path) as peer:
        peer.initialize(STREAMS)
        started = start(peer, "count", n=3, gate=gate.path)
        gate.wait_for("sent")
        peer.half_close()
        peer.close_output()
        gate.release()
        assert peer.exit_code() == 0
    with foreground(tmp_path) as peer:
        peer.initialize(STREAMS)
        messages = resume(peer, started.by_id, after=0)
        peer.half_close()
        assert peer.exit_code() == 0
    assert counted(messages) == [1, 2, 3]
    assert messages[-3].answers(started.id)
    assert messages[-1].result == COMPLETED


@contextlib.contextmanager
def owner_of(journal: Path) -> Iterator[int]:
    """A pidfd of the process that listens on the journal's socket; it is ended in any case."""
    with contextlib.closing(socket.socket(socket.AF_UNIX)) as connection:
        connection.connect(f"{journal}.sock")
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
        pid, _, _ = struct.unpack("3i", credentials)
        pidfd = os.pidfd_open(pid)
    try:
        yield pidfd
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def test_the_owner_outlives_the_process_that_started_it(
    tmp_path_factory: pytest.TempPathFactory, gate: Gate
) -> None:
    """W§7: "announced streams run on in the journal's owner […], and the next process on the same
    journal serves the resume. SIGTERM to the owner ends it in good order: running handlers end as
    `interrupted`"."""
    journal = tmp_path_factory.mktemp("owner") / "journal.db"
    command = [*CLI, "serve", APP, "--stdio", "--journal", str(journal)]
    with PipePeer(command) as peer:
        peer.initialize(STREAMS)
        with owner_of(journal) as owner:
            finished = start(peer, "count", n=3, gate=gate.path)
            gate.wait_for("sent")
            running = start(peer, "forever")
            peer.cut()
            gate.release()
            with PipePeer(command) as second:
                second.initialize(STREAMS)
                assert counted(resume(second, finished.by_id, after=0)) == [1, 2, 3]
            signal.pidfd_send_signal(owner, signal.SIGTERM)
            assert select.select([owner], [], [], DEADLINE_S)[0], "the owner does not end"
    with PipePeer(command) as third:
        third.initialize(STREAMS)
        with owner_of(journal):
            messages = resume(third, running.by_id)
            refused(messages[-3], "interrupted", -32603)
            assert messages[-3].answers(running.id)

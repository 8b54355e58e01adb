"""The limit of the whole journal, and the share of it for all anonymous callers together."""

import re
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from msgspec.structs import replace

from streams import messages
from streams.journal.records import Create
from streams.journal.sqlite import SQLiteStore
from streams.journal.sqlite.verify import inspect
from tests.rigs.sqlite import append, record
from tests.wire.process import Gate, ServerProcess, wait_until
from tests.wire.raw import Peer
from tests.wire.verbs import MIB, POSITIONS, Reader, Started, ack, opting_in, start

pytestmark = pytest.mark.needs_file("it measures the file")

LIMIT = 64 * MIB
SHARE = LIMIT // 4
COMMIT = 49 * MIB  # `docs/operate/operations.md`: what one commit more may add to the WAL
ADD = {"name": "add", "arguments": {"a": 1, "b": 2}}
ENDLESS = 1_000_000
WAIT, GO_ON = "anonymous callers wait for room", "there is room for anonymous callers again"
NO_ROOM = "there is no room for new calls"


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path, options=("--limit", f"journal_bytes_max={LIMIT}")) as server:
        yield server


def size_of(journal: Path) -> int:
    files = (journal, journal.with_name(f"{journal.name}-wal"))
    return sum(file.stat().st_size for file in files if file.exists())


def endless(
    server: ServerProcess, kinds: tuple[str, ...], gate: Gate, opened: ExitStack
) -> list[Started]:
    """Calls that write without end, all at once, to clients that do not read."""
    started = []
    for kind in kinds:
        peer = opened.enter_context(server.connect(kind))
        peer.initialize(opting_in(kind, POSITIONS))
        started.append(start(peer, "pour", n=ENDLESS, pad=10_000, gate=gate.path))
    gate.release(len(kinds))
    return started


def add(peer: Peer) -> None:
    assert peer.ask("tools/call", ADD).result["content"][0]["text"] == "3"


def test_anonymous_callers_together_have_their_share_and_others_go_on(
    server: ServerProcess, gate: Gate, gate2: Gate
) -> None:
    kinds = ("ws-streams", "ws-mcp", "http-sse", "http-lines", "ws-streams") * 2
    with ExitStack() as opened:
        other = opened.enter_context(server.connect("stdio"))
        other.initialize(POSITIONS)
        going_on = opened.enter_context(server.connect("stdio"))
        going_on.initialize(POSITIONS)
        steps = start(going_on, "steps", n=200, gate=gate.path)
        stranger = opened.enter_context(server.connect("ws-streams"))
        stranger.initialize(POSITIONS)
        waiting = start(stranger, "count", n=0, gate=gate.path)
        started = endless(server, kinds, gate2, opened)
        server.hear(WAIT)
        gate.release(201)  # both
        for _ in range(50):
            add(other)
            assert size_of(server.journal) <= LIMIT
        Reader(going_on).response(steps.id)
        assert stranger.response(waiting.id).result["content"][0]["text"] == "counted 0"

        refused = stranger.ask("tools/call", ADD)
        assert refused.reason == "too_many_bytes"
        assert refused.error["data"]["limit"] == SHARE
        assert "try again later" in refused.error["message"]

        # No message that was sent is lost.
        again = opened.enter_context(server.connect("ws-streams"))
        again.initialize(POSITIONS)
        found = Reader(again)
        for each in started:
            again.request("stream/resume", {**each.with_token, "after": 0})
        while sum(map(len, found.entries.values())) < 500:
            found.until(lambda _: True)
        for entries in found.entries.values():
            assert list(entries) == list(range(1, len(entries) + 1))
    assert server.stop() == 0
    assert inspect(server.journal).problems == ()
    assert size_of(server.journal) <= LIMIT


def test_the_share_survives_a_restart_and_room_lets_anonymous_callers_go_on(
    server: ServerProcess, gate: Gate
) -> None:
    with ExitStack() as opened:
        started = endless(server, ("ws-streams",) * 3, gate, opened)
        server.hear(WAIT)
        server.kill()
    server.log.clear()
    server.start()
    with ExitStack() as opened:
        other = opened.enter_context(server.connect("stdio"))
        other.initialize(POSITIONS)
        stranger = opened.enter_context(server.connect("ws-streams"))
        stranger.initialize(POSITIONS)
        add(other)

        def is_refused() -> bool:
            return stranger.ask("tools/call", ADD).get("error") is not None

        wait_until("the rows are counted", is_refused)
        reader = Reader(stranger)
        for each in started:
            reply = stranger.request("stream/resume", {**each.with_token, "after": 0})
            reader.response(reply)
            entries = reader.entries[each.stream]
            assert list(entries) == list(range(1, len(entries) + 1))
            assert entries[len(entries)].reason == "interrupted"
            ack(stranger, each.stream, len(entries))
        wait_until("there is room again", lambda: not is_refused())
        assert size_of(server.journal) <= LIMIT


def test_the_whole_has_a_limit_for_those_who_are_known_too(
    server: ServerProcess, gate: Gate
) -> None:
    with ExitStack() as opened:
        other = opened.enter_context(server.connect("stdio"))
        other.initialize(POSITIONS)
        started = endless(server, ("stdio",) * 4, gate, opened)
        server.hear(NO_ROOM)

        def refused() -> bool:
            return "error" in other.ask("tools/call", ADD)

        wait_until("calls are refused", refused)
        answer = other.ask("tools/call", ADD)
        if "error" in answer:
            assert answer.reason == "journal_full"
            told = answer.error["data"]
            assert told["limit"] == LIMIT
            assert 0 < told["used"] <= LIMIT
            assert f"{told['used']} bytes of {LIMIT} are in use" in answer.error["message"]
        with server.connect("http-sse") as late:  # to come back to a call, or to cancel it
            late.initialize(POSITIONS)
        for _ in range(50):
            assert other.ask("ping").result == {}
            assert size_of(server.journal) <= LIMIT + COMMIT
        for each in started:
            other.notify("notifications/cancelled", {"requestId": each.id})
    assert server.stop() == 0
    assert inspect(server.journal).problems == ()
    assert size_of(server.journal) <= LIMIT


def test_a_journal_that_is_larger_than_its_limit_is_told_at_the_start(tmp_path: Path) -> None:
    """After an upgrade a journal may already be larger than its new limit."""
    origin = messages.request(1, "tools/call", ADD).rstrip(b"\n")
    with closing(SQLiteStore(tmp_path / "journal.db")) as store:
        lines = append(1, 20, line=b'"%s"' % (b"x" * MIB))
        assert store.commit([Create(replace(record(), origin=origin)), lines]) == [None, None]
    options = ("--limit", f"journal_bytes_max={16 * MIB}")
    with ServerProcess(tmp_path, options=options) as server, server.connect("stdio") as peer:
        [line] = [line for line in server.log if "the journal has its limit" in line]
        assert "--limit journal_bytes_max=BYTES" in line
        assert f" limit={16 * MIB}" in line
        [used] = re.findall(r"used=(\d+)", line)
        assert int(used) > 20 * MIB
        peer.initialize(POSITIONS)
        refused = peer.ask("tools/call", ADD)
        assert refused.reason == "journal_full"
        assert refused.error["data"] | {"used": int(used)} == {
            "reason": "journal_full",
            "limit": 16 * MIB,
            "used": int(used),
        }
        assert server.stop() == 0
    with ServerProcess(tmp_path, options=("--limit", "journal_bytes_max=0")) as server:
        assert not any("the journal has its limit" in line for line in server.log)

"""Storage that fails under a real server: it ends with one line, and loses no durable message."""

import contextlib
import os
import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest

from streams.journal.sqlite.verify import inspect
from tests.rigs.command import run
from tests.rigs.injecting import injected
from tests.wire.process import APP, Gate, ServerProcess
from tests.wire.raw import Peer, PeerGone, method_is
from tests.wire.verbs import POSITIONS, Reader, Started, opting_in, read_stream, refused, start

pytestmark = pytest.mark.needs_file("it injects faults into the use of the file")


def begun(server: ServerProcess, kind: str, gate: Gate) -> tuple[Peer, Started, Reader]:
    """A call that has sent five messages, and waits."""
    peer = server.connect(kind)
    peer.initialize(opting_in(kind, POSITIONS))
    started = start(peer, "steps", n=50, gate=gate.path)
    gate.release(5)
    reader = Reader(peer)
    reader.until_seq(started.stream, 5)
    return peer, started, reader


def until_it_ends(server: ServerProcess, peer: Peer, gate: Gate, reader: Reader) -> str:
    """Let the tool go on, a commit for each message, until the server has ended; returns its last
    line.
    """
    with contextlib.suppress(PeerGone):
        while True:
            gate.release()
            reader.until(method_is("notifications/message"))
    assert server.wait() == 2
    with pytest.raises((PeerGone, OSError)):
        peer.ask("ping")
    unlogged = [line for line in server.log[:-1] if not line.startswith("20")]
    [said] = unlogged  # one line, and no traceback
    assert said.startswith(str(server.journal))
    return said


def is_there_again(server: ServerProcess, kind: str, started: Started, had: int) -> None:
    """Check that after a restart no message is missing, and that the call is over."""
    server.start()
    with server.connect(kind) as peer:
        peer.initialize(opting_in(kind, POSITIONS))
        reader, _ = read_stream(peer, started.with_token, after=0)
    entries = reader.entries[started.stream]
    last = max(entries)
    assert list(entries) == list(range(1, last + 1))
    assert last > had
    refused(entries[last], "interrupted", -32603)
    assert inspect(server.journal).problems == ()


@pytest.mark.parametrize(
    ("kind", "calls"), [("ws-streams", "fdatasync,fsync"), ("http-sse", "pwrite64")]
)
def test_storage_that_fails_ends_the_server_and_takes_nothing_back(
    fresh: ServerProcess, gate: Gate, tmp_path: Path, kind: str, calls: str
) -> None:
    """W§9: messages are stored before they are sent; what cannot be stored is not sent."""
    peer, started, reader = begun(fresh, kind, gate)
    with peer, injected(fresh.pid, calls, "error=EIO:when=3+", tmp_path) as noted:
        said = until_it_ends(fresh, peer, gate, reader)
        assert "EIO" in noted.read_text()
    assert "the disk fails: see the system's log, check the disk, then restart" in said
    is_there_again(fresh, kind, started, max(reader.seqs(started.stream)))


def removed(path: Path) -> None:
    path.unlink()


def replaced(path: Path) -> None:
    copy = Path(shutil.copy(path, f"{path}.other"))
    os.replace(copy, path)


@pytest.mark.parametrize(
    ("do", "suffix"), [(removed, ""), (replaced, ""), (removed, "-wal"), (removed, ".lock")]
)
def test_a_journal_that_is_removed_or_replaced_is_noticed(
    fresh: ServerProcess, gate: Gate, do: Callable[[Path], None], suffix: str
) -> None:
    peer, started, reader = begun(fresh, "ws-streams", gate)
    with peer:
        do(Path(f"{fresh.journal}{suffix}"))
        said = until_it_ends(fresh, peer, gate, reader)
    if suffix:  # the contents of a lost WAL were in the file already
        is_there_again(fresh, "ws-streams", started, 5)
    assert said.startswith(f"{fresh.journal}{suffix} was removed or replaced while this server")
    assert max(reader.entries.popitem()[1]) == 5, "what follows was not acknowledged"


def test_what_is_put_in_the_place_of_a_journal_is_left_alone(
    fresh: ServerProcess, gate: Gate, tmp_path: Path
) -> None:
    """A backup that is restored too early, with its side files, is as good as before."""
    peer, _, reader = begun(fresh, "ws-streams", gate)
    with peer:
        names = [fresh.journal, Path(f"{fresh.journal}-wal")]
        for path in names:
            replaced(path)
        before = [path.read_bytes() for path in names]
        until_it_ends(fresh, peer, gate, reader)
    assert [path.read_bytes() for path in names] == before


def test_a_page_that_cannot_be_read_ends_the_server_with_advice(
    fresh: ServerProcess, gate: Gate
) -> None:
    peer, started, _ = begun(fresh, "ws-streams", gate)
    with peer:
        fresh.stop()
    content = bytearray(fresh.journal.read_bytes())
    at = content.index(b'"n":3')
    page = at - at % (16 * 1024)
    content[page : page + 100] = b"\xa5" * 100
    fresh.journal.write_bytes(content)
    fresh.start()
    with fresh.connect("ws-streams") as again:
        again.initialize(POSITIONS)
        again.request("stream/resume", started.with_token)
        Reader(again).drain()
    assert fresh.wait() == 2
    assert (
        "it is damaged: restore it from a backup, or save what `mcp-streams export`"
        in (fresh.log[-2])
    )
    assert not any("Traceback" in line for line in fresh.log)
    assert inspect(fresh.journal).problems


def test_a_request_that_cannot_be_read_ends_the_start_with_advice(
    fresh: ServerProcess, gate: Gate
) -> None:
    """SQLite finds no fault with a changed letter in a row."""
    peer, *_ = begun(fresh, "ws-streams", gate)
    with peer:
        fresh.stop()
    with contextlib.closing(sqlite3.connect(fresh.journal, isolation_level=None)) as opened:
        changed = "CAST(replace(CAST(origin AS TEXT), 'jsonrpc', 'jsonqpc') AS BLOB)"
        opened.execute(f"UPDATE streams SET origin = {changed}")
    done = run("serve", APP, "--http", "127.0.0.1:0", "--journal", str(fresh.journal))
    assert done.returncode == 2
    assert "the request of its stream 1 cannot be read" in done.shown[-1]
    assert inspect(fresh.journal).problems

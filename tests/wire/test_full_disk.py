"""A full disk: nothing is lost, running calls end, new ones are refused until there is room.

The disk is a file system in memory, of 64 MiB unless a test says otherwise. Root may make it.
"""

import contextlib
import os
import subprocess
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from streams.journal.sqlite.verify import inspect
from tests.rigs.needing import lacking
from tests.wire.process import Gate, ServerProcess
from tests.wire.raw import DEADLINE_S, Peer
from tests.wire.verbs import MIB, POSITIONS, Reader, Started, ack, counted, opting_in, start, up_to

pytestmark = pytest.mark.needs_file("it fills the disk of the file")

MESSAGES = 1500  # of 10 KB: of each of four calls 15 MB
ACK_EVERY = 50
KINDS = ("ws-streams", "ws-mcp", "http-lines", "stdio")
ADD = {"name": "add", "arguments": {"a": 1, "b": 2}}
NO_ROOM, ROOM = "there is no room for new calls", "there is room again"


@contextlib.contextmanager
def small_disk(folder: Path, mib: int) -> Iterator[Path]:
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={mib}m", "tmpfs", str(folder)]
    made = subprocess.run(mount, capture_output=True, text=True, check=False)
    if made.returncode:
        lacking(f"a file system of our own may not be had here: {made.stderr}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A small disk that holds another program's file of 24 MiB."""
    with small_disk(tmp_path / "disk", 64) as folder:
        (folder / "theirs").write_bytes(bytes(24 * MIB))
        yield folder


class Load:
    """Four clients over four transports, each with a call that sends much."""

    def __init__(self, server: ServerProcess, gate: Gate) -> None:
        self.calls: list[tuple[Peer, Started, Reader]] = []
        for kind in KINDS:
            peer = server.connect(kind)
            peer.initialize(opting_in(kind, POSITIONS))
            started = start(peer, "pour", n=MESSAGES, pad=10_000, gate=gate.path)
            self.calls.append((peer, started, Reader(peer)))
        gate.release(len(KINDS))

    def read_all(self) -> None:
        """Read and confirm on all of them at once: all messages come, once and in order."""
        with ThreadPoolExecutor(len(self.calls)) as threads:
            for done in [threads.submit(read, *call) for call in self.calls]:
                done.result()


def read(peer: Peer, started: Started, reader: Reader) -> None:
    for seq in range(ACK_EVERY, MESSAGES + 1, ACK_EVERY):
        reader.until_seq(started.stream, seq)
        ack(peer, started.stream, seq)
    reader.until_seq(started.stream, MESSAGES + 1)
    entries = reader.entries[started.stream]
    assert list(entries) == up_to(MESSAGES + 1)
    assert counted(list(entries.values())) == up_to(MESSAGES)
    assert entries[MESSAGES + 1].result["content"][0]["text"] == f"poured {MESSAGES}"
    ack(peer, started.stream, MESSAGES + 1)
    peer.close()


def wait_for_room(peer: Peer) -> None:
    """Make a call again and again until it is taken: the last acks need a commit or two."""
    deadline = time.monotonic() + DEADLINE_S
    while "result" not in peer.ask("tools/call", ADD):
        assert time.monotonic() < deadline, "acks make no room"
        time.sleep(0.1)


def fill_up(path: Path) -> None:
    """Fill the rest of the disk."""
    with path.open("wb", buffering=0) as file:
        for size in (MIB, 4096):
            with pytest.raises(OSError, match="No space left"):  # noqa: PT012
                while True:
                    file.write(bytes(size))


def test_on_a_full_disk_calls_end_and_wait_and_go_on(disk: Path, gate: Gate, gate2: Gate) -> None:
    """W§9: an error says what to do next; W§1: accepted messages come, once and in order."""
    with ServerProcess(disk) as server, server.connect("ws-streams") as other:
        other.initialize(POSITIONS)
        waiting = [start(other, "steps", n=3, gate=gate.path) for _ in range(5)]
        load = Load(server, gate2)
        server.hear(NO_ROOM)
        # The journal first empties its WAL, and there may be room for a moment.
        while "result" in (refused := other.ask("tools/call", ADD)):
            continue
        assert refused.error["code"] == -32603
        assert "MiB are free on its disk" in refused.error["message"]
        assert refused.error["message"].endswith("try again later.")

        gate.release(3 * len(waiting))  # there is room to end the running calls
        for started in waiting:
            assert other.response(started.id).result["content"][0]["text"] == "stepped 3"

        fill_up(disk / "theirs too")
        assert other.ask("ping").result == {}
        os.unlink(disk / "theirs too")
        os.unlink(disk / "theirs")
        server.hear(ROOM)
        load.read_all()
        assert other.ask("tools/call", ADD).result
        assert server.stop() == 0
        assert not any("Traceback" in line for line in server.log)
        assert inspect(server.journal).problems == ()


def test_on_a_disk_that_stays_full_acks_make_room(disk: Path, gate: Gate) -> None:
    """W§4: an ack lets everything up to it be deleted."""
    with ServerProcess(disk) as server:
        load = Load(server, gate)
        server.hear(NO_ROOM)
        load.read_all()
        assert server.stop() == 0
        assert inspect(server.journal).problems == ()
        assert server.journal.stat().st_size < 40 * MIB


@pytest.mark.parametrize("mib", [16, 18, 20])
def test_on_a_small_disk_acks_make_room_for_a_journal_alone(
    tmp_path: Path, gate: Gate, mib: int
) -> None:
    """The WAL never takes the room that the file needs to take it over."""
    with small_disk(tmp_path / "disk", mib) as disk, ServerProcess(disk) as server:
        load = Load(server, gate)
        server.hear("no room for")
        load.read_all()
        with server.connect("ws-streams") as other:
            other.initialize(POSITIONS)
            wait_for_room(other)
        assert server.stop() == 0
        assert inspect(server.journal).problems == ()


def test_a_server_that_is_killed_on_a_full_disk_has_all_when_it_is_back(disk: Path) -> None:
    """W§1: entries are "stored in the journal before they are sent"."""
    with ServerProcess(disk) as server:
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            started = start(peer, "count", n=5000, pad=10_000)
            reader = Reader(peer)
            server.hear(NO_ROOM)
            fill_up(disk / "theirs too")
            server.kill()
            reader.drain()
        had = max(reader.seqs(started.stream))
        os.unlink(disk / "theirs too")
        server.start()
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            after = Reader(peer)
            reply = peer.request("stream/resume", {**started.with_token, "after": had})
            after.response(reply)
        entries = after.entries[started.stream]
        assert list(entries) == list(range(had + 1, max(entries) + 1))
        assert entries[max(entries)].reason == "interrupted"
        assert inspect(server.journal).problems == ()

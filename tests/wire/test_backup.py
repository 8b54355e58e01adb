"""A backup of a running server, and a restore from it."""

import os
from pathlib import Path

import pytest

from tests.rigs.command import run
from tests.wire.process import ServerProcess
from tests.wire.verbs import POSITIONS, Reader, read_stream, refused, start, up_to

pytestmark = pytest.mark.needs_file("a backup is one of the file")

MESSAGES = 40


def test_what_was_acknowledged_before_a_backup_is_in_it(tmp_path: Path) -> None:
    """W§1: entries are "kept until the client is known to have them", here by the copy."""
    copy = tmp_path / "copy.db"
    with ServerProcess(tmp_path) as server:
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            reader = Reader(peer)
            whole = [start(peer, "count", n=MESSAGES) for _ in range(10)]
            at_work = start(peer, "killed", n=100_000, flush_every=1, gate="")
            for started in whole:
                reader.until_seq(started.stream, MESSAGES + 1)
            reader.until_seq(at_work.stream, 100)
            had = max(reader.seqs(at_work.stream))
            done = run("backup", str(server.journal), str(copy))
            assert (done.returncode, done.stdout) == (0, ""), done.stderr
            reader.until_seq(at_work.stream, had + 200)  # the server goes on
        assert run("verify", str(copy)).returncode == 0
        server.kill()
        restore(copy, server.journal)
        server.start()
        with server.connect("ws-streams") as peer:
            peer.initialize(POSITIONS)
            for started in whole:
                after, _ = read_stream(peer, started.with_token, after=0)
                assert after.seqs(started.stream) == up_to(MESSAGES + 1)
            after, _ = read_stream(peer, at_work.with_token, after=0)
        entries = after.entries[at_work.stream]
        assert list(entries) == up_to(max(entries))
        assert max(entries) > had
        refused(entries[max(entries)], "interrupted", -32603)
        assert server.stop() == 0


def restore(copy: Path, journal: Path) -> None:
    """As docs/operate/operations.md says: only the keys and the lock of the old one stay."""
    for suffix in ("-wal", "-shm"):
        Path(f"{journal}{suffix}").unlink(missing_ok=True)
    os.replace(copy, journal)

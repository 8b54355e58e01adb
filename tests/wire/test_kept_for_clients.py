"""The state that a server keeps for a client's session is bounded, for any input."""

import sqlite3
from typing import Any

import pytest

from tests.wire.httpclient import HttpClient
from tests.wire.process import ServerProcess
from tests.wire.raw import Peer
from tests.wire.verbs import KINDS, MIB, PLAIN, STREAMS

MUCH = {"x": ["y" * 1000] * 1_500}


def journal_bytes(server: ServerProcess) -> int:
    return sum(file.stat().st_size for file in server.journal.parent.glob("journal.db*"))


@pytest.mark.needs_file("it measures the file")
def test_capabilities_that_are_not_understood_are_not_kept(fresh: ServerProcess) -> None:
    """WIRE §8: "Of a client's capabilities what is understood is kept, up to 16 KiB"."""
    before = journal_bytes(fresh)
    capabilities: dict[str, Any] = {**STREAMS, "streams": MUCH, "experimental": MUCH}
    for _ in range(5):
        with HttpClient(fresh.http_port) as client:
            client.initialize(capabilities)
    assert journal_bytes(fresh) - before < MIB
    fresh.restart()
    assert journal_bytes(fresh) - before < MIB


@pytest.mark.needs_file("it writes to the file")
def test_what_an_older_server_has_kept_is_dropped(fresh: ServerProcess) -> None:
    with HttpClient(fresh.http_port) as client:
        client.initialize(PLAIN)
    fresh.kill()
    with sqlite3.connect(fresh.journal) as database:
        database.execute("UPDATE sessions SET capabilities = ?", (b'{"x":"' + b"y" * MIB + b'"}',))
    database.close()
    fresh.start()
    fresh.stop()
    with sqlite3.connect(fresh.journal) as database:
        ((length,),) = database.execute("SELECT length(capabilities) FROM sessions").fetchall()
    database.close()
    fresh.start()
    assert length < 1024


@pytest.mark.parametrize("kind", KINDS)
def test_an_id_has_a_length(server: ServerProcess, kind: str) -> None:
    with server.connect(kind) as peer:
        peer.initialize({})
        longest, too_long = "i" * 1024, "i" * 1025
        call = {"name": "count", "arguments": {"n": 1}}
        refused = peer.ask("tools/call", call, id=too_long)
        assert refused.error["code"] == -32600
        assert refused.answers(too_long)
        assert "1025 characters: send at most 1024" in refused.error["message"]
        assert "result" in peer.ask("tools/call", call, id=longest)
        assert peer.ask("ping", id=too_long).result == {}  # which is not kept
        assert refused_call(peer, {"progressToken": too_long}) == -32600
        assert refused_call(peer, {"progressToken": longest}) is None


def refused_call(peer: Peer, meta: dict[str, Any]) -> int | None:
    params = {"name": "count", "arguments": {"n": 1}, "_meta": meta}
    answer = peer.ask("tools/call", params)
    return answer.error["code"] if "error" in answer else None

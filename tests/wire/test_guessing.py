"""Guesses at another caller's secrets: every guess gets the same answer.

The long form, with its times, is `python -m tests.guessing`; `GUESSES` sets the number of guesses
made here.
"""

import os
import shutil
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from tests.guessing import tries
from tests.guessing.guesses import Guesser, Theirs, served
from tests.wire.httpclient import HttpClient
from tests.wire.process import ServerProcess, gate_in
from tests.wire.verbs import (
    PLAIN,
    POSITIONS,
    STREAMS,
    read_stream,
    refused,
    start,
)

pytestmark = pytest.mark.needs_file("it looks into the file")

GUESSES = int(os.environ.get("GUESSES", "1200"))

Served = tuple[ServerProcess, Theirs]


@pytest.fixture(scope="module")
def victims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("victims")) as found:
        yield found


def test_all_guesses_over_a_websocket_get_the_one_answer(victims: Served) -> None:
    """W§9: "unknown, someone else's, wrong token: one answer, byte-identical"."""
    server, theirs = victims
    answers = tries.over_websocket(server, Guesser(theirs, 1), GUESSES)
    assert answers.count == GUESSES
    assert answers.kinds == {"stream", "page"}
    assert answers.reasons() == {"stream_not_found", "invalid_token"}


def test_all_guesses_over_http_get_the_one_answer(victims: Served) -> None:
    """W§6: an event id that is unknown, or another session's, is a 400; a session id that we did
    not mint is a 404.
    """
    server, theirs = victims
    answers = tries.over_http(server, Guesser(theirs, 2), GUESSES // 2)
    assert answers.count == GUESSES // 2
    assert answers.kinds == {"stream", "page", "event", "session"}
    assert answers.reasons() == {"stream_not_found", "invalid_token"}


def test_a_stranger_does_not_have_a_stream_at_rest_back_into_memory(victims: Served) -> None:
    """A load would cost the server memory, and its own client the place in the order of use."""
    server, theirs = victims
    before = stored(server.journal, "SELECT id, due_at FROM rests ORDER BY id")
    with server.connect("ws-streams") as stranger:
        stranger.initialize(POSITIONS)
        for stream in theirs.evicted:
            refused(stranger.ask("stream/poll", {"streamId": stream}), "stream_not_found")
    assert stored(server.journal, "SELECT id, due_at FROM rests ORDER BY id") == before


def stored(journal: Path, query: str) -> list[tuple[object, ...]]:
    with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as file:
        return file.execute(query).fetchall()


class Secrets:
    """All secrets that clients of a server get, and a copy of the server's journal."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.streams: list[str] = []
        self.tokens: list[str] = []
        self.events: list[str] = []
        self.sessions: list[str] = []
        self.leaked = b""

    def collect(self, server: ServerProcess, gate_path: str) -> None:
        """Make calls over both transports, running and ended, with pages and without."""
        with server.connect("ws-streams") as owner:
            owner.initialize(POSITIONS)
            for arguments in ({}, {"gate": gate_path}):
                begun = start(owner, "count", n=3, **arguments)
                self.streams.append(begun.stream)
                self.tokens.append(begun.token)
            page = owner.response(owner.call("pages", n=3, gate=gate_path, free=2))
            self.tokens.append(page.result["nextResumeToken"])
            with closing(HttpClient(server.http_port)) as client:
                client.initialize(STREAMS)
                assert client.session is not None
                self.sessions.append(client.session)
                exchange = client.call("count", 1, n=3, gate=gate_path).head()
                priming, announcement = exchange.next_event(), exchange.next_event()
                assert priming.id
                self.events.append(priming.id)
                told = announcement.message.params["stream"]
                self.streams.append(told["streamId"])
                self.tokens.append(told["resumeToken"])
                self.leaked = self._leak(server.journal)

    def _leak(self, journal: Path) -> bytes:
        """Copy the journal without its key."""
        copies = self.folder / "leaked"
        copies.mkdir()
        for suffix in ("", "-wal", "-shm", ".lock"):
            shutil.copy(f"{journal}{suffix}", copies)
        return b"".join(path.read_bytes() for path in sorted(copies.iterdir()))


@pytest.fixture
def secrets(tmp_path: Path) -> Iterator[tuple[Secrets, ServerProcess]]:
    strict = ("--require-resume-token",)
    with gate_in(tmp_path / "gate") as gate, ServerProcess(tmp_path, options=strict) as server:
        secrets = Secrets(tmp_path)
        secrets.collect(server, gate.path)
        yield secrets, server


def test_a_leaked_journal_has_no_token_in_it(secrets: tuple[Secrets, ServerProcess]) -> None:
    """W§2: "nothing of it is stored"; W§6: "id hashed"."""
    found, _ = secrets
    assert len(found.tokens) == 4
    assert found.events
    for secret in (*found.tokens, *found.sessions):
        assert secret.encode() not in found.leaked
        assert secret[:20].encode() not in found.leaked
    for event_id in found.events:
        assert event_id.partition("_")[0].encode() not in found.leaked
    for stream in found.streams:
        assert stream.encode() in found.leaked, "the right file is looked at"


def test_all_words_of_a_leaked_journal_open_nothing(
    secrets: tuple[Secrets, ServerProcess],
) -> None:
    """W§2: "An operator can switch the bare id off (`--require-resume-token`)": each word in the
    file is tried as an id, as a token of each stream, as the token of a request and as a session.
    The file also holds, as binary, the names by which evicted streams are found, and the first part
    of their event ids. Those are valid in their session alone.
    """
    found, server = secrets
    words = sorted({*words_of(found.leaked)})
    assert set(found.streams) <= set(words)
    with server.connect("ws-streams") as thief:
        thief.initialize({**POSITIONS, "resumableRequests": {}})
        for word in words:
            asks = [
                thief.request("stream/poll", {"streamId": word}),
                thief.request("requests/resume", {"resumeToken": word}),
            ]
            for stream in found.streams:
                params = {"streamId": stream, "resumeToken": word}
                asks.append(thief.request("stream/resume", params))
            for ask in asks:
                refused(thief.response(ask), "stream_not_found")
    with closing(HttpClient(server.http_port)) as thief_by_http:
        thief_by_http.initialize(PLAIN)
        for event_id in found.events:
            assert thief_by_http.get(event_id).head().status == 400
        for word in words:
            params = {"streamId": word}
            refused(thief_by_http.ask("stream/poll", params), "stream_not_found")
            with closing(HttpClient(server.http_port)) as impostor:
                impostor.session = word
                assert impostor.request("ping").head().status == 404


def words_of(leaked: bytes) -> Iterator[str]:
    """The words that look like an id or a token: whole, or without the binary bytes before or after
    them.
    """
    letters = frozenset(b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
    word = bytearray()
    for byte in leaked + b" ":
        if byte in letters:
            word.append(byte)
            continue
        for size in (43, 64, 72):
            if size <= len(word) <= size + 3:
                for start_at in range(len(word) - size + 1):
                    yield word[start_at : start_at + size].decode()
        word.clear()


def test_who_has_a_token_is_let_in(secrets: tuple[Secrets, ServerProcess]) -> None:
    """The same requests succeed with the secrets that the file lacks, so all refusals above were
    for want of these.
    """
    found, server = secrets
    with server.connect("ws-streams") as heir:
        heir.initialize(POSITIONS)
        params = {"streamId": found.streams[0], "resumeToken": found.tokens[0]}
        reader, reply = read_stream(heir, params)
        assert reply.result["_meta"]["mcp-streams/ended"] == "completed"
        assert reader.seqs(found.streams[0]) == [1, 2, 3, 4]

"""Two people with tokens on one server: who owns which stream, over either transport, after a
restart too.

The tests use none of this project's code; the tokens are made as an operator makes them.
"""

import json
import os
import re
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from websockets.exceptions import InvalidStatus

from tests.rigs.command import run
from tests.wire.httpclient import Headers, HttpClient
from tests.wire.httpverbs import (
    EventId,
    announced,
    messages_of,
    read_to_n,
    read_until,
    refusal,
    resumed,
    streamed,
    text_of,
)
from tests.wire.process import OFFERS, Gate, ServerProcess
from tests.wire.raw import Message, WebSocketPeer
from tests.wire.verbs import CREATE, PLAIN, STREAMS, UNKNOWN, counted, refused, resume, start, up_to

PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
HELLO = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "raw", "version": "0"},
    },
}


class Bearer(HttpClient):
    """A client that shows a token with each request."""

    def __init__(self, port: int, token: str) -> None:
        super().__init__(port)
        self.token = token

    def head(self, method: str, more: Headers | None = None, *, path: str = "/mcp") -> bytes:
        shown = {"Authorization": f"Bearer {self.token}"}
        return super().head(method, {**shown, **(more or {})}, path=path)


class Town:
    """A server with tokens for two people."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.file = folder / "tokens.jsonl"
        self.ada, self.eve = self.new_token("ada"), self.new_token("eve")
        options = ("--auth-tokens", str(self.file), "--json")
        self.server = ServerProcess(folder, options=options)
        self._stack = stack
        stack.enter_context(self.server)

    def new_token(self, name: str, *words: str) -> str:
        done = run("token", "new", name, "--file", str(self.file), "--json", *words)
        assert done.returncode == 0, done.stderr
        token: str = json.loads(done.stdout)["token"]
        return token

    def revoke(self, what: str) -> None:
        done = run("token", "revoke", what, "--file", str(self.file))
        assert done.returncode == 0, done.stderr

    def http(self, token: str, capabilities: dict[str, Any] | None = None) -> Bearer:
        client = self.stranger(token)
        client.initialize(PLAIN if capabilities is None else capabilities)
        return client

    def stranger(self, token: str) -> Bearer:
        """A client without a session."""
        return self._stack.enter_context(Bearer(self.server.http_port, token))

    def ws(self, token: str | None, capabilities: dict[str, Any] = STREAMS) -> WebSocketPeer:
        headers = None if token is None else {"Authorization": f"Bearer {token}"}
        peer = WebSocketPeer(self.server.url, OFFERS["ws-streams"], headers=headers)
        self._stack.enter_context(peer)
        peer.initialize(capabilities)
        return peer


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Town]:
    with ExitStack() as stack:
        yield Town(tmp_path_factory.mktemp("town"), stack)


@pytest.fixture
def town(shared: Town) -> Town:
    """A server for tests that revoke nothing and kill nothing."""
    return shared


@pytest.fixture
def own_town(tmp_path: Path) -> Iterator[Town]:
    with ExitStack() as stack:
        yield Town(tmp_path, stack)


# -- authentication


@pytest.mark.parametrize("given", [None, "Bearer mcps_" + UNKNOWN, "Basic YTpi", "mcps_x", ""])
def test_a_stranger_is_turned_away_everywhere(town: Town, given: str | None) -> None:
    """W§6: "every 4xx body is a JSON-RPC error"; RFC 6750, 3: "If the request lacks any
    authentication information […], the resource server SHOULD NOT include an error code"."""
    client = HttpClient(town.server.http_port)
    for method in ("POST", "GET", "DELETE"):
        exchange = client.send(client.head(method, {"Authorization": given, "Content-Length": "0"}))
        refused(refusal(exchange, 401), "unauthorized", -32600)
        has_token = (given or "").startswith("Bearer")
        challenge = exchange.headers["www-authenticate"]
        if has_token:
            assert re.fullmatch(
                r'Bearer error="invalid_token", error_description="[^"\\]+"', challenge
            )
        else:
            assert challenge == "Bearer"
    client.close()
    headers = {} if given is None else {"Authorization": given}
    with pytest.raises(InvalidStatus) as refusing:
        WebSocketPeer(town.server.url, headers=headers)
    response = refusing.value.response
    assert response.status_code == 401
    assert response.headers["www-authenticate"].startswith("Bearer")
    assert Message(response.body or b"").reason == "unauthorized"


def test_a_token_that_is_revoked_or_expired_is_a_strangers_at_once(own_town: Town) -> None:
    short = own_town.new_token("ada", "--expires", "0.000001")
    client = own_town.http(own_town.ada)
    own_town.revoke("ada")
    answers = set()
    for token in (own_town.ada, short, "mcps_" + UNKNOWN):
        client.token = token
        exchange = client.post(PING)
        refusal(exchange, 401)
        answers.add((exchange.body(), exchange.headers["www-authenticate"]))
    assert len(answers) == 1
    own_town.http(own_town.eve)
    own_town.http(own_town.new_token("zoe"))  # made while the server runs


# -- the owner of a session


def test_a_session_is_its_bearers(town: Town) -> None:
    """W§6: "A session id we did not mint, or with another subject's bearer: 404"."""
    client = town.http(town.ada)
    thief = town.stranger(town.eve)
    thief.session, thief.revision = client.session, client.revision
    guesser = town.stranger(town.eve)
    guesser.session, guesser.revision = UNKNOWN, client.revision
    for ask in (
        lambda one: one.post(PING),
        lambda one: one.get(),
        lambda one: one.send(one.head("DELETE")),
        lambda one: one.call("count", 7, n=1),
    ):
        assert refusal(ask(thief), 404) == refusal(ask(guesser), 404)
    assert client.ask("ping").result == {}
    renewed = town.stranger(town.new_token("ada"))  # another token of the same person
    renewed.session, renewed.revision = client.session, client.revision
    assert renewed.ask("ping").result == {}


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_response_goes_on_for_its_bearer_alone(
    own_town: Town, gate: Gate, is_restarted: bool
) -> None:
    client = own_town.http(own_town.ada)
    exchange = client.call("count", 7, n=3, gate=gate.path)
    last = EventId.of_call(read_to_n(exchange, 2)[-1])
    exchange.cut()
    if is_restarted:
        own_town.server.restart()
    else:
        gate.release()
    thief = own_town.http(own_town.eve)
    unknown = refusal(thief.get(f"{'0' * 32}_2"), 400)
    assert refusal(thief.get(last.at(2)), 400) == unknown, "one answer"
    thief.session = client.session
    refusal(thief.get(last.at(2)), 404)
    told = messages_of(streamed(client.get(last.at(2))).events())
    assert counted(told) == [3]
    if is_restarted:
        refused(told[-1], "interrupted", -32603)
    else:
        assert text_of(told[-1]) == "counted 3"


# -- the owner of a stream


@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_stream_is_its_bearers_over_every_transport(
    own_town: Town, gate: Gate, is_restarted: bool
) -> None:
    """W§10: "A stream belongs to the principal that made it; `poll/all` lists that principal's"."""
    client = own_town.http(own_town.ada, STREAMS)
    exchange = client.call("count", 7, n=3, gate=gate.path)
    stream = announced(read_until(exchange, CREATE))
    read_to_n(exchange, 3)
    exchange.cut()
    if is_restarted:
        own_town.server.restart()
    else:
        gate.release()
    eve, ada = own_town.ws(own_town.eve), own_town.ws(own_town.ada)
    assert eve.ask("stream/poll/all").result["statuses"] == []
    (status,) = ada.ask("stream/poll/all").result["statuses"]
    assert status["streamId"] == stream.stream
    for method in ("stream/poll", "stream/resume"):
        theirs = eve.ask(method, stream.by_id, id="same").error
        unknown = eve.ask(method, {"streamId": UNKNOWN}, id="same").error
        assert theirs == unknown, "one answer"
    other = own_town.http(own_town.ada, STREAMS)
    assert other.ask("stream/poll", stream.by_id).result["streamId"] == stream.stream
    told = resume(ada, stream.by_id, after=0)
    assert counted(told) == up_to(3)
    assert refused_or_text(told) in ("interrupted", "counted 3")
    # The resume token gives access to the stream, whichever principal has it.
    refused(eve.ask("stream/resume", {**stream.by_id, "resumeToken": UNKNOWN}), "stream_not_found")


def refused_or_text(told: list[Message]) -> str:
    (response,) = [message for message in told if message.answers(7)]
    return response.reason or "interrupted" if "error" in response else text_of(response)


@pytest.mark.parametrize("capabilities", [PLAIN, STREAMS])
def test_one_session_of_a_bearer_cancels_nothing_of_another(
    town: Town, gate: Gate, capabilities: dict[str, Any]
) -> None:
    """W§10: "`cancelled` reaches requests of this connection (session)": ids are the same."""
    first, second = (town.http(town.ada, capabilities) for _ in range(2))
    exchange = first.call("count", 7, n=3, gate=gate.path)
    last = EventId.of_call(read_to_n(exchange, 3)[-1])
    exchange.cut()
    second.notify("notifications/cancelled", {"requestId": 7})
    assert second.delete().head().status < 300
    gate.release()
    told = messages_of(streamed(first.get(last.at(3))).events())
    assert refused_or_text(told) == "counted 3"


def test_a_session_cancels_what_it_has_begun_and_was_cut_off_from(town: Town, gate: Gate) -> None:
    client = town.http(town.ada, STREAMS)
    for form in ("text/event-stream, application/json", "application/x-ndjson"):
        exchange = client.call("count", 7, n=3, gate=gate.path, more={"Accept": form})
        gate.wait_for("sent")
        exchange.cut()
        client.notify("notifications/cancelled", {"requestId": 7})
        gate.wait_for("cancelled")


def test_a_session_that_ends_cancels_its_own_calls(town: Town, gate: Gate) -> None:
    client = town.http(town.ada)
    exchange = client.call("count", 7, n=3, gate=gate.path)
    read_to_n(exchange, 3)
    assert client.delete().head().status < 300
    gate.wait_for("cancelled")


def test_a_call_outlives_its_token_for_the_next_one_of_the_same_bearer(
    own_town: Town, gate: Gate
) -> None:
    ada = own_town.ws(own_town.ada)
    stream = start(ada, "count", n=3, gate=gate.path)
    ada.cut()
    own_town.revoke("ada")
    gate.release()
    told = resume(own_town.ws(own_town.new_token("ada")), stream.by_id, after=0)
    assert counted(told) == up_to(3)


# -- logs and files


SHAPES = re.compile(r"mcps_[A-Za-z0-9_-]{20,}|eyJ[A-Za-z0-9_-]{10,}\.")


def test_no_secret_is_in_the_log_nor_in_any_file(own_town: Town, gate: Gate) -> None:
    """W§2: the resume token is "never logged"; a leaked journal opens nothing."""
    client = own_town.http(own_town.ada, STREAMS)
    exchange = client.call("count", 7, n=3, gate=gate.path)
    stream = announced(read_until(exchange, CREATE))
    read_to_n(exchange, 3)
    exchange.cut()
    gate.release()
    resumed(client, stream.with_token, "r", after=0).events()
    ada = own_town.ws(own_town.ada)
    jwt = "eyJhbGciOiJSUzI1NiJ9.eyJzdWIiOiJhZGEifQ.c2lnbmF0dXJl"
    # Requests that fail, with secrets in the wrong places.
    for secret in (own_town.ada, jwt, stream.token):
        if secret != own_town.ada:
            refusal(own_town.stranger(secret).post(HELLO), 401)
        ada.ask(f"no/such/{secret}")
        ada.ask("stream/poll", {"streamId": secret, "resumeToken": [secret]})
        ada.ask("tools/call", {"name": f"Bearer {secret}", "arguments": {"resumeToken": secret}})
        ada.ask("stream/resume", {"streamId": stream.stream, "resumeToken": secret, "after": "x"})
        ada.notify("notifications/cancelled", {"requestId": {"resumeToken": secret}})
        ada.send_raw(f'{{"resumeToken":"{secret}"'.encode())
        client.post(f"Authorization: Bearer {secret}".encode()).body()
        client.get(f"resumeToken={secret}").body()
    ada.settle()
    own_town.server.stop()
    log = "".join(own_town.server.log)
    assert len(log.splitlines()) > 10
    secrets = [own_town.ada, own_town.eve, jwt, stream.token, client.session or ""]
    assert [secret for secret in secrets if secret in log] == []
    assert not SHAPES.search(log)
    for path in own_town.file.parent.iterdir():
        if path.is_file():
            content = path.read_bytes()
            found = [each for each in secrets if each.encode() in content]
            assert found == [], path.name


@pytest.mark.needs_file("it looks at the files")
def test_every_file_is_its_owners_alone_whatever_the_umask(tmp_path: Path, gate: Gate) -> None:
    before = os.umask(0)
    try:
        with ExitStack() as stack:
            town = Town(tmp_path, stack)
            ada = town.ws(town.ada)
            start(ada, "count", n=3, gate=gate.path)
            relay = stack.enter_context(town.server.connect("stdio"))
            relay.initialize(STREAMS)
            modes = {
                path.name: stat.S_IMODE(path.stat().st_mode)
                for path in tmp_path.iterdir()
                if path.name != "gate"
            }
    finally:
        os.umask(before)
    journal = {f"journal.db{end}" for end in ("", "-wal", "-shm", ".key", ".lock", ".sock")}
    assert modes.keys() >= journal | {"tokens.jsonl"}
    assert {name: oct(mode) for name, mode in modes.items() if mode & 0o077} == {}

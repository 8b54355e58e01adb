"""The supported revisions, the answer to a request of another one, and the ids of errors."""

import json
from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.wire.conftest import Http, Wire
from tests.wire.httpclient import HttpClient
from tests.wire.httpverbs import messages_of, refusal, text_of
from tests.wire.process import Gate, ServerProcess
from tests.wire.raw import DEADLINE_S, Message
from tests.wire.rawhttp import JSON
from tests.wire.verbs import KINDS, PLAIN, UNKNOWN, refused

SPOKEN: Final = ["2025-11-25", "2025-06-18", "2025-03-26", "2024-11-05"]
KEY: Final = "io.modelcontextprotocol/protocolVersion"
MODERN: Final = "2026-07-28"
DISCOVER: Final = {
    "jsonrpc": "2.0",
    "id": "probe",
    "method": "server/discover",
    "params": {
        "_meta": {
            KEY: MODERN,
            "io.modelcontextprotocol/clientInfo": {"name": "x", "version": "1"},
            "io.modelcontextprotocol/clientCapabilities": {},
        }
    },
}
GO_AHEAD: Final = {"Expect": "100-continue"}
ADD: Final[dict[str, Any]] = {"name": "add", "arguments": {"a": 1, "b": 2}}


def told_what_is_spoken(message: Message, requested: str = MODERN) -> None:
    """The text of the refusal must leave every SDK's fallback to `initialize` working: see
    `check_revision`.
    """
    data = refused(message, "unsupported_revision", -32602)
    assert data["supported"] == SPOKEN
    assert data["requested"] == requested
    words = message.error["message"]
    assert all(revision in words for revision in SPOKEN)
    assert "session" not in words.lower()


@pytest.mark.parametrize("params", [ADD, {}, {"cursor": None}])
@pytest.mark.parametrize("method", ["server/discover", "tools/list", "tools/call", "ping", "no"])
def test_a_request_of_another_revision_is_told_which_are_spoken(
    wire: Wire, method: str, params: dict[str, Any]
) -> None:
    """W§6: "under the request's own id, with the ones that are"; before `initialize` and after."""
    peer = wire.connect()
    named = {**params, "_meta": {KEY: MODERN}}
    if wire.kind in ("stdio", "ws-mcp", "ws-streams"):
        told_what_is_spoken(peer.ask(method, named, id="first"))
    assert peer.initialize({}).result["protocolVersion"] == "2025-11-25", "and one may go on"
    told_what_is_spoken(peer.ask(method, named, id=7))
    assert peer.ask("ping", {"_meta": {KEY: "2025-06-18"}}, id=8).result == {}
    assert peer.settle() == [], "nothing was run"


@pytest.mark.parametrize("named", ["1999-01-01", "", "x" * 5000, 7, True, [], {}])
def test_what_is_no_revision_is_not_spoken_either(wire: Wire, named: object) -> None:
    peer = wire.plain()
    told_what_is_spoken(peer.ask("ping", {"_meta": {KEY: named}}), str(named)[:100])


@pytest.mark.parametrize("meta", [{KEY: None}, {"other": MODERN}, {}])
def test_who_names_no_revision_is_served(wire: Wire, meta: dict[str, Any]) -> None:
    peer = wire.plain()
    assert peer.ask("ping", {"_meta": meta, "protocolVersion": MODERN}).result == {}


def test_a_name_may_be_escaped(stdio: Wire) -> None:
    """JSON lets a slash be escaped, and some encoders do so."""
    peer = stdio.connect()
    peer.send_raw(json.dumps(DISCOVER).replace("/", "\\/").encode())
    told_what_is_spoken(peer.response("probe"))


# -- over HTTP


def in_words(client: HttpClient, message: object, revision: str | None) -> Message:
    client.revision = revision
    found = refusal(client.post(message), 400)
    client.revision = "2025-11-25"
    return found


def test_the_probe_of_a_newer_client_is_a_400_under_its_id(http: Http) -> None:
    """W§6: "400 under the request's own id, with the ones that are, in words that leave every SDK's
    automatic fallback working"; by its header, its envelope, or both, in a session or in none."""
    bare = {**DISCOVER, "params": {}}
    for client in (http.unopened(), http.opened()):
        for message, revision in ((DISCOVER, MODERN), (DISCOVER, None), (bare, MODERN)):
            found = in_words(client, message, revision)
            assert found.answers("probe")
            told_what_is_spoken(found)
    client = http.unopened()
    in_words(client, DISCOVER, MODERN)
    client.initialize(PLAIN)
    assert client.ask("ping").result == {}


def test_a_body_that_comes_later_is_read_for_its_id(http: Http) -> None:
    """Some HTTP clients write head and body apart; this one waits between them."""
    client = http.opened()
    client.revision = MODERN
    body = json.dumps(DISCOVER).encode()
    exchange = client.start()
    exchange.send(client.post_bytes(b"", {"Content-Length": str(len(body)), **GO_AHEAD}))
    exchange.connection.settimeout(DEADLINE_S)
    assert exchange.connection.recv(1 << 16).startswith(b"HTTP/1.1 100 ")
    exchange.send(body)
    found = refusal(exchange, 400)
    assert found.answers("probe")
    told_what_is_spoken(found)


def test_what_is_no_request_of_another_revision_is_a_400_too(http: Http) -> None:
    client = http.opened()
    client.revision = MODERN
    for exchange in (
        client.post({"jsonrpc": "2.0", "method": "notifications/initialized"}),
        client.post({"jsonrpc": "2.0", "id": "r", "result": {}}),
        client.get(),
        client.delete(),
    ):
        found = refusal(exchange, 400)
        assert found.get("id") is None
        told_what_is_spoken(found)
    client.revision = "2025-11-25"
    assert client.ask("ping").result == {}, "nothing was deleted"


def test_who_initializes_is_answered_whatever_the_header_says(http: Http) -> None:
    """A client may send the header of its probe once more; the handshake decides."""
    client = http.unopened()
    client.revision = MODERN
    assert client.initialize(PLAIN).result["protocolVersion"] == "2025-11-25"


def test_a_server_of_2024_11_05(http: Http) -> None:
    client = http.opened(revision="2024-11-05")
    assert client.revision == "2024-11-05"
    assert text_of(messages_of(client.call("count", 7, n=1).events())[-1]) == "counted 1"


# -- an error carries the id of its request


def spoiled(client: HttpClient, **settings: str | None) -> HttpClient:
    for name, value in settings.items():
        setattr(client, name, value)
    return client


@pytest.mark.parametrize("request_id", [7, "seven", 0, ""])
@pytest.mark.parametrize(
    ("status", "refuse"),
    [
        (400, lambda http: (spoiled(http.opened(), session=None), {})),
        (404, lambda http: (spoiled(http.opened(), session=UNKNOWN), {})),
        (400, lambda http: (spoiled(http.opened(), revision="1999-01-01"), {})),
        (406, lambda http: (spoiled(http.opened(), accept="text/html"), {})),
        (415, lambda http: (http.opened(), {"Content-Type": "text/plain"})),
    ],
)
def test_a_refusal_over_http_carries_the_requests_id(
    http: Http, status: int, refuse: Callable[[Http], Any], request_id: int | str
) -> None:
    client, headers = refuse(http)
    message = {"jsonrpc": "2.0", "id": request_id, "method": "ping"}
    assert refusal(client.post(message, headers), status).answers(request_id)


def test_a_refusal_by_path_or_method_carries_the_requests_id(http: Http) -> None:
    client = http.opened()
    body = b'{"jsonrpc":"2.0","id":7,"method":"ping"}'
    length = {"Content-Type": JSON, "Content-Length": str(len(body))}
    for method, path, status in (("POST", "/other", 404), ("PUT", "/mcp", 405)):
        head = client.head(method, length, path=path)
        assert refusal(client.send(head + body), status).answers(7)


def test_a_call_that_ends_with_nothing_to_say_is_refused_under_its_id(
    http: Http, gate: Gate
) -> None:
    client, other = http.opened(accept=JSON), http.unopened()
    exchange = client.call("count", 7, n=1, gate=gate.path)
    gate.wait_for("sent")
    other.session = client.session
    other.notify("notifications/cancelled", {"requestId": 7})
    assert refusal(exchange, 503).answers(7)


DEEP: Final = b"[" * 100_000 + b"]" * 100_000


@pytest.mark.parametrize(
    ("data", "code", "request_id"),
    [
        (b'{"jsonrpc":"1.0","id":7,"method":"ping"}', -32600, 7),
        (b'{"id":"7","method":"ping"}', -32600, "7"),
        (b'{"jsonrpc":"2.0","id":7}', -32600, 7),
        (b'{"jsonrpc":"2.0","id":7,"method":null}', -32600, 7),
        (b'{"jsonrpc":"2.0","id":7,"method":["ping"]}', -32600, 7),
        (b'{"jsonrpc":"2.0","id":7,"method":"ping","error":{}}', -32600, 7),
        (b'{"jsonrpc":"2.0","id":7,"method":"tools/call","params":[]}', -32602, 7),
        (b'{"method":"ping","params":{"a":' + DEEP + b'},"id":7}', -32700, None),
        (b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"a":' + DEEP + b"}}", -32700, 7),
        (b'{"method":"ping", "id" : "a b" ,"params":' + DEEP + b"}", -32700, "a b"),
        (b'{"jsonrpc":"2.0","id":7,"method":"ping"', -32700, None),
        (b'{"jsonrpc":"2.0","id":7,"method":"ping"}}', -32700, None),
        (b'{"jsonrpc":"1.0","id":7,"result":{}}', -32600, None),
        (b'[{"jsonrpc":"2.0","id":7,"method":"ping"}]', -32600, None),
    ],
)
def test_an_error_carries_the_id_of_what_can_be_read(
    wire: Wire, data: bytes, code: int, request_id: int | str | None
) -> None:
    """JSON-RPC 2.0, 5: "If there was an error in detecting the id in the Request object […], it
    MUST be Null"; the id of valid JSON can be read."""
    peer = wire.plain()
    peer.send_raw(data)
    told = peer.expect(lambda message: "error" in message)
    assert told.error["code"] == code
    assert told.get("id") == request_id
    assert peer.settle() == []


# Not in a text frame, which must be UTF-8 (RFC 6455, 8.1).
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "ws-mcp"])
def test_an_error_to_bytes_that_are_no_utf_8_carries_the_id(
    server: ServerProcess, kind: str
) -> None:
    with server.connect(kind) as peer:
        peer.initialize(PLAIN)
        peer.send_raw(b'{"jsonrpc":"2.0","id":7,"method":"ping","params":{"a":"\xff"}}')
        told = peer.expect(lambda message: "error" in message)
        assert (told.error["code"], told.get("id")) == (-32700, 7)

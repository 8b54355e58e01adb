"""HTTP requests that are not MCP, and the answer to each."""

import json

import pytest

from tests.wire.conftest import Http
from tests.wire.httpclient import HttpClient
from tests.wire.httpverbs import cut_after, messages_of, refusal, text_of
from tests.wire.process import Gate, ServerProcess
from tests.wire.raw import Message, PeerGone
from tests.wire.rawhttp import BOTH, EVENTS, JSON, LINES, Exchange
from tests.wire.verbs import MIB, STREAMS, UNKNOWN, ping_of, refused

PING = {"jsonrpc": "2.0", "id": 1, "method": "ping"}
PING_BYTES = json.dumps(PING).encode()
LENGTH = {"Content-Type": JSON, "Content-Length": str(len(PING_BYTES))}


def over(exchange: Exchange) -> Exchange:
    """Read to the end, whichever way the connection ends."""
    while not exchange.is_over:
        exchange.pump()
    return exchange


def is_well(client: HttpClient) -> bool:
    return bool(client.ask("ping").result == {})


@pytest.mark.parametrize("method", ["PUT", "PATCH", "PROPFIND", "BREW"])
def test_other_methods_are_not_allowed(http: Http, method: str) -> None:
    """W§6: "POST, GET, DELETE"; RFC 9110, 15.5.6: a 405 "MUST generate an Allow header field"."""
    client = http.opened()
    exchange = client.send(client.head(method, {"Content-Length": "0"}))
    refusal(exchange, 405)
    allowed = {one.strip() for one in exchange.headers["allow"].split(",")}
    assert {"GET", "POST", "DELETE"} <= allowed
    assert method not in allowed


@pytest.mark.parametrize("path", ["/", "/mcp2", "/mcp/x", "/MCP", "/mcp%2f", "//mcp"])
def test_there_is_one_endpoint(http: Http, path: str) -> None:
    """W§6: "one endpoint, default `/mcp`"."""
    client = http.opened()
    refusal(client.send(client.head("POST", LENGTH, path=path) + PING_BYTES), 404)


def test_a_query_is_no_other_path(http: Http) -> None:
    """RFC 3986: the query is not part of the path; some clients add one."""
    client = http.opened()
    exchange = client.send(client.head("POST", LENGTH, path="/mcp?a=b") + PING_BYTES)
    assert exchange.message().result == {}


@pytest.mark.parametrize("accept", ["text/html", "image/*", "application/xml, text/plain"])
def test_an_answer_that_nobody_takes_is_a_406(http: Http, accept: str) -> None:
    """W§6: "the status codes of 2025-11-25": "The client MUST include an `Accept` header, listing
    both `application/json` and `text/event-stream`"; RFC 9110, 15.5.7: 406."""
    client = http.opened()
    client.accept = accept
    refusal(client.post(PING), 406)
    refusal(client.get(), 406)


def test_a_get_is_for_event_streams(http: Http) -> None:
    """MCP, Transports: for a GET the client lists `text/event-stream`; RFC 9110: 406 otherwise."""
    client = http.opened()
    client.accept = JSON
    refusal(client.get(), 406)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", None])
def test_a_body_that_is_no_json_by_its_type_is_a_415(http: Http, kind: str | None) -> None:
    """RFC 9110, 15.5.16; a web page can send these types without asking (CORS), and no other."""
    refusal(http.opened().post(PING, {"Content-Type": kind}), 415)


@pytest.mark.parametrize("kind", ["application/json; charset=utf-8", "Application/JSON"])
def test_a_type_may_have_parameters(http: Http, kind: str) -> None:
    """RFC 9110, 8.3.1: case and parameters do not make another type."""
    assert http.opened().post(PING, {"Content-Type": kind}).message().result == {}


@pytest.mark.parametrize("body", [b"", b"{", b"nonsense", b'{"a":"\xff"}', b"[" * 5000])
@pytest.mark.parametrize("accept", [BOTH, LINES])
def test_a_body_that_is_no_json_is_a_400(http: Http, body: bytes, accept: str) -> None:
    """W§9: "-32700 […] parse error"; W§6: "every 4xx body is a JSON-RPC error"."""
    client = http.opened(accept=accept)
    assert refusal_of(client.post(body), 400).error["code"] == -32700
    client.accept = BOTH
    assert is_well(client)


def refusal_of(exchange: Exchange, status: int) -> Message:
    """As `refusal`, in either framing: no rule restricts the type of a refusal."""
    assert exchange.head().status == status, exchange.body()
    message = Message(exchange.body())
    assert message.get("id") is None
    return message


@pytest.mark.parametrize("body", [{}, [], [PING], [PING, PING], 7, "x", None, {**PING, "id": None}])
@pytest.mark.parametrize("revision", ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25"])
def test_a_body_that_is_no_message_is_a_400(http: Http, body: object, revision: str) -> None:
    """W§6: "batches of the oldest: -32600"; W§9: "-32600 […] not a request"."""
    client = http.opened(revision=revision)
    message = refusal(client.post(body), 400, -32600)
    assert message.get("id") is None
    assert is_well(client)


@pytest.mark.parametrize(
    ("method", "params", "code"),
    [
        ("no/such", {}, -32601),
        ("tools/call", {}, -32602),
        ("tools/call", {"name": "no such tool"}, -32602),
        ("stream/poll", {"streamId": UNKNOWN}, -32602),
        ("stream/resume", {"streamId": UNKNOWN}, -32602),
        ("stream/resume", {"streamId": 7}, -32602),
        ("logging/setLevel", {"level": "loud"}, -32602),
    ],
)
def test_an_error_to_a_well_formed_request_is_a_200(
    http: Http, method: str, params: object, code: int
) -> None:
    """W§6: "an error to a well-formed request in a valid session is HTTP 200 with a JSON-RPC
    error"."""
    exchange = http.opened(STREAMS).request(method, params, id="x").head()
    assert exchange.status == 200
    message = HttpClient.read_one(exchange)
    assert message.answers("x")
    assert message.error["code"] == code


@pytest.mark.needs_one_process("a replica knows the ids of its own requests")
def test_a_taken_id_is_an_error_under_its_id(http: Http, gate: Gate) -> None:
    """W§5: "An id is taken on a connection (HTTP: in a session) while in flight there"; "A new
    request with a taken id: -32600"; W§6: it is well-formed, so 200."""
    client, other = http.opened(), http.opened()
    held = client.call("count", 7, n=1, gate=gate.path)
    gate.wait_for("sent")
    assert client.ask("ping", id=8).result == {}
    assert client.ask("ping", id=7).error["code"] == -32600
    assert other.ask("ping", id=7).result == {}
    client.notify("notifications/cancelled", {"requestId": 7})
    over(held)
    assert client.ask("ping", id=7).result == {}


@pytest.mark.parametrize(
    "origin",
    ["http://evil.example", "https://localhost.evil.example", "null", "http://127.0.0.1.x"],
)
def test_a_web_page_of_another_origin_is_refused(http: Http, origin: str) -> None:
    """W§6: "`Origin` and `Host` checks with the status codes of 2025-11-25": "the server MUST
    respond with HTTP 403 Forbidden"; for every method."""
    client = http.opened()
    refusal(client.post(PING, {"Origin": origin}), 403)
    refusal(client.get(None, {"Origin": origin}), 403)
    refusal(client.send(client.head("DELETE", {"Origin": origin})), 403)
    assert is_well(client), "not deleted"


def test_a_page_of_our_own_origin_is_let_in(http: Http) -> None:
    """W§6: the check is against strangers only."""
    client = http.opened()
    for origin in (f"http://127.0.0.1:{client.port}", f"http://localhost:{client.port}"):
        assert client.post(PING, {"Origin": origin}).message().result == {}


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "localhost.evil.example"]
)
def test_another_host_is_refused(http: Http, host: str) -> None:
    """W§6: a name that was bent to loopback gives itself away by its `Host`."""
    refusal(http.opened().post(PING, {"Host": host}), 403)


def test_a_body_as_long_as_the_limit_is_taken(http: Http) -> None:
    """W§7: "A message **above** 4 MiB […] is refused"."""
    assert http.opened().post(ping_of(4 * MIB)).message().result == {}


def test_an_oversize_body_is_a_413(http: Http) -> None:
    """W§7: "A message above 4 MiB is refused with a clear error"; W§9: `too_large`, with `limit`;
    RFC 9110, 15.5.14: 413. The client that is still sending is let finish, and reads why."""
    client = http.opened()
    message = refusal(client.post(ping_of(4 * MIB + 1)), 413)
    assert refused(message, "too_large")["limit"] == 4 * MIB
    assert is_well(client)


def test_who_asks_before_sending_too_much_is_told(http: Http) -> None:
    """RFC 9110, 10.1.1: a server that refuses answers "without reading the entire content"; the
    head says how long it would be, and `100-continue` that its client waits to be told."""
    client = http.opened()
    length = {"Content-Type": JSON, "Content-Length": str(5 * MIB), "Expect": "100-continue"}
    exchange = client.send(client.head("POST", length))
    assert refused(refusal(exchange, 413), "too_large")["limit"] == 4 * MIB
    assert exchange.first.startswith(b"HTTP/1.1 413")


@pytest.mark.needs_one_process("the balancer answers")
def test_an_oversize_body_in_chunks_is_a_413(http: Http) -> None:
    """W§7: as above; a body that does not say its length is counted as it comes."""
    client = http.opened()
    exchange = client.send(
        client.head("POST", {"Content-Type": JSON, "Transfer-Encoding": "chunked"})
    )
    chunk = b"%x\r\n%b\r\n" % (MIB, b" " * MIB)
    for _ in range(5):
        exchange.send(chunk)
    refused(refusal(exchange, 413), "too_large")
    assert is_well(client)


@pytest.mark.needs_one_process("the balancer parts the head from the body")
@pytest.mark.parametrize("is_whole", [True, False], ids=["with_its_head", "after_its_head"])
@pytest.mark.parametrize("verb", ["GET", "DELETE"])
def test_a_long_body_that_nothing_reads_is_a_413(http: Http, verb: str, is_whole: bool) -> None:
    """However TCP cuts the request; up to 1 KiB is ignored."""
    client = http.opened()
    for size, status in ((1025, 413), (1024, 200)):
        head = client.head(verb, {"Content-Length": str(size)})
        exchange = client.send(head + b" " * size if is_whole else head)
        if not is_whole:
            exchange.send(b" " * size)
        assert exchange.head().status == status
        if status == 413:
            assert refused(refusal(exchange, 413), "too_large")["limit"] == 1024


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_a_body_may_come_in_chunks(http: Http, size: int) -> None:
    """RFC 9112, 7.1: clients that stream their bodies send chunks, and extensions."""
    client = http.opened()
    pieces = [PING_BYTES[at : at + size] for at in range(0, len(PING_BYTES), size)]
    body = b"".join(b"%x;a=b\r\n%b\r\n" % (len(piece), piece) for piece in pieces)
    head = client.head("POST", {"Content-Type": JSON, "Transfer-Encoding": "chunked"})
    assert client.send(head + body + b"0\r\nTrailer: x\r\n\r\n").message().result == {}


def test_a_request_may_come_byte_by_byte(http: Http) -> None:
    """RFC 9112: however TCP cuts it."""
    client = http.opened()
    exchange = client.start()
    for byte in client.post_bytes(PING_BYTES):
        exchange.send(bytes([byte]))
    assert exchange.message().result == {}


def test_pipelined_requests_are_answered_in_their_order(http: Http) -> None:
    """RFC 9112, 9.3.2: "a server […] MUST send the corresponding responses in the same order"."""
    client = http.opened()
    call = {"name": "count", "arguments": {"n": 2}}
    bodies = [{**PING, "id": n} for n in range(4)]
    bodies += [{"jsonrpc": "2.0", "id": 4, "method": "tools/call", "params": call}]
    sent = [client.post_bytes(json.dumps(body).encode()) for body in bodies]
    exchange = client.send(b"".join(sent))
    for n in range(4):
        assert exchange.message().answers(n)
        exchange = exchange.following()
    assert text_of(messages_of(exchange.events())[-1]) == "counted 2"


def test_a_connection_is_used_again_after_each_answer(http: Http) -> None:
    """RFC 9112, 9.3: persistent connections, after a refusal and lines too."""
    client = http.opened()
    call = {"name": "count", "arguments": {"n": 2}}
    counting = json.dumps({"jsonrpc": "2.0", "id": 4, "method": "tools/call", "params": call})
    exchange = client.post(PING)
    for body, accept, status in (
        (b"{", BOTH, 400),
        (PING_BYTES, BOTH, 200),
        (counting.encode(), LINES, 200),
        (PING_BYTES, LINES, 200),
    ):
        exchange.body()
        assert exchange.can_go_on
        exchange = exchange.following()
        exchange.send(client.post_bytes(body, {"Accept": accept}))
        assert exchange.head().status == status
    assert exchange.message().result == {}


def test_a_connection_is_used_again_after_lines_of_unknown_length(http: Http, gate: Gate) -> None:
    """RFC 9112, 9.3; the next answer is whole."""
    client = http.opened()
    params = {"name": "steps", "arguments": {"n": 2, "gate": gate.path}}
    body = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params})
    exchange = client.send(client.post_bytes(body.encode(), {"Accept": LINES})).head()
    gate.release(2)
    assert b"stepped 2" in exchange.body()
    assert exchange.can_go_on
    exchange = exchange.following()
    exchange.send(client.post_bytes(PING_BYTES))
    assert exchange.message().result == {}


def test_long_events_and_the_answer_to_a_get_end_with_their_connection(
    http: Http, gate: Gate
) -> None:
    """So that a client which is cut off sees no more than the end of its answer."""
    client = http.opened()
    exchange = client.call("steps", 8, n=1, gate=gate.path).head()
    gate.release(1)
    assert text_of(messages_of(exchange.events())[-1]) == "stepped 1"
    assert not {"content-length", "transfer-encoding"} & exchange.headers.keys()
    last = cut_after(client, gate, 1, of=2)
    gate.release(1)
    gate.wait_for("sent")
    exchange = client.get(last.at(1))
    assert text_of(messages_of(exchange.events())[-1]) == "stepped 2"
    assert not {"content-length", "transfer-encoding"} & exchange.headers.keys()


def test_a_client_of_http_1_0_is_served(http: Http) -> None:
    """RFC 9112, 6.1: "A server MUST NOT send a response containing Transfer-Encoding unless the
    corresponding request indicates HTTP/1.1"; the end of the connection is the end of the body."""
    client = http.opened()
    old = client.post_bytes(PING_BYTES).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    assert client.send(old).message().result == {}
    params = {"name": "count", "arguments": {"n": 2}}
    body = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params})
    exchange = client.send(
        client.post_bytes(body.encode()).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    ).head()
    assert exchange.media_type == EVENTS
    assert "transfer-encoding" not in exchange.headers
    assert text_of(messages_of(exchange.events())[-1]) == "counted 2"


@pytest.mark.needs_one_process("the balancer answers")
@pytest.mark.parametrize(
    "bomb",
    [
        b"X-Bomb: " + b"x" * MIB + b"\r\n",
        b"".join(b"X-%d: y\r\n" % n for n in range(50_000)),
        b"X" * MIB,
    ],
    ids=["long", "many", "endless"],
)
def test_a_header_bomb_is_refused(http: Http, bomb: bytes) -> None:
    """WIRE §9: limits; RFC 6585: 431, or 400; the connection ends, and nothing else."""
    client = http.opened()
    exchange = client.start()
    start, rest = client.post_bytes(PING_BYTES).split(b"\r\n", 1)
    exchange.send(start + b"\r\n" + bomb + rest)
    over(exchange)
    assert exchange.status in (400, 431)
    assert Message(exchange.body()).error["message"]
    assert not exchange.can_go_on
    assert is_well(client)


@pytest.mark.needs_one_process("the balancer answers")
@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00",
        b"nonsense\r\n\r\n",
        b"GET /mcp HTTP/9.9\r\n\r\n",
        b"POST /mcp HTTP/1.1\r\nContent-Length: 5\r\nContent-Length: 6\r\nHost: x\r\n\r\n",
        b"POST /mcp HTTP/1.1\r\nContent-Length: -1\r\nHost: 127.0.0.1\r\n\r\n",
        b"POST /mcp HTTP/1.1\r\nTransfer-Encoding: gzip\r\nHost: 127.0.0.1\r\n\r\n",
        b"POST /mcp HTTP/1.1\r\nTransfer-Encoding: chunked\r\nHost: 127.0.0.1\r\n\r\nzz\r\n",
        b"POST /mcp HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"POST /mcp HTTP/1.1\r\n\r\n",
        b"POST /mcp HTTP/1.1\r\nHost: 127.0.0.1\r\n folded: x\r\n\r\n",
    ],
    ids=lambda data: data[:60].decode("latin-1").encode("unicode_escape").decode(),
)
def test_what_is_no_http_is_refused(http: Http, data: bytes) -> None:
    """RFC 9112: 400 and the end of that connection; a server that guesses here can be tricked by
    one that guesses otherwise in front of it."""
    client = http.opened()
    exchange = client.start()
    exchange.send(data)
    exchange.half_close()
    over(exchange)
    assert exchange.status == 0 or 400 <= exchange.status < 600
    assert is_well(client)


@pytest.mark.parametrize("sent", [0, 10, len(PING_BYTES) - 1])
@pytest.mark.parametrize("politely", [False, True])
def test_a_body_that_stops_half_way_is_no_message(http: Http, sent: int, politely: bool) -> None:
    """RFC 9112, 8: "A server that receives an incomplete request message […] MAY send an error
    response prior to closing the connection": nothing of it is done, and the server goes on."""
    client = http.opened()
    call = {"name": "forever", "arguments": {}}
    body = json.dumps({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": call}).encode()
    whole = client.post_bytes(body)
    exchange = client.start()
    exchange.send(whole[: len(whole) - len(body) + sent])
    if politely:
        exchange.half_close()
        over(exchange)
        assert exchange.status in (0, 400, 408)
    else:
        exchange.cut()
    assert client.ask("ping", id=7).result == {}, "its id is free"


def test_a_head_request_is_no_get(http: Http) -> None:
    """RFC 9110, 9.3.2: HEAD has no body, whatever its status; it opens no standing stream."""
    client = http.opened()
    exchange = client.send(client.head("HEAD"))
    assert exchange.body() == b""
    assert exchange.status in (200, 405)


def test_who_expects_to_be_told_may_send(http: Http) -> None:
    """RFC 9110, 10.1.1: `Expect: 100-continue` is answered, or the body is waited for in vain."""
    client = http.opened()
    exchange = client.start()
    exchange.send(client.head("POST", {**LENGTH, "Expect": "100-continue"}))
    while not exchange.first:
        exchange.pump()
    assert exchange.first.startswith(b"HTTP/1.1 100")
    exchange.send(PING_BYTES)
    assert exchange.message().result == {}


@pytest.mark.needs_one_process("the balancer answers")
def test_a_slow_body_is_a_408(http: Http) -> None:
    """RFC 9110, 15.5.9: a server need not wait for ever for a request that was begun; it says so,
    and the connection ends. How long is the server's to say, within a minute here; nothing else
    waits meanwhile."""
    client = http.opened()
    exchange = client.start()
    exchange.send(client.post_bytes(PING_BYTES)[:-5])
    assert is_well(client)
    exchange.pump(within_s=60)
    refusal(exchange, 408)
    assert not exchange.can_go_on


def test_silence_ends_in_the_end(fresh: ServerProcess) -> None:
    """A connection without a request costs nothing else: SIGTERM does not wait for it."""
    with HttpClient(fresh.http_port) as client:
        client.initialize({})
        silent = [client.start() for _ in range(5)]
        silent[0].send(b"POST /mcp HT")
        assert fresh.stop(within_s=5) == 0
        for one in silent[1:]:
            with pytest.raises(PeerGone):
                one.head()

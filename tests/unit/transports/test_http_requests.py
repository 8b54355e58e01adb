"""HTTP/1.1 without sockets: how each response ends, and which requests share a connection."""

import h11
import pytest

from tests.rigs.bare_http import CHUNKED, CLOSE, asking
from transports.http.requests import Requests
from transports.net.origins import Origins

LIMIT = 100_000
FOLDED = "X: folded\r\n line"  # h11 reads such a head


def reading(*pieces: bytes) -> Requests:
    """A connection with one request, however it came."""
    requests = Requests(Origins(is_loopback=True), LIMIT)
    for piece in pieces:
        requests.feed(piece)
        request = requests.next_request()
    assert request is not None
    return requests


@pytest.mark.parametrize("more", [[], [FOLDED]])
@pytest.mark.parametrize(
    ("start", "field", "ends"),
    [
        ("POST / HTTP/1.1", "X: y", False),
        ("POST / HTTP/1.1", CLOSE, True),
        ("POST / HTTP/1.1", "Connection: TE, Close", True),
        ("POST / HTTP/1.1", "Connection: keep-alive", False),
        ("POST / HTTP/1.1", "Connection: closed", False),
        ("HEAD / HTTP/1.1", "X: y", False),
        ("POST / HTTP/1.0", "Connection: keep-alive", True),
    ],
)
def test_a_whole_response_keeps_the_connection_where_http_lets_it(
    start: str, field: str, ends: bool, more: list[str]
) -> None:
    requests = reading(asking(field, *more, start=start))
    head, _, body = requests.whole(200, [("X", "y")], b"hello").partition(b"\r\n\r\n")
    close = b"\r\nConnection: close" if ends else b""
    assert head == b"HTTP/1.1 200 OK\r\nX: y\r\nContent-Length: 5" + close
    assert body == (b"" if start.startswith("HEAD") else b"hello")
    assert requests.next_cycle() is not ends


@pytest.mark.parametrize("more", [[], [FOLDED]])
@pytest.mark.parametrize(
    ("start", "fields", "headers", "head", "body", "ends"),
    [
        ("GET / HTTP/1.1", [], [], b"Transfer-Encoding: chunked", b"2\r\nhi\r\n0\r\n\r\n", False),
        (
            "GET / HTTP/1.1",
            [CLOSE],
            [],
            b"Transfer-Encoding: chunked\r\nConnection: close",
            b"2\r\nhi\r\n0\r\n\r\n",
            True,
        ),
        ("GET / HTTP/1.1", [], [("connection", "close")], b"connection: close", b"hi", True),
        ("GET / HTTP/1.1", [], [("Connection", "close")], b"Connection: close", b"hi", True),
        ("GET / HTTP/1.0", [], [], b"Connection: close", b"hi", True),
        ("HEAD / HTTP/1.1", [], [], b"Transfer-Encoding: chunked", b"", False),
    ],
)
def test_a_response_of_unknown_length_has_chunks_or_ends_with_its_connection(
    start: str,
    fields: list[str],
    headers: list[tuple[str, str]],
    head: bytes,
    body: bytes,
    ends: bool,
    more: list[str],
) -> None:
    requests = reading(asking(*fields, *more, start=start))
    assert requests.begin(200, headers) == b"HTTP/1.1 200 OK\r\n" + head + b"\r\n\r\n"
    assert b"".join([*requests.more(b"h", b"i"), *requests.more(b""), requests.end()]) == body
    assert requests.next_cycle() is not ends


@pytest.mark.parametrize("status", [204, 304])
def test_a_status_without_a_body_has_no_length_and_no_chunks(status: int) -> None:
    requests = reading(asking())
    whole = requests.whole(status, (), b"")
    assert whole.endswith(b"\r\n\r\n")
    assert b"ength" not in whole
    assert requests.next_cycle()
    requests = reading(asking())
    assert b"chunked" not in requests.begin(status, ())
    assert list(requests.more(b"hi")) == []
    assert requests.end() == b""
    assert requests.next_cycle()


@pytest.mark.parametrize(
    "header",
    [
        ("X", "a\r\nY: b"),
        ("X", "a\nb"),
        ("X", "a\x00"),
        ("X\r\nY", "a"),
        ("X Y", "a"),
        ("", "a"),
        ("Content-Length", "3"),
        ("transfer-encoding", "chunked"),
    ],
)
def test_a_field_that_would_be_read_as_something_else_is_not_sent(header: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="cannot be sent"):
        reading(asking()).whole(200, [header], b"")
    with pytest.raises(ValueError, match="cannot be sent"):
        reading(asking()).begin(200, [header])


def test_a_response_that_did_not_end_is_the_last() -> None:
    requests = reading(asking())
    requests.begin(200, ())
    assert not requests.next_cycle()


@pytest.mark.parametrize("size", [1, 3, 100, 1_000, 1_000_000])
def test_requests_in_one_write_are_read_one_after_another(size: int) -> None:
    """Usual and unusual ones, cut anywhere: what h11 has read too much belongs to the next one."""
    one = asking("Content-Length: 3", body=b"one")
    two = asking(CHUNKED, body=b"3\r\ntwo\r\n0\r\n\r\n")
    three = asking(FOLDED, start="GET /three HTTP/1.1")
    wire = (one + two + three) * 30 + one[:-1]
    requests = Requests(Origins(is_loopback=True), LIMIT)
    seen = []
    for at in range(0, len(wire), size):
        requests.feed(wire[at : at + size])
        while request := requests.next_request():
            seen.append((request.path, request.body))
            requests.whole(200, (), b"")
            assert requests.next_cycle()
    assert seen == [("/mcp", b"one"), ("/mcp", b"two"), ("/three", b"")] * 30
    requests.feed(one[-1:])
    last = requests.next_request()
    assert last is not None
    assert last.body == b"one"


def test_a_body_of_the_limit_behind_a_usual_head_may_come_in_pieces() -> None:
    body = b"x" * LIMIT
    requests = Requests(Origins(is_loopback=True), LIMIT)
    requests.feed(asking(f"Content-Length: {LIMIT}"))
    for at in range(0, LIMIT, 10_000):
        assert requests.next_request() is None
        assert requests.head is not None
        requests.feed(body[at : at + 10_000])
    request = requests.next_request()
    assert request is not None
    assert request.body == body


def test_a_client_of_h11_reads_every_response() -> None:
    for start in ("POST / HTTP/1.1", "HEAD / HTTP/1.1", "POST / HTTP/1.0"):
        requests, client = reading(asking(start=start)), h11.Connection(h11.CLIENT)
        client.send(h11.Request(method=start.split()[0], target="/", headers=[("Host", "x")]))
        client.send(h11.EndOfMessage())
        client.receive_data(requests.begin(200, [("A", "b")]))
        client.receive_data(b"".join(requests.more(b"body")))
        if end := requests.end():
            client.receive_data(end)
        if not requests.next_cycle():
            client.receive_data(b"")
        events = [client.next_event() for _ in range(2 if start.startswith("HEAD") else 3)]
        assert isinstance(events[0], h11.Response)
        assert isinstance(events[-1], h11.EndOfMessage)

"""How the bodies of HTTP responses become lines, wherever they are cut into reads."""

import itertools
from collections.abc import Callable

import msgspec
import pytest

from streams import messages
from streams.messages import POSITION, Incoming, TooLarge
from transports.http.bodies import (
    EVENT_IDS_MAX,
    RETRY_MAX_S,
    RUN_BYTES_MAX,
    Body,
    EventBody,
    EventTrail,
    JsonBody,
    LineBody,
    Malformed,
    answer_in,
    body_of,
    refusal_line,
)
from transports.http.connections import ResponseHead
from transports.lines import in_blocks, lines_of

LIMIT = 1000


def header(count: int, stream: str = "s") -> bytes:
    params = {"streamId": stream, "seq": 1, "count": count}
    return messages.notification(POSITION, params)


def read(body: Body, *pieces: bytes) -> list[Incoming]:
    found: list[Incoming] = []
    for piece in pieces:
        found += lines_of(body.feed(piece))
    return found + lines_of(body.end())


def assert_same_however_cut(
    make: Callable[[], Body], text: bytes, expected: list[Incoming]
) -> None:
    assert read(make(), text) == expected
    assert read(make(), *(bytes([byte]) for byte in text)) == expected
    for at in range(len(text)):
        assert read(make(), text[:at], text[at:]) == expected, at


@pytest.mark.parametrize(
    ("media", "kind"),
    [
        ("application/x-ndjson", LineBody),
        ("Application/JSON; charset=utf-8", JsonBody),
        ("text/event-stream;charset=utf-8", EventBody),
        ("text/html", type(None)),
        ("", type(None)),
    ],
)
def test_the_media_type_says_how_a_body_is_read(media: str, kind: type) -> None:
    assert isinstance(body_of(ResponseHead(200, "OK", {"content-type": media}), LIMIT), kind)


# -- our framing


def test_lines_are_lines_and_blank_ones_keep_alive() -> None:
    text = b'\n\n{"a":1}\n\n{"b":2}\r\n\n'
    assert_same_however_cut(lambda: LineBody(LIMIT), text, [b'{"a":1}', b'{"b":2}'])


def test_a_run_is_given_away_in_one_piece() -> None:
    run = [header(3).rstrip(), b'{"n":1}', b'{"n":2}', b'{"n":3}']
    text = b'{"before":0}\n' + b"\n".join(run) + b'\n{"after":4}\n'
    expected: list[Incoming] = [b'{"before":0}', *run, b'{"after":4}']
    assert_same_however_cut(lambda: LineBody(LIMIT), text, expected)
    for at, cut in itertools.product(range(len(text)), (1, 30)):
        body = LineBody(LIMIT)
        for start in (slice(0, at), slice(at, at + cut), slice(at + cut, None)):
            batch = lines_of(body.feed(text[start]))
            assert [line for line in batch if line in run] in ([], run)


def test_a_blank_line_does_not_count_as_one_of_a_run() -> None:
    text = header(2) + b'{"n":1}\n\n{"n":2}\n{"x":0}\n'
    body = LineBody(LIMIT)
    assert lines_of(body.feed(text[:-8])) == [header(2).rstrip(), b'{"n":1}', b'{"n":2}']
    assert lines_of(body.feed(text[-8:])) == [b'{"x":0}']


def test_a_message_above_the_limit_stands_in_its_run_as_too_large() -> None:
    text = header(2) + b"x" * (LIMIT + 1) + b'\n{"n":2}\n'
    expected = [header(2).rstrip(), TooLarge(LIMIT), b'{"n":2}']
    assert read(LineBody(LIMIT), text) == expected


def test_a_body_that_ends_inside_a_run_is_malformed_and_what_came_is_kept() -> None:
    body = LineBody(LIMIT)
    assert body.feed(header(3) + b'{"n":1}\n{"n":2}\n{"n"') == []
    assert lines_of(body.held()) == [header(3).rstrip(), b'{"n":1}', b'{"n":2}']
    with pytest.raises(Malformed, match="inside a run"):
        read(LineBody(LIMIT), header(3), b'{"n":1}\n')


def test_a_body_that_ends_inside_a_line_is_malformed() -> None:
    """A proxy has ended it properly, because its own server was killed."""
    for text in (header(3) + b'{"n":1}\n{"n"', b'{"n":1}\n{"n":', b'{"n":1}\n{"n":2}'):
        with pytest.raises(Malformed, match="inside a line"):
            read(LineBody(LIMIT), text)


def test_a_run_longer_than_any_server_writes_is_malformed() -> None:
    body = LineBody(LIMIT)
    assert body.feed(header(10**9)) == []
    line = b'{"n":"' + b"x" * 900 + b'"}\n'
    with pytest.raises(Malformed, match="a run above"):
        body.feed(line * (3 * RUN_BYTES_MAX // len(line)))


def test_a_run_of_messages_above_the_limit_is_malformed() -> None:
    body = LineBody(2 * RUN_BYTES_MAX)
    assert body.feed(header(10**9)) == []
    line = b"x" * (2 * RUN_BYTES_MAX + 1) + b"\n"
    assert body.feed(line) == []
    with pytest.raises(Malformed, match="a run above"):
        body.feed(line)


def test_what_only_looks_like_a_header_holds_nothing_back() -> None:
    lines = [
        b'{"jsonrpc":"2.0","method":"x","params":"notifications/stream/position"}',
        b'{"jsonrpc":"2.0","method":"notifications/stream/position","params":{"count":"x"}}',
        b'{"jsonrpc":"2.0","method":"notifications/stream/position","params":{"count":-1}}',
        b'{"notifications/stream/position',
    ]
    assert_same_however_cut(lambda: LineBody(LIMIT), b"\n".join(lines) + b"\n", list(lines))


# -- one message


def test_a_pretty_printed_message_is_one_line() -> None:
    text = b'\n{\n  "a": [1,\r\n    2],\n  "b": "\\n"\n}\n'
    assert_same_however_cut(lambda: JsonBody(LIMIT), text, [b'{"a":[1,2],"b":"\\n"}'])


def test_a_body_with_nothing_in_it_is_no_message() -> None:
    assert read(JsonBody(LIMIT), b" \n") == []


@pytest.mark.parametrize("size", [LIMIT + 1, 10 * LIMIT])
def test_a_json_body_above_the_limit_is_too_large(size: int) -> None:
    assert read(JsonBody(LIMIT), *[b"[" * 100] * (size // 100 + 1)) == [TooLarge(LIMIT)]


@pytest.mark.parametrize("unit", [b"[", b" ", b"x", b"\n"])
def test_a_json_body_is_refused_before_its_end(unit: bytes) -> None:
    body = JsonBody(LIMIT)
    assert lines_of(body.feed(unit * 2 * LIMIT)) == []
    assert not body.is_useless
    assert lines_of(body.feed(unit)) == [TooLarge(LIMIT)]
    assert body.is_useless


def test_spaces_between_values_do_not_count() -> None:
    assert read(JsonBody(LIMIT), b"[" + b"\n" * LIMIT + b"]") == [b"[]"]


# -- server-sent events


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_the_data_of_messages_are_the_lines_whatever_ends_them(end: bytes) -> None:
    lines = [
        b"\xef\xbb\xbfid: 0",
        b"retry: 1000",
        b"data:",
        b"",
        b": a comment",
        b"",
        b"event: message",
        b'data: {"a":1}',
        b"",
        b"event: endpoint",
        b"data: elsewhere",
        b"",
        b'data:{"b":',
        b"data",
        b'data: "2"}',
        b"id: 7",
        b"",
        'data: {"c":"\u2028\u0085\x0b"}'.encode(),
        b"",
        b"data: unfinished",
    ]
    expected: list[Incoming] = [b'{"a":1}', b'{"b":"2"}', '{"c":"\u2028\u0085\x0b"}'.encode()]
    assert_same_however_cut(lambda: EventBody(LIMIT), end.join(lines), expected)


def test_a_message_is_here_as_soon_as_its_blank_line_has_begun() -> None:
    assert lines_of(EventBody(LIMIT).feed(b"data: 1\r\n\r")) == [b"1"]


@pytest.mark.parametrize("value", [b"x" * (LIMIT + 1), b"x" * (5 * LIMIT), b"x\ndata: " * LIMIT])
def test_an_event_above_the_limit_is_too_large_and_the_next_one_is_not(value: bytes) -> None:
    text = b"data: " + value + b"\n\ndata: 1\n\n"
    assert read(EventBody(LIMIT), text) == [TooLarge(LIMIT), b"1"]
    pieces = [text[at : at + 7] for at in range(0, len(text), 7)]
    assert read(EventBody(LIMIT), *pieces) == [TooLarge(LIMIT), b"1"]


@pytest.mark.parametrize("line", [b"data\n", b"data:\n", b"data: \r\n"])
def test_empty_lines_of_data_count_as_well(line: bytes) -> None:
    body = EventBody(LIMIT)
    for _ in range(100):
        assert body.feed(line * LIMIT) == []
        assert len(body._data) <= 2 * LIMIT
    assert lines_of(body.feed(b"\ndata: 1\n\n")) == [TooLarge(LIMIT), b"1"]


@pytest.mark.parametrize("piece", [b"data:\n" * 40_000, b"data: " + b"x" * 240_000])
def test_an_event_without_end_breaks_the_rules(piece: bytes) -> None:
    body = EventBody(LIMIT)
    with pytest.raises(Malformed, match="an event above 33554432 bytes"):
        lines_of(line for _ in range(200) for line in body.feed(piece))


def test_comments_without_end_take_no_room_and_are_no_message() -> None:
    body = EventBody(LIMIT)
    for _ in range(100):
        assert body.feed(b": " + b"x" * LIMIT) == []
        assert len(body._rest) <= 3 * LIMIT
    assert lines_of(body.feed(b"\n\ndata: 1\n\n")) == [b"1"]


# -- how far an event stream has come


def trail_of(text: bytes, trail: EventTrail | None = None) -> EventTrail:
    trail = trail or EventTrail()
    EventBody(LIMIT, trail).feed(text)
    return trail


@pytest.mark.parametrize(
    ("text", "last_id"),
    [
        (b"", b""),
        (b"id: 1\n", b""),  # the event is not whole
        (b"id: 1\n\n", b"1"),
        (b"id: 1\ndata: x\n\ndata: y\n\n", b"1"),
        (b"id: 1\n\nid\n\n", b""),  # taken back
        (b"id: 1\n\nid: 2\0\n\n", b"1"),
        ("id: é a\n\n".encode(), "é a".encode()),
        (b"id: 1\n\nid: a\x7f\n\n", b""),  # no header can say it
        (b"id: " + b"x" * 1024 + b"\n\n", b"x" * 1024),
        (b"id: " + b"x" * 1025 + b"\n\n", b""),
        (b"event: other\nid: 3\n\n", b"3"),
    ],
)
def test_the_last_id_is_that_of_the_last_whole_event(text: bytes, last_id: bytes) -> None:
    assert trail_of(text).last_id == last_id


@pytest.mark.parametrize(
    ("value", "retry_s"),
    [(b"1500", 1.5), (b"0", 0.0), (b"9" * 15, RETRY_MAX_S), (b"1e3", None), (b"", None)],
)
def test_the_pause_is_the_servers(value: bytes, retry_s: float | None) -> None:
    assert trail_of(b"retry: " + value + b"\n\n").retry_s == retry_s
    assert trail_of(b"retry: " + b"9" * 99 + b"\n").retry_s is None


def test_only_what_an_earlier_response_has_brought_comes_again() -> None:
    trail = EventTrail()
    events = b"id: 1\ndata: a\n\nid: 1\ndata: b\n\ndata: c\n\n"
    assert lines_of(EventBody(LIMIT, trail).feed(events)) == [b"a", b"b", b"c"]
    trail.continues()
    events += b"id: 2\ndata: d\n\n"
    assert lines_of(EventBody(LIMIT, trail).feed(events)) == [b"c", b"d"]
    for number in range(10_000):
        trail_of(b"id: x%d\n\n" % number, trail)
    trail.continues()
    assert len(trail._earlier) == EVENT_IDS_MAX


# -- answers


def test_the_answer_is_known_by_its_id_and_the_ids_type() -> None:
    lines: list[Incoming] = [
        b'{"jsonrpc":"2.0","method":"x","params":{"progressToken":"1"}}',
        b'{"jsonrpc":"2.0","id":1,"result":{}}',
        b'{"jsonrpc":"2.0","id":"1","method":"ping"}',
        b'"1" is no message',
    ]
    assert answer_in(in_blocks(lines), "1", 100) is None
    answer = answer_in(in_blocks(lines), 1, 100)
    assert isinstance(answer, messages.Message)
    assert answer.id == 1
    assert answer_in(in_blocks([*lines, TooLarge(5)]), "1", 100) == TooLarge(5)
    assert answer_in(in_blocks([*lines, b"{}", b"{}"]), 1, 3) is None


@pytest.mark.parametrize(
    ("head", "text", "expected"),
    [
        (
            ResponseHead(400, "Bad Request", {}),
            b'{"jsonrpc":"2.0","id":null,"error":{"code":-32600,"message":"No.","data":{"a":1}}}',
            {"code": -32600, "message": "No.", "data": {"a": 1}},
        ),
        (
            ResponseHead(401, "Unauthorized", {"content-type": "text/plain"}),
            b"who are\nyou?",
            {
                "code": -32603,
                "message": "The server answered with HTTP 401 Unauthorized: who are you?",
                "data": {"reason": "unauthorized"},
            },
        ),
        (
            ResponseHead(405, "Method Not Allowed", {"content-type": "text/html"}),
            b"<html>",
            {"code": -32603, "message": "The server answered with HTTP 405 Method Not Allowed."},
        ),
        (
            ResponseHead(307, "Temporary Redirect", {"location": "http://b/mcp"}),
            b"",
            {
                "code": -32603,
                "message": "The server answered with HTTP 307 Temporary Redirect: "
                "dial http://b/mcp instead.",
            },
        ),
        (
            ResponseHead(429, "Slow Down", {"retry-after": "7"}),
            b"",
            {
                "code": -32603,
                "message": "The server answered with HTTP 429 Slow Down.",
                "data": {"reason": "unavailable", "retryAfter": 7},
            },
        ),
        (
            ResponseHead(200, "OK", {"content-type": "text/html"}),
            b"<html>",
            {
                "code": -32603,
                "message": "The server answered with HTTP 200 OK, "
                "and a body that MCP does not allow.",
            },
        ),
    ],
)
def test_what_is_no_success_becomes_the_error_for_who_asked(
    head: ResponseHead, text: bytes, expected: dict[str, object]
) -> None:
    message = messages.parse(refusal_line(head, text, "a"))
    assert message.id == "a"
    assert isinstance(message.error, msgspec.Raw)
    assert messages.decode(message.error, dict) == expected


@pytest.mark.parametrize(
    ("url", "location", "advice"),
    [
        ("http://a/mcp", "/mcp/", "dial http://a/mcp/ instead."),
        ("http://a/mcp", "https://b/mcp", "dial https://b/mcp instead."),
        ("http://a/mcp", "http://b/$(id);x", "dial 'http://b/$(id);x' instead."),
        ("http://a/mcp", "http://b/'`id`'", "dial 'http://b/'\"'\"'`id`'\"'\"'' instead."),
        ("http://a/mcp", "http://b/a b", "it redirects to a URL that cannot be dialed."),
        ("http://a/mcp", "http://b/\x1b[2J", "it redirects to a URL that cannot be dialed."),
        ("http://a/mcp", "http://user:pw@b/", "it redirects to a URL that cannot be dialed."),
        ("http://a/mcp", "file:///etc/passwd", "it redirects to a URL that cannot be dialed."),
        ("http://a/mcp", "stdio:rm", "it redirects to a URL that cannot be dialed."),
        ("http://a/mcp", "http://[", "it redirects to a URL that cannot be dialed."),
        ("http://a/mcp", "http://b/" + "x" * 9999, "it redirects to a URL above 200 characters."),
        (
            "https://a/mcp",
            "http://a/mcp",
            "it redirects to an address without TLS, which is not safe to dial.",
        ),
    ],
)
def test_a_redirect_is_advised_as_a_shell_may_be_given_it(
    url: str, location: str, advice: str
) -> None:
    head = ResponseHead(307, "Temporary Redirect", {"location": location})
    message = messages.parse(refusal_line(head, b"", 1, url))
    assert isinstance(message.error, msgspec.Raw)
    said = messages.decode(message.error, dict)["message"]
    assert said == f"The server answered with HTTP 307 Temporary Redirect: {advice}"

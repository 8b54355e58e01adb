"""Usual heads are read exactly as h11 reads them; all others are left to h11."""

import h11
import pytest

from transports.net.heads import REMEMBERED_BYTES_MAX, RememberedHead, plain_head

HOST = b"Host: localhost:80\r\n"
LINE = b"POST /mcp?x=1 HTTP/1.1\r\n"


def read(head: bytes) -> dict[str, list[str]] | None:
    found = plain_head(head, 16_384, 128)
    return None if found is None else {name: list(values) for name, values in found.fields.items()}


@pytest.mark.parametrize(
    "fields",
    [
        b"",
        b"Accept:a, b\r\nACCEPT: \t c \t\r\nX-Empty:\r\nX-Colon: a:b: c\r\n",
        b"Content-Length: 3\r\nOrigin: http://localhost\r\n",
    ],
)
def test_a_plain_head_is_read_as_h11_reads_it(fields: bytes) -> None:
    head = LINE + HOST + fields + b"\r\n"
    protocol = h11.Connection(h11.SERVER)
    protocol.receive_data(head)
    event = protocol.next_event()
    assert isinstance(event, h11.Request)
    expected: dict[str, list[str]] = {}
    for name, value in event.headers:
        expected.setdefault(name.decode(), []).append(value.decode())
    assert read(head + b"abc") == expected
    found = plain_head(head + b"abc", 16_384, 128)
    assert found is not None
    assert (found.method, found.target, found.size) == ("POST", "/mcp?x=1", len(head))


@pytest.mark.parametrize(
    "head",
    [
        LINE + HOST,
        LINE + b"\r\n",
        LINE + HOST + HOST + b"\r\n",
        LINE + HOST + b"Transfer-Encoding: chunked\r\n\r\n",
        LINE + HOST + b"Expect: 100-continue\r\n\r\n",
        LINE + HOST + b"Content-Length: 3, 3\r\n\r\n",
        LINE + HOST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\n",
        LINE + HOST + b"Content-Length: +3\r\n\r\n",
        LINE + HOST + b"X: a\r\n folded\r\n\r\n",
        LINE + HOST + b"X : a\r\n\r\n",
        LINE + HOST + b"X: \xe9\r\n\r\n",
        LINE + HOST + b"X: a\x00b\r\n\r\n",
        LINE + HOST + b"X: a\n\r\n",
        b"GET http://localhost/ HTTP/1.1\r\n" + HOST + b"\r\n",
        b"GET / HTTP/1.0\r\n" + HOST + b"\r\n",
        LINE + HOST + b"X: " + b"x" * 16_384 + b"\r\n\r\n",
        LINE + HOST + b"X: x\r\n" * 128 + b"\r\n",
    ],
)
def test_what_is_not_plain_is_left_to_h11(head: bytes) -> None:
    assert read(head) is None


FIRST = LINE + HOST + b"Accept: a\r\nContent-Length: 12\r\nX: 12\r\n\r\n"


@pytest.mark.parametrize(
    "head",
    [
        FIRST,
        FIRST.replace(b": 12", b": 7", 1),
        FIRST.replace(b": 12", b": 123456789", 1),
        FIRST.replace(b": 12", b": 012", 1),
    ],
)
def test_a_repeated_head_is_read_as_if_it_were_new(head: bytes) -> None:
    first = plain_head(FIRST, 16_384, 128)
    assert first is not None
    remembered = RememberedHead.of(first, FIRST + b"body")
    assert remembered is not None
    assert remembered.again(head + b"\r\n\r\n12") == plain_head(head, 16_384, 128)


@pytest.mark.parametrize(
    "head",
    [
        b"",
        FIRST[:-1],
        FIRST[: FIRST.index(b"12")],
        FIRST[: FIRST.index(b"12") + 1],
        FIRST.replace(b": 12", b": ", 1),
        FIRST.replace(b": 12", b": 12 ", 1),
        FIRST.replace(b": 12", b": +12", 1),
        FIRST.replace(b": 12", b": 1\n2", 1),
        FIRST.replace(b": 12", b": \xb212", 1),
        FIRST.replace(b": 12", b": 1234567890", 1),
        FIRST.replace(b": 12", b": 12\r\nContent-Length: 13", 1),
        FIRST.replace(b"X: 12", b"X: 13"),
        FIRST.replace(b"Accept: a", b"Accept: b"),
    ],
)
def test_another_head_is_not_taken_for_the_remembered_one(head: bytes) -> None:
    first = plain_head(FIRST, 16_384, 128)
    assert first is not None
    remembered = RememberedHead.of(first, FIRST)
    assert remembered is not None
    assert remembered.again(head) is None


@pytest.mark.parametrize(
    "head", [LINE + HOST + b"\r\n", FIRST.replace(b"a", b"a" * REMEMBERED_BYTES_MAX)]
)
def test_a_long_head_or_one_without_a_length_is_not_remembered(head: bytes) -> None:
    found = plain_head(head, 16_384, 128)
    assert found is not None
    assert RememberedHead.of(found, head) is None

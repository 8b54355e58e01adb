"""Bytes to lines: on a pipe, and in the bodies of a server's responses."""

from collections.abc import Callable, Iterable

from streams.messages import Incoming, TooLarge
from tests.fuzz.pieces import same_however_cut, ways_to_cut
from transports.http.bodies import Body, EventBody, JsonBody, LineBody, Malformed
from transports.lines import LineSplitter, in_blocks, lines_of, one_line

LIMIT = 40
Answer = tuple[list[Incoming], str]


def lines(data: bytes) -> None:
    """Lines are the text between newlines, and at most one of them is held in memory."""

    def fed(pieces: Iterable[bytes]) -> list[Incoming]:
        splitter = LineSplitter(LIMIT)
        found: list[Incoming] = []
        for piece in pieces:
            found += splitter.feed(piece)
            assert len(splitter._rest) <= LIMIT + 1
        return found + splitter.feed(b"\n")

    def cut(pieces: Iterable[bytes]) -> list[Incoming]:
        splitter = LineSplitter(LIMIT)
        found: list[Incoming] = []
        for piece in pieces:
            padded = b"{}\n" + piece + b"\n{}"
            found += lines_of(splitter.blocks(padded, 3, 3 + len(piece)))
            assert len(splitter._rest) <= LIMIT + 1
        return found + lines_of(in_blocks(splitter.feed(b"\n")))

    expected: list[Incoming] = []
    for each in data[1:].split(b"\n"):
        line = each.removesuffix(b"\r")
        if line:
            expected.append(line if len(line) <= LIMIT else TooLarge(LIMIT))
    assert same_however_cut(data, fed) == expected
    assert same_however_cut(data, cut) == expected
    assert b"\n" not in one_line(data) or _is_no_json(data)


def _is_no_json(data: bytes) -> bool:
    return one_line(data) == data.strip(b"\r\n")


def _body(make: Callable[[], Body]) -> Callable[[bytes], None]:
    def read(pieces: Iterable[bytes]) -> Answer:
        body = make()
        found: list[Incoming] = []
        try:
            for piece in pieces:
                found += lines_of(body.feed(piece))
            found += lines_of(body.end())
        except Malformed as malformed:
            return [*found, *lines_of(body.held())], str(malformed)
        assert not body.held()
        return found, ""

    def target(data: bytes) -> None:
        found, _ = same_however_cut(data, read)
        for line in found:
            assert isinstance(line, TooLarge) or 0 < len(line) <= LIMIT

    return target


line_body = _body(lambda: LineBody(LIMIT))
json_body = _body(lambda: JsonBody(LIMIT))
event_body = _body(lambda: EventBody(LIMIT))


def event_memory(data: bytes) -> None:
    """The parser keeps at most twice the limit and a header of an event, however it is cut."""
    for pieces in ways_to_cut(data):
        body = EventBody(LIMIT)
        for piece in pieces:
            body.feed(piece)
            assert len(body._rest) <= 2 * LIMIT + 128
            assert sum(map(len, body._data)) <= 2 * LIMIT

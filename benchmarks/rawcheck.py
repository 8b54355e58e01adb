"""Checks of a raw client's bytes: each message of `fill` once, in order, byte for byte."""

from collections.abc import Iterator, Sequence
from typing import Final

import msgspec

from benchmarks.numbered import FIRST, METHOD, Lost, params, text_for
from streams.messages import POSITION, notification

Came = tuple[int, int]  # the number of messages, and their bytes

_POSITION: Final = b'{"jsonrpc":"2.0","method":"%b"' % POSITION.encode()
_CONTROL: Final = 0x08  # a bit of a frame's opcode: pings and pongs are no messages


def check_lines(
    lines: Sequence[bytes], count: int, size: int, *, is_embedded: bool = False
) -> Came:
    """Lines after message 1, with a header before each run. Raises `Lost`."""
    bare: list[bytes] = []
    at, seq = 0, 2
    while at < len(lines) and lines[at].startswith(_POSITION):
        told = msgspec.json.decode(lines[at])["params"]
        if told["seq"] != seq:
            raise Lost(f"a run from {seq} on was expected: {lines[at]!r}")
        bare += lines[at + 1 : at + 1 + told["count"]]
        seq += told["count"]
        at += 1 + told["count"]
    return check_messages(bare + list(lines[at:]), count, size, is_embedded=is_embedded)


def check_messages(
    lines: Sequence[bytes], count: int, size: int, *, is_embedded: bool = False
) -> Came:
    """Messages after message 1, the result, and the reply to the resume.

    The result is in the reply where that `is_embedded`. Raises `Lost`.
    """
    numbers = range(FIRST + 1, FIRST + count)
    _compare(lines, numbers, size)
    _check_result(lines[len(numbers) :], is_embedded=is_embedded)
    return len(numbers) + 1, sum(map(len, lines[: len(numbers)]))


def check_runs(came: bytes, whole: bytes, size: int) -> None:
    """Lines after message 1, as `check_lines` has them, against `whole`: all of these messages.

    Compares a run at a time, for a client that has to check while a clock runs. Raises `Lost`.
    """
    at, seq, compared = 0, 2, 0
    while came.startswith(_POSITION, at):
        start = came.index(b"\n", at) + 1
        told = msgspec.json.decode(came[at:start])["params"]
        if told["seq"] != seq:
            raise Lost(f"a run from {seq} on was expected: {told}")
        seq += told["count"]
        expected = whole[compared : compared + told["count"] * size]
        at, compared = start + len(expected), compared + len(expected)
        if came[start:at] != expected:
            raise Lost(f"another message is in a run: {told}")
    if compared != len(whole):
        raise Lost(f"{compared // size} messages have come, {len(whole) // size} were to")
    _check_result(came[at:].splitlines(), is_embedded=False)


def _check_result(lines: Sequence[bytes], *, is_embedded: bool) -> None:
    rest = [msgspec.json.decode(line) for line in lines]
    results = [line["result"] for line in rest if "result" in line]
    if is_embedded:
        results = [result["_meta"].get("mcp-streams/response") for result in results]
        results = [response["result"] for response in results if response]
    if not results or results[0].get("isError", False):
        raise Lost(f"a result was expected: {rest}")


def check_events(body: bytes, last_event: str, count: int, size: int) -> Came:
    """Server-sent events after `last_event`, each with the next id. Raises `Lost`."""
    key, _, seq = last_event.rpartition("_")
    events = [event.split(b"\ndata: ", 1) for event in body.split(b"\n\n")]
    numbered = [each for each in events if len(each) == 2 and each[0].startswith(b"id: ")]
    messages = [each for each in numbered if each[1] and b"\nretry:" not in each[0]]
    expected = [b"id: %b_%d" % (key.encode(), int(seq) + n + 1) for n in range(len(messages))]
    if [event_id for event_id, _ in messages] != expected:
        raise Lost("an event has another id than the one that follows")
    return check_messages([data + b"\n" for _, data in messages], count, size)


def _compare(lines: Sequence[bytes], numbers: range, size: int) -> None:
    model = notification(METHOD, params(FIRST, text_for(size)))
    before, after = model.split(b"%d" % FIRST)
    for line, number in zip(lines, numbers, strict=False):
        if line != b"%b%d%b" % (before, number, after):
            raise Lost(f"message {number - FIRST} was expected: {line[:160]!r}")
    if len(lines) < len(numbers):
        raise Lost(f"{len(lines)} messages have come, {len(numbers)} were to")


def frames_of(data: bytes) -> tuple[list[bytes], bytes]:
    """The payloads of a server's whole frames in `data`, and the rest."""
    found: list[bytes] = []
    at, end = 0, len(data)
    while at + 2 <= end:
        length, start = data[at + 1], at + 2
        if length == 126:
            start += 2
        elif length == 127:
            start += 8
        if length > 125:
            length = int.from_bytes(data[at + 2 : start], "big")
        if start + length > end:
            break
        if not data[at] & _CONTROL:
            found.append(data[start : start + length])
        at = start + length
    return found, data[at:]


def chunks_of(data: bytes) -> Iterator[bytes]:
    """The chunks of a body, up to its end or to its last whole chunk."""
    at = 0
    while (line_end := data.find(b"\r\n", at)) >= 0:
        start, length = line_end + 2, int(data[at:line_end], 16)
        if not length:
            return
        yield data[start : start + length]
        at = start + length + 2

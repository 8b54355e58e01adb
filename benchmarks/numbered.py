"""The messages of the benchmarks: numbered, of one exact size, and checked one by one."""

from collections.abc import Iterable, Iterator
from typing import Any, Final

import msgspec

from streams.client.call import RunningCall
from streams.messages import notification

METHOD: Final = "notifications/message"
FIRST: Final = 1_000_000_000  # all numbers have the same length, and so do all messages


_STAMP_BYTES: Final = len(b'"sent_at_ns":1000000000000000,')


class _Data(msgspec.Struct, gc=False):
    n: int


class _Params(msgspec.Struct, gc=False):
    data: _Data


class _Message(msgspec.Struct, gc=False):
    params: _Params


_params: Final = msgspec.json.Decoder(_Params).decode
_message: Final = msgspec.json.Decoder(_Message).decode


class Lost(Exception):
    """A message is missing, or stands in another's place."""


def data(number: int, text: str) -> dict[str, Any]:
    """The data of a log message."""
    return {"n": number, "text": text}


def params(number: int, text: str) -> dict[str, Any]:
    """The params of a message."""
    return {"level": "info", "data": data(number, text)}


def timed_params(number: int, sent_at_ns: int, text: str) -> dict[str, Any]:
    """The params of a message with its send time, which replaces some of the text."""
    stamped = {"n": number, "sent_at_ns": sent_at_ns}
    return {"level": "info", "data": {**stamped, "text": text[_STAMP_BYTES:]}}


def text_for(size: int) -> str:
    """The text that makes a message `size` bytes long, its newline included."""
    bare = len(notification(METHOD, params(FIRST, "")))
    if size < bare:
        raise ValueError(f"a message has at least {bare} bytes, not {size}")
    return "x" * (size - bare)


def number_of(message: bytes) -> int:
    """The index of a message, the first being 0. Raises `Lost` for any other line."""
    try:
        return _message(message).params.data.n - FIRST
    except msgspec.DecodeError:
        raise Lost(f"a message was expected: {message[:160]!r}") from None


def lines_of(count: int, size: int) -> Iterator[bytes]:
    """So many messages in their wire format, each `size` bytes long with its newline."""
    text = text_for(size)
    return (notification(METHOD, params(FIRST + number, text)) for number in range(count))


def check_messages(messages: Iterable[bytes], after: int, count: int) -> int:
    """The number of messages.

    Raises `Lost` unless they are those above `after` up to `count`, each once and in order.
    """
    came = [number_of(message) for message in messages]
    expected = range(after, count)
    for number, found in zip(expected, came, strict=False):
        if found != number:
            raise Lost(f"message {number} was expected: {found}")
    if len(came) != len(expected):
        raise Lost(f"{len(came)} messages have come, {len(expected)} were expected")
    return len(came)


async def check(call: RunningCall, count: int, after: int = 0) -> int:
    """Read a call to its end and return the number of messages, the result included.

    Raises `Lost` unless they are the ones above `after` up to `count`, each once and in order.
    """
    expected = FIRST + after
    async for message in call:
        if _params(message.params).data.n != expected:
            raise Lost(f"message {expected - FIRST} was expected: {bytes(message.params)[:60]!r}")
        expected += 1
    if expected != FIRST + count:
        raise Lost(f"{expected - FIRST} messages have come, {count} were sent")
    result = await call.result()
    if result.get("isError"):
        raise Lost(f"the tool failed: {result}")
    return count - after + 1

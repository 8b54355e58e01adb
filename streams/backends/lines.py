"""The output of a child as lines: long lines lose their middle, and usual faults are mended."""

import json
import math
from contextlib import suppress
from typing import Any, Final

import msgspec

from streams import messages

ENDS_BYTES: Final = 1024  # of a long line, at each end: the id of a response is in one of them


# A longer line is not mended: its decoding takes 100 ms, in which the server does nothing else.
MENDED_BYTES_MAX: Final = 1024 * 1024


class Long(msgspec.Struct, frozen=True):
    """Takes the place of a line above the limit, whose middle was discarded."""

    head: bytes
    tail: bytes


class Lines:
    """Holds no more than one line of `limit` bytes. Blank lines are skipped."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rest = bytearray()  # of a line whose newline has not come
        self._head: bytes | None = None  # of a line that is too long; `_rest` is its end

    def feed(self, data: bytes) -> list[bytes | Long]:
        """The lines that `data` completes, without their newlines."""
        if b"\n" not in data:
            self._keep(data)
            return []
        lines: list[bytes] = data.split(b"\n")
        last = lines.pop()
        found: list[bytes | Long] = []
        if self._rest or self._head is not None:
            self._keep(lines.pop(0))
            found.append(self._taken())
        if b"\r" in data:
            lines = [line.removesuffix(b"\r") for line in lines]
        if len(data) > self._limit:
            found += [self._checked(line) for line in lines if line]
        else:
            found += filter(None, lines)
        self._keep(last)
        return found

    def _keep(self, part: bytes) -> None:
        self._rest += part
        if self._head is None and len(self._rest) > self._limit:
            self._head = bytes(self._rest[:ENDS_BYTES])
        if self._head is not None:
            del self._rest[:-ENDS_BYTES]

    def _taken(self) -> bytes | Long:
        line, head = bytes(self._rest).removesuffix(b"\r"), self._head
        self._rest, self._head = bytearray(), None
        return line if head is None else Long(head, line)

    def _checked(self, line: bytes) -> bytes | Long:
        is_long = len(line) > self._limit
        return Long(line[:ENDS_BYTES], line[-ENDS_BYTES:]) if is_long else line


def mend(line: bytes) -> bytes | None:
    """A message with faults that lenient clients take, without them; None for anything else.

    They are: text that is no UTF-8, half of a surrogate pair, NaN and Infinity, an id with a
    fraction of 0, and no `jsonrpc`.
    """
    if len(line) > MENDED_BYTES_MAX or not line.lstrip(b"\xef\xbb\xbf \t").startswith(b"{"):
        return None
    with suppress(ValueError, RecursionError):
        found = json.loads(line.decode("utf-8-sig", errors="replace"))
        if isinstance(found, dict) and ("method" in found or "result" in found or "error" in found):
            members: dict[str, Any] = {"jsonrpc": "2.0"} | found
            if isinstance(found.get("id"), float) and found["id"].is_integer():
                members["id"] = int(found["id"])
            mended = messages.encode(_sound(members))
            messages.look(mended)
            return mended
    return None


def _sound(value: Any) -> Any:
    """A value that JSON can express."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, list):
        return [_sound(each) for each in value]
    if isinstance(value, dict):
        return {_sound(name): _sound(each) for name, each in value.items()}
    return value

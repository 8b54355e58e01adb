"""The output of a child as lines: long lines lose their middle."""

import msgspec

from streams.messages import ENDS_BYTES


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

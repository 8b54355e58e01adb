"""How what is sent becomes bytes: plain lines, numbered lines, or one message alone.

Stored runs go out as they are, or are re-framed as a whole; nothing here looks into a message.
Server-sent events are the framing of `streams.server.http.events`.
"""

from collections.abc import Sequence
from typing import Final, Protocol

from streams.messages import Run
from streams.protocol import extension


class Framing(Protocol):
    """One way to write the messages of a stream, and lines that belong to no stream."""

    @property
    def announces(self) -> bool:
        """Whether there is room for what is said about a stream, besides its messages."""

    @property
    def is_json(self) -> bool:
        """Whether what is written is one JSON message and nothing else."""

    @property
    def has_ids(self) -> bool:
        """Whether messages have event ids, by which any client can resume behind them."""

    def identify(self, event_id: bytes) -> None:
        """Messages have this event id from now on, with `%d` in place of the seq; `b""` for none.

        Called only where `has_ids`.
        """

    def opening(
        self, preamble: Sequence[bytes], position: int, *, retry_s: float, is_lone: bool
    ) -> bytes:
        """The bytes ahead of the messages behind `position`.

        `retry_s` is how long a client should wait before it resumes. `is_lone`: exactly one message
        follows.
        """

    def line(self, line: bytes) -> bytes:
        """A message that has no number."""

    def run(self, stream_id: str, run: Run, *, is_last: bool) -> Sequence[bytes]:
        """Some messages of a stream; `is_last` where the response that is waited for ends them."""

    def reply(self, line: bytes, position: int | None) -> bytes:
        """The reply that ends a delivery: with the event id of `position`, or None for no id."""


class Plain:
    """Lines, as every MCP client reads them. `opener` stands where nothing else would open."""

    announces = True
    has_ids = False
    is_json = False

    def __init__(self, opener: bytes = b"") -> None:
        self._opener = opener

    def identify(self, event_id: bytes) -> None:
        """Lines have no event ids."""

    def opening(
        self, preamble: Sequence[bytes], position: int, *, retry_s: float, is_lone: bool
    ) -> bytes:
        return b"".join(preamble) or self._opener

    def line(self, line: bytes) -> bytes:
        return line

    def run(self, stream_id: str, run: Run, *, is_last: bool) -> Sequence[bytes]:
        return (run.body,)

    def reply(self, line: bytes, position: int | None) -> bytes:
        return line


class Numbered(Plain):
    """Lines, with a header ahead of each run that tells its numbers."""

    def run(self, stream_id: str, run: Run, *, is_last: bool) -> Sequence[bytes]:
        return extension.position(stream_id, run), run.body


class Lone(Plain):
    """The final response and nothing before it, for a client that reads one message of JSON."""

    announces = False
    is_json = True

    def opening(
        self, preamble: Sequence[bytes], position: int, *, retry_s: float, is_lone: bool
    ) -> bytes:
        return b""

    def run(self, stream_id: str, run: Run, *, is_last: bool) -> Sequence[bytes]:
        return (run.without_last()[1],) if is_last else ()


PLAIN: Final = Plain()
NUMBERED: Final = Numbered()

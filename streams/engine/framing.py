"""How what is sent becomes bytes: plain lines, numbered lines, or server-sent events.

Stored runs go out as they are, or are re-framed as a whole; nothing here looks into a message.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, Protocol

from streams.messages import Run
from streams.protocol import extension

if TYPE_CHECKING:
    from streams.engine.delivery import Delivery

_EVENT: Final = b"data: %b\n"
_COMMENT: Final = b":\n\n"  # brings the head of a response that has no priming event
RETRY_MS_MAX: Final = 15_000  # a stock client that waits longer is taken for a dead one


class Framing(Protocol):
    """One way to write what belongs to a delivery, and what belongs to none."""

    @property
    def announces(self) -> bool:
        """Whether there is room for what is said about a stream, besides its messages."""

    @property
    def is_json(self) -> bool:
        """Whether what is written is one JSON message and nothing else."""

    @property
    def has_ids(self) -> bool:
        """Whether messages have ids by which any client can come back for the next."""

    def attached(self, delivery: "Delivery") -> None:
        """The delivery's messages will be written in this framing."""

    def opening(self, delivery: "Delivery", *, is_lone: bool) -> bytes:
        """What goes ahead of a delivery's messages, or of the lone one that there will ever be."""

    def line(self, line: bytes) -> bytes:
        """A message that has no number."""

    def run(self, delivery: "Delivery", run: Run) -> Sequence[bytes]:
        """Some messages of a delivery's stream."""

    def reply(self, delivery: "Delivery", line: bytes) -> bytes:
        """The last message of a delivery, which says that it is over."""


class Plain:
    """Lines, as every MCP client reads them. `opener` stands where nothing else would open."""

    announces = True
    has_ids = False
    is_json = False

    def __init__(self, opener: bytes = b"") -> None:
        self._opener = opener

    def attached(self, delivery: "Delivery") -> None:
        pass  # lines are the same for all

    def opening(self, delivery: "Delivery", *, is_lone: bool) -> bytes:
        return b"".join(delivery.preamble) or self._opener

    def line(self, line: bytes) -> bytes:
        return line

    def run(self, delivery: "Delivery", run: Run) -> Sequence[bytes]:
        return (run.body,)

    def reply(self, delivery: "Delivery", line: bytes) -> bytes:
        return line


class Numbered(Plain):
    """Lines, with a header ahead of each run that tells its numbers."""

    def run(self, delivery: "Delivery", run: Run) -> Sequence[bytes]:
        return extension.position(delivery.stream.id, run), run.body


class Lone(Plain):
    """The final response and nothing before it, for who reads one message of JSON."""

    announces = False
    is_json = True

    def opening(self, delivery: "Delivery", *, is_lone: bool) -> bytes:
        return b""

    def run(self, delivery: "Delivery", run: Run) -> Sequence[bytes]:
        is_last = run.last == delivery.stop and not delivery.replays
        return (run.without_last()[1],) if is_last else ()


class Events:
    """Server-sent events of one HTTP response, or plain JSON where it is one message alone.

    `name` gives what the ids of a delivery's events begin and end with. A revision before
    2025-11-25 knows no priming event: the first announcement has the id of where delivery starts.
    """

    announces = True

    def __init__(
        self,
        name: Callable[["Delivery"], tuple[str, str]],
        *,
        is_priming: bool = True,
        may_be_json: bool = True,
    ) -> None:
        self.has_ids = True
        self.is_json = False
        self._name = name
        self._is_priming = is_priming
        self._may_be_json = may_be_json  # nothing is written yet, and events are not called for
        self._id = b""  # the line that has a message's id, made with its number

    def attached(self, delivery: "Delivery") -> None:
        self.has_ids = delivery.stream.record.is_announced
        prefix, suffix = self._name(delivery)
        self._id = f"id: {prefix}_%d{suffix and '_'}{suffix}\n".encode()

    def opening(self, delivery: "Delivery", *, is_lone: bool) -> bytes:
        if is_lone and self._may_be_json:
            self._be_json()
            return b""
        self._may_be_json = False
        preamble = b"".join(self.line(line) for line in delivery.preamble)
        if not self.has_ids:
            return _COMMENT + preamble
        event_id = self._id % delivery.position
        if self._is_priming:
            retry_ms = min(int(delivery.stream.record.min_s * 1000), RETRY_MS_MAX)
            return event_id + b"retry: %d\ndata: \n\n" % retry_ms + preamble
        # 925: the policy "causes the Streamable HTTP transport to send a usable Last-Event-ID". A
        # preamble behind another position holds questions, whose numbers are not that position.
        is_announced = bool(preamble) and delivery.position == 0
        return _COMMENT + (event_id if is_announced else b"") + preamble

    def line(self, line: bytes) -> bytes:
        if self._may_be_json:  # a refusal: nothing follows it
            self._be_json()
        return line if self.is_json else _EVENT % line

    def run(self, delivery: "Delivery", run: Run) -> Sequence[bytes]:
        if self.is_json:
            return (run.body,)
        lines: list[int | bytes] = [*run.lines]
        if not self.has_ids:
            return (_EVENT * run.count % tuple(lines),)
        fields = lines * 2
        fields[::2], fields[1::2] = range(run.seq, run.last + 1), lines
        return ((self._id + _EVENT) * run.count % tuple(fields),)

    def reply(self, delivery: "Delivery", line: bytes) -> bytes:
        if not delivery.embeds_response:  # the final response has that id
            return self.line(line)
        return self._id % delivery.position + self.line(line)

    def _be_json(self) -> None:
        self.is_json, self.has_ids, self._may_be_json = True, False, False


PLAIN: Final = Plain()
NUMBERED: Final = Numbered()

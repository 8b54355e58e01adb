"""One stream on its way over one connection."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

from streams import dialects, messages
from streams.dialects import Dialect
from streams.errors import Refusal, refusal
from streams.messages import RequestId, Run

if TYPE_CHECKING:
    from streams.connection import Connection
    from streams.stream import Stream


class Delivery:
    """Made when somebody is to have a stream's messages, and over when nobody is."""

    __slots__ = (
        "connection",
        "dialects",
        "grant",
        "is_granted",
        "is_open",
        "is_over",
        "position",
        "preamble",
        "reply_id",
        "stream",
        "written",
    )

    def __init__(
        self,
        stream: "Stream",
        connection: "Connection",
        *,
        after: int,
        preamble: Sequence[bytes],
        speaks: tuple[Dialect, ...],
        reply_id: RequestId | None = None,
        grant: str = "",
    ) -> None:
        self.stream = stream
        self.connection = connection
        self.position = after  # handed to the sender
        self.written = after - 1  # becomes `after` once the client knows how to come back
        self.preamble = preamble  # lines that have no number
        self.dialects = speaks
        self.reply_id = reply_id  # of the resume; None for the originating request's own delivery
        self.grant = grant  # under which name it may be continued by event ids
        self.is_granted = True  # the grant, if there is one, is durable
        self.is_open = False  # the preamble is out
        self.is_over = False

    @property
    def taken_ids(self) -> set[RequestId]:
        """The request ids that stand for something else on this connection until this is over."""
        taken: set[RequestId] = set()
        if self.reply_id is not None:
            taken.add(self.reply_id)
        if self.reply_id is None or not self.connection.session.settings.positions:
            taken.add(self.stream.request_id)
        return taken

    @property
    def may_open(self) -> bool:
        """Whether the client may be told how to come back: what that takes is durable."""
        return self.stream.is_recorded and self.is_granted

    def is_lone(self, run: Run) -> bool:
        """Whether `run` is the final response, and all that there will be to say."""
        is_all = run.seq == run.count == 1 and self.stream.state.is_finished(1)
        return is_all and self.reply_id is None and not self.preamble

    @property
    def embeds_response(self) -> bool:
        """Whether the final response travels inside the reply to the resume.

        Stock clients take any response that a response to them brings for their own.
        """
        return self.reply_id is not None and self.connection.embeds_responses

    def end(self, reason: str) -> None:
        """Let go of the stream and tell the client why: `superseded` or `released`."""
        if self.reply_id is not None:
            self._close(dialects.resumed(self.reply_id, reason))
        elif reason == "superseded":
            self._close(messages.error(self.stream.request_id, refusal(reason)))
        else:
            self._close(b"")

    def fail(self, refused: Refusal) -> None:
        """Let go of the stream with an error for whoever waits for it."""
        waiting = self.stream.request_id if self.reply_id is None else self.reply_id
        self._close(messages.error(waiting, refused))

    def take(self) -> None:
        """For the committer: what this waits for is a change of its own."""

    def committed(self, seq: int) -> None:
        """The grant is durable: the client may be told of it."""
        self.is_granted = True
        self.connection.wake(self)

    def let_go(self) -> bool:
        """Let the client come back for this stream when it likes; False where that would cost
        others.

        A resume can be told so; an original call is let go with its whole connection, and so is
        whatever can be continued by the id of its last event.
        """
        if self.reply_id is not None and not self.connection.has_event_ids:
            self.end("released")
            return True
        everyone = self.connection.deliveries.values()
        if not all(delivery.stream.is_reachable for delivery in everyone):
            return False
        self.connection.hang_up()
        return True

    def drop(self) -> None:
        """Let go of the stream and say nothing."""
        self._close(b"")

    def _close(self, farewell: bytes) -> None:
        if not self.is_over:
            self.connection.forget(self)
            if farewell:
                self.connection.reply(farewell)
        self.stream.detach(self)

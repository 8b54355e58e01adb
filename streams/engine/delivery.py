"""One stream on its way over one connection."""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import msgspec

from streams import messages
from streams.errors import Refusal, refusal
from streams.journal.sessions import Grant
from streams.messages import RequestId, Run
from streams.protocol import dialects, extension
from streams.protocol.vocabulary import Dialect

if TYPE_CHECKING:
    from streams.engine.connection import Connection
    from streams.engine.stream import Stream


class Granted:
    """That a client may go on with one response, by the ids of its events."""

    __slots__ = ("ended", "grant", "is_call", "stop")

    def __init__(self, grant: Grant | None, *, is_call: bool = False) -> None:
        self.grant = grant  # None for the response to the originating request
        self.is_call = is_call or grant is None  # and not to a request to resume one
        self.stop: int | None = None  # the seq of its own end, once that was written
        # Why it does not go on, though the stream may: `superseded` by another session, or
        # `cancelled` by its own.
        self.ended = ""

    @property
    def name(self) -> str:
        """What tells it from the others of its session and stream."""
        return "" if self.grant is None else self.grant.delivery

    @property
    def start(self) -> int:
        """Behind which seq the response began."""
        return 0 if self.grant is None else self.grant.start

    @property
    def reply_id(self) -> RequestId | None:
        """Under which id the response ends; None where that is the originating request's."""
        return None if self.grant is None else self.grant.reply_id

    @property
    def takes_over(self) -> bool:
        """Whether it ends with the stream's own response, for another request than that one's."""
        return self.grant is not None and self.grant.takes_over


class Delivery:
    """Made when somebody is to have a stream's messages, and over when nobody is."""

    __slots__ = (
        "connection",
        "dialects",
        "granted",
        "has_progress",
        "is_call",
        "is_granted",
        "is_held",
        "is_open",
        "is_over",
        "number",
        "position",
        "preamble",
        "reply_id",
        "start",
        "stream",
        "takes_over",
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
        takes_over: bool = False,
        is_call: bool = False,
        granted: Granted | None = None,
    ) -> None:
        """Begin behind `after`, or go on from there with the response that was `granted`."""
        self.stream = stream
        self.connection = connection
        self.start = after if granted is None else granted.start
        self.number = 0  # in the order of its stream's deliveries, once it is attached
        self.position = after  # handed to the sender
        self.written = after - 1  # becomes `after` once the client knows how to come back
        self.preamble = preamble  # lines that have no number
        self.dialects = speaks
        self.reply_id = reply_id  # of the resume; None for the originating request's own delivery
        self.takes_over = takes_over  # the stream's response is the answer to that resume
        self.is_call = is_call  # it answers a call, and not a request to resume one
        self.granted = granted  # where it can be gone on with by event ids
        self.is_granted = True  # and that is durable
        self.has_progress = False  # has gone out, with which the response must share no read
        self.is_held = False  # all is written but the response, which waits for that
        self.is_open = False  # the preamble is out
        self.is_over = False

    @property
    def taken_ids(self) -> set[RequestId]:
        """The request ids that stand for something else on this connection until this is over."""
        taken = {self.waiting_id}
        if self.replays and not self.connection.session.settings.positions:
            taken.add(self.stream.request_id)
        return taken

    @property
    def waiting_id(self) -> RequestId:
        """Under which id the client waits for the end of this delivery."""
        return self.stream.request_id if self.reply_id is None else self.reply_id

    @property
    def stands_for_call(self) -> bool:
        """Whether who cancels the request for this delivery wants the work to stop."""
        return self.is_call or (self.takes_over and self.waiting_id == self.stream.request_id)

    @property
    def replays(self) -> bool:
        """Whether the stream's response is not the answer to what asked for this delivery."""
        return self.reply_id is not None and not self.takes_over

    @property
    def stop(self) -> int | None:
        """The seq of the response that this delivery ends with; None where it is not there yet."""
        return self.stream.state.answer_after(self.start)

    @property
    def may_open(self) -> bool:
        """Whether the client may be told how to come back: what that takes is durable."""
        return self.stream.is_recorded and self.is_granted

    @property
    def may_lose_progress(self) -> bool:
        """Whether the client may lose progress that shares a read with the response.

        A client with positions does not: it must take all that it confirms.
        """
        has_positions = self.connection.session.settings.positions
        return not has_positions and self.stream.is_progress_wanted

    def is_lone(self, run: Run) -> bool:
        """Whether `run` is the final response, and all that there will be to say."""
        is_all = run.seq == run.count == 1 and self.stream.state.is_finished(1)
        return is_all and self.reply_id is None and not self.preamble

    @property
    def embeds_response(self) -> bool:
        """Whether the final response travels inside the reply to the resume.

        Stock clients take any response that a response to them brings for their own.
        """
        return self.replays and self.connection.embeds_responses

    def shown(self, run: Run) -> tuple[Run, bytes | None]:
        """What goes out of a run, and the response at its end where that is to be embedded."""
        is_changed = self.takes_over or self.embeds_response or self.stream.state.is_paged
        if not is_changed or run.last != self.stop:
            return run, None
        rest, line = run.without_last()
        line = self._response(line, run.last)
        if self.embeds_response:
            return rest, line
        return Run(run.seq, run.count, rest.body + line), None

    def _response(self, line: bytes, seq: int) -> bytes:
        """The stream's response as this client is to have it.

        It comes under the id that is waited for, and leads to the next page where there is one.
        """
        stream, record = self.stream, self.stream.record
        request_id = self.waiting_id if self.takes_over else stream.request_id
        if stream.state.is_paged and not stream.state.is_finished(seq):
            token = stream.tell_page(seq)
            result = messages.parse(line).result
            assert isinstance(result, msgspec.Raw)
            return messages.result(request_id, dialects.leading_on(result, token, record.max_s))
        return messages.readdressed(line, request_id) if self.takes_over else line

    def farewells(self) -> list[bytes]:
        """All of it is sent: what is left to say, if the stream is over with it."""
        if self.granted is not None:
            self.granted.stop = self.position
        if not self.stream.state.is_finished(self.position):
            return []
        return [line for dialect in self.dialects if (line := dialect.end(self.stream.id))]

    def supersede(self, by: "Connection") -> None:
        """Another delivery has taken the place of this one: the newest wins."""
        if self.granted is not None and by.session is not self.connection.session:
            self.granted.ended = "superseded"  # else its client would just come back
        self.end("superseded")

    def end(self, reason: str) -> None:
        """Let go of the stream and tell the client why: `superseded` or `released`."""
        if self.replays:
            self._close(extension.resumed(self.waiting_id, reason))
        elif self.takes_over or reason == "superseded":
            self._close(messages.error(self.waiting_id, refusal(reason)))
        else:
            self._close(b"")

    def fail(self, refused: Refusal) -> None:
        """Let go of the stream with an error for whoever waits for it."""
        self._close(messages.error(self.waiting_id, refused))

    def allow(self) -> None:
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

"""What becomes of running calls when connections come and go: `running.Home` for a client.

A call belongs to one connection at a time (`call.way`). The original request attaches it to the one
that it is sent over; on every later one a resume does, or, where nothing has come that tells how to
resume, the same request again, for which the server finds the call by its key. Its response comes
last: it says how that delivery ended, or, where the resume took over from the original request, is
the call's own.
"""

from typing import Final

import trio

from streams.client import wire
from streams.client.answers import Answers
from streams.client.call import RunningCall
from streams.client.connection import Calls, Link
from streams.client.reconnect import RETRY_S, Keeper
from streams.client.wire import PAUSE_MAX_S
from streams.errors import CallLost, CannotConnect, ClientError, StreamGone, Superseded
from streams.logs import log
from streams.messages import Kind, Message, RequestId

_HELD: Final = (
    "This client still receives the stream: read it there, or resume over another client."
)


class Resumer:
    """Begins calls, resumes them, and lets go of them."""

    def __init__(
        self, keeper: Keeper, calls: Calls, answers: Answers, *, patience_s: float
    ) -> None:
        self._keeper = keeper
        self._calls = calls
        self._answers = answers
        self._patience_s = patience_s
        self._nursery: trio.Nursery | None = None  # of the connection
        self._has_warned = False  # of a pause above the maximum
        keeper.on_up = self._up
        keeper.on_down = self._down
        keeper.on_surrender = self._surrender

    # Connections come and go

    def _up(self, link: Link, nursery: trio.Nursery) -> None:
        self._nursery = nursery
        for call in self._calls:
            nursery.start_soon(self._resume, call, link)

    def _down(self, link: Link) -> None:
        self._nursery = None
        for call in self._calls:
            if not call.is_resumable:
                call.fail(_lost())
            if not call.is_running:
                self._calls.remove(call)
            elif call.way is link:
                call.not_before = trio.current_time() + self._min_s(call)

    def _surrender(self, error: CannotConnect) -> None:
        for call in self._calls:
            call.fail(error)
            self._calls.remove(call)

    # A call begins

    async def begin(self, call: RunningCall) -> None:
        """Send the call's request, or have it resumed.

        Raises `CannotConnect`, or `StreamGone` where this client has the stream already.
        """
        try:
            link = await self._keeper.connected_for_call()
        except BaseException:
            call.is_left = True  # again: its connection must not wait for it to be read
            raise
        if call in self._calls or call.is_complete or call.has_failed:
            return  # it was left and is read on
        if call.request is None:
            await self._make_way(call, link)
            self._calls.add(call)
            way = self._keeper.link  # the one from before may have gone meanwhile, or be going
            if self._nursery is not None and way is not None and not way.is_over:
                self._nursery.start_soon(self._resume, call, way)
            return
        call.attach(link)
        call.key_memory = link.hello.key_memory
        self._calls.add(call)
        try:
            await link.send(call.request)
        except BaseException:
            self._calls.remove(call)
            raise

    async def _make_way(self, call: RunningCall, link: Link) -> None:
        """Let what is still under way of an earlier delivery pass."""
        assert call.ticket is not None
        earlier = self._calls.of(call.ticket)
        if earlier is None:
            return
        if earlier.has_failed or (earlier.is_left and earlier.resume_id is not None):
            await self._barrier(earlier, link)
        else:
            raise StreamGone(_HELD, "id_in_use")

    async def _barrier(self, call: RunningCall, link: Link) -> None:
        """Forget a call that was detached, once its last messages have come.

        They were sent before the answer to what is asked now.
        """
        await link.ask("ping", {})
        self._calls.remove(call)

    # It is resumed

    async def _resume(self, call: RunningCall, link: Link) -> None:
        """Have a call's messages come over this connection, until either ends."""
        if call.ticket is None and call.key_memory != link.hello.key_memory:
            call.fail(_lost())  # sent again, it might run twice
        with trio.CancelScope() as call.resuming:
            await trio.sleep_until(call.not_before)
            give_up_at = trio.current_time() + self._patience_s
            while call.is_running and call.way is not link:
                reply = await self._deliver(call, link)
                if reply is None:
                    return  # the connection is over
                pause_s = self._judge(call, reply)
                if pause_s is None:
                    break
                if call.has_brought:
                    give_up_at = trio.current_time() + self._patience_s
                if trio.current_time() + pause_s > give_up_at:
                    call.fail(_as_error(reply))
                    break
                await trio.sleep(pause_s)
        # What was detached is forgotten behind its last messages (`_barrier`).
        if not (call.is_running or call.resuming.cancelled_caught):
            self._calls.remove(call)

    async def _deliver(self, call: RunningCall, link: Link) -> Message | None:
        ticket = call.ticket
        # What takes over a request has its id, and cannot be told from it any more.
        takes_over = ticket is None or wire.resuming(ticket).takes_over
        request_id = call.request_id if takes_over else self._keeper.new_id()
        resume_id = None if takes_over else request_id
        call.attach(link, resume_id)
        if ticket is not None:
            link.prepare_resume(request_id, call, may_lack_reply=not takes_over)
            await link.send(wire.resume(ticket, request_id, call.cursor))
        else:
            assert call.request is not None  # who begins with a ticket keeps it
            await link.send(call.request)
        self._keeper.stir()
        try:
            return await link.reply_to(request_id, is_last=not takes_over)
        finally:
            if call.resume_id == resume_id and not (call.is_complete or link.is_over):
                link.note_event(call)
                call.way = None

    def _judge(self, call: RunningCall, reply: Message) -> float | None:
        """What the end of a delivery means: seconds until the next try, or None for no more."""
        pause_s = max(self._min_s(call), RETRY_S)
        if reply.kind is Kind.ERROR:
            error = wire.error_of(reply)
            if error.reason in wire.RETRIED or error.reason == wire.LOST:
                return error.retry_after_s or pause_s
        elif wire.how_it_ended(reply) == "released":
            return pause_s
        call.fail(_as_error(reply))  # which changes nothing where the final response is here
        return None

    def _min_s(self, call: RunningCall) -> float:
        """For how long to leave the call alone when its connection is lost."""
        asked_s = 0.0 if call.ticket is None else call.ticket.min_s
        if asked_s > PAUSE_MAX_S and not self._has_warned:
            self._has_warned = True
            log.warning(
                "the server asks for a longer pause before a resume than it is given",
                asked_s=asked_s,
                given_s=PAUSE_MAX_S,
            )
        return min(asked_s, PAUSE_MAX_S)

    # The rest of what a call needs

    def leave(self, call: RunningCall) -> None:
        """Its caller listens no longer: detach where that can be, else let its messages pass."""
        link = self._keeper.link
        if link is None or link.is_over:
            self._calls.remove(call)
        elif call.way is link:
            self._leave_attached(call, link)
        else:
            call.resuming.cancel()
            self._calls.remove(call)
            if call.wants_confirming:
                # Its connection went before it could be confirmed: a cursor does that too.
                assert call.ticket is not None
                link.post(wire.resume(call.ticket, self._keeper.new_id(), call.cursor))

    def _leave_attached(self, call: RunningCall, link: Link) -> None:
        link.post(call.ack())
        if call.resume_id is not None and not call.is_complete:
            link.post(wire.cancelled(call.resume_id))
            call.resuming.cancel()
        elif not call.has_failed:
            return  # an original request cannot be detached: it is forgotten with its last message
        if self._nursery is not None:
            self._nursery.start_soon(self._barrier, call, link)

    async def cancel(self, call: RunningCall) -> None:
        """Tell the server to stop the work, until it has heard it.

        Raises `CannotConnect`.
        """
        while call.is_running:
            link = await self._keeper.connected_for_call()
            if call.way is not link:
                await self._keeper.change()
                continue
            await link.send(wire.cancelled(call.request_id))
            # A plain server may be too busy to answer, and cannot be asked again anyway.
            if not link.hello.has_positions or await link.ask("ping", {}) is not None:
                call.resuming.cancel()
                self._calls.remove(call)
                return

    def asked(self, message: Message, request_id: RequestId) -> None:
        """A request of the server was taken from a call's messages."""
        self._answers.take(message, request_id, self._keeper.link)

    def asked_again(self, request_id: RequestId) -> None:
        """A request of the server, that may have been taken, has come again."""
        self._answers.repeat(request_id, self._keeper.link)

    def want_ack(self, call: RunningCall, *, now: bool) -> None:
        """More was taken of a call: tell the server, where it can be told."""
        link = self._keeper.link
        if link is not None and call.way is link:
            link.want_ack(call, now=now)

    def ended(self, call: RunningCall) -> None:
        """The final response is here: what asked for it may be answered by that alone."""
        call.resuming.cancel()
        self._calls.remove(call)


def _lost() -> CallLost:
    return CallLost("The connection was lost: the call may or may not have run.")


def _as_error(reply: Message) -> ClientError:
    if reply.kind is Kind.ERROR:
        return wire.as_error(wire.error_of(reply))
    match wire.how_it_ended(reply):
        case "superseded":
            return Superseded("Another connection has resumed this stream.")
        case "released":
            return StreamGone("The server does not keep hold of this stream.", "released")
        case _:
            why = "All of this stream was confirmed before: there is nothing left to resume."
            return StreamGone(why, "delivered")

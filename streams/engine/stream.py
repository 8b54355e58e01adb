"""One stream as its handler and the engine hold it: its state, and who waits for that to change."""

import math
from collections.abc import Awaitable, Callable, Container, Sequence
from typing import TYPE_CHECKING, Final

import trio

from streams import messages
from streams.clock import wall
from streams.engine.asking import Answer, Asking
from streams.engine.committer import Committer
from streams.engine.identity import call_digest
from streams.engine.lifecycle import Event, ProgressToken, StreamState
from streams.engine.repeating import diverged
from streams.engine.rerun import Rerun
from streams.engine.session import LEVELS
from streams.errors import Refusal, refusal
from streams.exchange import authenticated
from streams.journal.contract import Ack, Append, Close, Forget, Outcome, Record
from streams.keys import Keyring
from streams.limits import Limits, Overflow
from streams.messages import Message, RequestId, Run
from streams.protocol import extension

if TYPE_CHECKING:
    from streams.engine.delivery import Delivery
    from streams.engine.proofs import Proofs
    from streams.engine.session import Session

# A client with positions confirms "at least every 1,000 messages or 1 s", also what it was sent
# last. This much later nothing is expected any more.
ACK_WAIT_S: Final = 10.0


class Stream:
    """Everything that the handler of one originating request sends."""

    __slots__ = (
        "__weakref__",
        "_changed",
        "_committer",
        "_is_progress_wanted",
        "_keyring",
        "_left_at",
        "_limits",
        "_newest",
        "_offered",
        "_on_settled",
        "_progress_token",
        "_reader",
        "ahead_of_messages",
        "asked",
        "asking",
        "delivery",
        "digest",
        "has_rested",
        "is_anonymous",
        "is_at_rest",
        "is_reachable",
        "is_recorded",
        "mark",
        "overflow",
        "record",
        "request_id",
        "rerun",
        "scope",
        "state",
        "witness",
    )

    def __init__(
        self,
        record: Record,
        limits: Limits,
        committer: Committer,
        keyring: Keyring,
        *,
        answers: dict[RequestId, Answer],
        on_settled: Callable[["Stream"], None],
        overflow: Overflow = "block",
        origin: Message | None = None,
    ) -> None:
        """`origin` is the originating request, where that was parsed already."""
        self.record = record
        self.state = StreamState(record, limits)
        if origin is None:
            origin = messages.parse(record.origin)
        assert isinstance(origin.id, int | str)
        self.request_id = origin.id
        self.is_anonymous = not authenticated(record.principal)
        self.mark = extension.mark_of(origin.params)  # of its idempotency key
        # What the tokens of its pages are bound to: where nobody vouches, they are the authority.
        owner = authenticated(record.principal)
        self.digest = call_digest(origin.params, owner) if self.state.is_paged else b""
        self.asked = 0  # the highest place that a client has asked for what is behind it
        self._progress_token: ProgressToken | None = None
        # By its first request, of which a restarted server knows no more than this text.
        self._is_progress_wanted = b'"progressToken"' in record.origin
        # Lets out what must come first, where the tool gives pages.
        self.ahead_of_messages: Callable[[], Awaitable[None]] | None = None
        self.overflow = overflow
        self.rerun: Rerun | None = None  # where the call is run again when its server has died
        self.delivery: Delivery | None = None
        self.is_reachable = record.is_announced  # whether anybody can come back for it
        self.is_recorded = False  # whether the journal has its record: not announced before
        self.has_rested = False  # the journal would find it, were it not in memory
        self.is_at_rest = False  # which has forgotten this object, and may have another one of it
        self.scope = trio.CancelScope()  # around the handler
        self._limits = limits
        self._committer = committer
        self._keyring = keyring
        self.asking = Asking(self, answers)
        self._on_settled = on_settled
        self._changed: trio.Event | None = None
        # The newest delivery, attached or over: its number, its client, and up to which seq it
        # has come. Only what that client shows of that delivery can move the delivered mark.
        self._newest = 0
        self._reader: Session | None = None
        self._offered = 0
        self._left_at = -math.inf  # when that ended last
        self.witness: Proofs | None = None  # whose signs of life may prove what was written

    @property
    def id(self) -> str:
        """The streamId."""
        return self.record.stream

    @property
    def number(self) -> int:
        """Its place in the order of creation."""
        return self.record.number

    @property
    def deadline(self) -> float | None:
        """When it is due to be given up, in trio's time."""
        return self.state.deadline

    @property
    def names(self) -> tuple[bytes, ...]:
        """What it is found by: what its tokens and its idempotency key lead to."""
        names = self._keyring.names(self.id)
        return tuple(names if self.mark is None else [*names, bytes.fromhex(self.mark.name)])

    @property
    def is_open_to_key(self) -> bool:
        """Whether its idempotency key leads to it from another connection or session too."""
        return self.mark is not None and not self.mark.is_own

    # For the handler

    async def recorded(self) -> None:
        """Wait until the journal has its record: no crash can make it unknown any more."""
        while not self.is_recorded:
            await self._committer.commit_done()

    async def send(self, line: bytes, *, is_droppable: bool = False) -> None:
        """Send a notification: returns when it is accepted in order, waits while there is no room.

        `is_droppable` is one that may be sent at one time and not at another. Raises `Refusal`
        where it is too large, or there is no room and the stream fails of that, or of another one
        that was sent in its place before the server died.
        """
        await self._let_out_ahead_of(line)
        if self.rerun is None or not await self.rerun.swallow(line, is_droppable=is_droppable):
            await self._offer(lambda: self.state.add(line))

    async def send_page(self, line: bytes) -> None:
        """Send a response that is not the last one. As for `send`."""
        self._check_size(line)
        await self._offer(lambda: self.state.add(line, is_page=True))

    async def send_progress(self, token: ProgressToken, line: bytes) -> None:
        """Send progress; where there is no room, only the latest of its token is kept."""
        await self._let_out_ahead_of(line)
        if self.rerun is not None and await self.rerun.swallow(line, is_droppable=True):
            return
        size = self.state.batch_bytes
        if self.state.add_progress(token, line):
            await self._accepted(size)
        else:
            await trio.lowlevel.checkpoint()

    async def send_request(self, request_id: RequestId, line: bytes) -> None:
        """Send a request to the client. As for `send`."""
        await self._let_out_ahead_of(line)
        is_forced = self.overflow == "fail"
        await self._offer(lambda: self.state.add_request(request_id, line, is_forced=is_forced))

    @property
    def progress_token(self) -> ProgressToken | None:
        """Under which token progress is reported, if at all.

        MCP: "Progress notifications MUST only reference tokens that: were provided in an active
        request": a page that is made before it is asked for has none.
        """
        is_awaited = not self.state.is_paged or self.state.answer_after(self.asked) is None
        return self._progress_token if is_awaited else None

    @progress_token.setter
    def progress_token(self, token: ProgressToken | None) -> None:
        self._progress_token = token

    @property
    def is_progress_wanted(self) -> bool:
        """Whether a call has asked for progress, and some of it may be among the messages."""
        return self._is_progress_wanted or self._progress_token is not None

    @property
    def is_repeating(self) -> bool:
        """Whether the handler still sends what was sent before its server died."""
        return self.rerun is not None and not self.rerun.repetition.is_over

    @property
    def is_suspended(self) -> bool:
        """Whether its call goes on when the server is back."""
        return self.rerun is not None and self.rerun.is_suspended

    @property
    def level(self) -> str:
        """The least severe log messages that its client wants."""
        return LEVELS[0] if self._reader is None else self._reader.level

    async def flush(self) -> None:
        """Wait until everything sent so far is durable."""
        seq = self.state.last
        while self.state.durable < min(seq, self.state.last):  # closing it takes `last` back
            await self._committer.commit_done()

    async def written(self, seq: int) -> None:
        """Wait until everything up to `seq` was written, or nobody is attached."""
        while self.delivery is not None and self.delivery.written < seq:
            await self.change()

    async def _offer(self, add: Callable[[], bool]) -> None:
        await trio.lowlevel.checkpoint_if_cancelled()
        size = self.state.batch_bytes
        while not add():
            if self.overflow == "fail":
                raise self._fail()
            await self.change()
            size = self.state.batch_bytes
        await self._accepted(size)

    async def _accepted(self, size_before: int) -> None:
        self._mark(size_before)
        committer = self._committer
        while self.state.batch_bytes >= committer.stream_bytes_max or committer.is_full(
            is_anonymous=self.is_anonymous
        ):
            await committer.commit_done()

    def _mark(self, size_before: int) -> None:
        self._committer.mark(self, self.state.batch_bytes - size_before)

    async def _let_out_ahead_of(self, line: bytes) -> None:
        self._check_size(line)
        if self.ahead_of_messages is not None:
            await self.ahead_of_messages()

    def _check_size(self, line: bytes) -> None:
        if len(line) > self._limits.message_bytes_max:
            raise refusal("too_large", limit=self._limits.message_bytes_max)

    def _fail(self) -> Exception:
        failure = refusal("too_slow", limit=self._limits.unsent_entries_max)
        self.fail(failure)
        return failure

    # For the engine

    def finish(self, line: bytes, *, is_error: bool) -> None:
        """Send the final response, a result; `is_error` tells whether it says `isError`."""
        if len(line) > self._limits.message_bytes_max:
            self.fail(refusal("too_large", limit=self._limits.message_bytes_max))
        elif self.rerun is not None and self.rerun.is_different(is_error=is_error):
            self.fail(diverged("it is done, and has not sent all of that again"))
        else:
            self._end(line, Event.END, is_error=is_error)

    def fail(self, refused: Refusal) -> None:
        """Send an error as the final response."""
        self._end(messages.error(self.request_id, refused), Event.FAIL, is_error=True)

    def _end(self, line: bytes, event: Event, *, is_error: bool) -> None:
        size = self.state.batch_bytes
        self.state.end(line, event, is_error=is_error, at=wall())
        self._mark(size)

    @property
    def can_wait(self) -> bool:
        """Whether there is more to come, for which there must be room first."""
        is_saved = self.rerun is not None and self.rerun.is_saving
        return self.state.outcome is Outcome.LIVE and not is_saved

    def take(self) -> Append | None:
        """What is new, for the journal."""
        return self.state.take(self.record.fence)

    def committed(self, seq: int) -> None:
        """The record and everything up to `seq` are durable: it may be delivered."""
        self.is_recorded = True
        self.state.committed(seq)
        if self.delivery is not None:
            self.delivery.connection.wake(self.delivery)

    def wrote(self, runs: Sequence[Run]) -> None:
        """The runs were written to the attached connection."""
        self._offered = runs[-1].last
        news = [self.state.wrote(run) for run in runs]
        if any(news):
            self._delivered()
        self.make_use_of_room()

    def close(self, event: Event) -> Close:
        """Abandon or cancel, for the journal."""
        return self.state.close(event, self.record.fence, at=wall())

    def forget(self) -> Forget:
        """Keep nothing, for the journal; whatever the handler says after that goes nowhere."""
        if not self.state.is_tombstone:
            self.close(Event.ABANDON if self.state.is_ended else Event.CANCEL)
        return Forget(self.id, self.record.fence)

    def deliver(self, seq: int) -> None:
        """The client says itself that it has everything up to `seq`.

        A page that has arrived may be asked for again, so nothing is let go of a stream with pages.
        """
        if not self.state.is_paged:
            self.turn(seq)

    def turn(self, seq: int) -> None:
        """Let go of everything up to `seq`, pages too, as far as the attached delivery has come.

        Everything that moves the delivered mark goes through here, or through `wrote`.
        """
        if not self.is_at_rest and self.state.deliver(seq):
            self._delivered()
            self.make_use_of_room()

    @property
    def pages(self) -> Container[int]:
        """The seqs behind which a page may be asked for; none once the stream is given up."""
        state = self.state
        if state.is_tombstone or not state.is_paged:
            return ()
        return (state.delivered, *state.pages) if state.delivered else state.pages

    def tell_page(self, seq: int) -> str:
        """The token of the page behind `seq`, for a client that can come back with it."""
        self.is_reachable = True
        return self._keyring.page_token(self.id, seq, self.digest)

    def confirm(self, session: "Session", seq: int) -> bool:
        """Take a client's word, an ack or an answer, that it has everything up to `seq`.

        False where the newest delivery is another client's, or has not come so far.
        """
        if session is not self._reader or seq > self._offered:
            return False
        self.deliver(seq)
        return True

    def is_newest(self, delivery_number: int) -> bool:
        """Whether no later delivery has begun since this one."""
        return delivery_number == self._newest

    def prove(self, delivery_number: int, seq: int) -> None:
        """A sign of life shows that a delivery was read up to `seq`: the newest one counts."""
        if self.is_newest(delivery_number):
            self.deliver(seq)

    def may_be_confirmed(self, now: float) -> bool:
        """Whether its last client may still say, or show, that it has more of it."""
        if self.witness is not None and self.witness.may_prove(self):
            return True
        is_asked = self.state.client_confirms and self.state.delivered < self._offered
        return is_asked and now - self._left_at < ACK_WAIT_S

    def attach(self, delivery: "Delivery") -> None:
        """From now on the delivery follows this stream, or it shows life again."""
        session = delivery.connection.session
        if delivery is not self.delivery:
            self._newest += 1
            delivery.number = self._newest
            self._reader, self._offered, self.witness = session, delivery.position, None
        self.delivery = delivery
        if delivery.start > self.asked:
            self.asked = delivery.start
            self.notify()
        confirms = session.settings.positions or self.state.is_paged
        self.state.attach(delivery.position, confirms=confirms)

    def detach(self, delivery: "Delivery") -> None:
        """The delivery is over; nothing changes where another one has taken its place."""
        if self.delivery is delivery:
            self.delivery = None
            self._leave(self.state.detach)
            self.notify()

    def displace(self) -> "Delivery | None":
        """Take away the attached delivery, which is returned, for another that is attached next.

        The stream is not left in between: one that only its connection leads to would end there.
        """
        displaced, self.delivery = self.delivery, None
        if displaced is not None:
            self.state.detach(trio.current_time())
            self.notify()
        return displaced

    def fall_silent(self, delivery: "Delivery") -> None:
        """The delivery's peer shows no life: that counts as detached, until it does again."""
        if self.delivery is delivery and self.state.idle_since is None:
            self._leave(self.state.fall_silent)

    def _leave(self, leave: Callable[[float], None]) -> None:
        self._left_at = trio.current_time()
        leave(self._left_at)
        self._on_settled(self)

    async def change(self) -> None:
        """Wait for something to happen to the stream, perhaps nothing of interest."""
        if self._changed is None:
            self._changed = trio.Event()
        await self._changed.wait()

    def notify(self) -> None:
        """Wake whoever waits for a change."""
        if self._changed is not None:
            self._changed.set()
            self._changed = None

    def _delivered(self) -> None:
        self._committer.ack(Ack(self.id, self.record.fence, self.state.delivered))
        if self.state.is_drained:
            self._on_settled(self)

    def make_use_of_room(self, *, is_forced: bool = False) -> None:
        """Send the progress that was held back, if there is room now or it must be sent."""
        size = self.state.batch_bytes
        if self.state.release_held(is_forced=is_forced):
            self._mark(size)
        self.notify()

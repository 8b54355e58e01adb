"""A stream that another replica owns, for the clients that are attached here.

It is a `Stream` without a handler: its messages come from the journal, and its marks from the
record that the owner changes. All that its client does is posted to the owner
(`streams.engine.posts`), which decides.

The owner may die before what it was told is durable, and a store that goes back loses posts. So the
next owner, or the same one, is told again: see `tell_again`.
"""

from collections.abc import Sequence
from typing import Final, Protocol

import trio
from msgspec.structs import replace

from streams import messages
from streams.engine import posts
from streams.engine.committer import Committer
from streams.engine.lifecycle import LIVE, ProgressToken, Question
from streams.engine.posts import Attach, ToOwner
from streams.engine.stream import Answer, Follower, Stream, StreamEvents
from streams.errors import Refusal, refusal
from streams.journal.records import Record
from streams.keys import Keyring
from streams.limits import Limits
from streams.messages import Kind, Message, RequestId, Run

ANSWERS_MAX: Final = 16  # that are kept to be posted again; the oldest go first


class Home(Protocol):
    """The replica that a followed stream is at."""

    def post(self, stream: str, post: ToOwner) -> None:
        """Send this to the stream's owner, after all that was sent before."""

    def introduce(self, stream: "FollowedStream") -> None:
        """Call `stream.introduced` once the owner has heard of all that it was told until now."""

    def moved(self, stream: "FollowedStream") -> None:
        """Call `stream.tell_position` soon."""

    def left(self, stream: "FollowedStream") -> None:
        """No delivery is attached to the stream any more."""


class FollowedStream(Stream):
    """One stream of another replica, which clients are attached to here."""

    __slots__ = (
        "_asked_up_to",
        "_home",
        "_is_taken",
        "_numbered",
        "_stopped",
        "_surely_told",
        "_token",
        "_told_written",
        "_unheard",
        "_unstored",
        "has_client",
        "is_refreshing",
        "owner",
        "refreshed_at",
        "seen",
        "seen_at",
    )

    def __init__(
        self,
        record: Record,
        limits: Limits,
        committer: Committer,
        keyring: Keyring,
        home: Home,
        *,
        answers: dict[RequestId, Answer],
        events: StreamEvents,
    ) -> None:
        super().__init__(
            record,
            limits,
            committer,
            keyring,
            answers=answers,
            on_stored=_nothing,
            on_settled=_nothing,
            events=events,
        )
        self.owner = record.owner
        self.has_client = False  # whether the owner, when it was asked last, had a client attached
        self.seen_at = trio.current_time()  # when a client was attached to it last
        self.seen: posts.Seen | None = None  # the newest view of it
        self.refreshed_at = self.seen_at  # when its record was read last
        self.is_refreshing = False  # whether its record will be read again
        self.is_recorded = True
        self.state.idle_since = trio.current_time()
        self._home = home
        self._asked_up_to = record.last_request  # questions up to this seq are known by the view
        self._numbered = 0  # what the view says of that
        self._unheard = 0  # deliveries of which the owner may not have heard yet
        self._is_taken = False  # at another replica
        self._told_written = 0  # up to where it was written, as the owner was told last
        # The position and that, as the owner was told by a post that the store keeps.
        self._surely_told = (0, 0)
        # The client's answers, with the seqs of the requests, and its cancel, which the record does
        # not tell yet.
        self._unstored: list[tuple[int, posts.Answered]] = []
        self._stopped: posts.Stopped | None = None
        self._token: posts.Token | None = None  # as the owner was told it last

    # From the owner

    def follow(self, record: Record) -> None:
        """Take over the record as the owner has changed it, and wake the delivery."""
        self.record, self.owner = record, record.owner
        self.state.follow(record)
        self._forget_stored()
        if self.state.is_tombstone:
            self.forget_questions()
            if self.delivery is not None:
                self.delivery.fail(refusal(record.outcome.value))
        elif self.delivery is not None:
            self.delivery.wake()

    def _forget_stored(self) -> None:
        """Forget what no owner needs to be told again."""
        restart = self.record.restart
        if self.state.outcome is not LIVE:
            self._unstored, self._stopped = [], None
        elif restart is not None:
            known = restart.answers
            self._unstored = [
                (seq, each)
                for seq, each in self._unstored
                if seq > restart.seq and seq not in known
            ]

    @property
    def is_waiting(self) -> bool:
        """Whether the next owner may have to be told what a client has told this one."""
        is_told = self._unstored or self._stopped is not None
        return self.record.restart is not None and bool(is_told)

    def view(self, view: posts.View, sender: str) -> None:
        """Take over what the owner, the replica `sender`, has told."""
        if self.seen is not None and self.seen.owner == sender and view.at < self.seen.at:
            return  # a newer one has overtaken it
        state = self.state
        self.seen = posts.Seen(sender, view.at)
        state.last = state.durable = max(state.durable, view.durable)
        self._numbered = view.numbered
        if view.outcome.is_tombstone:  # its record may not say so yet
            state.outcome = view.outcome
        state.learn(view.delivered, view.handed)
        self.has_client = view.idle_s is None
        if self.delivery is None:
            # A client may have confirmed more here, which did not count: it was displaced.
            state.delivered = max(view.delivered, self.record.acked)
        if view.idle_s is not None and self.delivery is None:
            state.idle_since = trio.current_time() - view.idle_s
        self.asked = max(self.asked, view.asked)
        self.is_reachable, self.is_findable = view.is_reachable, view.is_findable
        self.is_left, self.stays, self._is_taken = view.is_left, view.stays, view.is_taken
        self.latest_progress = view.latest_progress
        for session, response, why in view.ended_responses:
            super().end_response(session, response, why)
        known = {each: Question(seq, line) for each, (seq, line) in view.questions.items()}
        for request_id in [each for each in state.questions if each not in known]:
            if state.questions[request_id].seq <= self._asked_up_to:
                self._answers.pop(request_id, None)
                del state.questions[request_id]
        for request_id, question in known.items():
            self._open(request_id, question)
        self._asked_up_to = max([self._asked_up_to, *(each.seq for each in known.values())])

    def ended(self, post: posts.Ended) -> None:
        """The owner has ended a delivery of this stream."""
        delivery = self.delivery
        if post.superseded_by is not None and post.number == self.newest:
            self.newest += 1  # the client of this one moves the delivered mark no more
            self._reader = None
        if delivery is None or delivery.number != post.number:
            return
        if self._stopped is not None and post.superseded_by is None and post.answer is None:
            # The owner has found that this client may cancel the call.
            self._stopped = replace(self._stopped, number=0)
        if post.superseded_by is not None:
            delivery.give_way(post.superseded_by)
        elif post.error is not None:
            delivery.fail(Refusal(*post.error))
        elif post.answer is not None:
            delivery.answer(post.answer)
        elif post.is_released:
            delivery.let_go()
        else:
            delivery.drop()

    def tell_questions(self) -> None:
        """Its owner tells of them."""

    def _open(self, request_id: RequestId, question: Question) -> None:
        if request_id not in self.state.questions:
            self.state.questions[request_id] = question
            self._answers[request_id] = Answer(self)

    def forget_questions(self) -> None:
        for request_id in self.state.questions:
            self._answers.pop(request_id, None)
        self.state.questions.clear()

    # To the owner

    def _post(self, post: ToOwner) -> None:
        """Tell the owner, which must know by then how far the client is."""
        self.report()
        self._home.post(self.id, post)

    def attach(self, delivery: Follower) -> None:
        """See `Stream.attach`."""
        is_new = delivery is not self.delivery
        super().attach(delivery)
        self._tell_of(delivery, is_new=is_new)
        if is_new:
            self._unheard += 1
            self._home.introduce(self)

    @property
    def numbered(self) -> int:
        """See `Stream.numbered`. A store that was failed over to may lack what is numbered."""
        return max(self.state.last, self._numbered)

    @property
    def known_last(self) -> int:
        """See `Stream.known_last`. The owner may have appended more since the record was read."""
        return self.record.last

    @property
    def is_introduced(self) -> bool:
        """See `Stream.is_introduced`.

        Else a client could have all that it wanted, and be back at another replica, before the
        owner hears of the delivery here, which would displace the newer one.
        """
        return not self._unheard

    def introduced(self) -> None:
        """The owner has heard of a delivery that is attached here, or is silent."""
        self._unheard -= 1
        if self.delivery is not None:
            self.delivery.wake()

    def tell_again(self) -> None:
        """The owner is another one, or the store has lost posts: tell how things are here."""
        if self.delivery is not None:
            self._tell_of(self.delivery, is_new=True, is_again=True)
            self._post(posts.Delivered(self.state.delivered, self.newest))
        if self.state.idle_since is not None:
            self._post(posts.Left(self.newest, is_silent=self.delivery is not None))
        self.tell_wishes_again()

    def tell_wishes_again(self) -> None:
        """Tell once more what the client has said: its progress token, its answers, its cancel."""
        if self.delivery is not None and self._token is not None:
            self._post(self._token)
        for _, answered in self._unstored:
            self._post(answered)
        if self._stopped is not None:
            self._post(self._stopped)

    def _tell_of(self, delivery: Follower, *, is_new: bool, is_again: bool = False) -> None:
        reader = delivery.reader
        attach = Attach(
            number=delivery.number,
            taker=delivery.taker,
            start=delivery.start,
            position=delivery.position,
            reply_id=delivery.reply_id,
            level=reader.level,
            confirms=reader.confirms,
            is_new=is_new,
            at=delivery.attached_at,
            is_again=is_again,
            only_waits=delivery.only_waits,
            wait_s=delivery.wait_s,
            waited_s=delivery.waited_s,
            seen=self.seen,
        )
        self._home.post(self.id, attach)
        self._told_written = delivery.position - 1  # see `RemoteFollower`
        self._surely_told = delivery.position, self._told_written

    def detach(self, delivery: Follower) -> None:
        """See `Stream.detach`."""
        if self.delivery is delivery:
            self.report()
            super().detach(delivery)
            self._post(posts.Left(delivery.number))
            self._home.left(self)

    def read_differently(self, delivery: Follower) -> None:
        """See `Stream.read_differently`."""
        if self.delivery is delivery:
            self._tell_of(delivery, is_new=False)

    def fall_silent(self, delivery: Follower) -> None:
        """See `Stream.fall_silent`."""
        if self.delivery is delivery and self.state.idle_since is None:
            super().fall_silent(delivery)
            self._post(posts.Left(delivery.number, is_silent=True))

    def hand(self, runs: Sequence[Run], last: int) -> None:
        """See `Stream.hand`."""
        self._find_questions(runs)
        super().hand(runs, last)

    def _find_questions(self, runs: Sequence[Run]) -> None:
        """Open the requests among these lines, whose answers may come to this replica."""
        last_request = self.record.last_request
        if last_request <= self._asked_up_to:
            return
        for run in runs:
            if run.last <= self._asked_up_to or run.seq > last_request:
                continue
            news = run.after(self._asked_up_to)
            for seq, line in enumerate(news.lines, news.seq):
                message = messages.parse(line)
                if message.kind is Kind.REQUEST:
                    assert isinstance(message.id, int | str)
                    self._open(message.id, Question(seq, line))
        self._asked_up_to = max(self._asked_up_to, runs[-1].last)

    def notify(self) -> None:
        """See `Stream.notify`. The position has changed, or a write is out: tell the owner soon."""
        super().notify()
        self._home.moved(self)

    def tell_position(self) -> None:
        """Tell the owner how far the delivery is, once that is written, unless it was told."""
        delivery = self.delivery
        if delivery is not None and delivery.position <= delivery.written != self._told_written:
            self._tell_position(delivery, is_kept=False)

    def report(self) -> None:
        """Tell the owner how far the delivery is, unless it surely knows."""
        delivery = self.delivery
        if delivery is not None and (delivery.position, delivery.written) != self._surely_told:
            self._tell_position(delivery, is_kept=True)

    def _tell_position(self, delivery: Follower, *, is_kept: bool) -> None:
        position, self._told_written = delivery.position, delivery.written
        if is_kept:
            self._surely_told = position, delivery.written
        self._home.post(self.id, posts.Moved(delivery.number, position, delivery.written, is_kept))

    def _delivered(self, by: int) -> None:
        self._post(posts.Delivered(self.state.delivered, by))

    def answered(self, answer: Answer, seq: int, message: Message) -> None:
        """See `Stream.answered`."""
        self._post_answer(seq, posts.Answered(messages.answer(message)))

    def pass_answer(self, session: str, seq: int, message: Message) -> bool:
        """See `Stream.pass_answer`."""
        self._post_answer(seq, posts.Answered(messages.answer(message), session))
        return True

    def _post_answer(self, seq: int, answered: posts.Answered) -> None:
        self._post(answered)
        self._unstored = [*self._unstored, (seq, answered)][-ANSWERS_MAX:]

    def end_response(self, session: str, response: str, why: str) -> None:
        """See `Stream.end_response`."""
        super().end_response(session, response, why)
        self._post(posts.ResponseEnded(session, response, why))

    def leave(self) -> None:
        """See `Stream.leave`."""
        super().leave()
        self._post(posts.Leave())

    def stay(self) -> None:
        """See `Stream.stay`."""
        super().stay()
        if self.delivery is not None:
            self._tell_of(self.delivery, is_new=False)

    def touch(self) -> None:
        """See `Stream.touch`."""
        super().touch()
        self._post(posts.Touched())

    def await_again(self, short_name: str) -> None:
        """See `Stream.await_again`."""
        super().await_again(short_name)
        self._post(posts.Awaited(short_name))

    @property
    def is_taken(self) -> bool:
        """See `Stream.is_taken`."""
        return self._is_taken if self.delivery is None else super().is_taken

    def tell_page(self, seq: int) -> str:
        """See `Stream.tell_page`."""
        self._post(posts.Told(seq))
        return super().tell_page(seq)

    def take_progress_token(self, token: ProgressToken | None) -> None:
        """See `Stream.take_progress_token`."""
        super().take_progress_token(token)
        self._token = posts.Token(token)
        self._post(self._token)

    def stop(self, *, is_dropped: bool = False, is_told: bool = False) -> None:
        """The client wants the call no more; with `is_told` an operator does not."""
        number = 0 if self.delivery is None or is_told else self.delivery.number
        self._stopped = posts.Stopped(is_dropped, number, is_told)
        self._post(self._stopped)

    async def flush(self) -> None:
        """Nothing waits here: what the owner has sent is durable before it is known here."""
        await trio.lowlevel.checkpoint()


def _nothing(_: Stream) -> None:
    """A followed stream has no deadline here, and nothing to store."""

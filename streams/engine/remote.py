"""A delivery at another replica, of a stream that is owned here."""

from collections.abc import Callable

import trio

from streams.engine import posts
from streams.engine.posts import Taker, ToReplica
from streams.engine.stream import Stream
from streams.errors import Refusal

Tell = Callable[[str, str, ToReplica], None]  # to a replica, about a stream


class RemoteReader:
    """The client of a delivery at another replica."""

    def __init__(self, replica: str, attach: posts.Attach) -> None:
        self.name = attach.taker.session
        self.level = attach.level
        self.confirms = attach.confirms
        self.place = replica, attach.number  # where its delivery is


class RemoteFollower:
    """A delivery at another replica: the `Follower` of a stream that is owned here."""

    def __init__(
        self,
        stream: Stream,
        replica: str,
        attach: posts.Attach,
        asked_at: float | None,
        tell: Tell,
    ) -> None:
        self.number = 0
        self.asked_at = asked_at
        self.attached_at = attach.at
        self.waited_s = attach.waited_s
        self.is_again = attach.is_again
        self.replica = replica
        self.start = attach.start
        self.position = attach.position
        self.written = attach.position - 1
        self.reply_id = attach.reply_id
        self.taker = attach.taker
        self.only_waits = attach.only_waits
        self.wait_s = attach.wait_s
        self.number_there = attach.number
        self.reader = RemoteReader(replica, attach)
        self._stream = stream
        self._tell = tell

    def wake(self) -> None:
        """The replica hears of it from the journal."""

    def give_way(self, by: Taker) -> None:
        """See `Follower.give_way`."""
        self._end(posts.Ended(self.number_there, superseded_by=by))

    def hang_up(self) -> None:
        """See `Follower.hang_up`: the replica tells its client as soon as it knows the owner."""

    def drop(self) -> None:
        """See `Follower.drop`."""
        self._end(posts.Ended(self.number_there))

    def answer(self, line: bytes) -> None:
        """See `Follower.answer`."""
        self._end(posts.Ended(self.number_there, answer=line))

    def fail(self, refused: Refusal) -> None:
        """See `Follower.fail`."""
        self._end(posts.Ended(self.number_there, error=posts.error_of(refused)))

    def let_go(self) -> bool:
        """See `Follower.let_go`. The other replica alone knows whether its client can resume."""
        self._tell(self.replica, self._stream.id, posts.Ended(self.number_there, is_released=True))
        return True

    def _end(self, post: posts.Ended) -> None:
        self._tell(self.replica, self._stream.id, post)
        self._stream.detach(self)


def follower_at(stream: Stream, replica: str, number: int) -> RemoteFollower | None:
    """The attached delivery, if it is the one with this number at another replica."""
    follower = stream.delivery
    if isinstance(follower, RemoteFollower) and follower.reader.place == (replica, number):
        return follower
    return None


def moved(stream: Stream, follower: RemoteFollower, post: posts.Moved | posts.Left) -> None:
    """The delivery at another replica has come further, or is over."""
    if isinstance(post, posts.Moved):
        # An older one may come later.
        follower.position = max(follower.position, post.position)
        follower.written = max(follower.written, post.written)
        stream.hand_elsewhere(follower.position)
        stream.notify()
    elif post.is_silent:
        stream.fall_silent(follower)
    else:
        stream.detach(follower)


def view_of(stream: Stream, request: int) -> posts.View:
    """The stream as it is now, for the replica that has asked by this request."""
    state = stream.state
    idle_s = None if state.idle_since is None else trio.current_time() - state.idle_since
    questions = {
        request_id: (question.seq, question.line)
        for request_id, question in state.questions.items()
        if isinstance(request_id, str) and question.seq <= state.durable
    }
    return posts.View(
        request=request,
        at=trio.current_time(),
        delivered=state.delivered,
        handed=state.handed,
        durable=state.durable,
        numbered=stream.numbered,
        outcome=state.outcome,
        idle_s=idle_s,
        asked=stream.asked,
        is_reachable=stream.is_reachable,
        is_findable=stream.is_findable,
        is_left=stream.is_left,
        stays=stream.stays,
        latest_progress=stream.latest_progress,
        questions=questions,
        is_taken=stream.is_taken,
        ended_responses=[(*of, why) for of, why in (stream.ended_responses or {}).items()],
    )

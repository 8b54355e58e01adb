"""What the log says: one row a commit, with what that commit did to streams that were there.

Tables would have to be touched in a place for each stream; a row is written in one. It is read only
by who opens the file after a crash, and names streams by the ids of their rows.
"""

from typing import Final

import msgspec

from streams.journal.contract import (
    Ack,
    Answered,
    Append,
    Checkpoint,
    OfRestart,
    Outcome,
    Restarted,
)
from streams.messages import Run


class LoggedAppend(msgspec.Struct, frozen=True, array_like=True, tag=0, gc=False):
    """Lines of a stream that goes on."""

    id: int
    seq: int
    count: int
    body: bytes
    last_request: int
    last_error: int

    def change(self, stream: str, fence: int) -> Append:
        run = Run(self.seq, self.count, self.body)
        return Append(stream, fence, run, self.last_request, self.last_error)


class LoggedMarks(msgspec.Struct, frozen=True, array_like=True, tag=1, gc=False):
    """Lines with pages or with the final response among them."""

    id: int
    seq: int
    count: int
    body: bytes
    last_request: int
    last_error: int
    outcome: Outcome
    ended_at: float
    pages: tuple[int, ...]

    def change(self, stream: str, fence: int) -> Append:
        return Append(
            stream,
            fence,
            Run(self.seq, self.count, self.body),
            self.last_request,
            self.last_error,
            self.outcome,
            self.ended_at,
            self.pages,
        )


class LoggedAck(msgspec.Struct, frozen=True, array_like=True, tag=2, gc=False):
    id: int
    acked: int

    def change(self, stream: str, fence: int) -> Ack:
        return Ack(stream, fence, self.acked)


class LoggedForget(msgspec.Struct, frozen=True, array_like=True, tag=3, gc=False):
    """What the log says of this id up to here was of a stream of which nothing is kept."""

    id: int


class LoggedCheckpoint(msgspec.Struct, frozen=True, array_like=True, tag=4, gc=False):
    id: int
    seq: int
    state: bytes

    def change(self, stream: str, fence: int) -> Checkpoint:
        return Checkpoint(stream, fence, self.seq, self.state)


class LoggedAnswer(msgspec.Struct, frozen=True, array_like=True, tag=5, gc=False):
    id: int
    seq: int
    line: bytes

    def change(self, stream: str, fence: int) -> Answered:
        return Answered(stream, fence, self.seq, self.line)


class LoggedRestart(msgspec.Struct, frozen=True, array_like=True, tag=6, gc=False):
    id: int
    attempts: int
    reached: int

    def change(self, stream: str, fence: int) -> Restarted:
        return Restarted(stream, fence, self.attempts, self.reached)


_LIVE: Final = Outcome.LIVE
LoggedOfRestart = LoggedCheckpoint | LoggedAnswer | LoggedRestart
LoggedChange = LoggedAppend | LoggedMarks | LoggedAck | LoggedOfRestart
Logged = LoggedChange | LoggedForget

encode: Final = msgspec.msgpack.Encoder().encode
decode: Final = msgspec.msgpack.Decoder(list[Logged]).decode


def logged_append(id: int, change: Append) -> LoggedAppend | LoggedMarks:
    """What a row says of lines added to the stream with this id."""
    run = change.run
    if change.outcome is _LIVE and not change.pages and not change.ended_at:
        return LoggedAppend(
            id, run.seq, run.count, run.body, change.last_request, change.last_error
        )
    return LoggedMarks(
        id,
        run.seq,
        run.count,
        run.body,
        change.last_request,
        change.last_error,
        change.outcome,
        change.ended_at,
        change.pages,
    )


def logged_restart(id: int, change: OfRestart) -> LoggedOfRestart:
    """What a row says of a call that may be run again."""
    match change:
        case Checkpoint():
            return LoggedCheckpoint(id, change.seq, change.state)
        case Answered():
            return LoggedAnswer(id, change.seq, change.line)
        case Restarted():
            return LoggedRestart(id, change.attempts, change.reached)

"""A call that is run again when its server has died, and how often that is tried."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import trio

from streams import messages
from streams.clock import backoff_s
from streams.engine.asking import Answer
from streams.engine.committer import Committer
from streams.engine.repeating import Repetition
from streams.errors import Ended, Refusal, refusal
from streams.journal.contract import Answered, Checkpoint, Journal, Outcome, Restart, Restarted
from streams.limits import Limits
from streams.messages import Message, RequestId

if TYPE_CHECKING:
    from streams.engine.stream import Stream

# The first time it is run again at once, then after this, doubled each time up to the maximum: what
# ends the whole server shall not do so again and again without a pause.
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 60.0


class Rerun:
    """What the stream of such a call has besides: where it begins, and what must come again."""

    def __init__(
        self, stream: "Stream", journal: Journal, committer: Committer, limits: Limits
    ) -> None:
        record = stream.record
        assert record.restart is not None
        self._stream = stream
        self._record = record
        self._restart: Restart = record.restart
        self._committer = committer
        self._limits = limits
        self._answers: dict[RequestId, Answer] = {}  # to what was asked since the last checkpoint
        self._saved = 0  # up to where a checkpoint stands for what was sent, durable or about to be
        self.is_suspended = False
        self.repetition = Repetition(journal, record.stream, self._restart.seq, record.last)

    @property
    def state(self) -> bytes | None:
        """That of the last checkpoint before the server died, as JSON; None where there is none."""
        return self._restart.state

    @property
    def is_saving(self) -> bool:
        """Whether a checkpoint is on its way, with which the lines before it must go."""
        return self._stream.state.durable < self._saved

    def is_different(self, *, is_error: bool) -> bool:
        """Whether it ends before it has sent all of what it had sent.

        An error may well come earlier now, unless messages were taken to have been dropped before.
        """
        return not self.repetition.is_over and (self.repetition.has_dropped or not is_error)

    async def recall(self, open_answers: dict[RequestId, Answer]) -> None:
        """Open the questions again that have no answer: it may come before the tool asks again."""
        record, restart = self._record, self._restart
        if record.last_request <= restart.seq:
            return
        for request_id, question in (await self.repetition.questions()).items():
            answer = self._answers[request_id] = Answer(self._stream)
            if question.seq in restart.answers:
                answer.give(messages.parse(restart.answers[question.seq]))
            else:
                open_answers[request_id] = answer
                self._stream.state.questions[request_id] = question

    async def swallow(self, line: bytes, *, is_droppable: bool) -> bool:
        """Whether a message needs no sending, as `Repetition.swallow` says."""
        with self._ended_by_difference():
            return await self.repetition.swallow(line, is_droppable=is_droppable)

    async def asked(self, method: str, params: Any) -> tuple[RequestId, Answer] | None:
        """The id of a request that was sent before, and the answer, which may yet have to come."""
        with self._ended_by_difference():
            request_id = await self.repetition.asked(method, params)
        return None if request_id is None else (request_id, self._answers[request_id])

    @contextmanager
    def _ended_by_difference(self) -> Iterator[None]:
        try:
            yield
        except Refusal as difference:
            if not self._stream.state.is_ended:
                self._stream.fail(difference)
            raise

    async def begin(self) -> None:
        """Wait until it is time to run the call again, and note that.

        Raises `Refusal` where it got no further too many times.
        """
        restart, record, attempts_max = self._restart, self._record, self._limits.restarts_max
        attempts = restart.attempts + 1 if record.last == restart.reached else 1
        if attempts > attempts_max:
            raise _given_up(attempts_max)
        if attempts > 1:
            await trio.sleep(backoff_s(BACKOFF_FIRST_S, attempts - 2, BACKOFF_MAX_S))
        # Behind the pause: a server that dies in it has not died of this call.
        await self._committer.settled(Restarted(record.stream, record.fence, attempts, record.last))

    def suspend(self) -> None:
        """The server ends in good order, which is no attempt that has failed."""
        self.is_suspended = True
        self._committer.add(Restarted(self._record.stream, self._record.fence, 0, 0))

    async def checkpoint(self, state: bytes) -> None:
        """Begin here, with this state in JSON, when the call is run again; returns when that is
        durable. Raises `ValueError` where the state is too long.
        """
        limit = self._limits.checkpoint_bytes_max
        if len(state) > limit:
            raise ValueError(f"a checkpoint of {len(state)} bytes, of which there may be {limit}")
        stream, record = self._stream, self._record
        if stream.state.outcome is not Outcome.LIVE:
            raise Ended(f"a checkpoint: the stream is {stream.state.outcome.value} already")
        stream.make_use_of_room(is_forced=True)  # progress from before it is not sent behind it
        # What is yet to come again is behind it.
        seq = stream.state.last if self.repetition.is_over else self.repetition.position
        self._saved = seq
        await self._committer.settled(Checkpoint(record.stream, record.fence, seq, state))

    def keep(self, answer: Answer, seq: int, message: Message) -> None:
        """Hand an answer over as soon as it is durable, for nobody gives it twice."""
        record, line = self._record, messages.answer(message)
        self._committer.when_settled(
            lambda: answer.give(message), Answered(record.stream, record.fence, seq, line)
        )


def _given_up(attempts: int) -> Refusal:
    return refusal("interrupted", attempts=attempts).saying(
        f"The server stopped {attempts + 1} times while it was at the same place of this call: "
        "find out why before you make it again."
    )

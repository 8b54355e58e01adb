"""The restarts of one call: how often it is restarted, and the lines that its tool sends once more.

A call is restarted when the server has died, or the child process that ran it. After a restart the
tool does everything behind its last checkpoint a second time. The lines that it sent the first time
are in the journal, so each of them is swallowed when the tool sends it once more. A line that
differs ends the call, because a number that a client has seen cannot get another meaning.

The first run may have dropped progress and log messages, where the client read too slowly or did
not want them. So such a message is dropped where it is not the next line in the journal. Clients
that came for the call one after the other have different progress tokens, so these are not
compared.
"""

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import msgspec
import trio

from streams import messages
from streams.clock import backoff_s
from streams.engine.committer import Committer
from streams.engine.lifecycle import Question
from streams.engine.retry import MISSING_LEASES, patiently
from streams.errors import Missing, Refusal, Unavailable, refusal
from streams.journal.contract import STORED_BYTES_MAX, Journal
from streams.journal.records import Answered, Checkpoint, Record, Restart, Restarted
from streams.limits import Limits
from streams.logs import STREAM_LETTERS, log
from streams.messages import Kind, RequestId, Run

# The first restart comes at once, the second after this pause. Each further pause is twice as long,
# up to the maximum: a call that kills its server must not do so over and over without a pause.
BACKOFF_FIRST_S: Final = 0.1
BACKOFF_MAX_S: Final = 60.0
_TOKEN: Final = b'"progressToken"'


class Rerun:
    """The restarts of one call: where it begins, and which lines are expected once more."""

    def __init__(
        self, record: Record, journal: Journal, committer: Committer, limits: Limits
    ) -> None:
        assert record.restart is not None
        self._record = record
        self._restart: Restart = record.restart
        self._journal = journal
        self._committer = committer
        self._limits = limits
        self._position = self._restart.seq  # of the last line that came once more
        self._has_dropped = False  # whether a message was dropped since that line
        self._lines: deque[bytes] = deque()  # read from the journal, and expected next
        self._missing_since: float | None = None  # in trio's time, while lines are missing
        self._turn = trio.Lock()  # a tool may have several tasks that send
        self.checkpoint_seq = 0  # of the newest checkpoint, which may not be durable yet
        self.is_suspended = False  # the server shuts down

    @property
    def state(self) -> bytes | None:
        """The JSON of the last checkpoint before the server died; None without a checkpoint."""
        return self._restart.state

    @property
    def is_whole(self) -> bool:
        """Whether the store has kept all lines that are expected once more."""
        lost = self._record.lost
        return lost is None or lost[1] <= self._restart.seq

    @property
    def is_over(self) -> bool:
        """Whether all expected lines have come."""
        return self._position == self._record.last

    def is_different(self, *, is_error: bool) -> bool:
        """Whether a result ends the call before all expected lines have come.

        An error may come earlier this time, unless messages were taken for dropped ones before it.
        """
        return not self.is_over and (self._has_dropped or not is_error)

    # Lines of the first run

    async def swallow(self, line: bytes, is_droppable: bool) -> bool:
        """Whether this line needs no sending, because it was sent or dropped the first time.

        Raises `Refusal` where another line was sent in its place.
        """
        async with self._turn:
            if self.is_over:
                return False
            expected = await self._next()
            if expected == line or (is_droppable and _is_same_progress(expected, line)):
                self._take()
            elif is_droppable:
                self._has_dropped = True
            else:
                raise diverged("it sends another message than before")
            return True

    async def asked(self, method: str, params: Any) -> RequestId | None:
        """The id under which this request was sent the first time; None where it was not sent.

        Raises `Refusal` where another line was sent in its place.
        """
        async with self._turn:
            if self.is_over:
                return None
            line = await self._next()
            request_id = _request_id(line)
            if request_id is None or messages.request(request_id, method, params) != line:
                raise diverged(f"it asks for {method[:100]}, and did not at this point")
            self._take()
            return request_id

    async def expects(self, method: str) -> bool:
        """Whether the next expected line is a request of this method."""
        async with self._turn:
            if self.is_over:
                return False
            return messages.parse(await self._next()).method == method

    async def questions(self) -> dict[RequestId, Question]:
        """The requests among the expected lines, before any of these has come."""
        found: dict[RequestId, Question] = {}
        seq = self._position
        if self._record.last_request <= seq:
            return found
        while seq < self._record.last:
            for line in await self._lines_after(seq):
                seq += 1
                request_id = _request_id(line)
                if request_id is not None:
                    found[request_id] = Question(seq, line)
        return found

    def answer_to(self, seq: int) -> bytes | None:
        """The stored answer to the request at `seq`; None where it has none."""
        return self._restart.answers.get(seq)

    async def _next(self) -> bytes:
        if not self._lines:
            self._lines.extend(await self._lines_after(self._position))
        return self._lines[0]

    async def _lines_after(self, seq: int) -> Sequence[bytes]:
        runs = await patiently(partial(self._read, seq))
        return [line for run in runs for line in run.lines][: self._record.last - seq]

    async def _read(self, seq: int) -> Sequence[Run]:
        """The runs behind `seq`.

        Raises `Refusal` if a store has lost them, `Unavailable` if they may be put back.
        """
        stream, gap = self._record.stream, Missing(seq + 1, self._record.last)
        try:
            runs = await self._journal.read(stream, seq, bytes_max=STORED_BYTES_MAX)
        except Missing as missing:
            runs, gap = (), missing
        except Unavailable:
            self._missing_since = None  # they may come back with the store
            raise
        if runs and runs[0].seq == seq + 1:
            self._missing_since = None
            return runs
        if not self._journal.replica:
            raise gap
        record = await self._journal.find(stream)
        is_lost = record is not None and record.has_lost(seq + 1)
        if not (is_lost or self._are_gone(gap)):
            raise Unavailable(str(gap)) from gap
        raise refusal("interrupted").saying(
            "The store has lost messages of this call, which cannot be continued without them: "
            "make the call again if that is safe."
        )

    def _are_gone(self, gap: Missing) -> bool:
        """Whether lines are missing for so long that no replica will put them back."""
        now, stream = trio.current_time(), self._record.stream[:STREAM_LETTERS]
        if self._missing_since is None:
            self._missing_since = now
        if now - self._missing_since < MISSING_LEASES * self._journal.lease_s:
            return False
        log.error("a call cannot go on: the store lacks messages", stream=stream, why=str(gap))
        return True

    def _take(self) -> None:
        self._lines.popleft()
        self._position += 1
        self._has_dropped = False

    # Changes for the next restart

    async def again(self) -> "Rerun":
        """The next run of a call that has died while this server lives.

        All that it has sent must be durable. Raises `Refusal` where nothing is kept of the call.
        """
        await self._committer.settled()
        record = await patiently(lambda: self._journal.find(self._record.stream))
        if record is None or record.restart is None:
            raise refusal("interrupted")
        return Rerun(record, self._journal, self._committer, self._limits)

    async def begin(self) -> None:
        """Wait until it is time to run the call, and record the attempt.

        Raises `Refusal` where too many attempts in a row got no further.
        """
        restart, record, attempts_max = self._restart, self._record, self._limits.restarts_max
        attempts = restart.attempts + 1 if record.last == restart.reached else 1
        if attempts > attempts_max:
            raise _given_up(attempts_max)
        if attempts > 1:
            await trio.sleep(backoff_s(BACKOFF_FIRST_S, attempts - 2, BACKOFF_MAX_S))
        # Recorded after the pause: a server that dies during the pause has not died of this call.
        await self._committer.settled(Restarted(record.stream, record.fence, attempts, record.last))

    def suspend(self, last: int) -> None:
        """The server shuts down in good order: this does not count as a failed attempt.

        `last` is the number of the last line that the stream has.
        """
        self.is_suspended = True
        self._committer.add(Restarted(self._record.stream, self._record.fence, 0, last))

    @property
    def was_suspended(self) -> bool:
        """Whether the last run ended by `suspend`."""
        return self._restart.attempts == 0 and self._restart.reached == self._record.last

    async def checkpoint(self, last: int, state: bytes) -> None:
        """Begin here, with this state in JSON, at the next restart; returns when that is durable.

        `last` is the number of the last line that the stream has.
        """
        # Lines that are still expected lie behind the checkpoint.
        seq = self.checkpoint_seq = last if self.is_over else self._position
        record = self._record
        await self._committer.settled(Checkpoint(record.stream, record.fence, seq, state))

    def keep_answer(self, seq: int, line: bytes, then: Callable[[], object]) -> None:
        """Store the answer to the request at `seq`, then do this.

        The client gives each answer once, so the tool must not get it before it is durable.
        """
        record = self._record
        self._committer.when_settled(then, Answered(record.stream, record.fence, seq, line))


def _is_same_progress(expected: bytes, line: bytes) -> bool:
    """Whether two lines report the same, though under the tokens of two requests for the call."""
    if _TOKEN not in expected or _TOKEN not in line:
        return False
    try:
        first, again = (
            messages.decode(messages.parse(each).params, dict[str, msgspec.Raw])
            for each in (expected, line)
        )
    except ValueError:
        return False  # a backend has sent it, and it is no progress
    return first | {"progressToken": again["progressToken"]} == again


def _request_id(line: bytes) -> RequestId | None:
    """The id of a request; None for any other message."""
    message = messages.parse(line)
    if message.kind is not Kind.REQUEST:
        return None
    assert isinstance(message.id, int | str)
    return message.id


def diverged(why: str) -> Refusal:
    """The end of a restarted call whose tool does not do the same as before."""
    return refusal("interrupted").saying(
        f"The server stopped, and the tool, run again, did not repeat itself ({why}): "
        "make the call again if that is safe."
    )


def _given_up(attempts: int) -> Refusal:
    return refusal("interrupted", attempts=attempts).saying(
        f"The server stopped {attempts + 1} times while it was at the same place of this call: "
        "find out why before you make it again."
    )

"""The life of one stream in any order, crashes included, against lists of lines."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from streams.engine.lifecycle import Event, StreamState
from streams.journal.records import Ack, Append, Outcome, Record, apply
from streams.limits import Limits
from streams.messages import RequestId, Run
from tests.rigs.lives import FENCE, line, record


class Life(RuleBasedStateMachine):
    """Any order of what may happen to a stream, crashes included, against lists of lines."""

    limits = Limits(unsent_entries_max=5, unsent_bytes_max=60, undelivered_bytes_max=200)
    pages: tuple[int, ...] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.stored: Record = record(pages=self.pages)
        self.state = StreamState(self.stored, self.limits)
        self.journal: list[bytes] = []  # what is durable
        self.numbered: list[bytes] = []  # what is not yet
        self.held: dict[str, bytes] = {}
        self.requests: dict[int, str] = {}  # seq → id, all that were ever made
        self.error_seq = 0
        self.final_seq = 0
        self.seen = 0  # the highest seq that was handed to a connection in this life
        self.reader: int | None = None  # where the attached connection has come to
        self.clock = 0.0
        self.serial = 0

    @property
    def is_live(self) -> bool:
        return self.state.outcome is Outcome.LIVE

    def new_line(self) -> bytes:
        self.serial += 1
        return line(self.serial)

    def number(self, text: bytes) -> int:
        self.numbered += [*self.held.values(), text]
        self.held.clear()
        return len(self.journal) + len(self.numbered)

    @precondition(lambda self: self.is_live)
    @rule()
    def send(self) -> None:
        text, had_room = self.new_line(), self.state.has_room
        assert self.state.add(text) is had_room
        if had_room:
            self.number(text)

    @precondition(lambda self: self.is_live)
    @rule(token=st.sampled_from("ab"))
    def progress(self, token: str) -> None:
        text = self.new_line()
        if self.state.add_progress(token, text):
            assert not self.held
            self.number(text)
        else:
            self.held[token] = text

    @precondition(lambda self: self.is_live)
    @rule(is_forced=st.booleans())
    def ask(self, is_forced: bool) -> None:
        text = self.new_line()
        had_room = self.state.has_room
        asked = self.state.add_request(f"q{self.serial}", text, is_forced=is_forced)
        assert asked is (had_room or is_forced)
        if asked:
            self.requests[self.number(text)] = f"q{self.serial}"

    @property
    def askable(self) -> list[RequestId]:
        """The requests that may have reached the client."""
        questions = self.state.questions.items()
        return [asked for asked, question in questions if question.seq <= self.state.durable]

    @precondition(lambda self: self.askable)
    @rule(data=st.data())
    def answer(self, data: st.DataObject) -> None:
        del self.state.questions[data.draw(st.sampled_from(self.askable))]

    @precondition(lambda self: self.is_live)
    @rule(event=st.sampled_from([Event.END, Event.FAIL]), is_error=st.booleans())
    def end(self, event: Event, is_error: bool) -> None:
        text = self.new_line()
        self.state.end(text, event, is_error=is_error, at=1.0)
        self.final_seq = self.number(text)
        self.error_seq = self.final_seq if is_error else 0

    @rule()
    def commit(self) -> None:
        append = self.state.take(FENCE)
        assert (append is None) is (not self.numbered)
        if append is not None:
            assert append.run.seq == len(self.journal) + 1
            assert append.run.body == b"".join(self.numbered)
            self.store(append)
            self.journal += self.numbered
            self.numbered = []
            self.state.committed(append.run.last)

    def store(self, change: Append | Ack) -> None:
        stored = apply(self.stored, change)
        assert stored is not None
        self.stored = stored

    @precondition(lambda self: self.reader is not None and self.reader < self.state.durable)
    @rule(data=st.data())
    def write(self, data: st.DataObject) -> None:
        assert self.reader is not None
        first = self.reader + 1  # a connection skips nothing
        last = self.reader = data.draw(st.integers(first, self.state.durable))
        self.seen = max(self.seen, last)
        body = b"".join(self.journal[first - 1 : last])
        if self.state.hand(Run(first, last - first + 1, body)):
            self.store(Ack("a-stream", FENCE, self.state.delivered))
        self.release()

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        """A cursor, an ack, an answer or a pong, be it from an earlier connection."""
        seq = data.draw(st.integers(0, self.state.handed))
        assert self.state.deliver(seq) is self.is_news(seq)
        self.store(Ack("a-stream", FENCE, self.state.delivered))
        self.release()

    def is_news(self, seq: int) -> bool:
        is_kept_for_reader = self.reader is not None and seq > self.reader
        return seq > self.stored.acked and not is_kept_for_reader

    def release(self) -> None:
        if self.state.release_held():
            self.numbered += self.held.values()
            self.held.clear()

    @rule(data=st.data(), confirms=st.booleans(), passed=st.floats(0, 50))
    def attach(self, data: st.DataObject, confirms: bool, passed: float) -> None:
        """A connection begins anywhere behind what was delivered, for one or in place of one."""
        self.clock += passed
        self.reader = data.draw(st.integers(self.state.delivered, self.state.durable))
        self.state.attach(self.reader, confirms=confirms)
        assert self.state.deadline is None

    @rule(passed=st.floats(0, 50))
    def detach(self, passed: float) -> None:
        self.clock += passed
        self.reader = None
        self.state.detach(self.clock)
        assert self.state.deadline is not None
        assert self.state.deadline > self.clock

    @precondition(lambda self: self.reader is not None)
    @rule(passed=st.floats(0, 50))
    def fall_silent(self, passed: float) -> None:
        self.clock += passed
        self.state.fall_silent(self.clock)
        assert self.state.deadline is not None

    @rule()
    def crash(self) -> None:
        """A crash loses all that is not durable, and the handler: no request can be answered."""
        self.state = StreamState(self.stored, self.limits)
        self.numbered, self.seen, self.reader = [], self.state.handed, None
        self.held.clear()
        self.requests = {n: q for n, q in self.requests.items() if n <= len(self.journal)}
        self.error_seq = self.error_seq if self.error_seq <= len(self.journal) else 0
        self.final_seq = self.final_seq if self.final_seq <= len(self.journal) else 0

    @invariant()
    def marks_are_in_order(self) -> None:
        state = self.state
        assert state.last >= state.durable >= state.handed >= state.delivered >= 0

    @invariant()
    def what_the_attached_reader_has_not_had_is_kept(self) -> None:
        assert self.state.position == self.reader
        assert self.reader is None or self.state.delivered <= self.reader

    @invariant()
    def there_is_never_a_gap(self) -> None:
        assert self.state.last == len(self.journal) + len(self.numbered)
        assert self.state.durable == len(self.journal) == self.stored.last
        assert self.state.batch_bytes == sum(map(len, self.numbered))

    @invariant()
    def what_is_not_seen_is_not_delivered(self) -> None:
        assert self.state.delivered <= max(self.seen, self.stored.acked)

    @invariant()
    def what_is_held_can_only_be_held_for_want_of_room(self) -> None:
        assert not (self.held and self.is_live and self.state.has_room)

    @invariant()
    def flags_are_what_a_look_at_the_lines_would_say(self) -> None:
        for after in (None, 0, self.state.durable):
            mark = self.state.delivered if after is None else after
            pending = range(mark + 1, len(self.journal) + 1)
            flags = self.state.flags(after)
            assert flags.pending_messages is bool(pending)
            assert flags.has_error is (self.error_seq in pending)
            # A request on its way to disk counts already where the client has something to fetch.
            is_asked = bool(pending) and max(self.requests, default=0) > mark
            assert flags.has_request is (is_asked or bool(self.state.questions))
            assert flags.is_live is (self.stored.outcome is Outcome.LIVE)
            assert flags.has_failed is (self.state.outcome is Outcome.FAILED)

    @invariant()
    def the_answer_is_the_first_response_that_is_not_here_yet(self) -> None:
        for position in range(self.state.delivered, self.state.last + 1):
            behind = [seq for seq in self.responses if seq > position]
            expected = behind[0] if behind else (self.final_seq or None)
            assert self.state.answer_after(position) == expected

    @property
    def responses(self) -> list[int]:
        return [self.final_seq] if self.final_seq else []


class LifeWithPages(Life):
    """The same for a stream whose tool gives pages: only asking for the next one confirms any."""

    pages = ()

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []  # the seqs of all that were ever made

    @precondition(lambda self: self.is_live)
    @rule()
    def page(self) -> None:
        text, had_room = self.new_line(), self.state.has_room
        assert self.state.add(text, is_page=True) is had_room
        if had_room:
            self.made.append(self.number(text))

    @rule(data=st.data())
    def deliver(self, data: st.DataObject) -> None:
        durable = [seq for seq in self.made if seq <= self.state.durable]
        if durable:
            seq = data.draw(st.sampled_from(durable))
            assert self.state.deliver(seq) is self.is_news(seq)
            self.seen = max(self.seen, self.state.delivered)
            self.store(Ack("a-stream", FENCE, self.state.delivered))
            self.release()

    @rule(data=st.data(), passed=st.floats(0, 50))
    def attach(self, data: st.DataObject, passed: float) -> None:
        self.clock += passed
        self.reader = data.draw(st.integers(self.state.delivered, self.state.durable))
        self.state.attach(self.reader, confirms=True)
        assert self.state.deadline is None

    @rule(passed=st.floats(0, 50))
    def detach(self, passed: float) -> None:
        self.clock += passed
        self.reader = None
        self.state.detach(self.clock)
        # A client that asks for the last page over and over does not put off its end.
        assert self.state.deadline is not None
        assert self.state.deadline <= self.clock + max(100.0, self.limits.last_page_s)
        assert self.state.is_ended or self.state.deadline > self.clock

    @rule()
    def crash(self) -> None:
        super().crash()
        self.made = [seq for seq in self.made if seq <= len(self.journal)]

    @property
    def responses(self) -> list[int]:
        return [*self.made, *super().responses]

    @invariant()
    def pages_are_kept_until_a_later_one_was_asked_for(self) -> None:
        kept = [seq for seq in self.made if seq > self.state.delivered]
        assert self.state.pages == kept
        assert self.stored.pages == tuple(seq for seq in kept if seq <= self.stored.last)

    @invariant()
    def who_asks_again_for_the_page_before_is_answered_with_it(self) -> None:
        if self.state.delivered:
            assert self.state.answer_after(self.state.delivered - 1) == self.state.delivered


Life.TestCase.settings = settings(max_examples=100, stateful_step_count=40, deadline=None)
LifeWithPages.TestCase.settings = Life.TestCase.settings
TestLife = Life.TestCase
TestLifeWithPages = LifeWithPages.TestCase

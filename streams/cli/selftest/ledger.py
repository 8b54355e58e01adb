"""The books of a torture run: the messages that were promised, and those that came.

They rely on neither the client nor the server. Each message has the name of its call, its number
and a hash that proves both. The tool notes in a file of its own which messages are durable. The
messages that a user receives are counted here.
"""

import statistics
from pathlib import Path
from typing import Any, Final

import msgspec

from streams import messages
from streams.cli.selftest.torture_server import Entry, entry_of, noted, noted_runs
from streams.messages import Message

SHORT: Final = ("short", "reading")
ONCE: Final = ("work", "short")  # tools that are neither restarted nor safe to run again

# More failures than these would tell nothing new.
FAILURES_MAX: Final = 20


class Figures(msgspec.Struct):
    """The figures of one transport.

    `short` counts those of the calls that take some milliseconds at most. `run_twice` counts calls
    whose tool was run more often than once, and may not be.

    `acknowledged` counts the messages that the journal had confirmed when the tool asked, of calls
    that a client has a ticket for. `lost` counts those of them that never came, and those that
    never came although a later message did. `recovery_…` is seconds from the last message before a
    connection failed to the first one after it.
    """

    transport: str
    calls: int = 0
    short: int = 0
    finished: int = 0
    interrupted: int = 0
    unannounced: int = 0  # whose connection was lost before there was a ticket
    refused: int = 0  # by a server that shut down
    unfinished: int = 0
    acknowledged: int = 0
    delivered: int = 0
    lost: int = 0
    seen_twice: int = 0
    misordered: int = 0
    damaged: int = 0
    run_twice: int = 0
    last_words: int = 0  # of calls that told how their child ended
    kills: int = 0
    child_kills: int = 0  # of the wrapped command
    restarts: int = 0  # after SIGTERM
    cuts: int = 0
    recovery_median_s: float = 0.0
    recovery_worst_s: float = 0.0
    failures: list[str] = []

    @property
    def is_good(self) -> bool:
        """Whether every message came that had to, once, in order and as it was sent."""
        wrong = self.lost or self.seen_twice or self.misordered or self.damaged or self.run_twice
        has_come = self.delivered or self.finished
        return bool(has_come) and not (wrong or self.unfinished or self.failures)


class Story:
    """One call, as its user sees it."""

    def __init__(self, name: str, count: int, tool: str = "work") -> None:
        self.name = name
        self.count = count
        self.tool = tool
        self.is_over = False
        self.is_finished = False
        self.seen: set[int] = set()
        self.last = 0
        self.twice = self.misordered = self.damaged = 0

    def look(self, message: Message) -> None:
        """Count one message of the call."""
        number = self._number_of(message)
        if number is None:
            self.damaged += 1
        elif number in self.seen:
            self.twice += 1
        else:
            self.misordered += number < self.last
            self.last = max(self.last, number)
            self.seen.add(number)

    def _number_of(self, message: Message) -> int | None:
        """The number of a message of this call; None if it is another message."""
        try:
            params: Any = messages.decode(message.params, dict[str, Any])
            data = msgspec.convert(params.get("data"), Entry)
        except ValueError:
            return None
        is_ours = data == entry_of(self.name, data["number"])
        return data["number"] if is_ours and 1 <= data["number"] <= self.count else None

    def finish(self, result: Any) -> None:
        """Check the result."""
        self.is_over = self.is_finished = True
        if result.get("structuredContent") != {"messages": self.count}:
            self.damaged += 1


class Ledger:
    """Adds up the calls of one transport. `notes` is the folder of the tools' notes."""

    def __init__(self, transport: str, notes: Path) -> None:
        self.figures = Figures(transport)
        self.notes = notes
        self.open: set[Story] = set()
        self._recoveries_s: list[float] = []
        self._once: set[str] = set()  # calls whose tools must not be run twice
        self._finished: set[str] = set()

    def begin(self, story: Story) -> None:
        """A call is about to be made."""
        self.figures.calls += 1
        self.figures.short += story.tool in SHORT
        if story.tool in ONCE:
            self._once.add(story.name)
        self.open.add(story)

    def drop(self, story: Story) -> None:
        """The call has no ticket: it may or may not have run."""
        self.open.remove(story)
        self.figures.unannounced += 1

    def refuse(self, story: Story) -> None:
        """The server has not begun the call."""
        self.open.remove(story)
        self.figures.refused += 1

    def settle(self, story: Story) -> None:
        """The call is over: compare its messages with those that were acknowledged."""
        self.open.remove(story)
        figures, path = self.figures, self.notes / story.name
        acknowledged = noted(path)
        promised = max(acknowledged, story.last, story.count if story.is_finished else 0)
        lost = promised - len(story.seen)
        figures.finished += story.is_finished
        if story.is_finished and story.tool in ONCE:
            self._finished.add(story.name)
        figures.interrupted += story.is_over and not story.is_finished
        figures.unfinished += not story.is_over
        figures.acknowledged += acknowledged
        figures.delivered += len(story.seen)
        figures.lost += lost
        figures.seen_twice += story.twice
        figures.misordered += story.misordered
        figures.damaged += story.damaged
        if lost or story.twice or story.misordered or story.damaged:
            missing = sorted(set(range(1, promised + 1)) - story.seen)
            self.fail(
                f"{story.name}: {story.count} to be sent, {acknowledged} acknowledged, "
                f"{len(story.seen)} seen, {story.twice} twice, {story.misordered} out of order, "
                f"{story.damaged} damaged; missing: {missing[:10]}"
            )
        else:
            path.unlink(missing_ok=True)

    def settle_all(self) -> None:
        """The run is over: settle all calls that are open, and count the runs of their tools."""
        for story in list(self.open):
            self.settle(story)
        runs = noted_runs(self.notes)
        for name in sorted(self._once):
            self.figures.run_twice += runs[name] > 1
            if runs[name] > 1 or (name in self._finished and not runs[name]):
                self.fail(f"{name}: its tool was run {runs[name]} times")

    def fail(self, what: str) -> None:
        """Add a failure that is more than a number."""
        if len(self.figures.failures) < FAILURES_MAX:
            self.figures.failures.append(what)

    def recovered(self, took_s: float) -> None:
        """A user whose connection had failed receives messages again."""
        self._recoveries_s.append(took_s)
        self.figures.recovery_median_s = statistics.median(self._recoveries_s)
        self.figures.recovery_worst_s = max(self._recoveries_s)

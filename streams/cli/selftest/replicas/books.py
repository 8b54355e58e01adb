"""The books of a run with replicas: a row for each kind of fault.

A message that is missing, comes twice or comes late counts in the row of the moment, and so does
the longest time in which a running call brought its user no message.
"""

from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import msgspec
import trio

from streams.cli.selftest.ledger import FAILURES_MAX, ONCE, Story
from streams.cli.selftest.torture_server import noted, noted_runs
from streams.messages import Message

TOLD_S: Final = 1.0  # a silence of so many seconds is written down
HEARD_S: Final = 60.0  # after a fault, each call brings a message within this time
LOOK_EVERY_S: Final = 0.02


class Row(msgspec.Struct):
    """The figures of one kind of fault.

    `gaps` counts calls whose client was told that messages are gone, and `gone` these messages.
    `taken_over` counts restarts of tools and calls that ended as `interrupted`. Times are seconds;
    `beyond_outage_s` is the longest silence without the outage of the store in it.
    """

    fault: str
    silence_max_s: float | None = None  # as promised; None: not promised
    faults: int = 0
    delivered: int = 0
    finished: int = 0
    interrupted: int = 0
    unannounced: int = 0  # whose connection was lost before there was a ticket
    refused: int = 0  # by a server that shut down, or that had no store
    lost: int = 0
    twice: int = 0
    misordered: int = 0
    damaged: int = 0
    run_twice: int = 0
    gaps: int = 0
    gone: int = 0
    taken_over: int = 0
    longest_silence_s: float = 0.0
    longest_outage_s: float = 0.0
    beyond_outage_s: float = 0.0

    @property
    def wrong(self) -> int:
        """How many messages and calls were treated wrongly; told gaps are not among them."""
        return self.lost + self.twice + self.misordered + self.damaged + self.run_twice


class Account:
    """One call, as its user sees it."""

    def __init__(self, story: Story) -> None:
        self.story = story
        self.heard_at = trio.current_time()
        self.has_spoken = False
        self.is_told_of_gap = False  # and has had no message since
        self.missing: dict[int, Row] = {}  # and in which row each of them is lost
        self.gone: set[int] = set()


class Books:
    """All calls and rows. `notes` is the folder of the tools' notes, `diary` a file for events."""

    def __init__(self, notes: Path, diary: Path) -> None:
        self.notes = notes
        self._diary = diary
        self.failures: list[str] = []
        self.rows: list[Row] = []
        self.row = Row("start")
        self.open: set[Account] = set()
        self._calls_heard = 0
        self._longest_s = 0.0  # since the last fault began
        self._once: set[str] = set()
        self._runs_before = self._twice_before = 0

    def begin_row(self, row: Row) -> None:
        """Count in this row from now on."""
        self.count_runs()
        self.row = row
        self.rows.append(row)

    def begin_fault(self) -> None:
        """A fault is about to be inflicted."""
        self._longest_s = 0.0
        self.write(self.row.fault)

    def end_fault(self, outage_s: float) -> None:
        """All calls have brought messages again; the store was away for `outage_s`."""
        row = self.row
        row.faults += 1
        row.longest_outage_s = max(row.longest_outage_s, outage_s)
        row.beyond_outage_s = max(row.beyond_outage_s, self._longest_s - outage_s)

    async def begun(self, count: int) -> None:
        """Wait until so many calls have brought messages. The first row begins after that."""
        with trio.move_on_after(HEARD_S):
            while self._calls_heard < count:
                await trio.sleep(LOOK_EVERY_S)
            return
        self.fail(f"after {HEARD_S:g} s not all of {count} calls have brought a message")

    async def heard_again(self) -> None:
        """Wait until each call that runs now has brought a message or has ended."""
        now = trio.current_time()
        with trio.move_on_after(HEARD_S):
            while self._silent(now):
                await trio.sleep(LOOK_EVERY_S)
            return
        names = sorted(one.story.name for one in self._silent(now))
        self.fail(f"{self.row.fault}: no message for {HEARD_S:g} s: {', '.join(names)}")
        for one in self._silent(now):
            self.hear(one)  # counted once; the next fault begins anew

    def _silent(self, since: float) -> Iterable[Account]:
        return [one for one in self.open if one.heard_at < since]

    def begin(self, story: Story) -> Account:
        """A call is about to be made."""
        account = Account(story)
        self.open.add(account)
        if story.tool in ONCE:
            self._once.add(story.name)
        return account

    def look(self, account: Account, message: Message) -> None:
        """Count a message."""
        row, story = self.row, account.story
        before = (story.twice, story.misordered, story.damaged)
        last = story.last
        story.look(message)
        self.hear(account)
        twice, misordered, damaged = story.twice, story.misordered, story.damaged
        skipped = set(range(last + 1, story.last))
        if account.is_told_of_gap:
            account.gone |= skipped
            row.gone += len(skipped)
            skipped = set()
        account.is_told_of_gap = False
        self._miss(account, skipped)
        for late in account.missing.keys() & story.seen:
            account.missing.pop(late).lost -= 1
        row.delivered += 1
        row.twice += twice - before[0]
        row.misordered += misordered - before[1]
        row.damaged += damaged - before[2]
        if skipped or (twice, misordered, damaged) != before:
            self.fail(f"{row.fault}: {story.name}: {_wrongs(account)}")

    def _miss(self, account: Account, numbers: set[int]) -> None:
        self.row.lost += len(numbers)
        account.missing.update(dict.fromkeys(numbers, self.row))

    def hear(self, account: Account) -> None:
        """The call has brought something."""
        now = trio.current_time()
        silence_s = now - account.heard_at
        account.heard_at = now
        if silence_s >= TOLD_S:
            self.write(f"{account.story.name} ({account.story.tool}): silent for {silence_s:.2f} s")
        self._calls_heard += not account.has_spoken
        account.has_spoken = True
        self._longest_s = max(self._longest_s, silence_s)
        self.row.longest_silence_s = max(self.row.longest_silence_s, silence_s)

    def tell_gap(self, account: Account) -> None:
        """The client was told that messages are gone."""
        self.row.gaps += 1
        account.is_told_of_gap = True

    def finish(self, account: Account, result: object) -> None:
        """The call has brought its result."""
        before = account.story.damaged
        self.hear(account)
        account.story.finish(result)
        self.row.finished += 1
        self.row.damaged += account.story.damaged - before
        self._settle(account, promised=account.story.count)

    def interrupt(self, account: Account) -> None:
        """The call was ended with its replica."""
        self.hear(account)
        self.row.interrupted += 1
        self.row.taken_over += 1
        self._settle(account, promised=account.story.last)

    def drop(self, account: Account) -> None:
        """The call has no ticket, or has failed: it may or may not have run."""
        self.row.unannounced += 1
        self.open.discard(account)

    def refuse(self, account: Account) -> None:
        """The server has not begun the call."""
        self.row.refused += 1
        self.open.discard(account)

    def _settle(self, account: Account, promised: int) -> None:
        self.open.discard(account)
        story, path = account.story, self.notes / account.story.name
        promised = max(promised, noted(path))
        unseen = set(range(1, promised + 1)) - story.seen - account.missing.keys() - account.gone
        if account.is_told_of_gap:  # the gap was the last of it
            self.row.gone += len(unseen)
        elif unseen:
            self._miss(account, unseen)
            self.fail(f"{self.row.fault}: {story.name}: {_wrongs(account)}")
        path.unlink(missing_ok=True)

    def count_runs(self) -> None:
        """Count, in the row of the moment, the runs of tools since this was called last."""
        runs = noted_runs(self.notes)
        twice = sum(runs[name] > 1 for name in self._once)
        again = sum(count - 1 for name, count in runs.items() if name not in self._once)
        self.row.run_twice += twice - self._twice_before
        self.row.taken_over += again - self._runs_before
        if twice > self._twice_before:
            names = sorted(name for name in self._once if runs[name] > 1)
            self.fail(f"{self.row.fault}: run twice: {', '.join(names)}")
        self._twice_before, self._runs_before = twice, again

    def close(self) -> None:
        """The run is over: a call that still runs has not come to its end."""
        for account in sorted(self.open, key=lambda one: one.story.name):
            self.fail(f"{account.story.name} has not ended; {_wrongs(account)}")
        self.count_runs()

    def write(self, what: str) -> None:
        """Add a line to the diary, to compare with the logs of the processes."""
        with self._diary.open("a") as file:
            file.write(f"{datetime.now(UTC).isoformat()} {what}\n")

    def fail(self, what: str) -> None:
        """Add a failure that is more than a number."""
        self.write(what)
        if len(self.failures) < FAILURES_MAX and what not in self.failures:
            self.failures.append(what)


def _wrongs(account: Account) -> str:
    story = account.story
    missing = sorted(account.missing)[:10]
    return (
        f"{len(story.seen)} of {story.count} seen, {story.twice} twice, {story.misordered} out of "
        f"order, {story.damaged} damaged; missing: {missing}"
    )

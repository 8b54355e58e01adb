"""A call's place in the callbook, and the call that a name stands for.

Whatever is wrong with the file, no call fails for it: it is said once, and the call goes on.
"""

import contextlib
import os
from collections.abc import Callable, Iterable
from typing import Any, Final, TypeVar

import msgspec

from streams.cli.actions.callbook import Callbook, CallbookUnusable, Entry
from streams.cli.actions.output import say
from streams.client.call import RunningCall
from streams.clock import wall
from streams.errors import CallFailed, CannotConnect, StreamGone
from streams.protocol.ticket import Ticket

NAMES_MAX: Final = 30  # in one sentence
WORD_LETTERS_MAX: Final = 70  # of what may be half a ticket, which is a secret

# There is nothing to come back to, and never will be again.
GONE: Final = frozenset({"stream_not_found", "abandoned", "cancelled", "delivered"})
# The position is of no use, though there may be something to come back to.
MISPLACED: Final = frozenset({"messages_gone", "cursor_ahead"})

_T = TypeVar("_T")


class Target(msgspec.Struct, frozen=True):
    """What to come back to, and where. `cwd` is where to start the command that `url` names."""

    url: str
    ticket: Ticket
    cwd: str | None = None


def find(name: str) -> Target:
    """The call of this name. Raises `ValueError`, or `CallbookUnusable`."""
    entry = _named(name, f"No call is called {_shortened(name)}.")
    return Target(entry.url, entry.ticket, entry.cwd)


def find_at(url: str, text: str) -> Target:
    """The call of this ticket or name, at this URL. Raises `ValueError`, or `CallbookUnusable`."""
    try:
        return Target(url, Ticket.parse(text))
    except ValueError as error:
        why = f"No call is called {_shortened(text)}, and it is no ticket ({error})."
        return Target(url, _named(text, why).ticket)


def ticket_or_id(text: str) -> Ticket | str:
    """The ticket of what may be a ticket, a call's name or, where it is neither, a stream's id."""
    try:
        return Ticket.parse(text)
    except ValueError:
        pass
    try:
        return next((e.ticket for e in Callbook.of_user().entries() if e.name == text), text)
    except CallbookUnusable:
        return text  # it may well be an id, which needs no file


def _named(name: str, why_not: str) -> Entry:
    entries = {entry.name: entry for entry in Callbook.of_user().entries()}
    if name not in entries:
        raise ValueError(f"{why_not} {names_of(entries)}")
    return entries[name]


def names_of(entries: Iterable[str]) -> str:
    """A sentence with the names that there are, or the newest of many."""
    names = list(entries)
    if len(names) > NAMES_MAX:
        names = ["…", *names[-NAMES_MAX:]]
    return f"There are: {', '.join(names)}." if names else "None is noted."


def _shortened(text: str) -> str:
    return text if len(text) <= WORD_LETTERS_MAX else f"{text[:WORD_LETTERS_MAX]}…"


class Note:
    """One call's place in the file: to be taken, moved on and given up."""

    def __init__(self, draft: Callable[[Ticket], Entry] | None, name: str | None = None) -> None:
        self.name = name  # None until the call is noted
        self._draft = draft  # None when it was tried, or is not to be
        self._has_complained = False

    @classmethod
    def of_new(cls, url: str, tool: str, arguments: dict[str, Any]) -> "Note":
        """For a call that begins; noted once there is a ticket."""
        now, cwd = wall(), None
        if url.startswith("stdio:"):
            with contextlib.suppress(FileNotFoundError):  # somebody has deleted it
                cwd = os.getcwd()

        def draft(ticket: Ticket) -> Entry:
            return Callbook.of_user().add(
                ticket, url=url, tool=tool, arguments=arguments, cwd=cwd, now=now
            )

        return cls(draft)

    @classmethod
    def of_noted(cls, ticket: Ticket) -> "Note":
        """For a call that was begun before, if it is noted here."""
        note = cls(None)
        entry = note._try(lambda: Callbook.of_user().find(ticket))
        note.name = entry.name if entry is not None else None
        return note

    def take(self, call: RunningCall) -> None:
        """Note the call if it is announced: at once, for nobody knows when we are killed."""
        if self._draft is None or (ticket := call.ticket) is None:
            return
        draft, self._draft = self._draft, None
        entry = self._try(lambda: draft(ticket))
        self.name = entry.name if entry is not None else None

    def leave(self, call: RunningCall) -> None:
        """The call goes on without us, from where its ticket stands."""
        self.take(call)
        if (ticket := call.ticket) is not None:
            self._change(lambda book: book.move(ticket))

    def remove(self, call: RunningCall) -> None:
        """The call is over."""
        if (ticket := call.ticket) is not None:
            self._change(lambda book: book.remove([ticket]))

    def failed(self, call: RunningCall, error: BaseException) -> None:
        """Following the call ended so; the error is told how to come back, where one can."""
        if isinstance(error, CallFailed) and call.is_complete:
            self.remove(call)
        elif isinstance(error, StreamGone) and error.reason in GONE | MISPLACED:
            if call.ticket is not None:
                self.refused(call.ticket, error)
        elif isinstance(error, CannotConnect | StreamGone):
            self.leave(call)
            self._hint(error, "To come back to the call:")

    def refused(self, ticket: Ticket, error: StreamGone) -> None:
        """The server, asked for the call, has answered with this error."""
        if error.reason in GONE or (error.reason in MISPLACED and ticket.after is None):
            self._change(lambda book: book.remove([ticket]))
        elif error.reason in MISPLACED:
            self._change(lambda book: book.forget_position(ticket))
            self._hint(error, "To have what is left of it:")

    def _hint(self, error: BaseException, words: str) -> None:
        if self.name is not None:
            error.add_note(f"{words} mcp-streams resume {self.name}")

    def _change(self, change: Callable[[Callbook], None]) -> None:
        if self.name is not None:
            self._try(lambda: change(Callbook.of_user()))

    def _try(self, act: Callable[[], _T]) -> _T | None:
        try:
            return act()
        except CallbookUnusable as error:
            if not self._has_complained:
                self._has_complained = True
                say(f"Nothing is noted of this call: {error}")
            return None

"""The calls that the command has begun and that are not finished: a file, and each call's entry in
it.

Rules of the file:

- It is JSON, in `$MCP_STREAMS_STATE`, else `$XDG_STATE_HOME/mcp-streams/calls.json`, else
  `~/.local/state/mcp-streams/calls.json`. Only its owner may read it: tickets are secrets.
- A change writes a new file and renames it to the old one's name, while it holds a lock on a file
  beside it. A reader needs no lock and never sees half a file.
- A file that is not a list of calls, is damaged or is of a newer version is never overwritten. An
  empty file is an empty list.
- A call is identified by its ticket, whatever the ticket's position: names are used again.

A call never fails because of this file: the error is printed once, and the call goes on.
"""

import contextlib
import fcntl
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final, TypeVar

import msgspec

from streams.cli.actions.output import say
from streams.client import wire
from streams.client.call import RunningCall
from streams.client.client import Client
from streams.client.wire import MISPLACED
from streams.clock import wall
from streams.errors import CallFailed, CannotConnect, StreamGone, StreamsError, UnsafeFile
from streams.files import write_whole
from streams.permissions import check_folder, make_private_folders, open_own, real_path
from streams.protocol.ticket import Ticket

VERSION: Final = 1
CALLS_MAX: Final = 1_000  # the oldest are dropped
ARGUMENTS_BYTES_MAX: Final = 16 * 1024  # longer ones are left out, as they are only printed
ENTRY_BYTES_MAX: Final = 64 * 1024  # a server may send a resume token of any length
NAME_LETTERS_MAX: Final = 60
FINISHED_MAX: Final = 100  # names of finished calls
LOCK_S: Final = 2.0  # a change takes milliseconds, unless its process is stopped
_LOCK_PAUSE_S: Final = 0.01

_ELSEWHERE: Final = "name another file with MCP_STREAMS_STATE"
_NOT_TYPABLE: Final = re.compile(r"[^A-Za-z0-9_.-]+")

NAMES_MAX: Final = 30  # in one sentence
WORD_LETTERS_MAX: Final = 70  # printed of a text that may be half a ticket, which is a secret

# Reasons for which a call can never be resumed.
NEVER_RESUMABLE: Final = frozenset({"stream_not_found", "abandoned", "cancelled", "delivered"})

_T = TypeVar("_T")


class Finished(ValueError):
    """The call of this name is finished, and its result was printed."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"{name} is finished, and its result was printed: there is nothing left to resume."
        )


class CallbookUnusable(StreamsError):
    """The file cannot be read or written; the message says why and what to do, in one sentence."""


class Entry(msgspec.Struct, frozen=True, omit_defaults=True, rename="camel"):
    """One call. `started_at` is wall time; `cwd` is set if `url` begins with `stdio:`.

    `ticket` has the position at which the call was left, or at which it was announced. `server`
    identifies the server that made it: later another one may listen at `url`. `token_file` has the
    bearer token that was sent; if it was that of the environment, `has_token` is set.
    """

    name: str
    url: str
    tool: str
    started_at: float
    ticket: Ticket
    arguments: dict[str, Any] | None = None
    cwd: str | None = None
    server: str = ""
    token_file: str | None = None
    has_token: bool = False


class _Book(msgspec.Struct, omit_defaults=True):
    version: int
    calls: list[Entry]
    finished: list[str] = []  # the names of the last calls whose results were printed


class _Version(msgspec.Struct):
    version: int


def path_of_user(environment: Mapping[str, str] = os.environ) -> Path:
    """The path of the user's file. Raises `CallbookUnusable` if the user has no home directory."""
    if told := environment.get("MCP_STREAMS_STATE"):
        return Path(told)
    state = environment.get("XDG_STATE_HOME", "")
    try:
        # "All paths set in these environment variables must be absolute", else they are ignored.
        folder = Path(state) if os.path.isabs(state) else Path("~/.local/state").expanduser()
    except RuntimeError:
        why = "There is no home directory to keep calls in: name a file with MCP_STREAMS_STATE."
        raise CallbookUnusable(why) from None
    return folder / "mcp-streams" / "calls.json"


class Callbook:
    """The file. Its methods are quick and do not wait for trio; all raise `CallbookUnusable`."""

    def __init__(self, path: Path, *, lock_s: float = LOCK_S) -> None:
        self._path = path
        self._lock_s = lock_s

    @classmethod
    def of_user(cls) -> "Callbook":
        """The file of the user that runs this process."""
        return cls(path_of_user())

    def entries(self) -> list[Entry]:
        """All calls, in the order in which they were begun."""
        with self._complaining():
            return self._read(real_path(self._path)).calls

    def finished(self) -> list[str]:
        """The names of the last calls that are finished, the newest last."""
        with self._complaining():
            return self._read(real_path(self._path)).finished

    def find(self, ticket: Ticket) -> Entry | None:
        """The call that a ticket leads to."""
        return next((entry for entry in self.entries() if _is_same(entry.ticket, ticket)), None)

    def add(
        self,
        ticket: Ticket,
        *,
        url: str,
        tool: str,
        arguments: dict[str, Any],
        cwd: str | None,
        now: float,
        server: str = "",
        token_file: str | None = None,
        has_token: bool = False,
    ) -> Entry:
        """Add a call that begins, under a new name."""
        ticket = _at_its_beginning(ticket)
        fits = len(msgspec.json.encode(arguments)) <= ARGUMENTS_BYTES_MAX
        kept = arguments if fits else None
        entry = Entry("", url, tool, now, ticket, kept, cwd, server, token_file, has_token)
        if len(msgspec.json.encode(entry)) > ENTRY_BYTES_MAX:
            raise CallbookUnusable(f"Its ticket or URL has more than {ENTRY_BYTES_MAX} bytes.")

        def add(entries: list[Entry]) -> list[Entry]:
            nonlocal entry
            name = _free_name(tool, {each.name for each in entries})
            entry = msgspec.structs.replace(entry, name=name)
            return [*entries, entry][-CALLS_MAX:]

        self._change(add)
        return entry

    def move(self, ticket: Ticket) -> None:
        """Set the position of a call to that of `ticket`, unless it is further already."""
        self._set_position(ticket, lambda noted: max(noted or 0, ticket.after or 0) or None)

    def forget_position(self, ticket: Ticket) -> None:
        """Remove the position of a call, since the messages behind it are gone: what is left can be
        read.
        """
        self._set_position(ticket, lambda _: None)

    def _set_position(self, ticket: Ticket, of: Callable[[int | None], int | None]) -> None:
        def placed(entry: Entry) -> Entry:
            if not _is_same(entry.ticket, ticket):
                return entry
            moved = msgspec.structs.replace(entry.ticket, after=of(entry.ticket.after))
            return msgspec.structs.replace(entry, ticket=moved)

        self._change(lambda entries: [placed(entry) for entry in entries])

    def remove(self, tickets: Collection[Ticket]) -> None:
        """Remove calls that are over or not wanted any more."""

        over = {_at_its_beginning(ticket) for ticket in tickets}

        def kept(entries: list[Entry]) -> list[Entry]:
            return [each for each in entries if _at_its_beginning(each.ticket) not in over]

        self._change(kept)

    def finish(self, ticket: Ticket) -> None:
        """Remove a call whose result was printed, and keep its name for a while."""
        entry = self.find(ticket)
        if entry is not None:
            self._change(
                lambda entries: [each for each in entries if not _is_same(each.ticket, ticket)],
                finished=entry.name,
            )

    def _change(
        self, alter: Callable[[list[Entry]], list[Entry]], finished: str | None = None
    ) -> None:
        with self._complaining():
            path = real_path(self._path)  # a link stays a link
            make_private_folders(path.parent)
            check_folder(path.parent)
            with _locked(path.with_name(f"{path.name}.lock"), self._lock_s):
                before = self._read(path)
                after = alter(before.calls)
                if after != before.calls:
                    gone = [*before.finished, *([finished] if finished else [])][-FINISHED_MAX:]
                    book = _Book(VERSION, after, gone)
                    write_whole(path, msgspec.json.encode(book), os.replace)

    def _read(self, path: Path) -> _Book:
        try:
            check_folder(path.parent)
            if not stat.S_ISREG(path.stat().st_mode):
                raise self._unusable("is no regular file", _ELSEWHERE)
            with open(open_own(path), "rb") as file:
                content = file.read()
        except FileNotFoundError:
            return _Book(VERSION, [])
        try:
            if not content:
                return _Book(VERSION, [])
            if msgspec.json.decode(content, type=_Version).version > VERSION:
                raise self._unusable(
                    "is of a newer version", f"update mcp-streams, or {_ELSEWHERE}"
                )
            return msgspec.json.decode(content, type=_Book)
        except (msgspec.DecodeError, RecursionError) as error:
            what_to_do = f"move it away, or {_ELSEWHERE}"
            raise self._unusable(f"is no list of calls ({error})", what_to_do) from None

    @contextlib.contextmanager
    def _complaining(self) -> Iterator[None]:
        try:
            yield
        except UnsafeFile as error:
            raise CallbookUnusable(f"{error}, or {_ELSEWHERE}.") from error
        except OSError as error:
            why = error.strerror or str(error)
            raise self._unusable(f"cannot be used ({why})", _ELSEWHERE) from None

    def _unusable(self, why: str, what_to_do: str) -> CallbookUnusable:
        return CallbookUnusable(f"{self._path} {why}: {what_to_do}.")


def _is_same(one: Ticket, other: Ticket) -> bool:
    return _at_its_beginning(one) == _at_its_beginning(other)


def _at_its_beginning(ticket: Ticket) -> Ticket:
    return msgspec.structs.replace(ticket, after=None)


def _free_name(tool: str, taken: Collection[str]) -> str:
    """The tool's name and the lowest free number: easy to type, and never like an option."""
    typable = _NOT_TYPABLE.sub("_", tool)[:NAME_LETTERS_MAX].lstrip("-") or "call"
    names = (f"{typable}-{number}" for number in range(1, len(taken) + 2))
    return next(name for name in names if name not in taken)


@contextlib.contextmanager
def _locked(path: Path, within_s: float) -> Iterator[None]:
    """Exclude changes by other processes. Raises `OSError` if another one holds the lock."""
    descriptor = open_own(path, os.O_RDWR | os.O_CREAT)
    try:
        give_up_at = time.monotonic() + within_s
        while not _try_lock(descriptor):
            if time.monotonic() >= give_up_at:
                raise TimeoutError("another process keeps it locked")
            time.sleep(_LOCK_PAUSE_S)
        yield
    finally:
        os.close(descriptor)  # this unlocks


def _try_lock(descriptor: int) -> bool:
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # POSIX allows either
        return False
    return True


# Calls by name


class Target(msgspec.Struct, frozen=True):
    """The call to resume, and its server. `cwd` is the folder to start the command of `url` in."""

    url: str
    ticket: Ticket
    cwd: str | None = None
    token_file: str | None = None


def find(name: str) -> Target:
    """The call with this name. Raises `ValueError` (`Finished`), or `CallbookUnusable`."""
    entry = _named(name, f"No call is called {_shortened(name)}.")
    return Target(entry.url, entry.ticket, entry.cwd, entry.token_file)


def find_at(url: str, text: str) -> Target:
    """The call with this ticket or name, at this URL. Raises like `find`."""
    try:
        return Target(url, Ticket.parse(text))
    except ValueError as error:
        why = f"No call is called {_shortened(text)}, and it is no ticket ({error})."
        entry = _named(text, why)
        return Target(url, entry.ticket, None, entry.token_file)


def ticket_or_id(text: str) -> Ticket | str:
    """A ticket from its text or from a call's name; any other text is a stream's id."""
    try:
        return Ticket.parse(text)
    except ValueError:
        pass
    try:
        return next((e.ticket for e in Callbook.of_user().entries() if e.name == text), text)
    except CallbookUnusable:
        return text  # an id needs no file


def _named(name: str, why_not: str) -> Entry:
    book = Callbook.of_user()
    entries = {entry.name: entry for entry in book.entries()}
    if name not in entries:
        if name in book.finished():
            raise Finished(name)
        raise ValueError(f"{why_not} {names_of(entries)}")
    return entries[name]


def names_of(entries: Iterable[str]) -> str:
    """A sentence with all names, or the newest of many."""
    names = list(entries)
    if len(names) > NAMES_MAX:
        names = ["…", *names[-NAMES_MAX:]]
    return f"There are: {', '.join(names)}." if names else "The list of calls is empty."


def _shortened(text: str) -> str:
    return text if len(text) <= WORD_LETTERS_MAX else f"{text[:WORD_LETTERS_MAX]}…"


OTHER_SERVER: Final = (
    "Another server listens at this URL now than the one that began the call, or one with other "
    "keys."
)


def name_of(client: Client) -> str:
    """The identity of the server: the id of its keys, else the name that it gives itself."""
    hello = wire.Hello(client.protocol_version, client.capabilities)
    return hello.key_memory or str(client.server_info.get("name", ""))


class Note:
    """The entry of one call in the file: added, moved and removed."""

    def __init__(self, draft: Callable[[Ticket], Entry] | None, name: str | None = None) -> None:
        self.name = name  # None until the call has an entry
        self.server = ""  # identifies the server that is connected now; empty if it has no name
        self._maker = ""  # the same of the server that made the call
        self._draft = draft  # None when it was tried, or must not be
        self._has_complained = False

    @classmethod
    def of_new(
        cls,
        url: str,
        tool: str,
        arguments: dict[str, Any],
        *,
        token_file: Path | None = None,
        has_token: bool = False,
    ) -> "Note":
        """For a call that begins. Its entry is added once there is a ticket."""
        now, cwd = wall(), None
        if url.startswith("stdio:"):
            with contextlib.suppress(FileNotFoundError):  # the folder was deleted
                cwd = os.getcwd()

        def draft(ticket: Ticket) -> Entry:
            return Callbook.of_user().add(
                ticket,
                url=url,
                tool=tool,
                arguments=arguments,
                cwd=cwd,
                now=now,
                server=note.server,
                token_file=None if token_file is None else os.path.abspath(token_file),
                has_token=has_token,
            )

        note = cls(draft)
        return note

    @classmethod
    def of_noted(cls, ticket: Ticket) -> "Note":
        """For a call that was begun before, if it has an entry."""
        note = cls(None)
        entry = note._try(lambda: Callbook.of_user().find(ticket))
        if entry is not None:
            note.name, note._maker = entry.name, entry.server
        return note

    def take(self, call: RunningCall) -> None:
        """Add the entry once the call has a ticket: at once, as this process may be killed."""
        if self._draft is None or (ticket := call.ticket) is None:
            return
        draft, self._draft = self._draft, None
        entry = self._try(lambda: draft(ticket))
        self.name = entry.name if entry is not None else None

    def leave(self, call: RunningCall) -> None:
        """The call was left, and runs on from the position of its ticket."""
        self.take(call)
        if (ticket := call.ticket) is not None:
            self._change(lambda book: book.move(ticket))

    def skip(self, at: Ticket) -> None:
        """The messages up to the position of `at` are gone, and the call goes on behind them."""
        self._change(lambda book: book.move(at))

    def finish(self, call: RunningCall) -> None:
        """The result of the call was printed."""
        if (ticket := call.ticket) is not None:
            self._change(lambda book: book.finish(ticket))

    def remove(self, call: RunningCall) -> None:
        """The call is over."""
        if (ticket := call.ticket) is not None:
            self._change(lambda book: book.remove([ticket]))

    def failed(self, call: RunningCall, error: BaseException) -> None:
        """Following the call has failed: if it can be resumed, add a note that says how."""
        if isinstance(error, CallFailed) and call.is_complete:
            self.remove(call)
        elif isinstance(error, StreamGone) and error.reason in NEVER_RESUMABLE | MISPLACED:
            if call.ticket is not None:
                self.refused(call.ticket, error)
        elif isinstance(error, CannotConnect | StreamGone):
            self.leave(call)
            self._hint(error, "To come back to the call:")

    def refused(self, ticket: Ticket, error: StreamGone) -> None:
        """The server has answered a resume or poll with this error."""
        if error.reason == "stream_not_found" and self._maker not in ("", self.server):
            error.add_note(OTHER_SERVER)
            self._hint(error, "When the call's own server is back:")
        elif error.reason in NEVER_RESUMABLE or (
            error.reason in MISPLACED and ticket.after is None and error.earliest is None
        ):
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
                say(f"This call is not saved in the list of calls: {error}")
            return None

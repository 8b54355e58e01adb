"""The action of `calls`: polls all unfinished calls that were begun here."""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Final

import msgspec
import trio

from streams import logs
from streams.cli.actions import output
from streams.cli.actions.call import CLIENT_NAME, dialer_of
from streams.cli.actions.notes import (
    NEVER_RESUMABLE,
    OTHER_SERVER,
    Callbook,
    CallbookUnusable,
    Entry,
    name_of,
    names_of,
)
from streams.cli.actions.output import as_json_text, harmless, say
from streams.cli.actions.states import Finding, State, in_words
from streams.cli.base import CANNOT_CONNECT, DETACHED, DONE, complain
from streams.client.client import Client
from streams.clock import wall
from streams.errors import CannotConnect, ClientError, StreamGone
from streams.exchange import Dialer
from streams.process.options import TOKEN_VARIABLE
from streams.process.tokens import token_of

SERVERS_AT_ONCE: Final = 16  # each may be a process, and take the whole timeout
POLLS_AT_ONCE: Final = 16  # of one server
COLUMNS: Final = ("name", "tool", "age", "status")

print_to_terminal = partial(output.print_to_terminal, COLUMNS, wrapped=("status",))
print_aligned = partial(output.print_aligned, COLUMNS)

Dial = Callable[..., Dialer]  # for a URL, a working directory and, if one is needed, a token


class Row(msgspec.Struct, frozen=True, rename="camel"):
    """One call as `--json` prints it. `started_at` is seconds since 1970. Tickets are secrets and
    left out.
    """

    name: str
    tool: str
    arguments: object
    url: str
    cwd: str | None
    started_at: float
    state: State
    status: str


def forget(names: Iterable[str]) -> int:
    """`mcp-streams calls --forget`: remove all of these names, or none."""
    try:
        book = Callbook.of_user()
        tickets = {entry.name: entry.ticket for entry in book.entries()}
        if unknown := [name for name in names if name not in tickets]:
            why = f"No call is called {unknown[0]}. {names_of(tickets)}"
            return complain(why)
        book.remove([tickets[name] for name in names])
    except CallbookUnusable as error:
        return complain(str(error))
    return DONE


def run(*, timeout_s: float, as_json: bool, token_file: Path | None = None) -> int:
    """`mcp-streams calls`; `token_file` is for the calls that were begun without one."""
    logs.take_libraries()
    try:
        book = Callbook.of_user()
        entries = book.entries()
    except CallbookUnusable as error:
        return complain(str(error))
    found: dict[str, Finding] = {}
    try:
        asking = partial(ask_all, entries, timeout_s, tokens=Tokens(token_file))
        found = trio.run(asking, restrict_keyboard_interrupt_to_checkpoints=True)
    except* KeyboardInterrupt:
        pass
    if len(found) < len(entries):
        return DETACHED
    rows = [_row(entry, found[entry.name]) for entry in entries]
    _print(rows, as_json=as_json)
    if gone := [entry.ticket for entry in entries if found[entry.name].state == "gone"]:
        try:
            book.remove(gone)
        except CallbookUnusable as error:
            say(f"Calls that are gone stay in the list: {error}")
    is_none_reachable = rows and all(row.state == "unreachable" for row in rows)
    return CANNOT_CONNECT if is_none_reachable else DONE


def _row(entry: Entry, finding: Finding) -> Row:
    return Row(
        name=entry.name,
        tool=entry.tool,
        arguments=entry.arguments,
        url=entry.url,
        cwd=entry.cwd,
        started_at=entry.started_at,
        state=finding.state,
        status=finding.status,
    )


# Polling


class Tokens:
    """The bearer token of each call, as it was begun: no server is sent another one's."""

    def __init__(self, file: Path | None = None) -> None:
        self._file = file
        self._told = os.environ.pop(TOKEN_VARIABLE, None)  # servers that are started see no token

    def of(self, entry: Entry) -> str | Callable[[], str] | None:
        """The token to poll with. Raises `ValueError` if its file cannot be used."""
        if entry.token_file is not None:
            return token_of(Path(entry.token_file))
        if entry.has_token and self._told:
            return self._told
        return None if self._file is None else token_of(self._file)


async def ask_all(
    entries: Sequence[Entry],
    timeout_s: float,
    dial: Dial = dialer_of,
    *,
    tokens: Tokens | None = None,
) -> dict[str, Finding]:
    """The status of each call, by name. Servers are polled at the same time."""
    tokens = tokens or Tokens()
    servers: dict[tuple[object, ...], list[Entry]] = {}
    for entry in entries:
        way = (entry.url, entry.cwd, entry.token_file, entry.has_token)
        servers.setdefault(way, []).append(entry)
    unanswered = Finding("unreachable", f"cannot be reached: no answer within {timeout_s:g} s")
    found = {entry.name: unanswered for entry in entries}
    limiter = trio.CapacityLimiter(SERVERS_AT_ONCE)

    async def ask(of_server: list[Entry]) -> None:
        async with limiter:
            with trio.move_on_after(timeout_s):
                await _ask_server(of_server, dial, timeout_s, found, tokens)

    async with trio.open_nursery() as nursery:
        for of_server in servers.values():
            nursery.start_soon(ask, of_server)
    return found


async def _ask_server(
    entries: list[Entry],
    dial: Dial,
    timeout_s: float,
    found: dict[str, Finding],
    tokens: Tokens,
) -> None:
    limiter = trio.CapacityLimiter(POLLS_AT_ONCE)

    async def ask(client: Client, entry: Entry) -> None:
        async with limiter:
            found[entry.name] = await status_of(client, entry)

    try:
        token = tokens.of(entries[0])
        where = entries[0].url, entries[0].cwd
        dialer = dial(*where) if token is None else dial(*where, token)
        async with (
            Client(dialer, name=CLIENT_NAME, connect_timeout_s=timeout_s) as client,
            trio.open_nursery() as nursery,
        ):
            for entry in entries:
                nursery.start_soon(ask, client, entry)
    except (CannotConnect, ValueError) as error:
        why = str(error).removeprefix("No connection: ").removesuffix(".")
        unreachable = Finding("unreachable", f"cannot be reached: {why}")
        found |= {entry.name: unreachable for entry in entries}


async def status_of(client: Client, entry: Entry) -> Finding:
    """The status of one call; an error becomes a status."""
    try:
        return in_words(await client.poll(entry.ticket))
    except StreamGone as error:
        if error.reason == "stream_not_found" and entry.server not in ("", name_of(client)):
            return Finding("unknown", f"not known: {OTHER_SERVER.removesuffix('.')}")
        if error.reason in NEVER_RESUMABLE:
            what = "not found" if error.reason == "stream_not_found" else error.reason
            return Finding("gone", f"gone ({what})")
        return Finding("unknown", f"not known: {error}")
    except CannotConnect as error:
        return Finding("unreachable", f"cannot be reached: {error}")
    except ClientError as error:
        return Finding("unknown", f"not known: {error}")


# Printing


def _print(rows: Sequence[Row], *, as_json: bool) -> None:
    if as_json:
        print(as_json_text(rows))
    elif not rows:
        say("No unfinished calls.")
    else:
        now = wall()
        table = [_cells(row, now) for row in rows]
        print_to_terminal(table) if sys.stdout.isatty() else print_aligned(table)


def _cells(row: Row, now: float) -> list[str]:
    cells = (row.name, row.tool, age(now - row.started_at), row.status)
    return [harmless(" ".join(cell.split())) for cell in cells]


def age(seconds: float) -> str:
    """A time in the largest unit that it fills, such as 3 min."""
    units = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))
    unit, length = next((each for each in units if seconds >= each[1]), units[-1])
    return f"{max(seconds, 0) // length:.0f} {unit}"

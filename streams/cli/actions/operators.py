"""The actions of operators: `ls`, `show`, `tail`, `stats`, `drain` and their `cancel`.

This is one file because the same view of a call is a row of `ls`, the card of `show` and a line of
`tail`.
"""

import sys
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Final, TypeVar, get_args

import msgspec
import trio
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from streams import logs, messages
from streams.cli.actions.admin_client import AdminClient, CannotAsk
from streams.cli.actions.output import as_json_text, harmless, print_aligned, say
from streams.cli.actions.sources import CannotLook, Source, source_now, source_of
from streams.cli.base import CANNOT_CONNECT, DETACHED, DONE, GONE, USAGE, complain, nearest
from streams.cli.operator_options import Output, Where
from streams.clock import lasting, utc, wall
from streams.errors import first_of
from streams.observe.calls import principal_word
from streams.observe.details import CallDetail
from streams.observe.lines import MessageView, in_words
from streams.observe.registry import ALL, LIVE_STATES, CallView, Page, State, Wanted

COLUMNS: Final = ("call", "tool", "state", "age", "pending", "client", "principal")
TOOL_LETTERS: Final = 24  # of a tool in a window of 100 columns or fewer
LISTED_MAX: Final = 1000  # calls that `ls` takes as its limit
LISTED_AT_ONCE: Final = 500  # of a journal that is counted
TAILED_CALLS: Final = 200  # the newest calls, whose changes are told
MESSAGES_AT_ONCE: Final = 500
ENDED_EVERY_S: Final = 0.25
_TOMBSTONES: Final = ("abandoned", "cancelled")  # the states without messages


class Asked(msgspec.Struct, frozen=True):
    """The options of `ls`."""

    states: tuple[str, ...] = ()
    text: str = ""
    limit: int = 50

    @property
    def wanted(self) -> Wanted:
        """The calls that are wanted. Raises `CannotLook`."""
        given = [each for state in self.states for each in state.split(",")]
        known = get_args(State)
        for each in given:
            if each not in known:
                raise CannotLook(f"--state: unknown {each}{nearest(each, known)}")
        wanted = Wanted(frozenset(msgspec.convert(given, list[State])), self.text)
        return ALL if wanted == ALL else wanted


_T = TypeVar("_T")
Look = Callable[[Source], Awaitable[Any]]
Draw = Callable[[Any], RenderableType]


def ls(where: Where, asked: Asked, output: Output) -> int:
    """List calls; return the exit code."""

    async def look(source: Source) -> Page:
        return await calls_of(source, asked.wanted, asked.limit)

    return _run(where, partial(_shown, look=look, draw=table_of, output=output))


def show(where: Where, prefix: str, output: Output) -> int:
    """Show one call; return the exit code."""

    async def look(source: Source) -> CallDetail:
        return await source.call(prefix)

    return _run(where, partial(_shown, look=look, draw=card_of, output=output))


def stats(where: Where, output: Output) -> int:
    """Count what lives; return the exit code."""
    return _run(where, partial(_shown, look=_counted, draw=counts_of, output=output))


def tail(where: Where, prefix: str | None, lines: int, output: Output) -> int:
    """Print messages of a call, or changes of all calls, as they come; return the exit code."""
    if prefix is None:
        return _run(where, partial(_tail_all, output=output))
    return _run(where, partial(_tail_call, prefix=prefix, lines=lines, output=output))


def cancel(where: Where, prefix: str, *, as_json: bool) -> int:
    """Cancel a call; return the exit code."""

    async def ask(source: Source) -> int:
        if source.client is None:
            raise CannotLook(_no_server(source, "no call of it runs"))
        done = await source.client.post("calls", prefix, "cancel")
        if as_json:
            print(as_json_text(done))
        else:
            print(harmless(f"The call {done['cancelled']} is cancelled."))
        return DONE

    return _run(where, ask)


def drain(where: Where, grace_s: float | None, *, waits: bool, as_json: bool) -> int:
    """Drain a server, and wait until it has ended; return the exit code."""

    async def ask(source: Source) -> int:
        if source.client is None:
            raise CannotLook(_no_server(source, "there is nothing to drain"))
        done = await source.client.post("drain", value={"graceS": grace_s})
        if as_json:
            print(as_json_text(done), flush=True)
        else:
            print(f"The server drains, for {lasting(done['graceS'])} at most.", flush=True)
        if waits:
            await _ended(source.client)
            say("The server has ended.")
        return DONE

    return _run(where, ask)


def _no_server(source: Source, so: str) -> str:
    """Why a journal that is only read cannot be asked to change something."""
    if source.path is None:  # a store does not tell the addresses of its replicas
        return f"{source.name} is only read: name a replica's --admin, as http://HOST:PORT."
    return f"No process serves {source.name}, so {so}."


async def _ended(client: AdminClient) -> None:
    """Wait until a server answers no more, and tell how many calls it waits for."""
    told = -1
    while True:
        try:
            counts = await client.get("stats", kind=dict[str, Any])
        except CannotAsk as error:
            if error.status == 0:
                return
            raise
        if counts["running"] != told:
            told = counts["running"]
            say(f"{told:,} {'call runs' if told == 1 else 'calls run'}.")
        await trio.sleep(ENDED_EVERY_S)


def _run(where: Where, action: Callable[[Source], Awaitable[int]]) -> int:
    """Run an action on the source that the user means; say what is wrong."""
    logs.take_libraries()

    async def run() -> int:
        return await action(source_of(where))

    failure: BaseException | None = None
    code = DETACHED
    try:
        code = trio.run(run, restrict_keyboard_interrupt_to_checkpoints=True)
    except* KeyboardInterrupt:
        pass  # the usual end of --watch
    except* (CannotLook, CannotAsk) as errors:
        failure = first_of(errors)
    return code if failure is None else complain(failure, _exit_code(failure))


def _exit_code(error: BaseException | None) -> int:
    if isinstance(error, CannotAsk):
        return {0: CANNOT_CONNECT, 404: GONE, 409: GONE}.get(error.status, USAGE)
    return USAGE


# Looking once, or again and again


class _Again:
    """A place that is looked at again and again, while its server may restart.

    The first look fails where nothing answers; a later one waits for the next server.
    """

    def __init__(self, source: Source, output: Output) -> None:
        self.source = source
        self._output = output
        self._has_looked = self._is_away = False

    async def look(self, look: Callable[[Source], Awaitable[_T]]) -> _T:
        """Look, again where it has to be. Raises `CannotLook` and `CannotAsk`."""
        while True:
            try:
                self.source = source_now(self.source)
                found = await look(self.source)
            except (CannotAsk, CannotLook) as error:
                is_refused = isinstance(error, CannotAsk) and 0 < error.status < 500
                if is_refused or not self._has_looked:
                    raise
                if not self._is_away:
                    say(f"{error} Looking again until Ctrl-C.")
                self._is_away = True
                await trio.sleep(self._output.every)
            else:
                if self._is_away:
                    say(f"{self.source.name} answers again.")
                self._has_looked, self._is_away = True, False
                return found


async def _shown(source: Source, *, look: Look, draw: Draw, output: Output) -> int:
    again = _Again(source, output)
    if not output.watch:
        found = await look(source)
        _print(found, draw, output)
        if isinstance(found, Page) and not (output.json or sys.stdout.isatty()) and found.before:
            say(_more(found))
    elif output.json or not sys.stdout.isatty():
        while True:
            _print(await again.look(look), draw, output)
            await trio.sleep(output.every)
    else:
        with Live(console=_console(), screen=True, auto_refresh=False) as live:
            while True:
                live.update(draw(await again.look(look)), refresh=True)
                await trio.sleep(output.every)
    return DONE


def _print(found: Any, draw: Draw, output: Output) -> None:
    if output.json:
        print(as_json_text(found), flush=True)
        return
    drawn = draw(found)
    if sys.stdout.isatty() or not isinstance(drawn, _Rows):
        _console().print(drawn)
    else:
        print_aligned(drawn.columns, drawn.rows)
        sys.stdout.flush()


def _console() -> Console:
    return Console(highlight=False, markup=False, emoji=False, soft_wrap=not sys.stdout.isatty())


class _Rows:
    """A table: for a terminal by rich, else for programs that read lines."""

    def __init__(
        self,
        columns: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        title: str = "",
    ) -> None:
        self.columns = columns
        self.rows = [[safe(cell) for cell in row] for row in rows]
        self._title = title

    def __rich_console__(self, _: Console, options: ConsoleOptions) -> RenderResult:
        """The table in a window: the principal gives way, a long tool before that."""
        table = Table(box=None, pad_edge=False, caption=self._title or None, caption_justify="left")
        for column in self.columns:
            is_tool, gives_way = column == "tool", column == "principal"
            widest = max(TOOL_LETTERS, TOOL_LETTERS + options.max_width - 100) if is_tool else None
            # Rich takes columns that may be folded first; their cells are cut instead.
            table.add_column(column, no_wrap=not gives_way, max_width=widest, overflow="ellipsis")
        for row in self.rows:
            table.add_row(*(Text(each, no_wrap=True, overflow="ellipsis") for each in row))
        yield table


def safe(text: str) -> str:
    """A peer's text for one cell: in one line, and without characters that control a terminal."""
    return harmless(" ".join(text.split()))


# ls


async def calls_of(source: Source, wanted: Wanted, limit: int) -> Page:
    """The newest calls that are wanted, as many pages as that takes."""
    found: list[CallView] = []
    before: int | None = None
    async with source.held():
        while len(found) <= limit:  # one more tells whether there are more
            page = await source.calls(before, limit + 1 - len(found), wanted)
            found += page.calls
            before = page.before
            if before is None:
                break
    return Page(tuple(found[:limit]), found[limit - 1].number if len(found) > limit else None)


def table_of(page: Page) -> RenderableType:
    """The table of `ls`."""
    return _Rows(COLUMNS, map(_row, page.calls), title=_more(page) if page.before else "")


def _more(page: Page) -> str:
    shown = len(page.calls)
    if shown >= LISTED_MAX:
        return f"{shown:,} calls; there are more: choose with --state and --text"
    return f"{shown:,} calls; more: --limit {min(2 * shown, LISTED_MAX)}"


def _row(call: CallView) -> Sequence[str]:
    pending = f"{call.pending:,}" if call.pending else ""
    return (
        call.id,
        call.tool,
        call.state,
        lasting(wall() - call.began_at),
        pending,
        _where_client_is(call),
        principal_word(call.principal),
    )


def _where_client_is(call: CallView) -> str:
    if call.client_is_elsewhere:
        return "elsewhere"
    if call.is_client_unknown:
        return "unknown"
    return call.transport or ("away" if call.state in ("running", "asking") else "")


# show


def card_of(call: CallDetail) -> RenderableType:
    """The lines of `show`."""
    now = wall()
    rows = [
        ("call", f"{call.id}  number {call.number}"),
        ("tool", call.tool),
        ("state", _state(call)),
        ("principal", call.principal),
        ("client", _client(call, now)),
        ("began", f"{lasting(now - call.began_at)} ago"),
    ]
    if call.ended_at is not None:
        rows.append(("ended", f"{lasting(now - call.ended_at)} ago"))
    rows.append(("messages", _marks(call)))
    if call.owner:
        rows.append(("replica", call.owner))
    if call.restarts is not None:
        rows.append(("restarts", f"{call.restarts} without progress"))
    rows += [("question", f"{each.method} {_asked(each.params)}") for each in call.questions]
    rows.append(("", missed_in_words(call)))
    return _Lines(rows)


class _Lines:
    """Names and values, a line each."""

    def __init__(self, rows: Iterable[tuple[str, str]]) -> None:
        self._rows = [(name, safe(value)) for name, value in rows]

    def __rich__(self) -> Text:
        return Text("\n".join(f"{name:<10} {value}".strip() for name, value in self._rows))


def missed_in_words(call: CallDetail) -> str:
    """The sentence about the messages that the client has not confirmed."""
    if call.state in _TOMBSTONES:
        return "Its messages are deleted."
    if not call.pending:
        return "You missed nothing."
    told = in_words(call.missed)
    if call.uncounted:
        told = f"{told}{', ' if told else ''}{call.uncounted:,} not counted"
    return f"You missed {call.pending:,}: {told}."


def _state(call: CallView) -> str:
    if call.state == "stopped":
        return "stopped: no process serves it; a server that opens the journal ends or restarts it"
    return f"{call.state}, waits for an answer" if call.questions else call.state


def _client(call: CallView, now: float) -> str:
    if call.connection is not None:
        return f"{call.transport}, connection {call.connection}"
    if call.client_is_elsewhere:
        return "at another replica"
    if call.is_client_unknown:
        return "unknown; the replica that runs the call does not tell"
    if call.expires_at is None:
        return "none here"
    left = lasting(call.expires_at - now)
    if call.state in _TOMBSTONES or (call.ended_at is not None and not call.pending):
        return f"none; the call is remembered for {left}"
    return f"away; the call is abandoned in {left} unless it comes back"


def _marks(call: CallView) -> str:
    written = "" if call.written is None else f"{call.written:,} written, "
    return (
        f"{call.numbered:,} numbered, {call.durable:,} durable, {call.handed:,} handed, {written}"
        f"{call.delivered:,} delivered"
    )


class _Asked(msgspec.Struct):
    message: str


def _asked(params: msgspec.Raw) -> str:
    try:
        return messages.decode(params, _Asked).message
    except ValueError:
        return bytes(params).decode(errors="replace")


# stats


async def _counted(source: Source) -> dict[str, Any]:
    """The counts of a server, or of the calls in a journal."""
    if source.client is not None:
        found: dict[str, Any] = await source.client.get("stats", kind=dict[str, Any])
        return found
    # A store does not tell which calls ask.
    unknown = () if source.path is not None else ("asking",)
    states = {each: 0 for each in get_args(State) if each not in unknown}
    pending, before, is_over = 0, None, False
    async with source.held():
        while not is_over:
            page = await source.calls(before, LISTED_AT_ONCE, ALL)
            for call in page.calls:
                states[call.state] = states.get(call.state, 0) + 1
                pending += call.pending
            before = page.before
            is_over = before is None
    return {"journal": source.name, **states, "pending": pending}


def counts_of(counts: dict[str, Any]) -> RenderableType:
    """The table of `stats`."""
    rows: list[tuple[str, str]] = []
    for name, value in counts.items():
        if name == "unready":
            rows.append(("ready", f"no: {value}" if value else "yes"))
        elif isinstance(value, dict):
            rows += [(f"{name}: {each}", _number(count)) for each, count in value.items()]
        elif value is not None:
            rows.append((name, _AS_TEXT.get(name, _number)(value)))
    return _Rows(("what", "now"), rows)


def _number(value: object) -> str:
    return f"{value:,}" if isinstance(value, int) else str(value)


_AS_TEXT: Final[Mapping[str, Callable[[Any], str]]] = {"pid": str, "startedAt": utc}


# tail


async def _tail_call(source: Source, *, prefix: str, lines: int, output: Output) -> int:
    again = _Again(source, output)
    call = await again.look(lambda source: source.call(prefix))
    call_id = call.id
    following = _Following(again, call_id, max(0, call.durable - lines), output)
    is_stopped = call.state == "stopped"
    has_run = not is_stopped
    while True:
        await following.read_on()
        waits = call.state in LIVE_STATES and has_run
        if not waits and call.durable >= call.numbered:
            break
        await trio.sleep(output.every)
        # Looked at before its messages: those of a call that has ended are all there then.
        try:
            call = await again.look(lambda source: source.call(call_id))
        except CannotAsk as error:
            if error.status != 404:
                raise
            return complain(f"The call {call_id} is forgotten: nothing tells how it ended.", GONE)
        if call.state == "stopped" and not is_stopped:
            say("No process serves it: waiting for the next one, until Ctrl-C.")
        is_stopped = call.state == "stopped"
        has_run = has_run or not is_stopped
    say(f"The call is {call.state}. {missed_in_words(call)}")
    return DONE


class _Following:
    """The messages of one call, printed in order; gaps are told."""

    def __init__(self, again: _Again, call_id: str, after: int, output: Output) -> None:
        self._again, self._id, self._after, self._output = again, call_id, after, output

    async def read_on(self) -> None:
        """Print all that is there."""
        while True:
            found = await self._again.look(
                lambda source: source.messages(self._id, self._after, MESSAGES_AT_ONCE)
            )
            for each in found.messages:
                self._tell_gap(each.seq - 1)
                _print_message(each, self._output)
                self._after = each.seq
            if found.after is None:
                self._tell_gap(found.gone)
                return

    def _tell_gap(self, last: int) -> None:
        """The messages up to `last` were delivered before they could be read."""
        first = self._after + 1
        if last < first:
            return
        if self._output.json:
            print(as_json_text({"missing": {"from": first, "to": last}}), flush=True)
        else:
            which = f"{first}" if first == last else f"{first} to {last}"
            print(f"{which}: delivered, not kept any more", flush=True)
        self._after = last


def _print_message(message: MessageView, output: Output) -> None:
    if output.json:
        print(as_json_text(message), flush=True)
    else:
        print(f"{message.seq:>7}  {message.kind:<12}  {safe(message.text)}", flush=True)


async def _tail_all(source: Source, *, output: Output) -> int:
    """Print a line for each change of a call, for ever."""
    known: dict[str, tuple[State, bool]] | None = None
    again = _Again(source, output)
    while True:
        page = await again.look(lambda source: source.calls(None, TAILED_CALLS, ALL))
        now = {call.id: (call.state, call.is_attached) for call in page.calls}
        for call in reversed(page.calls):
            if known is not None and known.get(call.id) != now[call.id]:
                _print_change(call, known.get(call.id), output)
        if known is None:
            say(f"{len(now):,} calls are there. Their changes from now on:")
        known = now
        await trio.sleep(output.every)


def _print_change(call: CallView, before: tuple[str, bool] | None, output: Output) -> None:
    if output.json:
        print(as_json_text(call), flush=True)
        return
    if before is None:
        what = f"began, {call.state}"
    elif before[0] != call.state:
        what = call.state
    else:
        what = "resumed" if call.is_attached else "detached"
    print(f"{call.id}  {safe(call.tool)}  {what}  {safe(call.principal)}", flush=True)

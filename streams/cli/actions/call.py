"""The actions of `call`, `resume`, `cancel`, `pages` and `poll`.

Results go to standard output, everything else to standard error.

This is one file because all of them connect in one way, and follow a call in one way.
"""

import math
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from streams import logs
from streams.cli.actions.notes import Note, name_of
from streams.cli.actions.output import (
    QUESTION,
    Display,
    as_json_text,
    harmless,
    one_line,
    print_result,
    say,
)
from streams.cli.actions.questions import Questions, can_ask
from streams.cli.actions.states import in_words
from streams.cli.actions.tools import hint_for
from streams.cli.base import (
    BROKEN_PIPE,
    CANNOT_CONNECT,
    DETACHED,
    DONE,
    FAILED,
    GONE,
    TIMED_OUT,
    Errors,
    complain,
)
from streams.client import wire
from streams.client.call import RunningCall
from streams.client.client import Client
from streams.client.pages import Pages
from streams.client.wire import Standing
from streams.errors import (
    CallFailed,
    CannotConnect,
    ClientError,
    StreamGone,
    Superseded,
    first_of,
)
from streams.exchange import Dialer
from streams.process.options import TOKEN_VARIABLE
from streams.process.tokens import token_of
from streams.protocol.ticket import Ticket
from transports import dial, stdio
from transports.net.dialing import Token

CLIENT_NAME: Final = "mcp-streams-cli"

SECOND_CTRL_C_S: Final = 2.0  # for a second Ctrl-C after the first
CANCEL_S: Final = 5.0  # for the server to confirm a cancellation

# How long a server that is just starting may take to listen. A command that starts its server
# itself (stdio) need not wait.
CONNECT_S: Final = 5.0
ATTEMPT_S: Final = 10.0  # for one attempt
START_S: Final = 60.0  # for a command that has to start, such as npx, which may download first

# How often a call is checked for its ticket: the client has no event for that, and the call may
# send no message.
NOTED_WITHIN_S: Final = 0.1


class Reach(msgspec.Struct, frozen=True):
    """How a command reaches a server, and for how long it waits."""

    url: str
    cwd: str | None = None  # the folder to start the command of `url` in
    token_file: Path | None = None
    timeout_s: float | None = None

    @property
    def deadline(self) -> float:
        """When to give up, by trio's clock."""
        return math.inf if self.timeout_s is None else trio.current_time() + self.timeout_s

    @property
    def options(self) -> str:
        """The options that another command needs to reach the server."""
        if self.token_file is None:
            return ""
        return f" --token-file {shlex.quote(os.path.abspath(self.token_file))}"


Act = Callable[[Client, float], Awaitable[int]]
"""An action of a command; the number is the time at which to give up."""


def run(act: Act, reach: Reach, *, asks: Questions | None = None) -> int:
    """Connect to the server, act, and return the exit code; errors are printed in one line.

    A server that does not answer is tried for `CONNECT_S`. Its questions go to `asks`.
    """

    async def with_client(dialer: Dialer) -> int:
        deadline, timeout_s = reach.deadline, reach.timeout_s or math.inf
        is_command = reach.url.startswith("stdio:")
        codes: list[int] = []
        client = Client(
            dialer,
            name=CLIENT_NAME,
            connect_s=0.0 if is_command else min(CONNECT_S, timeout_s / 2),
            connect_timeout_s=min(START_S if is_command else ATTEMPT_S, timeout_s),
            answers={} if asks is None else {QUESTION: asks.answer},
        )
        with trio.CancelScope(deadline=deadline) as connecting:
            async with client:
                connecting.deadline = math.inf
                codes.append(await act(client, deadline))
        if connecting.cancelled_caught:
            raise CannotConnect(f"No connection: no answer within {timeout_s:g} s.")
        return codes[-1]

    return run_dialing(with_client, reach)


def bounded(act: Callable[[Client], Awaitable[int]]) -> Act:
    """An action that is given up at the deadline."""

    async def act_in_time(client: Client, deadline: float) -> int:
        with trio.CancelScope(deadline=deadline):
            return await act(client)
        return complain("The server did not answer in time.", TIMED_OUT)

    return act_in_time


def run_dialing(act: Callable[[Dialer], Awaitable[int]], reach: Reach) -> int:
    """Like `run`, for an action that opens its connections itself."""
    logs.take_libraries()
    try:
        token = token_of(reach.token_file)
        dialer = dialer_of(reach.url, reach.cwd, token)
    except ValueError as error:
        return complain(_with_url(str(error), reach.url))

    codes: list[int] = []

    async def main() -> None:
        codes.append(await act(dialer))

    try:
        # Else Ctrl-C may come where trio has made a task that it has not scheduled yet.
        trio.run(main, restrict_keyboard_interrupt_to_checkpoints=True)
    except* ClientError as errors:
        codes.append(_report(errors, reach, has_token=token is not None))
    except* KeyboardInterrupt:
        codes.append(DETACHED)  # there was no call to detach from
    except* BrokenPipeError:
        codes.append(BROKEN_PIPE)  # standard output was closed
    return codes[-1]


def _with_url(why: str, url: str) -> str:
    """An error with the URL in it, unless that may contain a password."""
    is_named = url in why or "@" in url or "--token-file" in why
    return why if is_named else f"{url}: {why}"


def dialer_of(url: str, cwd: str | None, token: Token = None) -> Dialer:
    """The dialer for a URL; a command that it names is started in `cwd`. Raises `ValueError`."""
    scheme, _, command = url.partition(":")
    if scheme == "stdio" and cwd is not None:
        return partial(stdio.connect, stdio.split_command(command), cwd=cwd)
    return dial(url, token=token)


def _report(failure: BaseException, reach: Reach, *, has_token: bool) -> int:
    error = first_of(failure)
    notes = list(getattr(error, "__notes__", ()))
    reason, code, data = None, None, None
    if isinstance(error, StreamGone):
        why, exit_code, reason = str(error), GONE, error.reason
    elif isinstance(error, Superseded):
        why, exit_code, reason = str(error), GONE, "superseded"
    elif isinstance(error, CallFailed):
        why, exit_code, code, data = str(error), FAILED, error.code, error.data
    else:
        why, exit_code = _why_not_connected(error, reach, has_token=has_token), CANNOT_CONNECT
    if Errors.are_json:
        details = {"reason": reason, "code": code, "data": data, "advice": " ".join(notes) or None}
        return complain(one_line(why), exit_code, **details)
    return complain("\n".join([one_line(why), *notes]), exit_code)


_FINISHED: Final = (
    "The call is finished, and its result was received before: there is nothing left to resume."
)
_NOT_KNOWN: Final = (
    "The server does not know this call: it was finished and forgotten, or the ticket is of "
    "another server or another user."
)


def _why_not_connected(error: BaseException, reach: Reach, *, has_token: bool) -> str:
    """The reason, with the name of the server in it, and what to do about its token."""
    why = str(error)
    if not isinstance(error, CannotConnect):
        return why
    shown = reach.url.rsplit("@", 1)[-1]
    if isinstance(error.__cause__, PermissionError):
        if not has_token:
            return (
                f"No connection: {shown} needs a bearer token, and none was sent: give one with "
                f"{TOKEN_VARIABLE} or --token-file."
            )
        source = TOKEN_VARIABLE if reach.token_file is None else f"--token-file {reach.token_file}"
        return (
            f"No connection: {shown} does not accept the bearer token of {source}: it is unknown, "
            "expired or revoked, or meant for another server: give another one with "
            f"{TOKEN_VARIABLE} or --token-file."
        )
    start = "No connection: "
    if why.startswith(start) and shown not in why and not reach.url.startswith("stdio:"):
        return f"{start}{shown}: {why.removeprefix(start)}"
    return why


def parse_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """A tool's arguments from `key=text` and `key:=json`. Raises `ValueError`."""
    arguments: dict[str, Any] = {}
    for pair in pairs:
        key, separator, value = pair.partition("=")
        if not separator or not key.removesuffix(":"):
            raise ValueError(f"{pair}: write key=text or key:=json")
        if key.endswith(":"):
            try:
                arguments[key[:-1]] = msgspec.json.decode(value)
            except ValueError as error:
                raise ValueError(f"{pair}: {error}; text is written key=text") from None
        else:
            arguments[key] = value
    return arguments


# call and resume


class Following(msgspec.Struct, frozen=True):
    """How a call is followed: until when, and how it is printed."""

    reach: Reach
    deadline: float
    as_json: bool
    asks: Questions | None = None
    detaches: bool = False  # as soon as the call can be resumed


async def follow(client: Client, call: RunningCall, how: Following, note: Note) -> int:
    """Print a call's messages and its result. The first Ctrl-C detaches, the second cancels.

    Where messages are gone, it says how many, and goes on behind them.
    """
    while True:
        async with call:
            try:
                return await _follow(call, how, note)
            except Exception as failure:
                error, before = first_of(failure), call.ticket
                behind = await _behind_gap(client, before, error)
                if before is None or behind is None:
                    note.failed(call, error)
                    raise
                note.take(call)
                note.skip(behind)
                _tell_gap(before, behind, as_json=how.as_json)
        call = client.resume(behind)


async def _follow(call: RunningCall, how: Following, note: Note) -> int:
    is_over = False
    with trio.open_signal_receiver(signal.SIGINT) as interrupts:
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = how.deadline
            nursery.start_soon(cancel_on, interrupts, nursery.cancel_scope)
            announced = nursery.cancel_scope.cancel if how.detaches else partial(note.take, call)
            nursery.start_soon(_once_announced, call, announced)
            with Display(as_json=how.as_json, asks=how.asks is not None) as display:
                if how.asks is not None:
                    how.asks.display = display
                async for message in call:
                    note.take(call)
                    display.show(message)
            result = await call.result()
            is_over = True
            nursery.cancel_scope.cancel()
        if not is_over:
            # Nothing more is read, so nothing more is acked, and the ticket stays valid.
            is_late = trio.current_time() >= how.deadline
            is_wanted = how.detaches and call.ticket is not None
            if is_late and not how.as_json:
                say(f"No result within {how.reach.timeout_s:g} s.")
            await _detach(call, how, note, interrupts, may_cancel=not (is_late or is_wanted))
            return DONE if is_wanted else TIMED_OUT if is_late else DETACHED
    print_result(result, as_json=how.as_json)
    if _leads_on(result) and not how.as_json:
        say("There are more pages: `mcp-streams pages` prints them all.")
    print(end="", flush=True)  # only a result that was printed is removed from the list
    note.finish(call)
    return FAILED if has_failed(result) else DONE


async def _behind_gap(client: Client, ticket: Ticket | None, error: BaseException) -> Ticket | None:
    """The ticket behind the messages that are gone, if this error says so and the call goes on."""
    if ticket is None or not isinstance(error, StreamGone) or error.reason != "messages_gone":
        return None
    if error.earliest is None or error.earliest - 1 <= (ticket.after or 0):
        return None
    with trio.move_on_after(CANCEL_S), suppress(ClientError):
        if in_words(await client.poll(ticket)).state == "gone":
            return None  # its result was received
    return msgspec.structs.replace(ticket, after=error.earliest - 1)


def _tell_gap(before: Ticket, behind: Ticket, *, as_json: bool) -> None:
    first, last = (before.after or 0) + 1, behind.after or 0
    if as_json:
        say(as_json_text({"gap": {"from": first, "to": last}}))
        return
    which = f"Message {first} is" if first == last else f"{last - first + 1} messages are"
    say(
        f"{which} gone: the server has lost them, or another client has read them. "
        f"The call goes on with message {last + 1}."
    )


def has_failed(result: Any) -> bool:
    """Whether a tool's result says that the tool has failed."""
    return isinstance(result, dict) and result.get("isError") is True


def _leads_on(result: Any) -> bool:
    try:
        return wire.next_page(result) is not None
    except ValueError:
        return False  # another server's result, of another shape


async def _once_announced(call: RunningCall, act: Callable[[], object]) -> None:
    while call.ticket is None:
        await trio.sleep(NOTED_WITHIN_S)
    act()


async def cancel_on(interrupts: AsyncIterator[int], scope: trio.CancelScope) -> None:
    """Cancel at the first Ctrl-C."""
    await anext(interrupts)
    scope.cancel()


async def _detach(
    call: RunningCall,
    how: Following,
    note: Note,
    interrupts: AsyncIterator[int],
    *,
    may_cancel: bool,
) -> None:
    """Print how to resume, and wait a little for a second Ctrl-C after a first one."""
    if call.ticket is None:
        complain("This call cannot be resumed: it is cancelled.")
        await _cancel(call, note, as_json=how.as_json)
        return
    note.leave(call)
    say(_way_back(how.reach, call.ticket, note.name, as_json=how.as_json))
    if sys.stdin.isatty() and may_cancel:
        if not how.as_json:
            say("Ctrl-C again cancels it.")
        with trio.move_on_after(SECOND_CTRL_C_S) as waiting:
            await anext(interrupts)
        if not waiting.cancelled_caught:
            await _cancel(call, note, as_json=how.as_json)


def _way_back(reach: Reach, ticket: Ticket, name: str | None, *, as_json: bool) -> str:
    command = f"mcp-streams resume {shlex.quote(reach.url)} {ticket}{reach.options}"
    if as_json:
        detached = {"name": name, "resume": command, "ticket": str(ticket)}
        return as_json_text({"detached": detached})
    lines = ["Detached; the call goes on. To come back:"]
    if name is not None:
        where = "from this folder" if reach.url.startswith("stdio:") else "from anywhere"
        lines += [f"  mcp-streams resume {name}{reach.options}", f"or, {where}:"]
    return "\n".join([*lines, f"  {command}"])


async def _cancel(call: RunningCall, note: Note, *, as_json: bool = False) -> None:
    def tell(state: str, words: str) -> None:
        say(as_json_text({"state": state}) if as_json else words)

    if call.is_complete:
        tell("done", "The call is done already.")
        return
    with trio.move_on_after(CANCEL_S) as cancelling:
        await call.cancel()
    if cancelling.cancelled_caught:
        tell("unknown", "The server does not answer: the call may still run.")
        return
    note.remove(call)
    tell("cancelled", "Cancelled.")


def call_tool(
    reach: Reach, tool: str, arguments: dict[str, Any], *, as_json: bool, detaches: bool = False
) -> int:
    """`mcp-streams call`."""
    has_token = reach.token_file is None and TOKEN_VARIABLE in os.environ
    note = Note.of_new(reach.url, tool, arguments, token_file=reach.token_file, has_token=has_token)
    asks = Questions() if can_ask() and not as_json else None

    async def act(client: Client, deadline: float) -> int:
        how = Following(reach, deadline, as_json, asks, detaches)
        return await _call_tool(client, tool, arguments, how, note)

    return run(act, reach, asks=asks)


async def _call_tool(
    client: Client, tool: str, arguments: dict[str, Any], how: Following, note: Note
) -> int:
    note.server = name_of(client)
    try:
        code = await follow(client, client.call(tool, arguments), how, note)
    except Exception as failure:
        error = first_of(failure)
        if isinstance(error, CallFailed) and (hint := await hint_for(client, tool, arguments)):
            error.add_note(hint)
        raise
    if code == FAILED and (hint := await hint_for(client, tool, arguments)):
        say(as_json_text({"advice": hint}) if how.as_json else hint)
    return code


def resume(reach: Reach, ticket: Ticket, *, as_json: bool) -> int:
    """`mcp-streams resume`."""
    asks = Questions() if can_ask() and not as_json else None

    async def act(client: Client, deadline: float) -> int:
        note = Note.of_noted(ticket)
        note.server = name_of(client)
        try:
            how = Following(reach, deadline, as_json, asks)
            return await follow(client, client.resume(ticket), how, note)
        except Exception as failure:
            error = first_of(failure)
            if isinstance(error, StreamGone):
                await _explain(client, ticket, error, note)
            raise

    return run(act, reach, asks=asks)


async def _explain(client: Client, ticket: Ticket, error: StreamGone, note: Note) -> None:
    """Say in a person's words why there is nothing to resume: the server's are for a program."""
    if error.reason == "stream_not_found":
        error.args = (_NOT_KNOWN,)
        return
    if error.reason not in ("delivered", *wire.MISPLACED):
        return
    with trio.move_on_after(CANCEL_S), suppress(ClientError):
        if in_words(await client.poll(ticket)).state == "gone":
            error.args, error.reason = (_FINISHED,), "delivered"
            error.__notes__ = []
            note.refused(ticket, error)


# cancel


def cancel(reach: Reach, ticket: Ticket, *, as_json: bool) -> int:
    """`mcp-streams cancel`: cancel a call that runs, and check that the server has done it."""
    return run(bounded(partial(_cancelled, ticket=ticket, as_json=as_json)), reach)


async def _cancelled(client: Client, *, ticket: Ticket, as_json: bool) -> int:
    note = Note.of_noted(ticket)
    note.server = name_of(client)
    standing = await _polled(client, ticket, note)
    if standing.status != "completed":
        try:
            async with client.resume(ticket) as call:
                await call.cancel()
            standing = await client.poll(ticket)
        except StreamGone as gone:
            if gone.reason != "cancelled":
                raise
            note.refused(ticket, gone)
            if as_json:
                print(as_json_text({"streamId": ticket.stream, "state": "cancelled"}))
            else:
                say("Cancelled.")
            return DONE
    found = in_words(standing)
    if found.state in ("running", "asking"):
        return complain("The server has not cancelled the call: it still runs.", FAILED)
    state = "its result was received" if found.state == "gone" else found.status
    return complain(f"The call is finished ({state}): there is nothing to cancel.", GONE)


# pages


class PagesWanted(msgspec.Struct, frozen=True):
    """The pages to print, from `token` on; `words` are the arguments as they were typed."""

    tool: str
    words: Sequence[str]
    arguments: dict[str, Any]
    token: str | None


def pages(reach: Reach, wanted: PagesWanted, *, as_json: bool) -> int:
    """`mcp-streams pages`: Ctrl-C stops, and prints the command that reads on."""
    return run(
        lambda client, deadline: _pages(client, wanted, Following(reach, deadline, as_json)), reach
    )


async def _pages(client: Client, wanted: PagesWanted, how: Following) -> int:
    found = client.pages(wanted.tool, wanted.arguments, token=wanted.token)
    code = DETACHED
    with trio.open_signal_receiver(signal.SIGINT) as interrupts:
        async with trio.open_nursery() as nursery:
            nursery.cancel_scope.deadline = how.deadline
            nursery.start_soon(cancel_on, interrupts, nursery.cancel_scope)
            code = await _print_all(found, as_json=how.as_json)
            nursery.cancel_scope.cancel()
    if code != DETACHED:
        return code
    say(_how_to_continue(wanted, found.token, how))
    return TIMED_OUT if trio.current_time() >= how.deadline else DETACHED


async def _print_all(pages: Pages, *, as_json: bool) -> int:
    code = DONE
    async for page in pages:
        print_result(page, as_json=as_json)
        print(end="", flush=True)  # the next page may take a while
        if has_failed(page):
            code = FAILED
    return code


def _how_to_continue(wanted: PagesWanted, token: str | None, how: Following) -> str:
    command = None
    if token is not None:
        words = [how.reach.url, wanted.tool, *wanted.words, f"--token={token}"]
        command = f"mcp-streams pages {shlex.join(words)}{how.reach.options}"
    if how.as_json:
        return as_json_text({"left": {"pages": command, "token": token}})
    if command is None:
        return "Stopped before the first page. Run the same command to begin."
    return f"Stopped behind the last page that was printed. To read on:\n  {command}"


# poll


def poll(reach: Reach, stream: Ticket | str | None, *, as_json: bool) -> int:
    """`mcp-streams poll`: the status of one stream by its ticket or id, or of all."""
    is_known = reach.token_file is not None or TOKEN_VARIABLE in os.environ
    is_anonymous = not (is_known or reach.url.startswith("stdio:"))
    return run(
        bounded(lambda client: _poll(client, stream, as_json=as_json, is_anonymous=is_anonymous)),
        reach,
    )


async def _poll(
    client: Client, stream: Ticket | str | None, *, as_json: bool, is_anonymous: bool
) -> int:
    if stream is not None:
        note = Note.of_noted(stream) if isinstance(stream, Ticket) else None
        standings = [await _polled(client, stream, note)]
    else:
        standings = await client.poll_all()
    if not standings and is_anonymous:
        say("This connection is anonymous and has no streams: poll with a ticket.")
    elif not standings:
        say("No stream runs or waits to be delivered.")
    if as_json:
        rows = [{**msgspec.to_builtins(each), "state": in_words(each).state} for each in standings]
        print(as_json_text(rows))
        return DONE
    for standing in standings:
        print(f"{harmless(one_line(standing.stream_id))}  {in_words(standing).status}")
    return DONE


async def _polled(client: Client, stream: Ticket | str, note: Note | None) -> Standing:
    try:
        return await client.poll(stream)
    except StreamGone as error:
        if isinstance(stream, Ticket) and note is not None:
            note.server = name_of(client)
            note.refused(stream, error)
        raise

"""The actions of `call`, `resume`, `pages` and `poll`.

Results go to standard output, everything else to standard error.
"""

import io
import logging
import os
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from streams import logs
from streams.cli.actions.notes import Note
from streams.cli.actions.output import Display, as_json_text, harmless, one_line, print_result, say
from streams.cli.base import BROKEN_PIPE, CANNOT_CONNECT, DETACHED, DONE, FAILED, GONE, complain
from streams.client import wire
from streams.client.call import RunningCall
from streams.client.client import Client
from streams.client.pages import Pages
from streams.client.wire import Standing
from streams.errors import CallFailed, ClientError, StreamGone, Superseded, UnsafeFile, first_of
from streams.exchange import Dialer
from streams.permissions import read_secret
from streams.protocol.ticket import Ticket
from transports import dial, stdio
from transports.net.dialing import Token

TOKEN_FILE_BYTES_MAX: Final = 64 * 1024  # eight times what a server of ours accepts
TOKEN_VARIABLE: Final = "MCP_STREAMS_TOKEN"
CLIENT_NAME: Final = "mcp-streams-cli"

SECOND_THOUGHTS_S: Final = 2.0  # for a second Ctrl-C after the first
CANCEL_S: Final = 5.0  # for the server to confirm a cancellation

# How long a server that is just starting may take to listen. A command that starts its server
# itself (stdio) need not wait.
CONNECT_S: Final = 5.0

# How often a call is checked for its ticket: the client has no event for that, and the call may
# send no message.
NOTED_WITHIN_S: Final = 0.1


def run(
    act: Callable[[Client], Awaitable[int]],
    url: str,
    *,
    cwd: str | None = None,
    token_file: Path | None = None,
) -> int:
    """Connect to the server, act, and return the exit code; errors are printed in one line.

    A server that does not answer is tried for `CONNECT_S`.
    """

    async def with_client(dialer: Dialer) -> int:
        codes: list[int] = []
        connect_s = 0.0 if url.startswith("stdio:") else CONNECT_S
        async with Client(dialer, name=CLIENT_NAME, connect_s=connect_s) as client:
            codes.append(await act(client))
        return codes[-1]

    return run_dialing(with_client, url, cwd=cwd, token_file=token_file)


def run_dialing(
    act: Callable[[Dialer], Awaitable[int]],
    url: str,
    *,
    cwd: str | None = None,
    token_file: Path | None = None,
) -> int:
    """Like `run`, for an action that opens its connections itself."""
    logs.log_to_stderr(logging.WARNING)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # some locales lack characters
    try:
        token = _token(token_file)
    except ValueError as error:
        return complain(str(error))
    try:
        dialer = dialer_of(url, cwd, token)
    except ValueError as error:
        why = str(error)
        return complain(why if url in why else f"{url}: {why}")

    codes: list[int] = []

    async def main() -> None:
        codes.append(await act(dialer))

    try:
        trio.run(main)
    except* ClientError as errors:
        codes.append(_report(errors))
    except* KeyboardInterrupt:
        codes.append(DETACHED)  # there was no call to detach from
    except* BrokenPipeError:
        codes.append(BROKEN_PIPE)  # standard output was closed
    return codes[-1]


def _token(file: Path | None) -> Token:
    """The bearer token to send: read from the file for each new connection, or from the variable.

    The variable is removed from the environment, so that a server which is started does not see it.
    Raises `ValueError` if the file cannot be used.
    """
    given = os.environ.pop(TOKEN_VARIABLE, None)
    if file is None:
        return given
    try:
        _read_token(file)  # report an unusable file before connecting
    except UnsafeFile as error:
        raise ValueError(f"{error}.") from None
    except OSError as error:
        raise ValueError(f"--token-file {file} cannot be read: {error.strerror}.") from None
    return lambda: _read_token(file)


def _read_token(file: Path) -> str:
    """Raises `UnsafeFile` if other users may read or change the file, or another `OSError`."""
    return read_secret(file, TOKEN_FILE_BYTES_MAX).decode(errors="replace").strip()


def dialer_of(url: str, cwd: str | None, token: Token = None) -> Dialer:
    """The dialer for a URL; a command that it names is started in `cwd`. Raises `ValueError`."""
    scheme, _, command = url.partition(":")
    if scheme == "stdio" and cwd is not None:
        return partial(stdio.connect, stdio.split_command(command), cwd=cwd)
    return dial(url, token=token)


def _report(failure: BaseException) -> int:
    error = first_of(failure)
    say("\n".join([one_line(str(error)), *getattr(error, "__notes__", ())]))
    if isinstance(error, StreamGone | Superseded):
        return GONE
    return FAILED if isinstance(error, CallFailed) else CANNOT_CONNECT


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


async def follow(call: RunningCall, url: str, note: Note, *, as_json: bool) -> int:
    """Print a call's messages and its result. The first Ctrl-C detaches, the second cancels."""
    try:
        return await _follow(call, url, note, as_json=as_json)
    except Exception as failure:
        note.failed(call, first_of(failure))
        raise


async def _follow(call: RunningCall, url: str, note: Note, *, as_json: bool) -> int:
    is_over = False
    with trio.open_signal_receiver(signal.SIGINT) as interrupts:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_on, interrupts, nursery.cancel_scope)
            nursery.start_soon(_note_once_announced, call, note)
            with Display(as_json=as_json) as display:
                async for message in call:
                    note.take(call)
                    display.show(message)
            result = await call.result()
            is_over = True
            nursery.cancel_scope.cancel()
        if not is_over:
            # Nothing more is read, so nothing more is acked, and the ticket stays valid.
            await _detach(call, url, note, interrupts, as_json=as_json)
            return DETACHED
    print_result(result, as_json=as_json)
    if _leads_on(result):
        say("There are more pages: `mcp-streams pages` prints them all.")
    print(end="", flush=True)  # only a result that was printed is removed from the list
    note.remove(call)
    return FAILED if has_failed(result) else DONE


def has_failed(result: Any) -> bool:
    """Whether a tool's result says that the tool has failed."""
    return isinstance(result, dict) and result.get("isError") is True


def _leads_on(result: Any) -> bool:
    try:
        return wire.next_page(result) is not None
    except ValueError:
        return False  # another server's result, of another shape


async def _note_once_announced(call: RunningCall, note: Note) -> None:
    while call.ticket is None:
        await trio.sleep(NOTED_WITHIN_S)
    note.take(call)


async def cancel_on(interrupts: AsyncIterator[int], scope: trio.CancelScope) -> None:
    """Cancel at the first Ctrl-C."""
    await anext(interrupts)
    scope.cancel()


async def _detach(
    call: RunningCall, url: str, note: Note, interrupts: AsyncIterator[int], *, as_json: bool
) -> None:
    """Print how to resume, and wait a little for a second Ctrl-C."""
    if call.ticket is None:
        say("This call cannot be resumed: it is cancelled.")
        await _cancel(call, note)
        return
    note.leave(call)
    say(_way_back(url, call.ticket, note.name, as_json=as_json))
    if sys.stdin.isatty():
        say("Ctrl-C again cancels it.")
        with trio.move_on_after(SECOND_THOUGHTS_S) as thinking:
            await anext(interrupts)
        if not thinking.cancelled_caught:
            await _cancel(call, note)


def _way_back(url: str, ticket: Ticket, name: str | None, *, as_json: bool) -> str:
    command = f"mcp-streams resume {shlex.quote(url)} {ticket}"
    if as_json:
        detached = {"name": name, "resume": command, "ticket": str(ticket)}
        return as_json_text({"detached": detached})
    lines = ["Detached; the call goes on. To come back:"]
    if name is not None:
        where = "from this folder" if url.startswith("stdio:") else "from anywhere"
        lines += [f"  mcp-streams resume {name}", f"or, {where}:"]
    return "\n".join([*lines, f"  {command}"])


async def _cancel(call: RunningCall, note: Note) -> None:
    if call.is_complete:
        say("The call is done already.")
        return
    with trio.move_on_after(CANCEL_S) as trying:
        await call.cancel()
    if trying.cancelled_caught:
        say("The server does not answer: the call may still run.")
        return
    note.remove(call)
    say("Cancelled.")


async def call_tool(
    client: Client, url: str, tool: str, arguments: dict[str, Any], *, as_json: bool
) -> int:
    """`mcp-streams call`."""
    note = Note.of_new(url, tool, arguments)
    async with client.call(tool, arguments) as call:
        return await follow(call, url, note, as_json=as_json)


async def resume(client: Client, url: str, ticket: Ticket, *, as_json: bool) -> int:
    """`mcp-streams resume`."""
    note = Note.of_noted(ticket)
    async with client.resume(ticket) as call:
        return await follow(call, url, note, as_json=as_json)


# pages


class PagesWanted(msgspec.Struct, frozen=True):
    """The pages to print, from `token` on; `words` are the arguments as they were typed."""

    url: str
    tool: str
    words: Sequence[str]
    arguments: dict[str, Any]
    token: str | None


async def pages(client: Client, wanted: PagesWanted, *, as_json: bool) -> int:
    """`mcp-streams pages`: Ctrl-C stops, and prints the command that reads on."""
    found = client.pages(wanted.tool, wanted.arguments, token=wanted.token)
    code = DETACHED
    with trio.open_signal_receiver(signal.SIGINT) as interrupts:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(cancel_on, interrupts, nursery.cancel_scope)
            code = await _print_all(found, as_json=as_json)
            nursery.cancel_scope.cancel()
    if code == DETACHED:
        say(_how_to_continue(wanted, found.token, as_json=as_json))
    return code


async def _print_all(pages: Pages, *, as_json: bool) -> int:
    code = DONE
    async for page in pages:
        print_result(page, as_json=as_json)
        print(end="", flush=True)  # the next page may take a while
        if has_failed(page):
            code = FAILED
    return code


def _how_to_continue(wanted: PagesWanted, token: str | None, *, as_json: bool) -> str:
    command = None
    if token is not None:
        words = [wanted.url, wanted.tool, *wanted.words, f"--token={token}"]
        command = f"mcp-streams pages {shlex.join(words)}"
    if as_json:
        return as_json_text({"left": {"pages": command, "token": token}})
    if command is None:
        return "Stopped before the first page. Run the same command to begin."
    return f"Stopped behind the last page that was printed. To read on:\n  {command}"


# poll


async def poll(client: Client, url: str, stream: Ticket | str | None, *, as_json: bool) -> int:
    """`mcp-streams poll`: the status of one stream by its ticket or id, or of all."""
    if stream is not None:
        standings = [await _polled(client, stream)]
    else:
        standings = await client.poll_all()
        if not standings and not url.startswith("stdio:"):
            say("This connection is anonymous and has no streams: poll with a ticket.")
        elif not standings:
            say("No stream runs or waits to be delivered.")
    if as_json:
        print(as_json_text(standings))
        return DONE
    for standing in standings:
        print(harmless(one_line(_described(standing))))
    return DONE


async def _polled(client: Client, stream: Ticket | str) -> Standing:
    try:
        return await client.poll(stream)
    except StreamGone as error:
        if isinstance(stream, Ticket):
            Note.of_noted(stream).refused(stream, error)
        raise


def _described(standing: Standing) -> str:
    has = {
        "pending messages": standing.pending_messages,
        "a request": standing.has_request,
        "an error": standing.has_error,
    }
    listed = ", ".join(what for what, is_so in has.items() if is_so) or "nothing pending"
    return f"{standing.stream_id} {standing.status}: {listed}"

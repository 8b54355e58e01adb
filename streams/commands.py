"""What `call`, `resume` and `poll` do. Results go to standard output, talk to standard error."""

import logging
import shlex
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Final

import msgspec
import trio
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeRemainingColumn,
)

from streams import console, messages
from streams.client import Client
from streams.clientwire import Standing
from streams.errors import CallFailed, ClientError, StreamGone, Superseded, first_of
from streams.messages import Message
from streams.running import RunningCall
from streams.ticket import Ticket
from transports import dial

DONE, TOOL_FAILED, USAGE, CANNOT_CONNECT, GONE, DETACHED = 0, 1, 2, 3, 4, 130
BROKEN_PIPE: Final = 141  # what a shell reports of a program that SIGPIPE has ended

SECOND_THOUGHTS_S: Final = 2.0  # for a second Ctrl-C after the first
CANCEL_S: Final = 5.0  # for telling the server that nobody wants the call any more

# A server's words may not move the cursor of our terminal, or worse.
_CONTROLS: Final = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in (*range(32), *range(127, 160))
    if chr(code) not in "\t\n"
}


def run(act: Callable[[Client], Awaitable[int]], url: str) -> int:
    """Connect to the server, act, and return the exit code; errors are said in one line."""
    console.log_to_stderr(logging.WARNING)
    try:
        dialer = dial(url)
    except ValueError as error:
        why = str(error)
        return complain(why if url in why else f"{url}: {why}", USAGE)

    codes: list[int] = []

    async def main() -> None:
        async with Client(dialer, name="mcp-streams-cli") as client:
            codes.append(await act(client))

    try:
        trio.run(main)
    except* ClientError as errors:
        codes.append(_report(errors))
    except* KeyboardInterrupt:
        codes.append(DETACHED)  # there was no call yet to detach from
    except* BrokenPipeError:
        codes.append(BROKEN_PIPE)  # whoever reads our output has had enough
    return codes[-1]


def _report(failure: BaseException) -> int:
    error = first_of(failure)
    if isinstance(error, StreamGone | Superseded):
        return complain(str(error), GONE)
    return complain(str(error), TOOL_FAILED if isinstance(error, CallFailed) else CANNOT_CONNECT)


def complain(why: str, code: int) -> int:
    """Say what went wrong; returns the exit code."""
    say(why)
    return code


def say(line: str) -> None:
    """Say something that is no result."""
    print(line.translate(_CONTROLS), file=sys.stderr, flush=True)


def parse_arguments(pairs: Sequence[str]) -> dict[str, Any]:
    """`key=text` and `key:=json` as a tool's arguments. Raises `ValueError`."""
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


class _Progress(msgspec.Struct):
    progress: int | float
    total: int | float | None = None
    message: str = ""


class Display:
    """Shows a call's messages on standard error: a progress bar on a terminal, else plain lines."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        if sys.stderr.isatty() and not as_json:
            what = TextColumn("{task.description}", markup=False)
            self._bar = Progress(
                what,
                BarColumn(),
                TaskProgressColumn(),
                TimeRemainingColumn(),
                console=Console(stderr=True, highlight=False, markup=False, emoji=False),
                transient=True,
            )

    def __enter__(self) -> "Display":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, message: Message) -> None:
        """Show one message of the call."""
        params = messages.decode(message.params, Any)
        if self._as_json:
            shown = {"method": message.method, "params": params}
            print(_json(shown), file=sys.stderr, flush=True)
        elif message.method == "notifications/progress" and (progress := _progress(params)):
            self._show_progress(progress)
        elif message.method == "notifications/message" and isinstance(params, dict):
            self._say(f"{params.get('level')}: {_text(params.get('data'))}")
        else:
            self._say(f"{message.method}: {_text(params)}")

    def _say(self, line: str) -> None:
        if self._bar is None:
            say(line)
        else:
            self._bar.console.print(line.translate(_CONTROLS), soft_wrap=True)

    def _show_progress(self, now: _Progress) -> None:
        if self._bar is None:
            of_all = "" if now.total is None else f"/{now.total}"
            self._say(f"{now.progress}{of_all} {now.message}".rstrip())
            return
        if self._task is None:
            self._task = self._bar.add_task("", total=now.total)
        what = now.message.translate(_CONTROLS)[-40:]
        self._bar.update(self._task, completed=now.progress, total=now.total, description=what)


def _progress(params: Any) -> _Progress | None:
    try:
        return msgspec.convert(params, _Progress)
    except msgspec.ValidationError:
        return None  # another server's, of another shape


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()


def _text(data: Any) -> str:
    return data if isinstance(data, str) else _json(data)


async def follow(call: RunningCall, url: str, *, as_json: bool) -> int:
    """Show a call's messages and print its result. The first Ctrl-C detaches, a second cancels."""
    is_over = False
    with trio.open_signal_receiver(signal.SIGINT) as interrupts:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_cancel_on, interrupts, nursery.cancel_scope)
            with Display(as_json=as_json) as display:
                async for message in call:
                    display.show(message)
            result = await call.result()
            is_over = True
            nursery.cancel_scope.cancel()
        if not is_over:
            # Nothing more is read, so nothing more is confirmed: the ticket stays true.
            await _detach(call, url, interrupts, as_json=as_json)
            return DETACHED
    _print_result(result, as_json=as_json)
    return TOOL_FAILED if isinstance(result, dict) and result.get("isError") else DONE


async def _cancel_on(interrupts: AsyncIterator[int], scope: trio.CancelScope) -> None:
    await anext(interrupts)
    scope.cancel()


async def _detach(
    call: RunningCall, url: str, interrupts: AsyncIterator[int], *, as_json: bool
) -> None:
    """Say how to come back, and wait a little for a second Ctrl-C."""
    if call.ticket is None:
        say("This call cannot be resumed: it is cancelled.")
        await _cancel(call)
        return
    command = f"mcp-streams resume {shlex.quote(url)} {call.ticket}"
    if as_json:
        say(_json({"detached": {"resume": command, "ticket": str(call.ticket)}}))
    else:
        say(f"Detached; the call goes on. To come back:\n  {command}")
    if sys.stdin.isatty():
        say("Ctrl-C again cancels it.")
        with trio.move_on_after(SECOND_THOUGHTS_S) as thinking:
            await anext(interrupts)
        if not thinking.cancelled_caught:
            await _cancel(call)


async def _cancel(call: RunningCall) -> None:
    if call.is_complete:
        say("It is done already.")
        return
    with trio.move_on_after(CANCEL_S) as trying:
        await call.cancel()
    is_heard = not trying.cancelled_caught
    say("Cancelled." if is_heard else "The server does not answer: the call may go on.")


def _print_result(result: Any, *, as_json: bool) -> None:
    blocks = result.get("content") if isinstance(result, dict) else None
    if as_json or not blocks:
        print(_json(result))
        return
    for block in blocks:
        shown = _block(block)
        print(shown.translate(_CONTROLS) if sys.stdout.isatty() else shown)


def _block(block: dict[str, Any]) -> str:
    """A content block as text: of what is no text, what it is and how large."""
    inner = block.get("resource", block)
    if "text" in inner:
        return str(inner["text"])
    words = [block.get("type"), inner.get("uri"), inner.get("mimeType")]
    data = inner.get("data") or inner.get("blob")
    if data:
        words.append(f"{len(data) * 3 // 4 - data[-2:].count('=')} bytes")
    return f"[{' '.join(filter(None, words))}]"


async def call_tool(
    client: Client, url: str, tool: str, arguments: dict[str, Any], *, as_json: bool
) -> int:
    """`mcp-streams call`."""
    async with client.call(tool, arguments) as call:
        return await follow(call, url, as_json=as_json)


async def resume(client: Client, url: str, ticket: Ticket, *, as_json: bool) -> int:
    """`mcp-streams resume`."""
    async with client.resume(ticket) as call:
        return await follow(call, url, as_json=as_json)


# poll


async def poll(client: Client, url: str, stream: str | None, *, as_json: bool) -> int:
    """`mcp-streams poll`: one stream by its ticket or id, or all."""
    if stream is not None:
        standings = [await client.poll(_ticket_or_id(stream))]
    else:
        standings = await client.poll_all()
        if not standings and not url.startswith("stdio:"):
            say("This connection is anonymous and no stream is its own: poll with a ticket.")
        elif not standings:
            say("No stream runs, or waits to be delivered.")
    if as_json:
        print(_json(standings))
        return DONE
    for standing in standings:
        print(_described(standing).translate(_CONTROLS))
    return DONE


def _ticket_or_id(text: str) -> Ticket | str:
    try:
        return Ticket.parse(text)
    except ValueError:
        return text


def _described(standing: Standing) -> str:
    has = {
        "pending messages": standing.pending_messages,
        "a request": standing.has_request,
        "an error": standing.has_error,
    }
    listed = ", ".join(what for what, is_so in has.items() if is_so) or "nothing pending"
    return f"{standing.stream_id} {standing.status}: {listed}"

"""What `call`, `resume` and `poll` do. Results go to standard output, talk to standard error."""

import logging
import shlex
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

import msgspec
import trio
from rich.console import Console
from rich.progress import Progress, TaskID

from streams import console, messages
from streams.client import Client
from streams.clientwire import Standing
from streams.errors import CallFailed, ClientError, StreamGone, Superseded
from streams.messages import Message
from streams.running import RunningCall
from streams.ticket import Ticket
from transports import dial

DONE, TOOL_FAILED, USAGE, CANNOT_CONNECT, GONE, DETACHED = 0, 1, 2, 3, 4, 130

SECOND_THOUGHTS_S: Final = 2.0  # for a second Ctrl-C after the first


def run(act: Callable[[Client], Awaitable[int]], url: str) -> int:
    """Connect to the server, act, and return the exit code; errors are said in one line."""
    console.log_to_stderr(logging.WARNING)
    try:
        dialer = dial(url)
    except ValueError as error:
        return complain(str(error), USAGE)

    codes: list[int] = []

    async def main() -> None:
        async with Client(dialer, name="mcp-streams-cli") as client:
            codes.append(await act(client))

    try:
        trio.run(main)
    except* ClientError as errors:
        codes.append(_report(errors))
    return codes[-1]


def _report(error: BaseException) -> int:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, StreamGone | Superseded):
        return complain(str(error), GONE)
    return complain(str(error), TOOL_FAILED if isinstance(error, CallFailed) else CANNOT_CONNECT)


def complain(why: str, code: int) -> int:
    """Say what went wrong; returns the exit code."""
    print(why, file=sys.stderr)
    return code


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


class Display:
    """Shows a call's messages on standard error: a progress bar on a terminal, else plain lines."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._console = Console(stderr=True, highlight=False, markup=False, soft_wrap=True)
        self._bar: Progress | None = None
        self._task: TaskID | None = None

    def __enter__(self) -> "Display":
        self._stack = ExitStack()
        if self._console.is_terminal and not self._as_json:
            self._bar = self._stack.enter_context(Progress(console=self._console, transient=True))
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def show(self, message: Message) -> None:
        """Show one message of the call."""
        params: Any = messages.decode(message.params, dict[str, Any])
        if self._as_json:
            shown = {"method": message.method, "params": params}
            self._console.print(msgspec.json.encode(shown).decode())
        elif message.method == "notifications/progress":
            self._show_progress(params)
        elif message.method == "notifications/message":
            self._console.print(f"{params.get('level')}: {_text(params.get('data'))}")
        else:
            self._console.print(f"{message.method}: {_text(params)}")

    def say(self, line: str) -> None:
        """Say something that is not the server's."""
        self._console.print(line)

    def _show_progress(self, params: dict[str, Any]) -> None:
        done, total = params.get("progress"), params.get("total")
        what = _text(params.get("message", ""))
        if self._bar is None:
            self._console.print(f"{done}/{total} {what}" if total else f"{done} {what}")
            return
        if self._task is None:
            self._task = self._bar.add_task("", total=total)
        self._bar.update(self._task, completed=done, total=total, description=what[-40:])


def _text(data: Any) -> str:
    return data if isinstance(data, str) else msgspec.json.encode(data).decode()


async def follow(call: RunningCall, url: str, *, as_json: bool) -> int:
    """Show a call's messages and print its result. The first Ctrl-C detaches, a second cancels."""
    code = DETACHED
    with Display(as_json=as_json) as display:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_detach_on_signal, call, url, display, nursery.cancel_scope)
            async for message in call:
                display.show(message)
            result = await call.result()
            code = TOOL_FAILED if result.get("isError") else DONE
            nursery.cancel_scope.cancel()
    if code != DETACHED:
        _print_result(result, as_json=as_json)
    return code


async def _detach_on_signal(
    call: RunningCall, url: str, display: Display, scope: trio.CancelScope
) -> None:
    with trio.open_signal_receiver(signal.SIGINT) as signals:
        await anext(signals)
        if call.ticket is None:
            display.say("This call cannot be resumed, and ends here.")
        else:
            display.say("Detached; the call goes on. To come back:")
            display.say(f"  mcp-streams resume {shlex.quote(url)} {call.ticket}")
            if sys.stdin.isatty():
                display.say("Ctrl-C again cancels it.")
            with trio.move_on_after(SECOND_THOUGHTS_S if sys.stdin.isatty() else 0):
                await anext(signals)
                await call.cancel()
                display.say("Cancelled.")
        scope.cancel()


def _print_result(result: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print(msgspec.json.encode(result).decode())
        return
    for block in result.get("content", []):
        kind = block.get("type")
        data = block.get("data") or block.get("resource", {}).get("uri") or block.get("uri") or ""
        print(block["text"] if kind == "text" else f"[{kind} {block.get('mimeType', '')} {data}]")


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
    if stream is None:
        standings = await client.poll_all()
    else:
        standings = [await client.poll(_ticket_or_id(stream))]
    if as_json:
        print(msgspec.json.encode(standings).decode())
    else:
        for standing in standings:
            print(_described(standing))
    if not standings and not url.startswith("stdio:"):
        print(
            "No streams of this connection: over WebSocket nobody is asked who they are, so a new "
            "connection has none. Poll with the ticket: mcp-streams poll URL TICKET",
            file=sys.stderr,
        )
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

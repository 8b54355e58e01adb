"""MCP over Streamable HTTP, continued after a cut: GET with `Last-Event-ID`.

Two readers: the bytes of the response as they come, and the official Python SDK's client, which
parses each message.
"""

import asyncio
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

import httpx2
import mcp_types as types
import msgspec
import trio
from mcp.client.session import ClientSession
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.message import ClientMessageMetadata

from benchmarks.events import REVISION, Response, Session, fill
from benchmarks.numbered import METHOD, Lost
from benchmarks.peers import READ_TIMEOUT_S, Replayed
from benchmarks.reconnect import up_to_the_result

# After a silence of this length, or after this time in all, no result is expected.
SILENCE_S: Final = 5.0
RESULT_S: Final = 20.0
RAW, SDK_CLIENT = "raw client", "Python SDK's client"


class Crowd:
    """For each size a client that has called `fill`, and has read only the first message."""

    def __init__(self, url: str) -> None:
        self._url = url
        self._absent: dict[int, tuple[Session, bytes]] = {}

    def fill(self, count: int, size: int) -> None:
        """Call the tool, in a session of its own."""
        self._absent[size] = trio.run(self._called, count, size)

    async def _called(self, count: int, size: int) -> tuple[Session, bytes]:
        session = await Session.opened(self._url, {})
        # Some servers tell streams apart by the ids of their requests, in all sessions.
        with await session.post("tools/call", fill(count, size), request_id=size) as response:
            with trio.fail_after(READ_TIMEOUT_S):
                events = await response.rest()
        first = next(event for event in events if METHOD.encode() in event.data)
        return session, first.id

    def readers(self) -> Mapping[str, Callable[[int], Replayed]]:
        """The readers by name."""
        return {
            RAW: lambda size: trio.run(_raw, *self._absent[size]),
            SDK_CLIENT: lambda size: asyncio.run(_by_the_sdk(self._url, *self._absent[size])),
        }


async def _raw(session: Session, last_event_id: bytes) -> Replayed:
    with trio.fail_after(READ_TIMEOUT_S), session.get(last_event_id) as response:
        await response.connect()
        began_at = time.perf_counter()
        await response.ask()
        came = await up_to_the_result(response, SILENCE_S)
        took_s = time.perf_counter() - began_at
    return Replayed(took_s, _messages(response, came))


def _messages(response: Response, came: bytes) -> Iterator[bytes]:
    told = [event.data for event in response.take(came) if event.data]
    if not told or "result" not in msgspec.json.decode(told[-1]):
        raise Lost("the result has not come last")
    yield from told[:-1]


async def _by_the_sdk(url: str, session: Session, last_event_id: bytes) -> Replayed:
    came: list[types.LoggingMessageNotificationParams] = []

    async def take(params: types.LoggingMessageNotificationParams) -> None:
        came.append(params)

    headers = {"mcp-session-id": session.id, "mcp-protocol-version": REVISION}
    async with (
        httpx2.AsyncClient(headers=headers, timeout=READ_TIMEOUT_S) as http,
        streamable_http_client(url, http_client=http, terminate_on_close=False) as (read, write),
        ClientSession(read, write, logging_callback=take) as client,
    ):
        asked = types.CallToolRequest(params=types.CallToolRequestParams(name="fill"))
        after = ClientMessageMetadata(resumption_token=last_event_id.decode())
        began_at = time.perf_counter()
        try:
            async with asyncio.timeout(RESULT_S):
                await client.send_request(asked, types.CallToolResult, metadata=after)
        except TimeoutError:
            raise Lost(f"{len(came)} messages have come, and no result") from None
        took_s = time.perf_counter() - began_at
    return Replayed(took_s, (_encoded(params) for params in came))


def _encoded(params: types.LoggingMessageNotificationParams) -> bytes:
    return msgspec.json.encode({"params": {"data": params.data}})

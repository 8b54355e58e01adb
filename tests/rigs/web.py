"""HTTP without a network: requests to a house's endpoint, under any clock."""

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import trio
from trio.testing import wait_all_tasks_blocked

from streams.exchange import Caller, Endpoint, Headers, Request
from streams.server.http.endpoint import HttpEndpoint
from tests.rigs.server import House, Json, said

EVENTS = "text/event-stream"
JSON = "application/json"
LINES = "application/x-ndjson"
BOTH = f"{JSON}, {EVENTS}"


class Answer:
    """A `Responder` that records the response."""

    def __init__(self) -> None:
        self.status = 0
        self.headers: dict[str, str] = {}
        self._body = bytearray()
        self.is_whole = False
        self._gone = trio.Event()

    @property
    def body(self) -> bytes:
        return bytes(self._body)

    # The endpoint's side.

    async def respond(self, status: int, headers: Headers = (), body: bytes = b"") -> None:
        await self.start(status, headers, body)
        await self.finish()

    async def start(self, status: int, headers: Headers, *first: bytes) -> None:
        assert not self.status, "one response to a request"
        self.status, self.headers = status, dict(headers)
        await self.write(*first)

    async def write(self, *data: bytes) -> None:
        assert not self.is_whole, "nothing follows the end"
        await trio.lowlevel.checkpoint()
        if self._gone.is_set():
            raise trio.BrokenResourceError
        self._body += b"".join(data)

    async def finish(self) -> None:
        await self.write(b"")
        self.is_whole = True

    async def gone(self) -> None:
        await self._gone.wait()

    def is_open(self) -> bool:
        return not self._gone.is_set()

    def unsent_bytes(self) -> int | None:
        return 0

    # The client's side.

    def cut(self) -> None:
        """The client hangs up."""
        self._gone.set()

    async def hang_up(self) -> None:
        """Hang up, and let the server notice it."""
        self.cut()
        await wait_all_tasks_blocked()

    @property
    def type(self) -> str:
        return self.headers["content-type"]

    @property
    def json(self) -> Json:
        found: Json = json.loads(self.body)
        return found

    @property
    def events(self) -> list[tuple[str | None, Json | None]]:
        """Each event's id and message; None for a priming event's."""
        assert self.type == EVENTS
        found = []
        for block in self.body.decode().split("\n\n")[:-1]:
            fields = dict(line.split(": ", 1) for line in block.split("\n") if line[0] != ":")
            if fields:
                found.append((fields.get("id"), json.loads(fields["data"] or "null")))
        return found

    @property
    def ids(self) -> list[str]:
        return [event_id for event_id, _ in self.events if event_id]

    @property
    def lines(self) -> list[Json]:
        assert self.type == LINES
        return [json.loads(line) for line in self.body.splitlines() if line]


class Browser:
    """A client of a house, with one session or none."""

    make_answer: Callable[[], Answer] = Answer

    def __init__(
        self,
        house: House,
        nursery: trio.Nursery,
        session: str | None = None,
        caller: Caller | None = None,
    ) -> None:
        self.session = session
        self.caller = caller
        self._endpoint: Endpoint = HttpEndpoint(house.running)
        self._nursery = nursery

    def ask(self, method: str, body: Any = None, *, path: str = "/mcp", **headers: str) -> Answer:
        """Send a request; its answer comes meanwhile."""
        answer = self.make_answer()
        given = {"content-type": JSON, "accept": BOTH}
        if self.session is not None:
            given["mcp-session-id"] = self.session
        given |= {name.replace("_", "-"): value for name, value in headers.items()}
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        request = Request(method, path, given, data, self.caller)
        self._nursery.start_soon(self._serve, request, answer)
        return answer

    async def _serve(self, request: Request, answer: Answer) -> None:
        try:
            await self._endpoint(request, answer)
        except trio.BrokenResourceError:
            assert not answer.is_open(), "the client is there"

    async def fetch(self, method: str, body: Any = None, **headers: str) -> Answer:
        """Send a request, and let all tasks run until they wait."""
        answer = self.ask(method, body, **headers)
        await wait_all_tasks_blocked()
        return answer

    async def post(
        self, id: int | str, method: str, /, accept: str = BOTH, **params: Any
    ) -> Answer:
        """Send a JSON-RPC request."""
        message = {"jsonrpc": "2.0", "id": id, "method": method, "params": params}
        return await self.fetch("POST", message, accept=accept)

    async def tell(self, method: str, **params: Any) -> Answer:
        """Send a notification."""
        return await self.fetch("POST", {"jsonrpc": "2.0", "method": method, "params": params})

    async def call(self, id: int | str, name: str, accept: str = BOTH, **arguments: Any) -> Answer:
        """Call a tool."""
        return await self.post(id, "tools/call", accept, name=name, arguments=arguments)

    async def go_on(self, event_id: str) -> Answer:
        """Continue a response by `Last-Event-ID`."""
        return await self.fetch("GET", accept=EVENTS, last_event_id=event_id)

    async def greet(self, capabilities: Json, revision: str = "2025-11-25") -> None:
        """Open a session."""
        hello = {"protocolVersion": revision, "capabilities": capabilities}
        answer = await self.post("hello", "initialize", **hello, clientInfo={"name": "b"})
        assert answer.json["result"]["protocolVersion"] == revision
        self.session = answer.headers["mcp-session-id"]


@asynccontextmanager
async def browsing(
    house: House,
    capabilities: Json,
    revision: str = "2025-11-25",
    *,
    caller: Caller | None = None,
) -> AsyncIterator[Browser]:
    """A session."""
    async with trio.open_nursery() as nursery:
        browser = Browser(house, nursery, caller=caller)
        await browser.greet(capabilities, revision)
        yield browser
        nursery.cancel_scope.cancel()


def logged(answer: Answer) -> list[str]:
    return said([message for _, message in answer.events if message])

"""Tools that need scopes: who may run them, and the answer to all others, over every transport.

MCP, Authorization, "Runtime Insufficient Scope Errors", and the same error where there is no HTTP.
"""

import json
import re
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from tests.rigs.command import run
from tests.wire.httpclient import HttpClient
from tests.wire.httpverbs import messages_of, refusal, text_of
from tests.wire.process import OFFERS, ServerProcess, wait_until
from tests.wire.raw import Message, Peer, WebSocketPeer
from tests.wire.rawhttp import EVENTS
from tests.wire.test_auth import Bearer
from tests.wire.verbs import PLAIN, STREAMS, refused, resume

APP: Final = """
from collections.abc import AsyncIterator
from pathlib import Path

import trio

from streams import Call, Server

server = Server("scoped", resume_min_s=0, resume_max_s=600)


def note(folder: str, what: str) -> None:
    with Path(folder, "ran").open("a") as file:
        file.write(what + "\\n")


@server.tool(scopes=("reports.write",))
async def write(call: Call, folder: str, wait: bool = False) -> str:
    note(folder, "write")
    while wait and not Path(folder, "go").exists():
        await trio.sleep(0.01)
    return "written"


@server.tool(scopes=("reports.read", "reports.write"))
async def rewrite(folder: str) -> str:
    note(folder, "rewrite")
    return "rewritten"


@server.tool(pages=True, scopes=("reports.read",))
async def rows(folder: str) -> AsyncIterator[str]:
    for n in range(3):
        note(folder, f"row {n}")
        yield f"row {n}"


@server.tool
async def free() -> str:
    return "free"
"""
RESOURCE: Final = "https://mcp.example.com/mcp"
METADATA: Final = "https://mcp.example.com/.well-known/oauth-protected-resource/mcp"
CHALLENGE: Final = re.compile(
    r'Bearer error="insufficient_scope", scope="([^"]+)", '
    rf'resource_metadata="{re.escape(METADATA)}", error_description="([^"\\]+)"'
)


class Office:
    """A server whose tools need scopes, and several tokens of one person, with more or fewer
    scopes.
    """

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self._file = folder / "tokens.jsonl"
        self._stack = stack
        (folder / "app.py").write_text(APP)
        self.none, self.reader, self.writer = (
            self.token(*scopes)
            for scopes in ((), ("reports.read",), ("reports.read", "reports.write"))
        )
        auth = ("--auth-tokens", str(self._file), "--auth-server", "https://issuer.example.com")
        options = (*auth, "--auth-resource", RESOURCE)
        self.server = ServerProcess(folder, app=f"{folder / 'app.py'}:server", options=options)
        stack.enter_context(self.server)

    def token(self, *scopes: str, name: str = "ada") -> str:
        words = [word for scope in scopes for word in ("--scope", scope)]
        done = run("token", "new", name, "--file", str(self._file), "--json", *words)
        assert done.returncode == 0, done.stderr
        made = json.loads(done.stdout)
        assert made["scopes"] == list(scopes)
        token: str = made["token"]
        return token

    def http(self, token: str, capabilities: dict[str, Any] | None = None) -> HttpClient:
        client = self._stack.enter_context(Bearer(self.server.http_port, token))
        client.initialize(PLAIN if capabilities is None else capabilities)
        return client

    def ws(self, token: str, kind: str = "ws-streams") -> Peer:
        headers = {"Authorization": f"Bearer {token}"}
        peer = WebSocketPeer(self.server.url, OFFERS[kind], headers=headers)
        self._stack.enter_context(peer)
        peer.initialize(STREAMS)
        return peer

    def stdio(self) -> Peer:
        peer = self._stack.enter_context(self.server.connect("stdio"))
        peer.initialize(STREAMS)
        return peer


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Office]:
    with ExitStack() as stack:
        yield Office(tmp_path_factory.mktemp("office"), stack)


def ran(folder: Path) -> list[str]:
    file = folder / "ran"
    return file.read_text().splitlines() if file.exists() else []


def call(name: str, folder: Path, **more: Any) -> dict[str, Any]:
    return {"name": name, "arguments": {"folder": str(folder)}, **more}


def lacks(message: Message, needed: str, missing: list[str]) -> None:
    """Check that the error names the needed scopes, and the missing ones."""
    data = refused(message, "insufficient_scope", -32600)
    assert (data["scope"], data["missing"]) == (needed, missing)
    assert all(scope in message.error["message"] for scope in missing)


def challenged(client: HttpClient, params: dict[str, Any], needed: str, missing: list[str]) -> None:
    exchange = client.request("tools/call", params, id=7)
    message = refusal(exchange, 403)
    assert message.answers(7)
    lacks(message, needed, missing)
    match = CHALLENGE.fullmatch(exchange.headers["www-authenticate"])
    assert match is not None, exchange.headers
    assert match[1] == needed
    assert all(scope in match[2] for scope in missing)


def answer(client: HttpClient, params: dict[str, Any]) -> Message:
    exchange = client.request("tools/call", params, id=7).head()
    return (
        messages_of(exchange.events())[-1] if exchange.media_type == EVENTS else exchange.message()
    )


FORMS: Final = [
    "text/event-stream, application/json",
    "application/json",
    "application/x-ndjson",
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("capabilities", [PLAIN, STREAMS])
def test_over_http_a_lack_of_scope_is_a_403_with_a_challenge(
    office: Office, tmp_path: Path, form: str, capabilities: dict[str, Any]
) -> None:
    """MCP, Authorization: "HTTP 403 Forbidden", `error`, `scope`, `resource_metadata`,
    `error_description`; before there is a stream."""
    client = office.http(office.none, capabilities)
    client.accept = form
    challenged(client, call("write", tmp_path), "reports.write", ["reports.write"])
    both = ["reports.read", "reports.write"]
    challenged(client, call("rewrite", tmp_path), "reports.read reports.write", both)
    reader = office.http(office.reader, capabilities)
    reader.accept = form
    challenged(reader, call("rewrite", tmp_path), "reports.read reports.write", ["reports.write"])
    assert ran(tmp_path) == []
    assert client.ask("stream/poll/all").result["statuses"] == []


def test_who_has_the_scopes_may_call(office: Office, tmp_path: Path) -> None:
    client = office.http(office.writer)
    for name, said in (("write", "written"), ("rewrite", "rewritten")):
        assert text_of(answer(client, call(name, tmp_path))) == said
    peer = office.ws(office.writer)
    assert text_of(peer.ask("tools/call", call("write", tmp_path))) == "written"
    assert ran(tmp_path) == ["write", "rewrite", "write"]


def test_a_tool_without_scopes_needs_none(office: Office) -> None:
    free = {"name": "free", "arguments": {}}
    assert text_of(answer(office.http(office.none), free)) == "free"
    assert text_of(office.ws(office.none).ask("tools/call", free)) == "free"


def test_every_tool_is_listed_for_everybody(office: Office) -> None:
    """A tool that is not listed is never called, so no client would learn its scope."""
    listed = {"write", "rewrite", "rows", "free"}
    for asking in (office.http(office.none), office.ws(office.none), office.http(office.writer)):
        assert {tool["name"] for tool in asking.ask("tools/list").result["tools"]} == listed


def test_the_step_up_goes_on_in_the_same_session(office: Office, tmp_path: Path) -> None:
    """The same subject with a better token: its session goes on, and the same request succeeds."""
    client = office.http(office.none)
    challenged(client, call("write", tmp_path), "reports.write", ["reports.write"])
    client.token = office.writer  # type: ignore[attr-defined]
    assert text_of(answer(client, call("write", tmp_path))) == "written"
    client.token = office.none  # type: ignore[attr-defined]
    challenged(client, call("write", tmp_path), "reports.write", ["reports.write"])


def test_the_door_says_which_scopes_there_are(office: Office) -> None:
    """RFC 6750, 3: `scope` in the challenge; RFC 9728, 2: `scopes_supported`."""
    stranger = HttpClient(office.server.http_port)
    exchange = stranger.send(stranger.head("POST", {"Content-Length": "0"}))
    refusal(exchange, 401)
    scopes = "reports.write reports.read"
    expected = f'Bearer scope="{scopes}", resource_metadata="{METADATA}"'
    assert exchange.headers["www-authenticate"] == expected
    stranger.close()
    document = stranger.send(stranger.head("GET", path="/.well-known/oauth-protected-resource/mcp"))
    assert json.loads(document.body())["scopes_supported"] == scopes.split()
    stranger.close()


# -- over WebSocket and stdio


@pytest.mark.parametrize("kind", ["ws-streams", "ws-mcp"])
def test_over_websocket_it_is_the_same_error(office: Office, tmp_path: Path, kind: str) -> None:
    peer = office.ws(office.reader, kind)
    for name, needed in (
        ("write", "reports.write"),
        ("rewrite", "reports.read reports.write"),
    ):
        told = peer.ask("tools/call", call(name, tmp_path), id=7)
        assert told.answers(7)
        lacks(told, needed, ["reports.write"])
    assert peer.settle() == [], "nothing was announced"
    assert ran(tmp_path) == []


def test_the_user_of_the_machine_may_call_every_tool(office: Office, tmp_path: Path) -> None:
    """Over stdio the operating system does the authentication: that user could make any token."""
    peer = office.stdio()
    assert text_of(peer.ask("tools/call", call("rewrite", tmp_path))) == "rewritten"


@pytest.mark.parametrize("kind", ["ws-streams", "ws-mcp", "http-sse", "http-lines", "stdio"])
def test_where_nobody_is_asked_only_the_user_of_the_machine_has_scopes(
    tmp_path: Path, kind: str
) -> None:
    (tmp_path / "app.py").write_text(APP)
    with ServerProcess(tmp_path, app=f"{tmp_path / 'app.py'}:server") as server:
        server.hear("tools that need scopes can be called over stdio alone")
        if kind.startswith("http"):
            with HttpClient(server.http_port) as client:
                client.initialize(PLAIN)
                exchange = client.request("tools/call", call("write", tmp_path))
                lacks(refusal(exchange, 403), "reports.write", ["reports.write"])
                challenge = exchange.headers["www-authenticate"]
                assert challenge.startswith('Bearer error="insufficient_scope", scope="reports.w')
            return
        with server.connect(kind) as peer:
            peer.initialize(PLAIN)
            told = peer.ask("tools/call", call("write", tmp_path))
            if kind == "stdio":
                assert text_of(told) == "written"
            else:
                lacks(told, "reports.write", ["reports.write"])


# -- calls that began with the scope


def test_a_repeat_without_the_scope_is_refused_and_disturbs_nothing(
    office: Office, tmp_path: Path
) -> None:
    key = {"_meta": {"mcp-streams/idempotencyKey": "k" * 40}}
    params = {"name": "write", "arguments": {"folder": str(tmp_path), "wait": True}, **key}
    maker = office.ws(office.writer)
    maker.request("tools/call", params, id=1)
    wait_until("it runs", lambda: ran(tmp_path))
    lacks(office.ws(office.none).ask("tools/call", params), "reports.write", ["reports.write"])
    challenged(office.http(office.reader), params, "reports.write", ["reports.write"])
    (tmp_path / "go").touch()
    assert text_of(maker.response(1)) == "written"
    assert ran(tmp_path) == ["write"]


def test_a_page_needs_the_scope_that_its_call_needs(office: Office, tmp_path: Path) -> None:
    reader, none = office.http(office.reader), office.http(office.none)
    first = answer(reader, call("rows", tmp_path))
    turned = call("rows", tmp_path, resumeToken=first.result["nextResumeToken"])
    challenged(none, turned, "reports.read", ["reports.read"])
    lacks(office.ws(office.none).ask("tools/call", turned), "reports.read", ["reports.read"])
    assert text_of(answer(reader, turned)) == "row 1", "the token still holds"


def test_to_read_a_stream_takes_the_scope_or_its_token(office: Office, tmp_path: Path) -> None:
    """W§10: "A stream belongs to the principal that made it": a bearer may have tokens with fewer
    scopes, and those cannot read the stream by its id; the resume token is the authority itself."""
    maker = office.ws(office.writer)
    params = {"name": "write", "arguments": {"folder": str(tmp_path), "wait": True}}
    maker.request("tools/call", params, id=1)
    created = maker.expect(lambda message: message.method == "notifications/stream/create")
    stream = created.params["stream"]
    maker.cut()
    (tmp_path / "go").touch()
    by_id = {"streamId": stream["streamId"]}
    by_token = {**by_id, "resumeToken": stream["resumeToken"]}
    none = office.ws(office.none)
    lacks(none.ask("stream/resume", by_id), "reports.write", ["reports.write"])
    exchange = office.http(office.none, STREAMS).request("stream/resume", by_id)
    lacks(refusal(exchange, 403), "reports.write", ["reports.write"])
    assert CHALLENGE.fullmatch(exchange.headers["www-authenticate"])
    assert none.ask("stream/poll", by_id).result["streamId"] == stream["streamId"], "its state"
    eve = office.token(name="eve")
    refused(office.ws(eve).ask("stream/resume", by_id), "stream_not_found")
    for peer in (none, office.ws(eve), office.stdio()):
        told = resume(peer, by_token, after=0)
        assert [text_of(message) for message in told if message.answers(1)] == ["written"]


def test_a_cut_response_goes_on_in_its_session_whatever_the_token(
    office: Office, tmp_path: Path
) -> None:
    """The session got the event id with the response: a GET begins nothing."""
    client = office.http(office.writer)
    params = {"name": "write", "arguments": {"folder": str(tmp_path), "wait": True}}
    exchange = client.request("tools/call", params, id=7)
    last = exchange.next_event().id
    exchange.cut()
    (tmp_path / "go").touch()
    client.token = office.none  # type: ignore[attr-defined]
    assert text_of(messages_of(client.get(last).events())[-1]) == "written"

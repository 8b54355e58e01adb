"""HTTP from an ASGI server: requests, bounds and hang-ups. `Host` is the ASGI server."""

import json
import socket
from collections.abc import Sequence
from typing import Any

import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams.exchange import Caller, Head, HttpError, Request, Responder
from transports.http import asgi
from transports.http.asgi import BODY_S, AsgiRequests, path_in

Message = dict[str, Any]
BODY_BYTES_MAX = 100


class Host:
    """An ASGI server with one request, whose body comes in `parts`."""

    def __init__(self, *parts: bytes, **scope: Any) -> None:
        self.scope = {
            "type": "http",
            "http_version": "1.1",
            "method": "POST",
            "path": "/mcp",
            "headers": [(b"host", b"127.0.0.1")],
            "server": ("127.0.0.1", 1),
            "client": ("127.0.0.1", 2),
            **scope,
        }
        self.sent: list[Message] = []
        self.left = trio.Event()
        self.read = 0
        self.fails_with: BaseException | None = None
        self._parts = parts

    async def receive(self) -> Message:
        if self.read < len(self._parts):
            self.read += 1
            part = self._parts[self.read - 1]
            return {"type": "http.request", "body": part, "more_body": self._has_more}
        await self.left.wait()
        return {"type": "http.disconnect"}

    @property
    def _has_more(self) -> bool:
        return self.read < len(self._parts) or self._parts[-1] == b"..."

    async def send(self, message: Any) -> None:
        await trio.lowlevel.checkpoint()
        if self.fails_with is not None:
            raise self.fails_with
        self.sent.append(message)

    @property
    def status(self) -> int:
        status: int = self.sent[0]["status"]
        return status

    @property
    def headers(self) -> dict[str, str]:
        return {name.decode(): value.decode() for name, value in self.sent[0]["headers"]}

    @property
    def error(self) -> str:
        message: str = json.loads(self.sent[1]["body"])["error"]["message"]
        return message


async def echo(request: Request, responder: Responder) -> None:
    await responder.respond(200, (), request.body)


def requests(endpoint: Any = echo, **settings: Any) -> AsgiRequests:
    given: dict[str, Any] = {
        "screen": lambda request: None,
        "body_bytes_max": BODY_BYTES_MAX,
        "requests_max": 10,
        "per_principal_max": 1,
        **settings,
    }
    return AsgiRequests(endpoint, **given)


async def answered(host: Host, served: AsgiRequests | None = None) -> Host:
    with trio.fail_after(2 * BODY_S):
        await (served or requests()).serve(host.scope, host.receive, host.send)
    return host


async def test_a_body_comes_in_parts() -> None:
    host = await answered(Host(b"one ", b"two\n"))
    assert (host.status, host.sent[1]["body"]) == (200, b"one two\n")
    assert host.headers == {"content-length": "8"}


@pytest.mark.parametrize(
    "parts", [[b"x" * BODY_BYTES_MAX + b"x"], [b"x"] * (BODY_BYTES_MAX + 4)], ids=["one", "many"]
)
async def test_a_longer_body_is_refused(parts: Sequence[bytes]) -> None:
    host = await answered(Host(*parts))
    assert host.status == 413
    assert host.headers["connection"] == "close"


async def test_a_body_of_the_limit_may_end_with_a_newline() -> None:
    assert (await answered(Host(b"x" * BODY_BYTES_MAX + b"\r\n"))).status == 200


async def test_a_length_above_the_limit_is_refused_unread() -> None:
    host = Host(b"x", headers=[(b"host", b"127.0.0.1"), (b"content-length", b"999")])
    await answered(host)
    assert (host.status, host.read) == (413, 0)


async def test_a_slow_body_is_given_up(autojump_clock: MockClock) -> None:
    host = await answered(Host(b"..."))
    assert host.status == 408
    assert trio.current_time() >= BODY_S


async def test_a_client_that_leaves_with_half_a_body_gets_no_answer() -> None:
    host = Host(b"...")
    host.left.set()
    assert (await answered(host)).sent == []


@pytest.mark.parametrize(
    ("scope", "status", "why"),
    [
        ({"http_version": "2"}, 505, "a proxy may end HTTP/2"),
        ({"http_version": "3"}, 505, "a proxy may end HTTP/2"),
        ({"headers": [(b"host", b"127.0.0.1")] * 129}, 431, "128"),
        ({"headers": [(b"host", b"127.0.0.1"), (b"x", b"1" * 17_000)]}, 431, "16384"),
        ({"headers": []}, 403, "allowed_hosts"),
        ({"headers": [(b"host", b"evil.example")]}, 403, "allowed_hosts"),
        ({"headers": [(b"host", b"127.0.0.1"), (b"host", b"evil.example")]}, 403, "allowed_hosts"),
        (
            {"headers": [(b"host", b"127.0.0.1"), (b"origin", b"http://evil.example")]},
            403,
            "allowed_origins",
        ),
        (
            {"server": ("192.0.2.1", 80), "headers": [(b"host", b"x"), (b"Origin", b"http://x")]},
            403,
            "allowed_origins",
        ),
    ],
)
async def test_a_head_is_refused(scope: dict[str, Any], status: int, why: str) -> None:
    host = await answered(Host(b"", **scope))
    assert host.status == status
    assert why in host.error
    assert host.read == 0


async def test_named_hosts_and_origins_are_allowed() -> None:
    served = requests(allowed_hosts=["Api.example"], allowed_origins=["https://Page.example"])
    fields = [(b"host", b"api.example:80"), (b"origin", b"https://page.example")]
    assert (await answered(Host(b"", headers=fields), served)).status == 200


@pytest.mark.parametrize(
    ("path", "root", "expected"),
    [
        ("/tools/mcp", "/tools", "/mcp"),
        ("/tools/mcp", "/tools/", "/mcp"),
        ("/mcp", "/tools", "/mcp"),  # frameworks that take the prefix off
        ("/tools", "/tools", "/"),
        ("/toolsmcp", "/tools", "/toolsmcp"),
        ("/mcp", "", "/mcp"),
    ],
)
def test_the_path_below_the_mount(path: str, root: str, expected: str) -> None:
    assert path_in({"path": path, "root_path": root}) == expected


async def test_a_hang_up_ends_the_waiting_and_fails_the_writing() -> None:
    host = Host(b"")
    seen: list[object] = []

    async def stream(request: Request, responder: Responder) -> None:
        await responder.start(200, (("content-type", "text/event-stream"),), b"one", b"two")
        assert responder.is_open()
        host.left.set()
        await responder.gone()
        seen.append(responder.is_open())
        with pytest.raises(trio.BrokenResourceError):
            await responder.write(b"three")

    await answered(host, requests(stream))
    assert seen == [False]
    assert [message.get("body") for message in host.sent] == [None, b"onetwo"]


async def test_an_error_of_send_is_a_hang_up() -> None:
    host = Host(b"")
    host.fails_with = ConnectionResetError("gone")
    assert (await answered(host)).sent == []


async def test_a_response_is_finished() -> None:
    async def begin(request: Request, responder: Responder) -> None:
        await responder.start(200, ())

    host = await answered(Host(b""), requests(begin))
    assert host.sent[-1] == {"type": "http.response.body", "body": b"", "more_body": False}


async def test_an_endpoint_that_fails_is_a_500() -> None:
    async def fail(request: Request, responder: Responder) -> None:
        raise ValueError("a secret")

    host = await answered(Host(b""), requests(fail))
    assert host.status == 500
    assert "secret" not in host.error


async def test_a_header_with_a_line_break_is_not_sent() -> None:
    async def split(request: Request, responder: Responder) -> None:
        await responder.respond(200, (("x", "1\r\ny: 2"),))

    assert (await answered(Host(b""), requests(split))).status == 500


async def test_requests_at_once_are_limited() -> None:
    held = trio.Event()

    async def hold(request: Request, responder: Responder) -> None:
        await held.wait()
        await responder.respond(200)

    async def admit(head: Head) -> Caller | None:
        name = head.headers.get("x-name")
        return None if name is None else Caller(name, lambda: 1.0)

    served = requests(hold, requests_max=3, admit=admit)

    def named(name: bytes) -> Host:
        return Host(b"", headers=[(b"host", b"127.0.0.1"), (b"x-name", name)])

    async with trio.open_nursery() as nursery:
        for host in (named(b"a"), named(b"b")):
            nursery.start_soon(answered, host, served)
        await wait_all_tasks_blocked()
        assert (await answered(named(b"a"), served)).status == 429
        nursery.start_soon(answered, Host(b""), served)
        await wait_all_tasks_blocked()
        assert (await answered(Host(b""), served)).status == 503
        held.set()
    assert (await answered(named(b"a"), served)).status == 200


async def test_authentication_comes_before_the_body() -> None:
    async def admit(head: Head) -> Caller | None:
        raise HttpError(401, "no token", (("www-authenticate", "Bearer"),))

    host = await answered(Host(b"body"), requests(admit=admit))
    assert (host.status, host.read) == (401, 0)
    assert host.headers["www-authenticate"] == "Bearer"


@pytest.fixture
def connection() -> Any:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.create_connection(listener.getsockname())
        far, _ = listener.accept()
    with near, far:
        yield near, far


def ends(far: socket.socket) -> dict[str, Any]:
    return {"client": far.getpeername(), "server": far.getsockname()}


async def test_a_peer_that_does_not_read_is_reset_when_its_response_is_cancelled(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    near, far = connection

    async def stream(request: Request, responder: Responder) -> None:
        await responder.start(200, (), b"")
        await responder.write(b"more")

    class Stuck(Host):
        async def send(self, message: Any) -> None:
            self.sent.append(message)
            if message.get("body") == b"more":
                await trio.sleep_forever()

    host = Stuck(b"", **ends(far))
    with trio.move_on_after(0.05):
        await requests(stream).serve(host.scope, host.receive, host.send)
    near.settimeout(10)
    assert near.recv(1) == b""


async def test_a_connection_that_is_not_found_is_left_alone(
    connection: tuple[socket.socket, socket.socket],
) -> None:
    near, far = connection
    asgi.reset({"client": ("192.0.2.1", 1), "server": far.getsockname()})
    asgi.reset({"client": None, "server": None})
    forged = [(b"X-Forwarded-For", b"127.0.0.1:1, " + near.getsockname()[0].encode())]
    asgi.reset({"client": near.getsockname(), "server": far.getsockname(), "headers": forged})
    far.sendall(b"x")
    near.settimeout(10)
    assert near.recv(1) == b"x"

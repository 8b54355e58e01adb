"""The ASGI app in an asyncio program: its lifespan, its start, its end, and its failures."""

import asyncio
import json
import signal
import sys
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.routing import Mount
from starlette.testclient import TestClient

from streams import Server
from streams.aio.asgi import App
from streams.auth import tokens
from streams.engine import retry
from streams.errors import JournalUnusable
from streams.journal.sqlite import open_sqlite_journal

WITHIN_S = 30
HELLO = {"protocolVersion": "2025-11-25", "capabilities": {}, "clientInfo": {"name": "t"}}
BOTH = {"accept": "application/json, text/event-stream"}

server = Server("mounted")


@server.tool
async def add(a: int, b: int) -> int:
    return a + b


def run(main: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(main, WITHIN_S))


def post(client: TestClient, path: str, method: str, params: Any, **headers: str) -> Any:
    body = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}
    return client.post(path, json=body, headers={**BOTH, **headers})


def use(client: TestClient, path: str = "/tools/mcp") -> None:
    """A whole session."""
    hello = post(client, path, "initialize", HELLO)
    assert hello.status_code == 200, hello.text
    session = hello.headers["mcp-session-id"]
    called = post(
        client,
        path,
        "tools/call",
        {"name": "add", "arguments": {"a": 1, "b": 2}},
        **{"mcp-session-id": session},
    )
    assert '"3"' in called.text, called.text


def mounted(app: Any, **settings: Any) -> FastAPI:
    outer = FastAPI(lifespan=app.lifespan)
    outer.mount("/tools", app)
    return outer


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_a_test_client_of_starlette_uses_it_again_and_again(backend: Any, tmp_path: Path) -> None:
    app = server.asgi(journal=tmp_path / "calls.db")
    for _ in range(2):
        with TestClient(mounted(app), backend=backend) as client:
            use(client)


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_alone_it_has_a_lifespan_of_its_own(backend: Any) -> None:
    with TestClient(server.asgi("/"), backend=backend) as client:  # type: ignore[arg-type]
        use(client, "/")


@pytest.mark.parametrize("backend", ["asyncio", "trio"])
def test_without_a_lifespan_it_starts_with_the_first_request(backend: Any, tmp_path: Path) -> None:
    app = server.asgi(journal=tmp_path / "calls.db")
    for _ in range(2):  # each in an event loop of its own
        with TestClient(Starlette(routes=[Mount("/tools", app)]), backend=backend) as client:
            use(client)


class Passing(BaseHTTPMiddleware):
    """A middleware that has tasks and streams of anyio around each request."""

    async def dispatch(self, request: Any, call_next: Any) -> Any:
        return await call_next(request)


def test_behind_a_middleware_of_anyio() -> None:
    app = server.asgi()
    outer = Starlette(
        routes=[Mount("/tools", app)], middleware=[Middleware(Passing)], lifespan=app.lifespan
    )
    with TestClient(outer) as client:
        use(client)


def test_bearer_tokens(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    token, _ = tokens.add(path, "someone")
    with TestClient(mounted(server.asgi(auth_tokens=path))) as client:
        refused = post(client, "/tools/mcp", "initialize", HELLO)
        assert refused.status_code == 401
        assert refused.headers["www-authenticate"].startswith("Bearer")
        granted = post(client, "/tools/mcp", "initialize", HELLO, authorization=f"Bearer {token}")
        assert granted.status_code == 200


def test_a_journal_that_another_process_has_fails_the_start(tmp_path: Path) -> None:
    journal = tmp_path / "calls.db"

    async def main() -> None:
        async with server.asgi(journal=journal).lifespan():
            with pytest.raises(JournalUnusable, match=str(journal)):
                async with server.asgi(journal=journal).lifespan():
                    pytest.fail("it has started")

    run(main())


def test_the_lifespan_protocol_tells_why_the_start_failed(tmp_path: Path) -> None:
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    async def main() -> None:
        app = server.asgi(journal=tmp_path / "nowhere" / "calls.db")
        await app({"type": "lifespan"}, receive, send)

    run(main())
    assert sent[0]["type"] == "lifespan.startup.failed"
    assert "nowhere" in sent[0]["message"]


async def answer_to_a_ping(app: Any) -> int:
    sent: list[Any] = []
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": HELLO})

    async def receive() -> Any:
        return {"type": "http.request", "body": body.encode()}

    async def send(message: Any) -> None:
        sent.append(message)

    fields = [(b"host", b"x"), (b"content-type", b"application/json"), (b"accept", b"*/*")]
    scope = {"type": "http", "http_version": "1.1", "method": "POST", "path": "/mcp"}
    await app({**scope, "headers": fields}, receive, send)
    status: int = sent[0]["status"]
    return status


async def can_serve(journal: Path) -> bool:
    try:
        async with server.asgi(journal=journal).lifespan():
            return True
    except JournalUnusable:
        return False


def test_the_lifespan_is_entered_once_at_a_time() -> None:
    async def main() -> None:
        app = server.asgi()
        async with app.lifespan():
            assert await answer_to_a_ping(app) == 200
            with pytest.raises(RuntimeError, match="entered already"):
                await app.lifespan().__aenter__()
        assert await answer_to_a_ping(app) == 200  # started anew, by the request

    run(main())


def test_after_a_failure_it_answers_503_and_the_program_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        app = App(
            server,
            "/mcp",
            journal=tmp_path / "calls.db",
            durability="power",
            auth_tokens=None,
            admit=None,
            allowed_hosts=(),
            allowed_origins=(),
        )
        async with app.lifespan():
            assert await answer_to_a_ping(app) == 200
            assert app._service is not None
            assert app._service._running is not None
            app._service._running.engine.fail(JournalUnusable("the disk is gone"))
            while not app._service.ended.is_set():
                await asyncio.sleep(0.01)
            assert await answer_to_a_ping(app) == 503

    run(main())


@pytest.fixture
def handlers() -> Iterator[list[int]]:
    """The signals that reach the handlers of the program."""
    caught: list[int] = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    for number in before:
        signal.signal(number, lambda number, _: caught.append(number))
    yield caught
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_service_and_reaches_the_handler(
    number: signal.Signals, handlers: list[int], tmp_path: Path
) -> None:
    journal = tmp_path / "calls.db"
    mine = signal.getsignal(number)

    async def main() -> None:
        app = server.asgi(journal=journal)
        async with app.lifespan():
            signal.raise_signal(number)
            assert handlers == [number]
            while await answer_to_a_ping(app) != 503:
                await asyncio.sleep(0.01)
            while not await can_serve(journal):  # it is released soon
                await asyncio.sleep(0.01)
        assert signal.getsignal(number) is mine

    run(main())


def test_settings_are_checked() -> None:
    with pytest.raises(ValueError, match="begin it with a slash"):
        server.asgi("mcp")
    with pytest.raises(ValueError, match="give one of them"):
        server.asgi(auth_tokens="tokens", admit=lambda head: None)  # type: ignore[arg-type,return-value]


async def test_the_journal_is_free_after_the_lifespan(tmp_path: Path) -> None:
    journal = tmp_path / "calls.db"
    async with server.asgi(journal=journal).lifespan():
        with pytest.raises(JournalUnusable):
            async with open_sqlite_journal(journal):
                pytest.fail("it has two owners")
    async with open_sqlite_journal(journal):
        pass


# A journal in a store


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("redis://:secret@127.0.0.1:1/0", "no connection to 127.0.0.1:1"),
        ("redis://127.0.0.1:1/x", "it may have one number, that of the database"),
        ("redis://", "there is no host: write redis://HOST:PORT/0"),
        ("http://127.0.0.1:1", "is no store: name a file, or a URL with redis://"),
    ],
)
def test_a_store_that_cannot_be_used_fails_the_start_with_one_sentence(
    url: str, says: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retry, "START_S", 0.5)  # so long a server waits for a store that is down
    sent: list[Any] = []

    async def receive() -> Any:
        return {"type": "lifespan.startup"}

    async def send(message: Any) -> None:
        sent.append(message)

    run(server.asgi(journal=url)({"type": "lifespan"}, receive, send))  # type: ignore[arg-type]
    (told,) = sent
    assert told["type"] == "lifespan.startup.failed"
    assert says in told["message"]
    assert "secret" not in told["message"]
    assert "\n" not in told["message"]


def test_a_store_without_its_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [each for each in sys.modules if each.startswith("streams.journal.redis.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "coredis", None)
    monkeypatch.setitem(sys.modules, "coredis.connection", None)

    async def main() -> None:
        with pytest.raises(JournalUnusable, match=r"run pip install 'mcp-streams\[redis\]'"):
            async with server.asgi(journal="redis://127.0.0.1:1").lifespan():
                pytest.fail("it has started")

    run(main())


def test_a_store_is_shared_by_two_applications_of_one_process(
    store_url: Callable[[str], str],
) -> None:
    """A session of one is known to the other."""
    url = f"{store_url('redis')}?prefix=two-applications"
    apps = [server.asgi(journal=url, lease_s=1) for _ in range(2)]
    with TestClient(mounted(apps[0])) as one, TestClient(mounted(apps[1])) as other:
        hello = post(one, "/tools/mcp", "initialize", HELLO)
        session = {"mcp-session-id": hello.headers["mcp-session-id"]}
        listed = post(other, "/tools/mcp", "tools/list", {}, **session)
        assert listed.json()["result"]["tools"][0]["name"] == "add"


@pytest.mark.parametrize("lease_s", [0, 0.01, 1e6])
def test_a_lease_is_of_a_length_that_works(lease_s: float) -> None:
    with pytest.raises(ValueError, match=r"lease_s \S+: write 0\.1 to 3600"):
        server.asgi(journal="redis://127.0.0.1:1", lease_s=lease_s)

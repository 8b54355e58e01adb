"""The caller that a tool sees: with a JWT over WebSocket and HTTP, over stdio, after a kill."""

import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Final

import pytest

from streams.limits import DAY_S
from tests.rigs.jwts import AUDIENCE, ISSUER, KEYS, signed
from tests.wire.process import OFFERS, ServerProcess, wait_until
from tests.wire.raw import WebSocketPeer
from tests.wire.test_auth import Bearer
from tests.wire.verbs import STREAMS

APP: Final = """
import json
from pathlib import Path
from typing import Any

import trio

from streams import Call, Server

server = Server("callers")


def seen(call: Call) -> dict[str, Any]:
    principal = call.principal
    return {
        "issuer": principal.issuer,
        "subject": principal.subject,
        "scopes": principal.scopes and sorted(principal.scopes),
        "tenant": principal.claims.get("tenant"),
        "is_anonymous": principal.is_anonymous,
        "client": call.client.info.name,
        "capabilities": sorted(call.client.capabilities),
    }


@server.tool
async def look(call: Call) -> dict[str, Any]:
    return seen(call)


@server.tool(restart=True)
async def wait(call: Call, folder: str) -> str:
    with Path(folder, "seen").open("a") as file:
        file.write(json.dumps(seen(call)) + "\\n")
    await trio.sleep_forever()
"""

CLAIMS: Final[dict[str, Any]] = {"scope": "read", "tenant": "acme", "exp": time.time() + DAY_S}
ADA: Final = {
    "issuer": ISSUER,
    "subject": "ada",
    "scopes": ["read"],
    "tenant": "acme",
    "is_anonymous": False,
}


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ServerProcess]:
    keys, app = tmp_path / "keys.json", tmp_path / "callers_app.py"
    keys.write_text(json.dumps({"keys": KEYS}))
    app.write_text(APP)
    options = ("--auth-jwks", str(keys), "--auth-issuer", ISSUER, "--auth-audience", AUDIENCE)
    with ServerProcess(tmp_path, app=f"{app}:server", options=options) as server:
        yield server


def found(message: Any) -> dict[str, Any]:
    content: dict[str, Any] = message["result"]["structuredContent"]
    return content


def test_the_claims_of_a_token_reach_the_tool(server: ServerProcess) -> None:
    token = signed(**CLAIMS)
    with ExitStack() as stack:
        headers = {"Authorization": f"Bearer {token}"}
        peer = stack.enter_context(WebSocketPeer(server.url, OFFERS["ws-streams"], headers=headers))
        peer.initialize(STREAMS)
        seen = found(peer.response(peer.call("look")))
        assert seen.items() >= ADA.items()
        assert "streams" in seen["capabilities"]
        client = stack.enter_context(Bearer(server.http_port, token))
        client.initialize(STREAMS)
        answer = client.ask("tools/call", {"name": "look", "arguments": {}})
        assert found(answer).items() >= ADA.items()


def test_a_user_of_this_machine_is_known_by_the_system(
    server: ServerProcess, tmp_path: Path
) -> None:
    with server.connect("stdio") as peer:
        peer.initialize(STREAMS)
        seen = found(peer.response(peer.call("look")))
    assert (seen["issuer"], seen["subject"]) == ("os", f"{tmp_path.stat().st_uid}")
    assert (seen["scopes"], seen["is_anonymous"]) == (None, False)


def test_a_call_that_is_restarted_after_a_kill_keeps_its_caller(
    server: ServerProcess, tmp_path: Path
) -> None:
    def lines() -> list[str]:
        path = tmp_path / "seen"
        return path.read_text().splitlines() if path.exists() else []

    headers = {"Authorization": f"Bearer {signed(**CLAIMS)}"}
    with WebSocketPeer(server.url, OFFERS["ws-streams"], headers=headers) as peer:
        peer.initialize(STREAMS)
        peer.call("wait", folder=str(tmp_path))
        wait_until("the tool runs", lines)
        peer.expect(lambda message: message.method == "notifications/stream/create")
    server.restart()
    wait_until("the tool runs again", lambda: len(lines()) > 1)
    first, second = map(json.loads, lines()[:2])
    assert first == second
    assert first.items() >= ADA.items()

"""Clients with a bearer token, over TLS: the official Python SDK's, and our own command.

The server ends TLS itself, or nginx or HAProxy does as docs/operate/deploy.md says.
"""

import asyncio
import contextlib
import os
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import httpx2
import pytest
import trustme
from mcp import Client
from mcp.client.auth.utils import (
    build_protected_resource_metadata_discovery_urls,
    extract_resource_metadata_from_www_auth,
)
from mcp.client.streamable_http import streamable_http_client
from mcp.shared.auth import ProtectedResourceMetadata

from tests.rigs.command import run
from tests.rigs.doc_pages import free_port
from tests.sdk.proxies import Hardened, haproxy_before, nginx_before
from tests.sdk.stock import Journey
from tests.wire.process import CLI, ServerProcess

APP: Final = f"{Path(__file__).parent / 'cut_server.py'}:server"
ISSUER: Final = "https://issuer.example.com"
RUN_S: Final = 60
INITIALIZE: Final = {
    "jsonrpc": "2.0",
    "id": 1,
    "method": "initialize",
    "params": {
        "protocolVersion": "2025-11-25",
        "capabilities": {},
        "clientInfo": {"name": "bare", "version": "1"},
    },
}
ACCEPT: Final = "application/json, text/event-stream"


class Front(NamedTuple):
    """The addresses of a server, a token, and the authority of its certificate."""

    http: str
    ws: str
    token_file: Path
    authority: Path

    @property
    def token(self) -> str:
        return self.token_file.read_text().strip()

    def client(self, token: str | None) -> httpx2.AsyncClient:
        context = ssl.create_default_context(cafile=str(self.authority))
        shown = {} if token is None else {"Authorization": f"Bearer {token}"}
        return httpx2.AsyncClient(verify=context, headers=shown, timeout=RUN_S)


ENDS_TLS: Final = pytest.mark.needs_one_process("the balancer speaks no TLS")


@pytest.fixture(
    scope="module", params=(pytest.param("directly", marks=ENDS_TLS), "nginx", "haproxy")
)
def front(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Front]:
    folder = tmp_path_factory.mktemp("front")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(folder / "authority.pem")
    certificate = folder / "cert.pem"
    issued = authority.issue_cert("localhost", "127.0.0.1")
    certificate.touch(0o600)
    certificate.write_bytes(issued.private_key_and_cert_chain_pem.bytes())
    tokens = folder / "tokens.jsonl"
    token_file = folder / "ada.token"
    run("token", "new", "ada", "--file", str(tokens), "--to", str(token_file))
    options = ("--auth-tokens", str(tokens), "--auth-server", ISSUER)
    tls = ("--tls-cert", str(certificate))
    with contextlib.ExitStack() as stack:
        if request.param == "directly":
            server = stack.enter_context(ServerProcess(folder, app=APP, options=(*options, *tls)))
            http_at, ws_at = server.http_port, f"{server.port}"
        else:
            program = request.getfixturevalue(request.param)
            http_at = free_port()
            resource = f"https://127.0.0.1:{http_at}/mcp"
            behind = (*options, "--behind-proxy", "--auth-resource", resource)
            server = stack.enter_context(ServerProcess(folder, app=APP, options=behind))
            before = {"nginx": nginx_before, "haproxy": haproxy_before}[request.param]
            hardened = Hardened(certificate, server.port)
            stack.enter_context(before(server.http_port, program, folder, hardened, http_at))
            ws_at = f"{http_at}/ws"
        yield Front(
            f"https://127.0.0.1:{http_at}/mcp",
            f"wss://127.0.0.1:{ws_at}",
            token_file,
            folder / "authority.pem",
        )


def test_the_official_client_makes_a_call_with_a_token(front: Front, tmp_path: Path) -> None:
    journey = Journey(tmp_path)
    journey.open(4)

    async def main() -> str:
        async with (
            asyncio.timeout(RUN_S),
            front.client(front.token) as http,
            Client(streamable_http_client(front.http, http_client=http)) as client,
        ):
            result = await client.call_tool("journey", journey.to(0)["arguments"])
            text: str = result.model_dump(by_alias=True, mode="json")["content"][0]["text"]
            return text

    assert asyncio.run(main()) == "4 steps"


@pytest.mark.parametrize("token", [None, "mcps_none"])
def test_the_official_client_learns_where_to_get_a_token(front: Front, token: str | None) -> None:
    async def main() -> tuple[httpx2.Response, list[httpx2.Response]]:
        async with front.client(token) as http:
            denied = await http.post(front.http, json=INITIALIZE, headers={"Accept": ACCEPT})
            named = extract_resource_metadata_from_www_auth(denied)
            places = build_protected_resource_metadata_discovery_urls(named, front.http)
            return denied, [await http.get(place) for place in places]

    denied, found = asyncio.run(main())
    assert denied.status_code == 401
    assert len(found) >= 2
    for answer in found:
        document = ProtectedResourceMetadata.model_validate_json(answer.content)
        assert str(document.resource) == front.http
        assert [str(each).rstrip("/") for each in document.authorization_servers] == [ISSUER]


def call(
    url: str, front: Front, *words: str, **environment: str
) -> subprocess.CompletedProcess[str]:
    variables = {**os.environ, "SSL_CERT_FILE": str(front.authority), **environment}
    command = [*CLI, "call", url, "journey", "steps:=1", *words]
    return subprocess.run(
        command, env=variables, capture_output=True, text=True, timeout=RUN_S, check=False
    )


@pytest.fixture
def gates(tmp_path: Path) -> str:
    """The tool's gates, which are open already."""
    (tmp_path / "1").touch()
    return f"gates={tmp_path}"


@pytest.mark.parametrize("scheme", ["https", "wss"])
def test_our_own_client_makes_a_call_with_a_token(front: Front, scheme: str, gates: str) -> None:
    url = front.http if scheme == "https" else front.ws
    done = call(url, front, gates, "--token-file", str(front.token_file))
    assert (done.returncode, done.stdout) == (0, "1 steps\n"), done.stderr


@ENDS_TLS
@pytest.mark.parametrize("front", ["directly"], indirect=True)
def test_our_own_client_says_what_is_wrong(front: Front, gates: str) -> None:
    done = call(front.http, front, gates, MCP_STREAMS_TOKEN=front.token)
    assert (done.returncode, done.stdout) == (0, "1 steps\n"), done.stderr
    for url in (front.http, front.ws):
        refused = call(url, front, gates, MCP_STREAMS_TOKEN="mcps_none")
        assert refused.returncode == 3
        assert "MCP_STREAMS_TOKEN or --token-file" in refused.stderr
        assert "mcps_none" not in refused.stderr
    stranger = call(front.ws, front, gates, SSL_CERT_FILE=os.devnull, MCP_STREAMS_TOKEN="mcps_none")
    assert stranger.returncode == 3
    assert "certificate" in stranger.stderr

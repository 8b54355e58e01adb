"""A request whose head is refused: the answer comes before the body, and ends the connection.

The clients here announce 4 MiB and send none of them, so a server that read the body before the
refusal would never answer.
"""

import json
import re
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.wire.process import ServerProcess
from tests.wire.raw import DEADLINE_S

LENGTH = "Content-Length: 4194304"
CHUNKED = "Transfer-Encoding: chunked"
JSON = "Content-Type: application/json"
BOTH = "Accept: application/json, text/event-stream"
KNOWN = "/.well-known/oauth-protected-resource"
AUTH = ("--auth-server", "https://issuer.example")

pytestmark = pytest.mark.needs_one_process("the balancer reads heads and bodies")

SESSION = "Mcp-Session-Id: 0123456789abcdef0123456789abcdef"


@pytest.fixture(scope="module")
def anonymous(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    with ServerProcess(tmp_path_factory.mktemp("anonymous")) as server:
        yield server


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server that requires a token, and accepts none."""
    folder = tmp_path_factory.mktemp("asking")
    tokens = folder / "tokens.jsonl"
    tokens.touch(mode=0o600)
    with ServerProcess(folder, options=("--auth-tokens", str(tokens), *AUTH)) as server:
        yield server


def answer_to(port: int, start: str, *fields: str, then: bytes = b"") -> tuple[int, bytes]:
    """The status and the body of the answer to a head; the connection has ended."""
    lines = [f"{start} HTTP/1.1", *fields]
    if not any(field.startswith("Host:") for field in fields):
        lines.append(f"Host: 127.0.0.1:{port}")
    with socket.create_connection(("127.0.0.1", port), DEADLINE_S) as connection:
        connection.settimeout(20)  # a read of the body would take longer
        connection.sendall("\r\n".join([*lines, "", ""]).encode() + then)
        received = b""
        while chunk := connection.recv(1 << 16):
            received += chunk
    head, _, body = received.partition(b"\r\n\r\n")
    found = re.match(rb"HTTP/1\.1 (\d+) ", head)
    assert found, received
    return int(found[1]), body


LOOKED_UP = pytest.mark.needs_file("a store is asked for an unknown session once the body is there")
REFUSED = [
    (404, "POST /elsewhere", [JSON, BOTH]),
    (404, f"GET {KNOWN}", []),
    (405, "OPTIONS /mcp", []),
    (405, "PUT /mcp", [JSON]),
    (403, "POST /mcp", [JSON, BOTH, "Origin: https://evil.example"]),
    (403, "POST /mcp", [JSON, BOTH, "Host: evil.example"]),
    (415, "POST /mcp", ["Content-Type: text/plain", BOTH]),
    (406, "POST /mcp", [JSON, "Accept: text/html"]),
    pytest.param(404, "POST /mcp", [JSON, BOTH, SESSION], marks=LOOKED_UP),
    pytest.param(404, "DELETE /mcp", [SESSION], marks=LOOKED_UP),
    (400, "DELETE /mcp", []),
    (406, "GET /mcp", ["Accept: text/html"]),
    (400, "GET /mcp", ["Accept: text/event-stream"]),
    pytest.param(404, "GET /mcp", ["Accept: text/event-stream", SESSION], marks=LOOKED_UP),
]


@pytest.mark.parametrize("framing", [LENGTH, CHUNKED])
@pytest.mark.parametrize(("status", "start", "fields"), REFUSED)
def test_a_refused_head_is_answered_at_once(
    anonymous: ServerProcess, status: int, start: str, fields: list[str], framing: str
) -> None:
    told, body = answer_to(anonymous.http_port, start, *fields, framing)
    assert told == status
    assert json.loads(body)["error"]["message"]


@pytest.mark.parametrize("framing", [LENGTH, CHUNKED])
@pytest.mark.parametrize(
    "start", ["POST /mcp", "GET /mcp", "DELETE /mcp", "OPTIONS /mcp", "POST /elsewhere"]
)
def test_a_stranger_is_turned_away_by_the_head(
    asking: ServerProcess, start: str, framing: str
) -> None:
    told, body = answer_to(asking.http_port, start, JSON, BOTH, framing)
    assert told == 401
    assert json.loads(body)["error"]["data"] == {"reason": "unauthorized"}


@pytest.mark.parametrize("path", [KNOWN, f"{KNOWN}/mcp"])
@pytest.mark.parametrize(
    ("framing", "then"), [(LENGTH, b""), (CHUNKED, b"5\r\nhello\r\n"), (LENGTH, b"x" * 1000)]
)
def test_the_document_that_anybody_may_read_takes_no_body(
    asking: ServerProcess, path: str, framing: str, then: bytes
) -> None:
    told, body = answer_to(asking.http_port, f"GET {path}", framing, then=then)
    assert told == 413
    assert json.loads(body)["error"]["data"] == {"reason": "too_large", "limit": 0}
    told, body = answer_to(asking.http_port, f"GET {path}", "Connection: close")
    assert told == 200
    assert json.loads(body)["authorization_servers"] == ["https://issuer.example"]


def test_an_upgrade_that_is_refused_reads_no_body(asking: ServerProcess) -> None:
    for start, fields, status in [
        ("POST /", [LENGTH], 400),
        ("GET /", [LENGTH, "Upgrade: websocket", "Connection: Upgrade"], 400),
    ]:
        told, _ = answer_to(asking.port, start, *fields)
        assert told in (status, 405, 426)


@pytest.mark.parametrize("start", ["POST /elsewhere", f"GET {KNOWN}"])
def test_a_flood_that_follows_a_refused_head_is_not_held(asking: ServerProcess, start: str) -> None:
    """The server reads for a second, and keeps none of it."""
    peak = Path(f"/proc/{asking.pid}/status")
    Path(f"/proc/{asking.pid}/clear_refs").write_text("5")

    def most() -> int:
        return int(peak.read_text().partition("VmHWM:")[2].split()[0])

    before = most()
    connections = [socket.create_connection(("127.0.0.1", asking.http_port)) for _ in range(20)]
    try:
        for connection in connections:
            head = f"{start} HTTP/1.1\r\nHost: 127.0.0.1\r\n{LENGTH}\r\n\r\n"
            connection.settimeout(DEADLINE_S)
            try:
                connection.sendall(head.encode() + b" " * 4_000_000)
            except OSError:
                continue  # it has hung up
        assert most() - before < 8 * 1024
    finally:
        for connection in connections:
            connection.close()

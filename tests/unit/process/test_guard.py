"""`serve` refuses some options before it listens, and some callers then."""

import http.server
import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import trio
import trustme
from structlog.testing import capture_logs

from streams.auth import tokens
from streams.auth.jwks import KEYS_BYTES_MAX, KeySet, fetcher
from streams.auth.metadata import WELL_KNOWN
from streams.exchange import Caller, Head, HttpError, Request
from streams.process.guard import Guard, guard_for
from streams.process.options import Auth, CannotServe, Options
from tests.rigs.jwts import AUDIENCE, ISSUER, KEYS, RSA, STRANGER, jwk, signed
from tests.rigs.web import Answer

AFAR, NEAR = "0.0.0.0:0", "127.0.0.1:0"
SOON = 4_000_000_000.0  # the clock is the wall's here


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "tokens.jsonl"
    tokens.add(path, "ada")
    return path


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    path = tmp_path / "cert.pem"
    path.touch(0o600)
    path.write_bytes(trustme.CA().issue_cert("localhost").private_key_and_cert_chain_pem.bytes())
    return path


def options(auth: dict[str, Any] | None = None, **other: Any) -> Options:
    return Options(**({"app": "app.py:server", "http": NEAR} | other), auth=Auth(**(auth or {})))


@pytest.mark.parametrize(
    ("origin", "why"),
    [
        ("*", "name each origin"),
        ("null", "name each origin"),
        ("app.example.com", "write it as browsers do"),
        ("https://app.example.com/", "write it as browsers do"),
        ("https://app.example.com/page", "write it as browsers do"),
        ("https://app.example.com:443", "write it as browsers do"),
        ("http://app.example.com:80", "write it as browsers do"),
        ("https://me@app.example.com", "write it as browsers do"),
        ("https://*.example.com", "write it as browsers do"),
        ("https://bücher.example", "write it as browsers do"),
        ("https://a.example https://b.example", "write it as browsers do"),
        ("", "write it as browsers do"),
    ],
)
def test_an_origin_that_no_browser_sends_is_refused(origin: str, why: str) -> None:
    with pytest.raises(CannotServe, match=why) as refused:
        guard_for(options(allowed_origins=(origin,)))
    assert f"--allow-origin {origin}:" in str(refused.value)


@pytest.mark.parametrize(
    "origin",
    [
        "https://app.example.com",
        "HTTPS://App.example.com",
        "http://localhost:3000",
        "http://[::1]:3000",
        "https://app.example.com:8443",
        "http://app.example.com:443",
        "chrome-extension://abcdefghijklmnopabcdefghijklmnop",
    ],
)
def test_an_origin_is_named_as_browsers_write_it(origin: str) -> None:
    guard_for(options(allowed_origins=(origin,)))


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("127.0.0.1", "write HOST:PORT, such as"),
        ("http://127.0.0.1:8080", "write HOST:PORT, such as"),
        ("127.0.0.1:99999", "up to 65535"),
        (f"127.0.0.1:{'9' * 5_000}", "up to 65535"),
        ("..:8080", "write HOST:PORT, such as"),
        (f"{'x' * 64}:8080", "write HOST:PORT, such as"),
        ("[]:8080", "write HOST:PORT, such as"),
    ],
)
def test_an_address_of_another_form_is_refused(address: str, why: str) -> None:
    with pytest.raises(CannotServe, match=why):
        guard_for(options(http=address))


JWKS = {"auth_jwks": "https://issuer.example.com/keys", "auth_issuer": ISSUER}


@pytest.mark.parametrize(
    ("auth", "other", "why"),
    [
        ({}, {"http": AFAR}, "callers are not authenticated"),
        ({}, {"ws": AFAR}, "callers are not authenticated"),
        ({"auth_tokens": ...}, {"http": AFAR}, "unencrypted"),
        ({"auth_tokens": ...}, {"ws": AFAR}, "unencrypted"),
        ({"auth_tokens": ...}, {"insecure_anonymous": True}, "leave it out"),
        ({"auth_tokens": ..., "behind_proxy": True}, {}, "--auth-resource"),
        ({**JWKS, "auth_audience": AUDIENCE, "behind_proxy": True}, {}, "--auth-resource"),
        ({"behind_proxy": True}, {}, "--auth-resource"),
        ({"auth_tokens": ...}, {"http": None, "stdio": True}, "are for --ws and --http"),
        ({"auth_tokens": Path("/no/such/file")}, {}, "cannot be read"),
        ({"auth_issuer": ISSUER}, {}, "--auth-jwks"),
        (JWKS, {}, "--auth-audience"),
        ({**JWKS, "auth_issuer": None, "auth_audience": AUDIENCE}, {}, "--auth-issuer"),
        ({**JWKS, "auth_issuer": "a b", "auth_audience": "x"}, {}, "without blanks"),
        ({**JWKS, "auth_audience": "x", "auth_algorithms": "HS256"}, {}, "'HS256' is not one of"),
        ({**JWKS, "auth_audience": "x", "auth_algorithms": "none"}, {}, "'none' is not one of"),
        ({**JWKS, "auth_jwks": "http://issuer.example.com/keys"}, {}, "use https"),
        ({**JWKS, "auth_jwks": "file:///etc/passwd", "auth_audience": "x"}, {}, "use https"),
        ({**JWKS, "auth_resource": 'https://a"b'}, {}, "write a URL"),
        ({**JWKS, "auth_server": ("issuer",)}, {}, "write a URL"),
        ({}, {"tls_cert": Path("/no/such/file")}, "cannot be used for TLS"),
    ],
)
def test_what_is_not_safe_is_refused(
    file: Path, auth: dict[str, Any], other: dict[str, Any], why: str
) -> None:
    given = {name: file if value is ... else value for name, value in auth.items()}
    with pytest.raises(CannotServe, match=why):
        guard_for(options(given, **other))


def test_what_is_safe_may_be_reached_from_elsewhere(file: Path, certificate: Path) -> None:
    guarded = {"auth_tokens": file}
    assert guard_for(options(ws=AFAR, insecure_anonymous=True)).admit_ws is None
    behind = {**guarded, "behind_proxy": True, "auth_resource": AUDIENCE}
    assert guard_for(options(behind, ws=AFAR)).admit_ws
    guard = guard_for(options(guarded, ws=AFAR, tls_cert=certificate))
    assert guard.tls is not None
    assert guard.admit_http is not None
    assert guard.s == "s"


def test_what_a_relay_tells_the_owner_is_understood(file: Path) -> None:
    told = options({"auth_tokens": file, "auth_server": ("https://a.example.com",)}, http=None)
    assert Options.parse(told.for_owner()).auth == told.auth


# -- the document that says where tokens are to be had


async def asked(guard: Guard, path: str, host: str = "localhost:8080") -> Answer:
    """The answer of the endpoint to a request without a token."""
    head = Head("GET", path, {"host": host})
    assert guard.admit_http is not None
    assert await guard.admit_http(head) is None
    answer = Answer()
    served = guard.with_metadata(_nothing)
    await served(Request(head.method, head.path, head.headers, b""), answer)
    return answer


async def _nothing(request: Request, responder: Any) -> None:
    await responder.respond(404)


async def denied(
    guard: Guard, *, ws: bool = False, path: str = "/mcp", **headers: str
) -> HttpError:
    admit = guard.admit_ws if ws else guard.admit_http
    assert admit is not None
    with pytest.raises(HttpError) as denying:
        await admit(Head("POST", path, {"host": "localhost:8080", **headers}))
    return denying.value


@pytest.mark.parametrize("path", [WELL_KNOWN, f"{WELL_KNOWN}/mcp"])
async def test_a_client_is_told_who_gives_out_tokens(path: str) -> None:
    """RFC 9728, 3.2 and 3.3; MCP: "MUST include the `authorization_servers` field"."""
    guard = guard_for(options({**JWKS, "auth_audience": AUDIENCE}))
    answer = await asked(guard, path)
    assert answer.status == 200
    assert answer.json == {
        "resource": "http://localhost:8080/mcp",
        "authorization_servers": [ISSUER],
        "bearer_methods_supported": ["header"],
    }
    challenge = dict((await denied(guard)).headers)["www-authenticate"]
    place = f"http://localhost:8080{WELL_KNOWN}/mcp"
    assert challenge == f'Bearer resource_metadata="{place}"'


async def test_a_name_that_clients_know_the_server_by_beats_what_they_call_it() -> None:
    servers = ("https://a.example.com", "https://b.example.com")
    auth = {**JWKS, "auth_resource": AUDIENCE, "auth_server": servers}
    guard = guard_for(options(auth, ws=NEAR))
    answer = await asked(guard, WELL_KNOWN, host="elsewhere.example.com")
    assert answer.json["resource"] == AUDIENCE
    assert answer.json["authorization_servers"] == list(servers)
    for ws in (False, True):
        challenge = dict((await denied(guard, ws=ws)).headers)["www-authenticate"]
        assert challenge == f'Bearer resource_metadata="https://mcp.example.com{WELL_KNOWN}/mcp"'


@pytest.mark.parametrize("host", ['a"b', "a, b", "a\\b", "", "x" * 300])
async def test_a_host_that_is_no_name_is_not_repeated(host: str) -> None:
    guard = guard_for(options({**JWKS, "auth_audience": AUDIENCE}))
    assert dict((await denied(guard, host=host)).headers)["www-authenticate"] == "Bearer"
    assert (await asked(guard, WELL_KNOWN, host=host)).status == 404


async def test_behind_a_proxy_the_document_names_what_clients_use() -> None:
    """A proxy may send any Host: what it sends is not repeated to others."""
    auth = {**JWKS, "auth_resource": AUDIENCE, "behind_proxy": True}
    answer = await asked(guard_for(options(auth)), WELL_KNOWN, host="inside:8080")
    assert answer.json["resource"] == AUDIENCE


async def test_scopes_are_told_where_tools_need_them(file: Path) -> None:
    """RFC 9728, 2: `scopes_supported`; RFC 6750, 3: `scope`. They are known late."""
    scopes: list[str] = []
    auth = {"auth_tokens": file, **JWKS, "auth_resource": AUDIENCE}
    guard = guard_for(options(auth, ws=NEAR), lambda: scopes)
    own = guard_for(options({"auth_tokens": file}), lambda: scopes)
    assert "scopes_supported" not in (await asked(guard, WELL_KNOWN)).json
    scopes += ["reports.read", "reports.write"]
    assert (await asked(guard, WELL_KNOWN)).json["scopes_supported"] == scopes
    scope = 'Bearer scope="reports.read reports.write"'
    place = f'resource_metadata="https://mcp.example.com{WELL_KNOWN}/mcp"'
    for ws in (False, True):
        challenge = dict((await denied(guard, ws=ws)).headers)["www-authenticate"]
        assert challenge == f"{scope}, {place}"
        assert dict((await denied(own, ws=ws)).headers)["www-authenticate"] == scope
    shown = await denied(guard, authorization="Bearer mcps_x")
    challenge = dict(shown.headers)["www-authenticate"]
    assert challenge.startswith(f'Bearer error="invalid_token", {scope[7:]}, {place}, error_desc')


async def test_nothing_else_is_open(file: Path) -> None:
    guard = guard_for(options({**JWKS, "auth_audience": AUDIENCE}))
    for path in ("/", "/mcp", f"{WELL_KNOWN}/mcp/", f"{WELL_KNOWN}/other", f"/x{WELL_KNOWN}"):
        assert (await denied(guard, path=path)).status == 401
    assert (await denied(guard, path=WELL_KNOWN)).status == 401, "POST"
    own = guard_for(options({"auth_tokens": file}))
    assert (await denied(own, path=WELL_KNOWN)).status == 401
    assert own.metadata is None, "no authorization server is known"


# -- keys over HTTP


class Issuer(http.server.BaseHTTPRequestHandler):
    """Serves what the test has set, and where else to look."""

    keys: list[dict[str, Any]]
    asked: int

    def do_GET(self) -> None:
        type(self).asked += 1
        body = json.dumps({"keys": self.keys}).encode()
        if self.path == "/elsewhere":
            self.send_response(302)
            self.send_header("Location", "/keys")
            self.end_headers()
            return
        self.send_response(500 if self.path == "/broken" else 200)
        self.end_headers()
        self.wfile.write(b" " * (2 * KEYS_BYTES_MAX) if self.path == "/huge" else body)

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def issuing(*keys: dict[str, Any]) -> Iterator[tuple[str, type[Issuer]]]:
    handler = type("Issuing", (Issuer,), {"keys": list(keys), "asked": 0})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", handler
        finally:
            server.shutdown()
            thread.join()


async def test_a_key_that_is_new_at_the_issuer_is_soon_taken_here(
    nursery: trio.Nursery, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("streams.auth.jwks.RETRY_S", 0)
    with issuing(*KEYS) as (url, issuer):
        auth = {"auth_jwks": f"{url}/keys", "auth_issuer": ISSUER, "auth_audience": AUDIENCE}
        guard = guard_for(options(auth))
        await nursery.start(guard.run)
        assert guard.admit_http is not None

        async def admitted(token: str) -> Caller | None:
            assert guard.admit_http is not None
            shown = {"host": "localhost", "authorization": f"Bearer {token}"}
            return await guard.admit_http(Head("POST", "/mcp", shown))

        caller = await admitted(signed(exp=SOON))
        assert caller is not None
        assert caller.principal == f"bearer({ISSUER}, ada)"
        new = signed(STRANGER, kid="new", exp=SOON)
        with pytest.raises(HttpError):
            await admitted(new)
        issuer.keys = [jwk(STRANGER, "new")]
        assert await admitted(new)
        with pytest.raises(HttpError):
            await admitted(signed(exp=SOON))
        assert caller.holds_for_s() <= 0


@pytest.mark.parametrize("path", ["/elsewhere", "/broken", "/huge"])
async def test_what_is_no_answer_of_the_issuer_is_said_and_taken_for_none(
    nursery: trio.Nursery, path: str
) -> None:
    with issuing(*KEYS) as (url, issuer), capture_logs() as logs:
        keys = KeySet(fetcher(url + path))
        await nursery.start(keys.run)
        assert not keys.is_known
        assert issuer.asked == 1, "nobody was followed elsewhere"
    assert [entry["log_level"] for entry in logs] == ["error"]


async def test_keys_may_be_in_a_file(nursery: trio.Nursery, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text(json.dumps({"keys": [jwk(RSA, "rsa")]}))
    auth = {"auth_jwks": str(path), "auth_issuer": ISSUER, "auth_audience": AUDIENCE}
    guard = guard_for(options(auth))
    await nursery.start(guard.run)
    assert guard.keys is not None
    assert await guard.keys.find("rsa", _any) is not None


_any: Callable[[Any], bool] = bool

"""Only the operator is let in."""

import pytest
from trio.testing import MockClock

from streams.admin.endpoint import AdminEndpoint, Route, respond_json
from streams.admin.gate import REFUSED_MAX, REQUESTS_MAX, OwnerGate, Token, TokenGate
from streams.exchange import Request, Responder
from tests.rigs.operators import asked_of

SECRET = "mcps_0123456789abcdef"
BEARER = {"authorization": f"Bearer {SECRET}"}


async def _ok(_: Request, responder: Responder, *parts: str) -> None:
    await respond_json(responder, parts)


ROUTES = (
    Route("GET", "/open", _ok, "open"),
    Route("GET", "/read/{}", _ok),
    Route("POST", "/write/{}/now", _ok, "write"),
)


def endpoint(*, may_write: bool = False, token: Token | None = None) -> AdminEndpoint:
    gate = TokenGate(
        token or Token(SECRET),
        may_write=may_write,
        why_refused=lambda host: "another Host" if host == "evil.example" else None,
    )
    return AdminEndpoint(gate, ROUTES)


@pytest.mark.parametrize(
    "header",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Basic {SECRET}",
        f"Bearer {SECRET}x",
        f"Bearer {SECRET[:-1]}",
        f"Bearer {SECRET}, Bearer {SECRET}",
        "Bearer \udcff",
    ],
)
async def test_only_the_token_opens_what_is_not_open(header: str) -> None:
    given = {"authorization": header} if header else {}
    refused = await asked_of(endpoint(), "/read/x", headers=given)
    assert refused.status == 401
    assert refused.headers["www-authenticate"].startswith("Bearer")
    assert "token" in refused.json["error"]["message"]
    assert SECRET not in refused.body.decode()
    assert (await asked_of(endpoint(), "/open", headers=given)).status == 200


async def test_the_token_opens_it_and_the_parts_of_the_path_are_handed_over() -> None:
    found = await asked_of(endpoint(), "/read/abc", headers=BEARER)
    assert (found.status, found.json) == (200, ["abc"])
    for path in ("/read", "/read/", "/read/a/b", f"/read/{'x' * 1000}"):
        assert (await asked_of(endpoint(), path, headers=BEARER)).status == 404


async def test_changes_need_the_option_as_well() -> None:
    refused = await asked_of(endpoint(), "/write/x/now", "POST", headers=BEARER)
    assert (refused.status, "--admin-write" in refused.body.decode()) == (403, True)
    at = endpoint(may_write=True)
    assert (await asked_of(at, "/write/x/now", "POST", headers=BEARER)).status == 200
    assert (await asked_of(at, "/write/x/now", "POST")).status == 401
    assert (await asked_of(at, "/write/x/now", "GET", headers=BEARER)).status == 405


async def test_the_owner_of_the_socket_may_do_all() -> None:
    at = AdminEndpoint(OwnerGate(), ROUTES)
    assert (await asked_of(at, "/write/x/now", "POST")).status == 200


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({"host": "evil.example"}, 403),
        ({"host": "127.0.0.1:9090"}, 200),
        ({"host": "127.0.0.1:9090", "origin": "http://127.0.0.1:9090"}, 200),
        ({"host": "127.0.0.1:9090", "origin": "http://127.0.0.1:3000"}, 403),
        ({"host": "127.0.0.1:9090", "origin": "null"}, 403),
        ({"host": "", "origin": "null"}, 403),
        ({"host": "127.0.0.1:9090", "origin": "http://[", "x": ""}, 403),
        ({"host": "127.0.0.1:9090", "sec-fetch-site": "cross-site"}, 403),
        ({"host": "127.0.0.1:9090", "sec-fetch-site": "same-origin"}, 200),
    ],
)
async def test_pages_of_others_are_refused(headers: dict[str, str], status: int) -> None:
    """Even with the token, which a browser may send by itself."""
    answered = await asked_of(endpoint(), "/read/x", headers={**BEARER, **headers})
    assert answered.status == status


async def test_another_proof_of_the_operator_is_as_good() -> None:
    gate = TokenGate(Token(SECRET))
    gate.proofs.append(lambda request: request.headers.get("cookie") == "ours")
    at = AdminEndpoint(gate, ROUTES)
    assert (await asked_of(at, "/read/x", headers={"cookie": "ours"})).status == 200
    assert (await asked_of(at, "/read/x", headers={"cookie": "theirs"})).status == 401


async def test_without_a_token_all_is_refused_but_health(autojump_clock: MockClock) -> None:
    at = AdminEndpoint(TokenGate(None), ROUTES)
    refused = await asked_of(at, "/read/x", headers=BEARER)
    assert (refused.status, "--admin-token-file" in refused.body.decode()) == (503, True)


async def test_strangers_cannot_use_up_what_operators_need(autojump_clock: MockClock) -> None:
    at = endpoint()
    wrong = {"authorization": f"Bearer {SECRET}x"}
    statuses = [
        (await asked_of(at, "/read/x", headers=wrong)).status for _ in range(3 * REFUSED_MAX)
    ]
    assert statuses == [401] * REFUSED_MAX + [429] * 2 * REFUSED_MAX
    without = [(await asked_of(at, "/read/x")).status for _ in range(3 * REFUSED_MAX)]
    assert without == [401] * 3 * REFUSED_MAX, "only wrong tokens count"
    assert (await asked_of(at, "/read/x", headers=BEARER)).status == 200


async def test_operators_are_limited_too(autojump_clock: MockClock) -> None:
    at = endpoint()
    statuses = [
        (await asked_of(at, "/read/x", headers=BEARER)).status for _ in range(REQUESTS_MAX + 9)
    ]
    assert statuses == [200] * REQUESTS_MAX + [429] * 9


async def test_a_large_body_is_only_for_those_who_may_write() -> None:
    def limit(at: AdminEndpoint, path: str, headers: dict[str, str]) -> int | None:
        return at.screen(Request("POST", path, headers, b""))

    at = endpoint(may_write=True)
    assert limit(at, "/write/x/now", BEARER) is None
    for refused in (("/write/x/now", {}), ("/nowhere", BEARER)):
        assert limit(at, *refused) == 1024
    assert limit(endpoint(), "/write/x/now", BEARER) == 1024

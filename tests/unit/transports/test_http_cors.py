"""CORS: what a browser is told, as the Fetch standard has it."""

from typing import Any

import pytest
import trio

from streams.errors import refusal
from streams.exchange import Caller, Head, HttpError, Request, Responder
from tests.rigs.bare_http import CHUNKED, CLOSE, asking, serving, tell

PAGE = "https://app.example"
ORIGIN = f"Origin: {PAGE}"
ASKING = "Access-Control-Request-Method: POST"
OPTIONS = "OPTIONS /mcp HTTP/1.1"


async def refusing(head: Head) -> Caller | None:
    raise HttpError(401, refusal("unauthorized"), [("WWW-Authenticate", "Bearer")])


async def asked(*fields: str, start: str = "POST /mcp HTTP/1.1", **settings: Any) -> dict[str, str]:
    """Send one request; returns the status as `status`, and the header fields of the response."""
    async with serving(allowed_origins=[PAGE], **settings) as port:
        wire = await tell(port, asking(*fields, CLOSE, start=start))
    status, *lines = wire.partition(b"\r\n\r\n")[0].decode().split("\r\n")
    named = [(name.lower(), value) for name, _, value in (line.partition(": ") for line in lines)]
    assert len(dict(named)) == len(named), "no field comes twice"
    return {"status": status.split(" ")[1], **dict(named)}


def listed(value: str) -> set[str]:
    return {each.strip().lower() for each in value.split(",")}


async def test_a_preflight_is_answered_without_a_token() -> None:
    wanted = "Access-Control-Request-Headers: authorization,content-type,mcp-session-id"
    told = await asked(ORIGIN, ASKING, wanted, start=OPTIONS, admit=refusing)
    assert told["status"] == "204"
    assert told["access-control-allow-origin"] == PAGE
    assert listed(told["access-control-allow-methods"]) == {"post", "get", "delete"}
    headers = listed(told["access-control-allow-headers"])
    assert headers >= {"authorization", "content-type", "mcp-session-id", "mcp-protocol-version"}
    assert headers >= {"accept", "last-event-id"}
    assert int(told["access-control-max-age"]) > 0
    assert told["vary"] == "Origin"
    assert "access-control-allow-credentials" not in told
    assert "content-length" not in told


@pytest.mark.parametrize("path", ["/stream", "/404", "/mcp"])
async def test_a_response_can_be_read_by_the_page(path: str) -> None:
    told = await asked(ORIGIN, start=f"GET {path} HTTP/1.1")
    assert told["access-control-allow-origin"] == PAGE
    assert listed(told["access-control-expose-headers"]) >= {"mcp-session-id", "www-authenticate"}
    assert told["vary"] == "Origin"


@pytest.mark.parametrize(
    ("fields", "settings", "status"),
    [
        ([], {"admit": refusing}, "401"),
        (["Content-Length: 9999999"], {}, "413"),
        ([CHUNKED, "Content-Length: 5"], {}, "400"),
        ([*["X: y"] * 200], {}, "431"),
    ],
)
async def test_a_refusal_can_be_read_too(
    fields: list[str], settings: dict[str, Any], status: str
) -> None:
    told = await asked(ORIGIN, *fields, **settings)
    assert told["status"] == status
    if status != "431":  # such a head is not kept
        assert told["access-control-allow-origin"] == PAGE
    if status == "401":
        assert told["www-authenticate"] == "Bearer"
        assert "www-authenticate" in listed(told["access-control-expose-headers"])


async def test_a_failure_of_the_endpoint_can_be_read_too() -> None:
    async def failing(request: Request, responder: Responder) -> None:
        raise ValueError

    told = await asked(ORIGIN, endpoint=failing)
    assert (told["status"], told["access-control-allow-origin"]) == ("500", PAGE)


@pytest.mark.parametrize("start", [OPTIONS, "POST /mcp HTTP/1.1"])
@pytest.mark.parametrize(
    "origins",
    [
        ["https://evil.example"],
        ["https://app.example.evil.example"],
        ["http://app.example"],
        ["https://app.example:8443"],
        ["null"],
        [PAGE, "https://evil.example"],
        [f"{PAGE}, {PAGE}"],
    ],
)
async def test_another_origin_is_refused_and_told_nothing(start: str, origins: list[str]) -> None:
    told = await asked(*(f"Origin: {each}" for each in origins), ASKING, start=start)
    assert told["status"] == "403"
    assert "access-control-allow-origin" not in told
    assert "access-control-allow-methods" not in told


async def test_pages_of_loopback_may_connect_but_are_shown_nothing_unless_named() -> None:
    told = await asked("Origin: http://localhost:3000")
    assert told["status"] == "200"
    assert "access-control-allow-origin" not in told
    assert told["vary"] == "Origin"


async def test_a_program_gets_no_headers_for_pages() -> None:
    told = await asked()
    assert "access-control-allow-origin" not in told
    assert told["vary"] == "Origin", "a cache must not give this response to a page"


async def test_options_that_is_no_preflight_goes_to_the_endpoint() -> None:
    assert (await asked(ORIGIN, start=OPTIONS))["status"] == "200"
    assert (await asked(ASKING, start=OPTIONS))["status"] == "200"


async def test_headers_of_the_endpoint_are_not_repeated() -> None:
    async def public(request: Request, responder: Responder) -> None:
        await responder.respond(200, [("access-control-allow-origin", "*")], b"")

    told = await asked(ORIGIN, endpoint=public)
    assert told["access-control-allow-origin"] == "*"


async def test_without_allowed_origins_nothing_is_said() -> None:
    async with serving() as port:
        for origin in ([], ["Origin: http://localhost"]):
            wire = await tell(port, asking(*origin, CLOSE))
            assert b"access-control" not in wire.lower()
            assert b"vary" not in wire.lower()


async def test_the_next_request_on_a_connection_is_judged_by_its_own_origin() -> None:
    async with (
        serving(allowed_origins=[PAGE]) as port,
        await trio.open_tcp_stream("127.0.0.1", port) as stream,
    ):
        await stream.send_all(asking(ORIGIN))
        assert PAGE.encode() in await stream.receive_some()
        await stream.send_all(asking("Origin: http://localhost"))
        assert PAGE.encode() not in await stream.receive_some()
        await stream.send_all(b"\xff garbage\r\n\r\n")
        refused = await stream.receive_some()
        assert b" 400 " in refused
        assert PAGE.encode() not in refused


async def test_a_body_of_a_preflight_is_refused() -> None:
    told = await asked(ORIGIN, ASKING, "Content-Length: 100", start=OPTIONS)
    assert (told["status"], told["access-control-allow-origin"]) == ("413", PAGE)

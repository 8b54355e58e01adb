"""`call.principal` and `call.client`: the caller that made the call."""

import math
from typing import Any

import msgspec
import pytest
import trio
from trio.testing import MockClock, wait_all_tasks_blocked

from streams import Call, Server, SyncCall
from streams.exchange import Caller
from streams.keys import Keyring
from streams.protocol.clients import CAPABILITIES_BYTES_MAX, ClientInfo, described
from streams.server.call import Context
from streams.server.caller import CallerInfo
from tests.rigs.server import PLAIN, STREAMS, open_house
from tests.rigs.web import JSON, browsing

CLAIMS = {"iss": "https://issuer", "sub": "ada, the first", "tenant": "x", "big": 2**80}
NAME = "bearer(https://issuer, ada, the first)"


def seen(call: Context | SyncCall) -> list[Any]:
    principal, client = call.principal, call.client
    scopes = None if principal.scopes is None else sorted(principal.scopes)
    return [
        [principal.name, principal.issuer, principal.subject, scopes, sorted(principal.claims)],
        [client.info.name, client.info.version, client.capabilities, client.revision],
    ]


@pytest.fixture
def server() -> Server:
    server = Server("tested", announce_after_s=0)

    @server.tool
    async def look(call: Call) -> list[Any]:
        return seen(call)

    @server.tool
    def plain(call: SyncCall) -> list[Any]:
        return seen(call)

    @server.tool
    async def wait(call: Call, s: float) -> list[Any]:
        await trio.sleep(s)
        return seen(call)

    return server


def found(answer: Any) -> Any:
    return msgspec.json.decode(answer["result"]["content"][0]["text"])


@pytest.mark.parametrize("tool", ["look", "plain"])
@pytest.mark.parametrize(
    ("name", "issuer", "subject", "is_anonymous"),
    [
        ("os(1000)", "os", "1000", False),
        ("bearer(tokens, ada)", "tokens", "ada", False),
        (NAME, "https://issuer", "ada, the first", False),
        ("conn(abc)", None, None, True),
        ("ada", None, "ada", False),
    ],
)
async def test_a_line_channel_knows_its_principal(
    server: Server, tool: str, name: str, issuer: str, subject: str, is_anonymous: bool
) -> None:
    async with open_house(server) as house:
        talker = await house.dial(PLAIN, name)
        await talker.call(1, tool)
        principal, client = found(await talker.answer(1))
    assert principal == [name, issuer, subject, None, []]
    assert client == ["talker", "0", {}, "2025-11-25"]
    assert CallerInfo(name, None, {}, None).principal.is_anonymous is is_anonymous


async def test_over_http_the_token_is_known(server: Server) -> None:
    caller = Caller(NAME, lambda: math.inf, frozenset(["read"]), CLAIMS)
    async with open_house(server) as house, browsing(house, PLAIN, caller=caller) as browser:
        answer = await browser.call(1, "look")
        while not answer.is_whole:
            await wait_all_tasks_blocked()
        message = answer.json if answer.type == JSON else answer.events[-1][1]
        principal, client = found(message)
    assert principal[:4] == [NAME, "https://issuer", "ada, the first", ["read"]]
    assert principal[4] == sorted(CLAIMS)
    assert client[3] == "2025-11-25"


async def test_a_resume_does_not_change_the_caller(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker = await house.dial(STREAMS, "bearer(tokens, ada)")
        stream = await talker.begin(1, "wait", s=100)
        await talker.leave()
        other = await house.dial(STREAMS | {"roots": {}}, "bearer(tokens, eve)")
        heard = await other.resume(2, stream, resumeToken=stream["resumeToken"])
    principal, client = found(next(m for m in heard if m.get("id") == 1))
    assert principal[2] == "ada"
    assert client[2] == STREAMS


async def test_a_restarted_call_knows_its_caller(autojump_clock: MockClock) -> None:
    server, calls = Server("tested", announce_after_s=0), list[Any]()

    @server.tool(restart=True)
    async def wait(call: Call) -> str:
        calls.append(seen(call))
        await trio.sleep_forever()
        return "never"

    capabilities = STREAMS | {"elicitation": {"url": {}}}
    async with open_house(server) as house:
        talker = await house.dial(capabilities, "bearer(tokens, ada)")
        await talker.begin(1, "wait")
        journal = house.as_after_a_crash()
    async with open_house(server, journal=journal, keyring=Keyring.load(None)):
        await trio.sleep(1)
    assert calls[0] == calls[1]
    assert calls[1][0][:3] == ["bearer(tokens, ada)", "tokens", "ada"]
    assert calls[1][1] == ["talker", "0", capabilities, "2025-11-25"]


def test_what_the_journal_keeps_of_a_caller_comes_back() -> None:
    client = described(msgspec.Raw(b'{"name":"n","version":"1","title":"t"}'), {}, "2025-06-18")
    caller = CallerInfo(NAME, frozenset(["read"]), CLAIMS, client)
    assert CallerInfo.kept_as(NAME, caller.kept()) == caller
    assert CallerInfo.kept_as("os(0)", b"").principal.scopes is None
    assert CallerInfo.kept_as(NAME, b"").principal.scopes == frozenset()
    assert CallerInfo.kept_as(NAME, b"\xff\xff").client == ClientInfo()


@pytest.mark.parametrize(
    ("capabilities", "has"),
    [
        ({}, []),
        ({"elicitation": {}}, ["elicitation", "elicitation.form"]),
        ({"elicitation": {"form": {}}}, ["elicitation", "elicitation.form"]),
        ({"elicitation": {"url": {}}}, ["elicitation", "elicitation.url"]),
        (
            {"elicitation": {"url": {}, "form": {}}, "roots": {}},
            ["elicitation", "elicitation.form", "elicitation.url", "roots"],
        ),
        ({"elicitation": None}, []),
        ({"elicitation": True}, ["elicitation", "elicitation.form"]),
    ],
)
def test_a_client_has_what_it_declares(capabilities: dict[str, Any], has: list[str]) -> None:
    raw = {name: msgspec.Raw(msgspec.json.encode(each)) for name, each in capabilities.items()}
    client = described(msgspec.Raw(b"{}"), raw, "2025-11-25")
    asked = ["elicitation", "elicitation.form", "elicitation.url", "roots"]
    assert [each for each in asked if client.has(each)] == has


@pytest.mark.parametrize("info", [b"[]", b'{"name":1}', b'"' + b"x" * 5000 + b'"', b"null"])
def test_an_odd_client_has_no_name(info: bytes) -> None:
    assert described(msgspec.Raw(info), {}, "").info.name == ""


def test_huge_capabilities_are_not_kept() -> None:
    huge = msgspec.Raw(b'"' + b"x" * CAPABILITIES_BYTES_MAX + b'"')
    deep = msgspec.Raw(b"[" * 500 + b"]" * 500)
    capabilities = described(
        msgspec.Raw(b"{}"), {"roots": msgspec.Raw(b"{}"), "x": huge}, ""
    ).capabilities
    assert capabilities == {"roots": {}}
    assert "x" in described(msgspec.Raw(b"{}"), {"x": deep}, "").capabilities

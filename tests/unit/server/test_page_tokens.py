"""Page tokens: their call, their callers, their lifetime, and the pages that are dropped."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
import trio
from trio.testing import MockClock

from streams import Call, Limits, Server
from streams.keys import Keyring
from tests.rigs.pages import MAX_S, begun, counting
from tests.rigs.server import (
    PLAIN,
    POSITIONS,
    STREAMS,
    Json,
    is_last,
    methods,
    named,
    next_of,
    open_house,
    page_text,
    reason,
    said,
)


@pytest.fixture
def server() -> Server:
    return counting()


# The same page twice


async def test_the_same_token_gives_the_same_page_until_a_later_one_was_used(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, (first, second, third) = await begun(house)
        pages = [await talker.page(number, "count", second) for number in range(3)]
        assert pages[0] == pages[1] == pages[2]
        assert page_text(pages[0]) == "3"
        assert said(talker.seen) == [3, 3, 3]
        assert reason(await talker.page(3, "count", first)) == "invalid_token"
        assert page_text(await talker.page(4, "count", third)) == "4"
        assert reason(await talker.page(5, "count", second)) == "invalid_token"


async def test_a_page_that_was_cut_is_given_again_over_another_connection(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, tokens = await begun(house)
        lost = await talker.page(1, "count", tokens[-1])
        await talker.leave()
        again = await (await house.dial(principal="os(0)")).page("another", "count", tokens[-1])
        assert again == lost


async def test_the_last_page_can_be_had_again_for_two_minutes(autojump_clock: MockClock) -> None:
    server = counting(resume_max_s=86_400)
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        token = next_of(await talker.page(1, "count", to=2))
        last = await talker.page(2, "count", token, to=2)
        assert is_last(last)
        for number in range(3, 8):  # a second request for a page does not extend its lifetime
            await trio.sleep(23)
            assert await talker.page(number, "count", token, to=2) == last
        await trio.sleep(10)
        assert reason(await talker.page(9, "count", token, to=2)) == "invalid_token"


async def test_how_long_the_last_page_is_kept_can_be_set(autojump_clock: MockClock) -> None:
    server = counting(limits=Limits(last_page_s=2))
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        token = next_of(await talker.page(1, "count", to=2))
        await trio.sleep(MAX_S - 1)  # the lifetime begins with the last page
        assert page_text(await talker.page(2, "count", token, to=2)) == "2"
        await trio.sleep(1)
        assert page_text(await talker.page(3, "count", token, to=2)) == "2"
        await trio.sleep(2)
        assert reason(await talker.page(4, "count", token, to=2)) == "invalid_token"


async def test_a_token_may_stand_in_either_place_and_that_in_the_params_counts(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, tokens = await begun(house)

        async def ask(id: int, **params: Any) -> Json:
            return await talker.request(id, "tools/call", name="count", arguments={}, **params)

        in_meta = {"_meta": {"mcp-streams/resumeToken": tokens[-1]}}
        assert page_text(await ask(1, **in_meta)) == "4"
        assert page_text(await ask(2, resumeToken=tokens[-1], **in_meta)) == "4"
        garbled = {"_meta": {"mcp-streams/resumeToken": "x"}}
        assert page_text(await ask(3, resumeToken=tokens[-1], **garbled)) == "4"
        assert reason(await ask(4, resumeToken="x", **in_meta)) == "invalid_token"


# Page tokens of other calls


def flipped(token: str) -> str:
    return token[:-1] + ("A" if token[-1] != "A" else "B")


SAME: dict[str, Json] = {
    "as it was": {"arguments": {}},
    "null": {"arguments": None},
    "absent": {},
    "with other meta": {"arguments": {}, "_meta": {"progressToken": 1, "x": 2}},
}
OTHER: dict[str, Json] = {
    "other arguments": {"arguments": {"to": 6}},
    "a default, spelled out": {"arguments": {"to": 5}},
    "true": {"arguments": {"why": True}},
    "another tool": {"name": "lone"},
    "no tool at all": {"name": "none"},
    "garbled": {"resumeToken": "?"},
    "empty": {"resumeToken": ""},
}


@pytest.mark.parametrize("call", SAME.values(), ids=SAME)
async def test_the_same_call_is_what_says_the_same(
    server: Server, autojump_clock: MockClock, call: Json
) -> None:
    async with open_house(server) as house:
        talker, tokens = await begun(house)
        params = {"name": "count", "resumeToken": tokens[-1]} | call
        assert page_text(await talker.request(1, "tools/call", **params)) == "4"


async def test_whatever_is_wrong_with_a_token_the_answer_is_the_same(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, tokens = await begun(house)
        token = tokens[-1]
        wrong = [
            {"name": "count", "arguments": {}, "resumeToken": token} | o for o in OTHER.values()
        ]
        wrong += [{"name": "count", "resumeToken": t} for t in (flipped(token), *tokens[:-2])]
        answers = {repr(await talker.request(1, "tools/call", **params)) for params in wrong}
        stranger = await house.dial(PLAIN, "os(1)")
        answers.add(repr(await stranger.page(1, "count", token)))
        expired = Keyring.load(None).page_token("s", 1, b"c" * 32)
        answers.add(repr(await talker.page(1, "count", expired)))
        assert len(answers) == 1
        refused = await talker.page(1, "count", flipped(token))
        assert (refused["code"], refused["data"]) == (-32602, {"reason": "invalid_token"})
        assert (
            page_text(await talker.page(2, "count", token)) == "4"
        )  # none of these requests changed anything


@pytest.mark.parametrize(
    ("principal", "is_bound"),
    [("os(0)", True), ("bearer(a, b)", True), ("session(k)", False), ("conn(x)", False)],
)
async def test_a_token_is_bound_to_who_is_authenticated(
    server: Server, autojump_clock: MockClock, principal: str, is_bound: bool
) -> None:
    async with open_house(server) as house:
        _, tokens = await begun(house, principal=principal)
        other = await (await house.dial(PLAIN, "os(1)")).page(1, "count", tokens[-1])
        if is_bound:
            assert reason(other) == "invalid_token"
        else:  # an anonymous client is another caller now: the page token is the authority
            assert page_text(other) == "4"


async def test_a_stream_of_one_call_is_not_led_on_by_another_calls_token(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, tokens = await begun(house)
        second = next_of(await talker.page(1, "count"))
        assert page_text(await talker.page(2, "count", second)) == "2"
        assert page_text(await talker.page(3, "count", tokens[-1])) == "4"


# Stored pages


async def test_only_a_later_token_lets_go_of_a_page(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker = await house.dial(POSITIONS)
        stream = await talker.begin(1, "count")
        token = next_of((await talker.answer(1))["result"])
        await talker.tell("notifications/stream/ack", **named(stream), seq=2)
        await trio.sleep(5)
        heard = await talker.resume(2, stream, after=1)  # a cursor confirms no more than an ack
        assert page_text(heard[1]["result"]) == "1"
        await trio.sleep(5)
        (kept,) = await house.as_after_a_crash().claim()
        assert (kept.acked, kept.pages) == (0, (2,))
        await talker.page(3, "count", token)
        await trio.sleep(5)
        (kept,) = await house.as_after_a_crash().claim()
        assert kept.acked == 2


async def test_a_resume_of_pages_delivers_up_to_the_next_one(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, other = await house.dial(STREAMS), await house.dial(STREAMS)
        stream = await talker.begin(1, "count", to=2)
        first = (await talker.answer(1))["result"]
        heard = await other.resume(2, stream)
        assert methods(heard) == [
            "notifications/stream/create",
            "notifications/message",
            "result",
            "result",
        ]
        assert heard[2] == {"jsonrpc": "2.0", "id": 1, "result": first}
        assert is_last(await talker.page(3, "count", next_of(first), to=2))
        heard = await other.resume(4, stream)
        assert methods(heard)[-2:] == ["notifications/stream/end", "result"]
        assert is_last(heard[-3]["result"])


async def test_only_the_first_call_is_announced(server: Server, autojump_clock: MockClock) -> None:
    async with open_house(server) as house:
        talker, tokens = await begun(house, STREAMS)
        await talker.page(1, "count", tokens[-1])
        assert "notifications/stream/create" not in methods(talker.seen)


async def test_what_is_written_to_a_plain_client_may_be_proved_and_is_kept_all_the_same(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        token = next_of(await talker.page(1, "count"))
        for number in range(2, 5):
            await trio.sleep(130)
            assert await talker.request(number, "ping") == {}
        assert page_text(await talker.page(9, "count", token)) == "2"
        assert page_text(await talker.page(10, "count", token)) == "2"


async def test_a_page_is_kept_however_much_was_written_to_who_confirms_nothing(
    autojump_clock: MockClock,
) -> None:
    server, much = counting(limits=Limits(undelivered_bytes_max=100_000)), "x" * 70_000

    @server.tool(pages=True)
    async def large(call: Call) -> AsyncIterator[str]:
        for _ in range(3):
            await call.log("info", much)
            yield much

    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        token = next_of(await talker.page(1, "large"))
        page = await talker.page(2, "large", token)
        assert await talker.page(3, "large", token) == page
        assert said(talker.seen) == [much] * 3


async def test_pages_that_nobody_turned_count_among_a_principals_streams(
    autojump_clock: MockClock,
) -> None:
    server = counting(limits=Limits(streams_per_principal_max=2))
    async with open_house(server) as house:
        talker = await house.dial(PLAIN)
        token = next_of(await talker.page(1, "count", to=2))
        await talker.page(2, "count", to=3)
        assert reason(await talker.page(3, "count")) == "too_many_streams"
        await talker.page(4, "count", token, to=2)
        await talker.page(5, "count", to=4)  # streams that ended and are written can be dropped
        assert reason(await talker.page(6, "count", token, to=2)) == "invalid_token"

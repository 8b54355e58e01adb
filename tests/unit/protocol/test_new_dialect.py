"""A proposal to come takes one entry in the table of dialects, on either side of the wire."""

import msgspec
import pytest
from trio.testing import MockClock

from streams import Client, Server
from streams.errors import Refusal
from streams.protocol.dialects import DIALECTS
from streams.protocol.ticket import Ticket
from streams.protocol.vocabulary import (
    Announcement,
    Announcing,
    Dialect,
    Ending,
    Poll,
    Polling,
    Report,
    Resume,
    Resuming,
    Standing,
    read_params,
)
from tests.rigs.clients import at_home
from tests.rigs.server import Json, Steps, open_house, reason, said, text_of
from transports.memory import MemoryServer


class Where(msgspec.Struct):
    """How the proposal to come names a stream: by one word."""

    word: str
    from_: int | None = msgspec.field(name="from", default=None)


class Told(msgspec.Struct):
    word: str
    call: int | str


class Stands(msgspec.Struct):
    open: bool


def read_resume(params: msgspec.Raw) -> Resume:
    where = read_params(params, Where)
    return Resume(None, where.word, where.from_)


def read_poll(params: msgspec.Raw) -> Poll:
    where = read_params(params, Where)
    return Poll(None, where.word, where.from_)


def hear(params: msgspec.Raw) -> Announcement:
    told = msgspec.json.decode(params, type=Told)
    return Announcement("", told.word, told.call, 0.0, None)


def tell(report: Report) -> Json:
    return {"open": report.is_live}


def hear_standing(result: msgspec.Raw) -> Standing:
    is_open = msgspec.json.decode(result, type=Stands).open
    status = "live" if is_open else "completed"
    return Standing("", status, pending_messages=False, has_request=False, has_error=False)


def where(word: str, after: int | None) -> Json:
    return {"word": word} if after is None else {"word": word, "from": after}


ONLY = ("fourth",)
FOURTH = Dialect(
    capability="fourthThing",
    announcing=Announcing(
        "notifications/fourth/begun",
        lambda made: {"word": made.token, "call": made.request_id},
        hear,
        names_stream=False,
    ),
    resuming=Resuming(
        "fourth/goOn",
        lambda _, token, after: where(token, after),
        read_resume,
        takes_over=True,
    ),
    polling=Polling(
        "fourth/howIsIt",
        lambda _, token, __, after: where(token, after),
        read_poll,
        tell,
        hear_standing,
    ),
    ending=Ending("notifications/fourth/over", lambda stream: {}),
)


@pytest.fixture(autouse=True)
def _fourth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DIALECTS, "fourth", FOURTH)


@pytest.fixture
def server() -> Server:
    return Server("tested", resume_min_s=0, resume_max_s=600)


# The server


@pytest.mark.parametrize(
    "capabilities",
    [{"fourthThing": {}}, {"extensions": {"mcp-streams/v1": {"dialects": ["fourth"]}}}],
)
async def test_a_server_announces_resumes_and_polls_in_it(
    server: Server, steps: Steps, autojump_clock: MockClock, capabilities: Json
) -> None:
    async with open_house(server) as house:
        first, second = await house.dial(capabilities), await house.dial(capabilities, "bob")
        await first.call(7, "step")
        begun = await first.read()
        assert begun["method"] == "notifications/fourth/begun"
        assert begun["params"]["call"] == 7
        word = {"word": begun["params"]["word"]}
        steps.log("a", "b")
        await first.find(lambda m: said([m]) == ["b"])
        await first.leave()
        assert await second.request(1, "fourth/howIsIt", **word) == {"open": True}
        await second.ask(2, "fourth/goOn", **word, **{"from": 1})
        steps.finish("over")
        assert text_of(await second.answer(2)) == "over"
        assert said(second.seen) == ["b"]
        assert (await second.read())["method"] == "notifications/fourth/over"
        assert await second.request(3, "fourth/howIsIt", **word) == {"open": False}
        assert reason(await second.request(4, "fourth/goOn", word="?")) == "stream_not_found"
        assert (await second.request(5, "fourth/goOn"))["code"] == -32602


async def test_it_is_advertised_and_nobody_is_told_of_it_who_does_not_know_it(
    server: Server, steps: Steps
) -> None:
    async with open_house(server) as house:
        talker = await house.dial()
        await talker.begin(1, "step")
        steps.finish()
        await talker.request(2, "ping")
        assert not any("fourth" in str(m.get("method")) for m in talker.seen)
    async with at_home(server) as memory, Client(memory.connect) as client:
        assert "fourth" in client.capabilities["experimental"]["mcp-streams/v1"]["dialects"]


# The client


async def test_our_client_calls_is_cut_and_resumes_in_it(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with at_home(server) as memory, Client(memory.connect, dialects=ONLY) as client:
        async with client.call("step") as call:
            steps.log("a")
            heard = [await anext(call)]
            ticket = call.ticket
            assert ticket is not None
            assert (ticket.dialect, ticket.stream) == ("fourth", "")
            assert (await client.poll(ticket)).status == "live"
            (lost,) = memory.cables
            lost.cut()
            steps.log("b")
            steps.finish("over")
            heard += [message async for message in call]
            result = await call.result()
        assert result["content"][0]["text"] == "over"
        texts = [msgspec.json.decode(message.params)["data"] for message in heard]
        assert [text for n, text in enumerate(texts) if text not in texts[:n]] == ["a", "b"]
        assert memory.cables != [lost]


async def test_another_client_comes_back_with_the_ticket_alone(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with at_home(server) as memory:
        async with (
            Client(memory.connect, dialects=ONLY) as client,
            client.call("step") as call,
        ):
            steps.log("a")
            await anext(call)
            word = str(call.ticket)
        async with Client(memory.connect, dialects=ONLY) as other:
            steps.finish("over")
            joined = await other.join(Ticket.parse(word))
            assert joined.is_done
            assert joined.result["content"][0]["text"] == "over"
            assert (await other.poll(Ticket.parse(word))).status == "completed"


def test_a_dialect_that_is_not_in_the_table_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(DIALECTS, "fourth")
    with pytest.raises(ValueError, match="fourth"):
        Client(MemoryServer().connect, dialects=ONLY)


def test_it_reads_what_it_is_asked_as_all_do() -> None:
    assert FOURTH.resuming is not None
    with pytest.raises(Refusal):
        FOURTH.resuming.read(msgspec.Raw(b"[]"))

"""Which responses wait for the progress ahead of them, for how long, and which do not."""

from typing import Any

import pytest
import trio
from trio.testing import MockClock

from streams import Call, Server
from streams.engine.receipts import PATIENCE_S, PAUSE_S
from streams.keys import Keyring
from tests.rigs.server import (
    PLAIN,
    POSITIONS,
    REQUESTS,
    STREAMS,
    House,
    Json,
    Steps,
    Talker,
    methods,
    named,
    next_of,
    open_house,
    reason,
    text_of,
    with_token,
)
from transports.lines import LineChannel
from transports.memory import Cable

PROGRESS = "notifications/progress"
LOG = "notifications/message"

# A pong, or a read, is as much later than the progress.
LATER_S = 2.0


class Peer(LineChannel):
    """The server's end of a cable, which notes what it writes and when.

    With `pong_s` its peer answers pings that much later, as a WebSocket's does.
    """

    def __init__(self, cable: Cable, pong_s: float | None) -> None:
        super().__init__(cable.far_end, principal="alice", unsent=cable.far_end.unsent_bytes)
        self.writes: list[tuple[float, bytes]] = []
        self.pings = 0
        self.pong_s = pong_s

    async def send(self, *lines: bytes) -> None:
        self.writes.append((trio.current_time(), b"".join(lines)))
        await super().send(*lines)

    async def ping(self) -> bool:
        if self.pong_s is None:
            return await super().ping()
        self.pings += 1
        await trio.sleep(self.pong_s)
        return True

    def written(self, text: str) -> float:
        """When the one write with this text in it began; no progress may be in that write."""
        ((at, write),) = [each for each in self.writes if text.encode() in each[1]]
        assert PROGRESS.encode() not in write
        return at


async def met(
    house: House, pong_s: float | None, capabilities: Json = PLAIN
) -> tuple[Talker, Peer]:
    cable = Cable(capacity=1 << 20)
    peer = Peer(cable, pong_s)
    talker = await house.connect(cable, peer, capabilities)
    peer.writes.clear()
    return talker, peer


@pytest.fixture
def server() -> Server:
    server = Server("separate")

    @server.tool
    async def work(call: Call, steps: int = 3, pause_s: float = 0) -> str:
        for step in range(1, steps + 1):
            await call.progress(step, total=steps)
        await trio.sleep(pause_s)
        return "worked"

    @server.tool
    async def talk(call: Call) -> str:
        await call.log("info", "a word")
        return "talked"

    @server.tool
    async def quote() -> str:
        return '{"method":"notifications/progress"}'

    @server.tool
    async def forward(call: Call) -> dict[str, str]:
        await call.progress(1)
        return {"method": PROGRESS}

    @server.tool
    async def fail(call: Call) -> None:
        await call.progress(1)
        raise ValueError("the tool says no")

    @server.tool(pages=True)
    async def pages(call: Call) -> Any:
        for page in ("one", "two"):
            await call.progress(1)
            yield page

    return server


@pytest.mark.parametrize("pause_s", [0, 1])
async def test_a_response_follows_the_pong_to_a_ping_behind_the_progress(
    server: Server, pause_s: float, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, peer = await met(house, LATER_S)
        start = trio.current_time()
        await talker.call(1, "work", token=1, pause_s=pause_s)
        assert text_of(await talker.answer(1)) == "worked"
        assert methods(talker.seen) == [PROGRESS] * 3 + ["result"]
        assert peer.written("worked") == pytest.approx(start + pause_s + LATER_S)
        assert peer.pings == 1


@pytest.mark.parametrize("pause_s", [0, 1])
async def test_where_nothing_can_be_asked_a_response_follows_the_read_of_the_progress(
    server: Server, pause_s: float, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, peer = await met(house, None)
        start = trio.current_time()
        await talker.call(1, "work", token=1, pause_s=pause_s)
        await trio.sleep(LATER_S)
        assert [at for at, _ in peer.writes] == [start]  # the progress, and nothing since
        await talker.answer(1)
        assert methods(talker.seen) == [PROGRESS] * 3 + ["result"]
        assert peer.written("worked") - start >= LATER_S + PAUSE_S
        assert peer.written("worked") - start < LATER_S + 0.1


async def test_what_other_streams_write_meanwhile_is_not_waited_for(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    """The queue is never seen empty, and the response goes as soon as the progress is read."""
    async with open_house(server) as house:
        talker, peer = await met(house, None)
        await talker.call("loud", "step")
        await talker.call(1, "work", token=1)
        for count in range(200):
            steps.log(f"{count}")
            await trio.sleep(PAUSE_S / 2)
            if count >= 100:
                await talker.read()  # it is always some messages behind
        assert b"worked" in b"".join(write for _, write in peer.writes)
        assert peer.writes[-1][0] - peer.written("worked") > 10 * PAUSE_S


async def test_only_that_response_waits(
    server: Server, steps: Steps, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, peer = await met(house, LATER_S)
        await talker.call(1, "work", token=1)
        await trio.sleep(LATER_S / 2)
        asked_at = trio.current_time()
        await talker.call(2, "talk", token=2)
        await talker.call(3, "step")
        await talker.ask(4, "ping")
        steps.log("on it goes")
        await talker.answer(1)
        assert peer.written("talked") == peer.written("on it goes") == asked_at
        assert peer.written('"id":4') == asked_at
        assert peer.written("worked") - asked_at == pytest.approx(LATER_S / 2)


@pytest.mark.parametrize(
    ("capabilities", "call"),
    [
        pytest.param(POSITIONS, {"tool": "work", "token": 1}, id="a client with positions"),
        pytest.param(PLAIN, {"tool": "work"}, id="progress that was not asked for"),
        pytest.param(PLAIN, {"tool": "talk", "token": 1}, id="messages and no progress"),
        pytest.param(PLAIN, {"tool": "quote", "token": 1}, id="a result that looks like progress"),
        pytest.param(PLAIN, {"tool": "work", "token": 1, "steps": 0}, id="nothing but a result"),
    ],
)
@pytest.mark.parametrize("pong_s", [LATER_S, None])
async def test_other_calls_wait_for_nothing(
    server: Server, capabilities: Json, call: Json, pong_s: float, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, peer = await met(house, pong_s, capabilities)
        start = trio.current_time()
        await talker.call(1, **call)
        assert "result" in await talker.answer(1)
        assert peer.writes[-1][0] == start
        assert peer.pings == 0


async def test_a_peer_that_answers_no_ping_waits_once(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, peer = await met(house, 8.0)
        start = trio.current_time()
        for call_id in (1, 2, 3):
            await talker.call(call_id, "work", token=call_id)
            assert text_of(await talker.answer(call_id)) == "worked"
            assert trio.current_time() - start == pytest.approx(PATIENCE_S)
        assert peer.pings == 1  # nor is it asked again
        await trio.sleep(8.0 - PATIENCE_S)
        peer.pong_s = LATER_S  # it has answered, and is quicker from now on
        await talker.call(4, "work", token=4)
        await talker.answer(4)
        assert trio.current_time() - start == pytest.approx(8.0 + LATER_S)


async def test_calls_that_end_together_share_a_ping(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, peer = await met(house, LATER_S)
        start, count = trio.current_time(), 100
        for call_id in range(count):
            await talker.call(call_id, "work", token=call_id)
        for _ in range(count):
            await talker.find(lambda m: "result" in m)
        assert trio.current_time() - start <= 2 * LATER_S + 0.01
        assert peer.pings <= 2


async def test_an_error_at_the_end_waits_as_a_result_does(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, peer = await met(house, LATER_S)
        start = trio.current_time()
        await talker.call(1, "fail", token=1)
        assert "the tool says no" in text_of(await talker.answer(1))
        assert peer.written("the tool says no") - start == pytest.approx(LATER_S)


async def test_a_result_with_the_content_of_a_notification_waits_once(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, peer = await met(house, LATER_S)
        start = trio.current_time()
        await talker.call(1, "forward", token=1)
        with trio.fail_after(10 * LATER_S):
            answer = await talker.answer(1)
        assert answer["result"]["structuredContent"] == {"method": PROGRESS}
        assert trio.current_time() - start == pytest.approx(LATER_S)
        assert peer.pings == 1


async def test_each_page_follows_its_progress(server: Server, autojump_clock: MockClock) -> None:
    async with open_house(server) as house:
        talker, peer = await met(house, LATER_S)
        start = trio.current_time()
        await talker.call(1, "pages", token=1)
        first = await talker.answer(1)
        assert methods(talker.seen) == [PROGRESS, "result"]
        assert peer.written("one") - start == pytest.approx(LATER_S)
        assert "two" in str(await talker.page(2, "pages", next_of(first["result"])))


@pytest.mark.parametrize("capabilities", [STREAMS, REQUESTS], ids=["streams", "requests"])
@pytest.mark.parametrize("is_restarted", [False, True])
async def test_a_backlog_with_the_response_at_its_end_is_divided(
    server: Server, capabilities: Json, is_restarted: bool, autojump_clock: MockClock
) -> None:
    keyring = Keyring.load(None)
    async with open_house(server, keyring=keyring) as house:
        first = await house.dial(capabilities)
        await first.call(1, "work", token=1, pause_s=60)
        if capabilities is STREAMS:
            ask: Json = {"method": "stream/resume"} | named(await first.announced())
        else:
            ask = {"method": "requests/resume"} | with_token(await first.policy())
        await first.leave()
        await trio.sleep(120)
        if not is_restarted:
            await see_divided(house, capabilities, ask)
            return
        crashed = house.as_after_a_crash()
    async with open_house(server, journal=crashed, keyring=keyring) as house:
        await see_divided(house, capabilities, ask)


async def see_divided(house: House, capabilities: Json, ask: Json) -> None:
    talker, peer = await met(house, LATER_S, capabilities)
    start = trio.current_time()
    await talker.ask(2, **ask)
    assert "result" in await talker.answer(2)
    assert methods(talker.seen).count(PROGRESS) == 3
    assert peer.written("worked") - start == pytest.approx(LATER_S)


async def test_a_stream_that_is_displaced_while_its_response_waits_is_told_so(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, _ = await met(house, LATER_S, STREAMS)
        other = await house.dial(POSITIONS | STREAMS)
        await talker.call(1, "work", token=1)
        stream = await talker.announced()
        assert methods(await other.resume(2, stream))[-3:-1] == [
            "result",
            "notifications/stream/end",
        ]
        assert reason((await talker.answer(1))["error"]) == "superseded"
        await trio.sleep(2 * LATER_S)
        assert await talker.request(3, "ping") == {}
        assert methods(talker.seen).count("result") == 1


@pytest.mark.parametrize("pong_s", [0.1, 1_000.0])
async def test_a_shutdown_does_not_keep_a_response_back(
    server: Server, pong_s: float, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, _ = await met(house, pong_s)
        await talker.call(1, "work", token=1)
        await talker.call(2, "work", token=2, pause_s=60)
        await trio.sleep(0.05)
        house.nursery.start_soon(house.running.engine.shut_down)
        heard = await talker.end()
        assert methods(heard).count(PROGRESS) == 6
        worked, interrupted = sorted(heard[-2:], key=lambda message: int(message["id"]))
        assert text_of(worked) == "worked"
        assert reason(interrupted["error"]) == "interrupted"


async def test_a_connection_that_ends_while_a_response_waits_is_over(
    server: Server, autojump_clock: MockClock
) -> None:
    async with open_house(server) as house:
        talker, _ = await met(house, 1_000.0)
        await talker.call(1, "work", token=1)
        await talker.find(lambda m: m["params"]["progress"] == 3)
        await talker.leave()
        with trio.fail_after(PATIENCE_S):
            await house.running.engine.shut_down()

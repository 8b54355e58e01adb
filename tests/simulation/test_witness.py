"""The witness keeps an account for each request, also where one connection makes several; and it
knows what must be durable before it is written.
"""

import random
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from trio.testing import MockClock

from streams.journal.records import Change, Create, Record
from streams.keys import Keyring
from tests.simulation.ledger import Known, Ledger
from tests.simulation.network import Cable, FarChannel
from tests.simulation.plan import plan_of
from tests.simulation.weather import Weather
from tests.simulation.witness import TOLD_S, Witness
from tests.simulation.world import World

STREAM = "a stream"
JOB = "c0"


KEYRING = Keyring([bytes(32)])


class Scene:
    """A witness, and what it is shown of one job's stream."""

    def __init__(self) -> None:
        chance = random.Random(0)
        self.world = World(plan_of(chance, 0), chance, is_traced=False)
        self.ledger = Ledger(self.world)
        job = self.world.jobs[JOB]
        job.stream = STREAM
        self.ledger.known[STREAM] = Known(job, last=100, has_ended=True)
        self.witness = Witness(self.world, self.ledger, KEYRING)

    def channel(self) -> FarChannel:
        """The server's end of another connection."""
        weather = Weather(self.world)
        far = Cable(weather, principal="os(0)", pings=False, capacity_bytes=1_000).far
        far.witness = self.witness
        return far

    def resumes(self, channel: FarChannel, id: str) -> None:
        params = {"streamId": STREAM, "resumeToken": "a token"}
        self._hear(channel, {"id": id, "method": "stream/resume", "params": params})

    def cancels(self, channel: FarChannel, id: str) -> None:
        self._hear(channel, {"method": "notifications/cancelled", "params": {"requestId": id}})

    def _hear(self, channel: FarChannel, said: dict[str, Any]) -> None:
        self.witness.heard(channel, [msgspec.json.encode({"jsonrpc": "2.0"} | said)])

    def is_sent_some(self, channel: FarChannel, *, seq: int = 100) -> None:
        params = {"streamId": STREAM, "seq": seq, "count": 1}
        self._say(channel, {"method": "notifications/stream/position", "params": params})

    def is_told(self, channel: FarChannel, id: str, ended: str) -> None:
        self._say(channel, {"id": id, "result": {"_meta": {"mcp-streams/ended": ended}}})

    def _say(self, channel: FarChannel, said: dict[str, Any]) -> None:
        self.witness.said(channel, msgspec.json.encode({"jsonrpc": "2.0"} | said) + b"\n")

    def violations(self, clock: MockClock) -> list[str]:
        """The violations that the witness has found once the deadline for answers is over."""
        clock.jump(TOLD_S + 1)
        self.witness.check()
        return self.world.violations


@pytest.fixture
async def scene() -> Scene:
    return Scene()


async def test_a_displaced_request_is_answered(scene: Scene, mock_clock: MockClock) -> None:
    older, newer = scene.channel(), scene.channel()
    scene.resumes(older, "1")
    scene.is_sent_some(older)
    scene.resumes(newer, "2")
    scene.is_told(older, "1", "superseded")
    scene.is_sent_some(newer)
    assert not scene.violations(mock_clock)


@pytest.mark.parametrize("is_sent_some", [True, False])
async def test_a_displaced_request_must_be_answered(
    scene: Scene, mock_clock: MockClock, is_sent_some: bool
) -> None:
    """This holds also where no message was written for it yet."""
    older, newer = scene.channel(), scene.channel()
    scene.resumes(older, "1")
    if is_sent_some:
        scene.is_sent_some(older)
    scene.resumes(newer, "2")
    scene.is_sent_some(newer)
    assert scene.violations(mock_clock) == [f"{JOB}: a displaced reader was never told"]


@pytest.mark.parametrize("is_late", [True, False])
async def test_a_displaced_request_is_not_released(
    scene: Scene, mock_clock: MockClock, is_late: bool
) -> None:
    """A released client would resume, and displace the newer one."""
    older, newer = scene.channel(), scene.channel()
    scene.resumes(older, "1")
    scene.is_sent_some(older)
    scene.resumes(newer, "2")
    if not is_late:
        scene.is_told(older, "1", "released")
    scene.is_sent_some(newer)
    if is_late:
        scene.is_told(older, "1", "released")
    assert scene.violations(mock_clock) == [f"{JOB}: released, and not superseded"]


async def test_a_write_that_was_under_way_does_not_undo_a_cancel(
    scene: Scene, mock_clock: MockClock
) -> None:
    older, newer = scene.channel(), scene.channel()
    scene.resumes(older, "1")
    scene.is_sent_some(older)
    scene.cancels(older, "1")
    scene.is_sent_some(older)
    scene.resumes(newer, "2")
    scene.is_sent_some(newer)
    assert not scene.violations(mock_clock)


@pytest.mark.parametrize("ended", ["cancelled", "superseded"])
async def test_each_request_of_a_connection_must_be_answered(
    scene: Scene, mock_clock: MockClock, ended: str
) -> None:
    """Each one, independent of the one before."""
    older, newer = scene.channel(), scene.channel()
    scene.resumes(older, "1")
    scene.is_sent_some(older)
    if ended == "cancelled":
        scene.cancels(older, "1")
    scene.resumes(older, "2")
    if ended == "superseded":
        scene.is_told(older, "1", ended)
    scene.is_sent_some(older)
    scene.resumes(newer, "3")
    scene.is_sent_some(newer)
    assert scene.violations(mock_clock) == [f"{JOB}: a displaced reader was never told"]


async def test_an_answer_to_one_request_is_kept_when_its_connection_asks_again(
    scene: Scene, mock_clock: MockClock
) -> None:
    older, newer = scene.channel(), scene.channel()
    scene.resumes(older, "1")
    scene.is_sent_some(older)
    scene.resumes(newer, "2")
    scene.is_told(older, "1", "superseded")
    scene.resumes(older, "3")
    scene.is_sent_some(newer)
    scene.is_told(newer, "2", "superseded")
    scene.is_sent_some(older)
    assert not scene.violations(mock_clock)


@pytest.mark.parametrize("ended", ["superseded", "completed"])
async def test_nothing_follows_the_answer(scene: Scene, ended: str) -> None:
    older, newer = scene.channel(), scene.channel()
    scene.resumes(older, "1")
    scene.is_sent_some(older)
    scene.resumes(newer, "2")
    scene.is_told(older, "1", ended)
    scene.is_sent_some(older)
    assert scene.world.violations == [
        f"{JOB} is sent to a displaced reader, or one that never asked"
    ]


async def test_no_request_is_complete_that_lacks_some(scene: Scene) -> None:
    channel = scene.channel()
    scene.resumes(channel, "1")
    scene.is_sent_some(channel, seq=99)
    scene.is_told(channel, "1", "completed")
    assert scene.world.violations == [f"{JOB}: is complete, and lacks some"]


SHORT = "c1"  # a job that has no stream yet
ANSWER = {"content": [{"type": "text", "text": "the result"}]}


class Short(Scene):
    """A witness, and what it is shown of a short call."""

    def __init__(self) -> None:
        super().__init__()
        self.job = self.world.jobs[SHORT]
        self.near = self.channel()
        self.called()

    def called(self, id: str = "1", meta: dict[str, Any] | None = None) -> None:
        params = {"name": "quick", "arguments": {"job": SHORT}, "_meta": meta or {}}
        self._hear(self.near, {"id": id, "method": "tools/call", "params": params})

    @property
    def create(self) -> Change:
        origin = msgspec.json.encode({"params": {"arguments": {"job": SHORT}}})
        return Create(Record("short", "os(0)", origin, 0.0, 1.0, 0.0, 1, is_announced=True))

    def is_recorded(self) -> None:
        self.ledger.asked([self.create])
        self.ledger.done([self.create])

    def is_answered(self, id: str = "1") -> None:
        self._say(self.near, {"id": id, "result": ANSWER})

    def is_announced(self) -> None:
        stream = {"streamId": "short", "resumeToken": KEYRING.token("short")}
        self._say(
            self.near, {"method": "notifications/stream/create", "params": {"stream": stream}}
        )

    def is_logged(self) -> None:
        params = {"data": {"job": SHORT}}
        self._say(self.near, {"method": "notifications/message", "params": params})


@pytest.fixture
async def short() -> Short:
    return Short()


async def test_a_call_is_answered_and_leaves_nothing(short: Short) -> None:
    short.is_answered()
    assert not short.world.violations
    assert short.world.counts["plain replies"] == 1


async def test_no_call_is_recorded_after_its_plain_reply(short: Short) -> None:
    short.is_answered()
    short.is_recorded()
    assert short.world.violations == ["c1 is recorded after the answer to its request"]


@pytest.mark.parametrize("is_durable", [True, False])
async def test_a_call_that_is_recorded_has_no_plain_reply(short: Short, is_durable: bool) -> None:
    """Not even while the journal has not confirmed the record."""
    short.ledger.asked([short.create])
    if is_durable:
        short.ledger.done([short.create])
    short.is_answered()
    assert len(short.world.violations) == 1
    assert "is a plain reply, and recorded" in short.world.violations[0]


async def test_a_call_may_be_recorded_for_a_request_that_repeats_it(short: Short) -> None:
    short.is_answered()
    short.called("2")
    short.is_recorded()
    assert not short.world.violations


async def test_a_call_is_announced_once_its_record_is_durable(short: Short) -> None:
    short.is_recorded()
    short.is_announced()
    assert not short.world.violations


async def test_no_call_is_announced_before_its_record_is_durable(short: Short) -> None:
    short.ledger.asked([short.create])
    short.is_announced()
    assert short.world.violations == ["a call is announced, and its record is not durable"]


@pytest.mark.parametrize("is_recorded", [True, False])
async def test_no_message_is_sent_before_it_is_durable(short: Short, is_recorded: bool) -> None:
    if is_recorded:
        short.is_recorded()
    short.is_logged()
    assert len(short.world.violations) == 1
    assert "is sent, and is not durable" in short.world.violations[0]


@pytest.mark.parametrize("is_recorded", [True, False])
async def test_no_tool_runs_for_a_key_before_the_record_is_durable(
    short: Short, is_recorded: bool
) -> None:
    short.called("2", {"mcp-streams/idempotencyKey": "a key"})
    if is_recorded:
        short.is_recorded()
    short.world.started(short.job)
    unsafe = ["c1 has a key, and is run before its record is durable"]
    assert short.world.violations == ([] if is_recorded else unsafe)


async def test_no_tool_runs_twice(short: Short) -> None:
    short.called("2")
    for _ in range(2):
        short.world.started(short.job)
    assert short.world.violations == ["c1 is run 2 times"]


async def test_a_tool_that_is_safe_to_repeat_runs_once_for_a_request(short: Short) -> None:
    short.job.part = replace(short.job.part, tool="reading")
    short.called("2")
    for _ in range(2):
        short.world.started(short.job)
    assert not short.world.violations
    short.world.started(short.job)
    assert short.world.violations == ["c1 is run 3 times"]

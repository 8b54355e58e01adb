"""Clients that know the proposals and no numbers: they may see a line twice, but never miss one.

Now and then one resumes over a new connection while the old one is open, and reads from both: then
the old one's pongs and answers are late.
"""

from collections import deque
from contextlib import suppress
from typing import Any, Final

import msgspec
import trio

from streams.exchange import ClientChannel
from tests.simulation.ledger import Ledger
from tests.simulation.network import Network
from tests.simulation.weather import Weather
from tests.simulation.world import Job, World

CALL: Final = 1  # the id of the call's request
ANNOUNCED: Final = ("notifications/stream/create", "notifications/requests/resumePolicy")
RETRIED: Final = ("superseded", "released", "id_in_use", "too_early")
GIVEN_UP: Final = ("abandoned", "stream_not_found")  # the latter once the tombstone is gone
# The capacity between server and client, unread.
WIDE_BYTES: Final = 64 * 1024
NARROW_BYTES: Final = 1024
# The params of `initialize`.
HELLO: Final = {"protocolVersion": "2025-11-25", "clientInfo": {"name": "plain", "version": "0"}}


class Visit:
    """One connection of a caller."""

    def __init__(self, *, is_slow: bool) -> None:
        self.is_slow = is_slow  # pauses after each read
        self.is_left = trio.Event()  # it is over, or another one is opened beside it
        self.is_over = False
        self.is_refused = False  # for now
        self.last: int | None = None  # the seq that came last
        self.answers: deque[dict[str, Any]] = deque()  # that are yet to be sent


class PlainCaller:
    """The caller that wants the result of one job, over one connection after the other."""

    def __init__(
        self, job: Job, world: World, weather: Weather, network: Network, ledger: Ledger
    ) -> None:
        self._job = job
        self._world = world
        self._ledger = ledger
        self._dialect = job.part.dialects[0]
        # An anonymous connection needs the resume token; another one has its principal.
        self._name = f"plain {job.key}"
        principal = world.chance.choice(("os(0)", ""))
        self._dial = network.dialer(self._name, principal, pings=world.chance.random() < 0.9)
        self._stream = self._token = ""
        self._was_called = False
        self._resumes = 0

    async def run(self) -> None:
        """Make the call, and resume it until it is over."""
        chance = self._world.chance
        await trio.sleep(self._job.part.starts_at)
        async with trio.open_nursery() as nursery:
            is_slow = False
            while not self._job.outcome:
                visit = Visit(is_slow=is_slow)
                nursery.start_soon(self._visit, visit, nursery.cancel_scope)
                await visit.is_left.wait()
                is_slow = not visit.is_over
                await trio.sleep(0 if is_slow else chance.choice((0.1, 1.0, 10.0)))
        self._job.is_settled.set()

    async def _visit(self, visit: "Visit", visits: trio.CancelScope) -> None:
        """Keep one connection until it is over, alone or with another one beside it."""
        with suppress(OSError, trio.EndOfChannel, trio.BrokenResourceError):
            async with self._dial(NARROW_BYTES if visit.is_slow else WIDE_BYTES) as channel:
                try:
                    await self._talk(channel, visit)
                finally:
                    if visit.is_left.is_set() and not self._job.outcome:
                        await trio.sleep(5)  # its pongs still confirm the messages that it has read
        if self._job.outcome:
            visits.cancel()
        visit.is_over = True
        visit.is_left.set()

    async def _talk(self, channel: ClientChannel, visit: "Visit") -> None:
        await _say(channel, id=0, method="initialize", params=self._hello)
        if not self._was_called:
            self._was_called = True
            call = {
                "name": self._job.part.tool,
                "arguments": {"job": self._job.key},
                "_meta": {"progressToken": "progress"},
            }
            await _say(channel, id=CALL, method="tools/call", params=call)
        elif not self._token:
            self._world.refused(self._job, "lost")
            return
        else:
            await self._resume(channel)
        while not self._job.outcome:
            # A pong has confirmed all of these already, so none is lost with the connection.
            for line in await channel.receive():
                assert isinstance(line, bytes)
                self._hear(line + b"\n", visit)
            while visit.answers:
                await _say(channel, **visit.answers.popleft())
            if visit.is_refused:
                raise trio.EndOfChannel
            if self._world.chance.random() < self._job.part.restlessness:
                await self._be_restless(visit)
            elif visit.is_slow and not self._world.is_calm:
                await trio.sleep(self._world.chance.uniform(0, 5))
        await trio.sleep(self._world.chance.choice((0.0, 5.0)))

    async def _be_restless(self, visit: "Visit") -> None:
        """Stop reading for a while, and perhaps resume over another connection meanwhile."""
        world = self._world
        is_alone = self._token and not visit.is_left.is_set() and not world.is_calm
        is_doubled = is_alone and world.chance.random() < 0.9
        if is_doubled:
            world.counts["doubled"] += 1
            visit.is_left.set()
        await trio.sleep(world.chance.uniform(0, 5 if is_doubled or world.is_calm else 60))

    @property
    def _hello(self) -> dict[str, Any]:
        return HELLO | {"capabilities": {self._dialect: {}}}

    async def _resume(self, channel: ClientChannel) -> None:
        self._resumes += 1
        self._world.note(self._name, f"comes back with {self._job.handed}")
        token = {"resumeToken": self._token}
        if self._dialect == "streams":
            params = token | {"streamId": self._stream}
            await _say(channel, id=f"r{self._resumes}", method="stream/resume", params=params)
        else:
            await _say(channel, id=CALL, method="requests/resume", params=token)

    def _hear(self, line: bytes, visit: "Visit") -> None:
        seq = None
        if self._job.stream is not None:
            seq = self._ledger.seqs[self._job.stream].get(line)
        said = msgspec.json.decode(line)
        if said.get("method") in ANNOUNCED:
            told = said["params"].get("stream", said["params"])
            self._stream, self._token = told.get("streamId", ""), told["resumeToken"]
            self._job.has_ticket = True
        elif seq is not None:
            self._take(seq, said, visit)
        elif b'"mcp-streams/ended":"superseded"' in line and not visit.is_left.is_set():
            visit.is_refused = True  # by an earlier visit, whose request came later to the owner
        elif "error" in said:
            self._refused(said["error"].get("data", {}).get("reason", "busy"), visit)
        elif said.get("id") == CALL:
            self._world.violate(f"{self._job.key}: {said} is not in the journal")

    def _take(self, seq: int, said: dict[str, Any], visit: "Visit") -> None:
        job, method = self._job, said.get("method")
        is_question = method == "elicitation/create"
        if is_question:
            visit.answers.append({"id": said["id"], "result": {"to": said["params"]}})
        if is_question and seq <= job.handed and seq - 1 != visit.last:
            return  # asked again, ahead of what follows
        expected = job.handed + 1 if visit.last is None else visit.last + 1
        is_next = seq <= expected if visit.last is None else seq == expected
        self._world.expect(is_next, f"{job.key}: {expected} expected, {seq} has come")
        visit.last = seq
        if seq != job.handed + 1:
            return
        self._world.handed(job, seq)
        if method is not None:
            self._world.heard(job, method, said["params"])
        elif "result" in said:
            self._world.finished(job, said["result"])
        else:
            self._world.refused(job, said["error"]["data"]["reason"])

    def _refused(self, reason: str, visit: "Visit") -> None:
        self._world.note(self._name, f"is refused: {reason}")
        could_not_look = reason in ("busy", "unavailable") and self._token
        if reason in RETRIED or could_not_look:
            visit.is_refused = True
        elif self._job.outcome:
            self._refused_too(reason)
        else:
            self._world.refused(self._job, reason)

    def _refused_too(self, reason: str) -> None:
        """Another visit was told the end while this one's request was in flight."""
        outcome = self._job.outcome
        expected = GIVEN_UP if outcome in GIVEN_UP else ("messages_gone",)
        self._world.expect(reason in expected, f"{self._job.key}: {outcome}, and then {reason}")


async def _say(channel: ClientChannel, **said: Any) -> None:
    await channel.send(msgspec.json.encode({"jsonrpc": "2.0"} | said) + b"\n")

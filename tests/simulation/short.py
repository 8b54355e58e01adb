"""Callers of short calls, by hand: plain MCP clients, or clients that know a proposal; some send an
idempotency key.

A caller that was told how to come back finds its call. So does one with a key, if the tool must not
run twice. Any other caller whose connection is lost has lost its call.
"""

from contextlib import suppress
from typing import Any, Final

import msgspec
import trio

from streams.exchange import ClientChannel
from streams.protocol.extension import KEY
from tests.simulation.ledger import Ledger
from tests.simulation.network import Network
from tests.simulation.plain import GIVEN_UP, HELLO, RETRIED
from tests.simulation.plan import WHIMS
from tests.simulation.weather import Weather
from tests.simulation.witness import ANNOUNCEMENTS, IN_USE
from tests.simulation.world import Job, World

GONE: Final = (trio.EndOfChannel, trio.BrokenResourceError, trio.ClosedResourceError)
PATIENCE_S: Final = 300.0  # with a connection that brings nothing
CANCELLED_S: Final = 2.0  # in which a call that was cancelled too late is still answered
AGAIN_S: Final = 10.0  # after the answer: the memory of the call is kept for longer
# A server says these where it cannot begin a call now, or find it.
TROUBLED: Final = (
    "busy",
    "unavailable",
    "draining",
    "The server is shutting down: try again later.",
)


class ShortCaller:
    """The caller of one short call, over one connection after the other."""

    def __init__(
        self, job: Job, world: World, weather: Weather, network: Network, ledger: Ledger
    ) -> None:
        self._job = job
        self._world = world
        self._ledger = ledger
        self._name = f"short {job.key}"
        principal = world.chance.choice(("os(0)", ""))
        self._dial = network.dialer(self._name, principal, pings=world.chance.random() < 0.9)
        self._dialect = (*job.part.dialects, "")[0]
        self._key = f"the key of {job.key}".ljust(40, ".")  # too long to be guessed
        self._stream = self._token = ""
        self._calls = 0
        self._twins = 0
        self._visits = 0
        self._last = 0  # the number of the last log message over this connection
        self._answer = ""
        self._is_again = False  # it asks once more, after the answer

    async def run(self) -> None:
        """Make the call, and come back until it is over; some ask once more after that."""
        job, chance = self._job, self._world.chance
        await trio.sleep(job.part.starts_at)
        while not job.outcome:
            await self._visit()
            await trio.sleep(chance.choice((0.0, 0.5, 5.0)))
        if job.part.is_keyed and self._answer and chance.random() < 0.5:
            self._is_again = True
            with trio.move_on_after(AGAIN_S):
                await self._visit()
        job.is_settled.set()

    async def _visit(self) -> None:
        self._visits += 1
        self._last = 0
        with suppress(OSError):
            async with self._dial() as channel, trio.open_nursery() as nursery:
                if self._calls == 0:
                    nursery.start_soon(self._be_fated, channel)
                with suppress(*GONE), trio.move_on_after(PATIENCE_S):
                    await self._talk(channel)
                nursery.cancel_scope.cancel()

    async def _talk(self, channel: ClientChannel) -> None:
        hello = HELLO | {"capabilities": {self._dialect: {}} if self._dialect else {}}
        await _say(channel, id=0, method="initialize", params=hello)
        if not self._is_again and self._token:
            await self._resume(channel)
        elif self._calls == 0 or self._job.part.is_keyed:
            await self._call(channel)
        else:
            self._world.refused(self._job, "cancelled" if self._job.is_cancelled else "lost")
        while not self._is_done:
            for line in await channel.receive():
                assert isinstance(line, bytes)
                await self._hear(line, channel)

    @property
    def _is_done(self) -> bool:
        return self._job.outcome != "" and not self._is_again

    async def _call(self, channel: ClientChannel) -> None:
        self._calls += 1
        meta: dict[str, Any] = {"progressToken": "progress"}
        if self._job.part.is_keyed:
            meta[KEY] = self._key
        call = {"name": self._job.part.tool, "arguments": {"job": self._job.key}, "_meta": meta}
        await _say(channel, id=f"c{self._calls}", method="tools/call", params=call)
        self._world.reach(self._job, "sent")

    async def _resume(self, channel: ClientChannel) -> None:
        self._world.note(self._name, "comes back")
        token = {"resumeToken": self._token}
        if self._dialect == "streams":
            params = token | {"streamId": self._stream}
            await _say(channel, id=f"r{self._visits}", method="stream/resume", params=params)
        else:
            await _say(channel, id="c1", method="requests/resume", params=token)

    # Its part in the call's fate

    async def _be_fated(self, channel: ClientChannel) -> None:
        fate, job = self._job.part.fate, self._job
        if fate is None or fate.what not in WHIMS:
            return
        await job.fate_is_due.wait()
        await trio.sleep(fate.after_s)
        self._world.note(self._name, f"{fate.what}, {fate.after_s:.4f} s after: {fate.moment}")
        self._world.counts[fate.what] += 1
        with suppress(*GONE):
            match fate.what:
                case "leave":
                    await channel.aclose()
                case "cancel" if not job.outcome:
                    job.is_cancelled = True
                    params = {"requestId": "c1"}
                    await _say(channel, method="notifications/cancelled", params=params)
                    await trio.sleep(CANCELLED_S)
                    await channel.aclose()
                case "again" if job.part.is_keyed:
                    await self._call(channel)
                case "same id":
                    self._twins += 1
                    twin = {"name": "twin", "arguments": {"of": job.key}}
                    await _say(channel, id="c1", method="tools/call", params=twin)

    # Receiving

    async def _hear(self, line: bytes, channel: ClientChannel) -> None:
        said = msgspec.json.decode(line)
        method, reply_to = said.get("method"), str(said.get("id"))
        self._note_seq(line + b"\n", is_response=method is None)
        if method in ANNOUNCEMENTS:
            told = said["params"].get("stream", said["params"])
            if told.get("requestId", "c1") == "c1":
                self._stream, self._token = told.get("streamId", ""), told["resumeToken"]
                self._job.has_ticket = True
        elif method is not None:
            await self._take(said, channel)
        elif "result" in said:
            if reply_to.startswith("c"):
                self._take_result(said["result"])
        elif IN_USE in line:
            self._world.expect(self._twins, f"{self._job.key}: {said}")
        elif reply_to != "0":
            self._take_error(said, reply_to)

    def _note_seq(self, line: bytes, *, is_response: bool) -> None:
        known = self._ledger.known.get(self._job.stream or "")
        if known is not None:  # a response may be under another id than the one that is stored
            seqs = self._ledger.seqs[str(self._job.stream)]
            has_all = is_response and known.has_ended
            self._world.handed(self._job, known.last if has_all else seqs.get(line, 0))

    async def _take(self, said: dict[str, Any], channel: ClientChannel) -> None:
        job, params = self._job, said["params"]
        match said["method"]:
            case "notifications/message":
                number = params["data"]["number"]
                expected = job.heard + 1 if self._last == 0 else self._last + 1
                self._world.expect(
                    number <= expected, f"{job.key}: {expected} expected, heard {number}"
                )
                self._last = number
                if number == job.heard + 1:
                    self._world.heard(job, said["method"], params)
            case "elicitation/create":
                if params["question"] == job.asked + 1:
                    self._world.heard(job, said["method"], params)
                await _say(channel, id=said["id"], result={"to": params})

    def _take_result(self, result: dict[str, Any]) -> None:
        job, text = self._job, result["content"][0]["text"]
        if text == f"the twin of {job.key}":
            self._twins -= 1
            self._world.expect(self._twins == 0, f"{job.key}: its twin is answered twice")
            self._world.expect(job.outcome, f"{job.key}: its id was in use, and its twin was run")
            return
        may_differ = job.part.is_repeatable and job.requests > 1
        self._world.expect(
            self._answer in ("", text) or may_differ,
            f"{job.key}: answered {self._answer!r}, then {text!r}",
        )
        self._answer = text
        if job.outcome:
            self._world.expect(text in job.texts, f"{job.key}: the result says {text!r}")
            self._is_again = False
        else:
            self._world.finished(job, result)

    def _take_error(self, said: dict[str, Any], reply_to: str) -> None:
        job, error = self._job, said["error"]
        told = error["message"]
        reason = error.get("data", {}).get("reason", "busy" if "journal" in told else told)
        self._world.note(self._name, f"is refused: {reason}")
        if reason in RETRIED and reply_to.startswith("c") and reply_to != f"c{self._calls}":
            return  # its newer request with the same key goes on
        can_return = job.part.is_keyed or self._token
        if can_return and reason in (*RETRIED, *TROUBLED):
            raise trio.EndOfChannel
        if self._answer:  # it has asked again
            kept = ("messages_gone", *GIVEN_UP)
            self._world.expect(reason in kept, f"{job.key}: answered, and then {reason}")
            self._is_again = False
        elif not job.outcome:
            self._world.refused(job, reason)


async def _say(channel: ClientChannel, **said: Any) -> None:
    await channel.send(msgspec.json.encode({"jsonrpc": "2.0"} | said) + b"\n")

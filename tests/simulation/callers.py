"""Our clients in the simulation, and the callers of tools behind them.

A `Process` has one `Client`, and dies now and then with all callers in it. A `Caller` follows one
job to its end: through any process that is alive, from the last ticket that it kept.
"""

from collections import Counter
from contextlib import suppress
from typing import Any

import msgspec
import trio

from streams import Client, Ticket
from streams.client.call import RunningCall
from streams.errors import (
    CallFailed,
    CallLost,
    CannotConnect,
    ClientError,
    StreamGone,
    Superseded,
)
from streams.messages import Message, decode
from tests.simulation.network import Network
from tests.simulation.weather import FOREVER, Weather
from tests.simulation.world import Job, World

AGAIN_S = 1.0
GHOST_S = 600.0  # a displaced reader has been told after this time
_WHIMS = ("stall", "stall", "leave", "hand over", "hand over", "poll", "cancel")


class Process:
    """The process of one client, restarted whenever it has died."""

    def __init__(
        self, name: str, world: World, weather: Weather, network: Network, principal: str
    ) -> None:
        self.name = name
        self._world = world
        self._weather = weather
        self._network = network
        self._dial = network.dialer(name, principal, pings=world.chance.random() < 0.5)
        self._dialects = [("streams",), ("streams", "resumableRequests")]
        self._client: Client | None = None
        self._changed = trio.Event()
        self._scopes: dict[trio.CancelScope, None] = {}  # scopes of the callers in it, in order
        self._asked: Counter[str] = Counter()

    async def run(self) -> None:
        """Live and die, until cancelled."""
        while True:
            with trio.CancelScope() as scope:
                scope.deadline = trio.current_time() + self._die_in_s()
                await self._live()
            if scope.cancelled_caught:
                self._world.counts["deaths"] += 1
                self._world.note(self.name, "is started again")

    def _die_in_s(self) -> float:
        left_s = self._world.plan.chaos_s - trio.current_time()
        in_s = self._world.chance.expovariate(1 / 150)
        return in_s if in_s < left_s else FOREVER

    async def _live(self) -> None:
        self._asked.clear()
        while True:
            try:
                dialects = self._world.chance.choice(self._dialects)
                answers = {"elicitation/create": self._answer}
                async with Client(self._dial, answers=answers, dialects=dialects) as client:
                    self._client = client
                    self._stir()
                    try:
                        await trio.sleep_forever()
                    finally:
                        self._die()
            except CannotConnect:
                await trio.sleep(AGAIN_S)

    def _die(self) -> None:
        """Cut the client off: no message from it arrives any more."""
        self._world.note(self.name, "dies")
        self._client = None
        self._network.lose_client(self.name)
        for scope in list(self._scopes):
            scope.cancel()
        self._scopes.clear()

    def _stir(self) -> None:
        self._changed.set()
        self._changed = trio.Event()

    async def _answer(self, params: dict[str, Any]) -> dict[str, Any]:
        self._asked[str(params)] += 1
        self._world.expect(self._asked[str(params)] == 1, f"{self.name} is asked {params} twice")
        await trio.sleep(self._world.chance.choice((0.0, 0.0, 1.0, 10.0)))
        return {"to": params}

    async def client(self) -> Client:
        """The client, while it is alive."""
        while self._client is None:
            await self._changed.wait()
        return self._client

    def enter(self) -> trio.CancelScope:
        """A scope that is cancelled when the process dies."""
        scope = trio.CancelScope()
        self._scopes[scope] = None
        return scope

    def leave(self, scope: trio.CancelScope) -> None:
        """Drop the scope of a caller that has left."""
        self._scopes.pop(scope, None)


class Caller:
    """The caller that wants the result of one job."""

    def __init__(self, job: Job, world: World, weather: Weather, processes: list[Process]) -> None:
        self._job = job
        self._world = world
        self._weather = weather
        self._processes = processes
        self._ticket: Ticket | None = None
        self._was_called = False

    async def run(self) -> None:
        """Make the call, and resume it until it is over."""
        await trio.sleep(self._job.part.starts_at)
        while not self._job.outcome:
            process = self._world.chance.choice(self._processes)
            if await self._visit(process):
                await trio.sleep(self._world.chance.choice((0.0, AGAIN_S, 20.0)))
        self._job.is_settled.set()

    async def _visit(self, process: Process) -> bool:
        """Read on through one process, for a while; returns whether the call can be resumed."""
        client = await process.client()
        scope = process.enter()
        try:
            with scope:
                await self._through(process, client)
        finally:
            process.leave(scope)
        if self._was_called and self._ticket is None and not self._job.outcome:
            self._world.refused(self._job, "lost")
        return not self._job.outcome

    async def _through(self, process: Process, client: Client) -> None:
        job = self._job
        try:
            if self._ticket is None:
                call = client.call(job.part.tool, {"job": job.key})
            else:
                call = client.resume(self._ticket)
            async with call:
                self._was_called = True
                self._world.note(process.name, f"has {job.key} from {self._at}")
                await self._read(process, client, call)
        except CannotConnect:
            await trio.sleep(AGAIN_S)
        except Superseded:
            self._world.note(process.name, f"{job.key} is superseded")
            self._world.counts["superseded"] += 1
        except CallLost:
            self._world.refused(job, "lost")
        except StreamGone as gone:
            self._gone(gone)
        except CallFailed as failed:
            self._keep(call)
            self._failed(failed)

    @property
    def _at(self) -> int:
        return 0 if self._ticket is None else self._ticket.after or 0

    def _gone(self, gone: StreamGone) -> None:
        has_more = gone.earliest is not None and self._ticket is not None
        if gone.reason == "messages_gone" and self._job.has_lost and has_more:
            assert gone.earliest is not None
            assert self._ticket is not None
            self._world.skipped(self._job, self._at + 1, gone.earliest - 1)
            self._ticket = msgspec.structs.replace(self._ticket, after=gone.earliest - 1)
        elif gone.reason != "id_in_use":
            # Else the reader left here, and its last messages are still to come.
            self._world.refused(self._job, gone.reason)

    def _failed(self, failed: CallFailed) -> None:
        data = failed.data if isinstance(failed.data, dict) else {}
        reason = data.get("reason", "busy" if "journal" in failed.message else failed.message)
        if reason in ("busy", "unavailable") and self._ticket is not None:
            return  # the stream could not be found this time
        self._world.handed(self._job, self._at)  # the final response must report it
        self._world.refused(self._job, reason)

    async def _read(self, process: Process, client: Client, call: RunningCall) -> None:
        job, chance = self._job, self._world.chance
        waits_since = FOREVER  # for the second message and all later ones
        async for message in call:
            self._take(call, message)
            self._world.received(job, self._at, process.name, waits_since)
            is_restless = chance.random() < job.part.restlessness
            if is_restless and await self._be_restless(process, client, call):
                return
            waits_since = trio.current_time()
        self._keep(call)
        result = await call.result()
        self._world.received(job, self._at + 1, process.name, waits_since)
        self._world.handed(job, self._at + 1)
        self._world.finished(job, result)

    def _take(self, call: RunningCall, message: Message) -> None:
        job, before = self._job, self._at
        self._keep(call)
        if self._world.expect(self._at == before + 1, f"{job.key}: {before}, then {self._at}"):
            self._world.handed(job, self._at)
            self._world.heard(job, str(message.method), decode(message.params, dict[str, Any]))

    def _keep(self, call: RunningCall) -> None:
        if call.ticket is not None:
            self._ticket = call.ticket
            self._job.has_ticket = True

    async def _be_restless(self, process: Process, client: Client, call: RunningCall) -> bool:
        """Do something that callers do; returns whether the call is left."""
        world, job = self._world, self._job
        match world.chance.choice(_WHIMS):
            case "stall":
                await trio.sleep(world.chance.uniform(0, 60))
            case "leave":
                world.note(process.name, f"leaves {job.key} at {self._at}")
                return True
            case "hand over":
                await self._hand_over(process, call)
                return True
            case "poll":
                await self._poll(client)
            case "cancel" if world.chance.random() < 0.1:
                job.is_cancelled = True
                world.note(process.name, f"cancels {job.key}")
                await call.cancel()
                world.refused(job, "cancelled")
                return True
        return False

    async def _poll(self, client: Client) -> None:
        """Check that the status reports the end only once it can be read."""
        ticket = self._ticket
        assert ticket is not None
        with trio.move_on_after(30):
            standing = await client.poll(ticket)
            self._world.counts["polls"] += 1
            is_over = standing.status == "completed" and not standing.pending_messages
            self._world.expect(not is_over, f"{self._job.key} is said to be over at {self._at}")

    async def _hand_over(self, process: Process, call: RunningCall) -> None:
        """Have another process take over the stream, then check that this reader is told.

        Messages that are here already are read to the end.
        """
        job, at = self._job, self._at
        self._world.counts["handovers"] += 1
        self._world.note(process.name, f"hands {job.key} over at {at}")
        while not job.outcome:
            other = self._world.chance.choice(self._processes)
            if other is process:
                return
            await self._visit(other)
            await trio.sleep(self._world.chance.choice((0.0, AGAIN_S)))
        with trio.move_on_after(GHOST_S) as patience:
            await self._read_what_is_left(call, at)
        self._world.expect(
            not patience.cancelled_caught, f"{process.name}: no answer about {job.key}"
        )

    async def _read_what_is_left(self, call: RunningCall, at: int) -> None:
        try:
            async for _ in call:
                at += 1
                assert call.ticket is not None
                self._world.expect(call.ticket.after == at, f"{at} expected, {call.ticket.after}")
                self._world.handed(self._job, at)
            with suppress(CallFailed):  # which is a final response, too
                await call.result()
            self._world.handed(self._job, at + 1)
        except ClientError as error:
            self._world.note("ghost", f"of {self._job.key} ends at {at}: {type(error).__name__}")

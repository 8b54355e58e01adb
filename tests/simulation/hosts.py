"""Hosts that give up: each of their calls gets one answer, whatever becomes of its replica.

Replicas share a store that loses nothing; they serve with patience. A call may run once, or have an
idempotency key. A host that loses its connection goes to any replica, waits for the call by its
name, or makes it again, until it has the result, or an error with a reason.
"""

import random
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import msgspec
import trio

from streams import Call, Server
from streams.backends import PatienceSettings
from streams.engine.engine import Engine
from streams.exchange import ClientChannel
from streams.journal.records import Outcome
from streams.limits import Limits
from streams.messages import Incoming
from streams.protocol.extension import KEY
from streams.server.patience import CALL
from tests.rigs.server import PLAIN, POSITIONS, STREAMS, Json
from tests.simulation.lives import KEYRING, Life
from tests.simulation.network import FarChannel, Network
from tests.simulation.pauses import Pauses
from tests.simulation.plain import HELLO
from tests.simulation.plan import ALWAYS, FOREVER_S, LONG_S, Plan, Sharing, shared_plan_of
from tests.simulation.replicas import Replica, Replicas, SharedWitness
from tests.simulation.short import GONE, TROUBLED
from tests.simulation.universe import Report, end_when_broken, live_through
from tests.simulation.weather import Weather
from tests.simulation.world import World

TOOLS: Final = ("work", "lasting", "once-work", "once-lasting")
SHARED_S: Final = 30.0  # in which another host makes the same call
ANSWER_S: Final = 60.0  # in which a request has its answer, where no fault occurs
LOOK_S: Final = 5.0  # between looks at that
CALM_S: Final = 600.0  # in which all hosts are done, once no fault occurs any more
LIMITS: Final = (
    Limits(restarts_max=ALWAYS),
    Limits(restarts_max=ALWAYS, unsent_entries_max=5, resident_max=0),
)
RETRIED: Final = ("superseded", "released", *TROUBLED)
ANOTHER_WAITS: Final = "Another client of yours"  # an answer of `wait_for_call`
NOT_KEPT: Final = ("No call ", "Call ")  # the beginnings of its answers about a call that is gone


def simulate_hosts(seed: int, *, is_traced: bool = False) -> Report:
    """Run one seed: the same history each time."""
    chance = random.Random(seed)
    return live_through(World(plan_of(chance, seed), chance, is_traced=is_traced), _live)


def plan_of(chance: random.Random, seed: int) -> Plan:
    """Draw the plan of a seed: no jobs, and many faults in a short time."""
    plan = shared_plan_of(chance, seed)
    assert plan.sharing is not None
    faults = [field for field in Sharing.__struct_fields__ if field.endswith("every_s")]
    rates = {fault: chance.choice((5.0, 20.0, 60.0, FOREVER_S, FOREVER_S)) for fault in faults}
    return msgspec.structs.replace(
        plan,
        limits=chance.choice(LIMITS),
        chaos_s=chance.uniform(40, 160),
        parts=(),
        sharing=msgspec.structs.replace(plan.sharing, is_forgetful=False, **rates),
    )


async def _live(world: World, _: Path, pauses: Pauses) -> None:
    chance, sharing = world.chance, world.plan.sharing
    assert sharing is not None
    weather = Weather(world)
    network = Network(world, weather)
    patience = PatienceSettings(
        patience_s=chance.choice((None, 1.0, 5.0)),
        once=("once-*",),
        keep_cancelled=chance.choice(("never", "timeout", "always")),
    )
    replicas = PatientReplicas(world, weather, network, sharing, pauses, patience)
    hosts = [
        Host(n, world, network, replicas.orders, patience) for n in range(chance.randint(2, 7))
    ]
    world.note("plan", f"{patience} {sharing}")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(end_when_broken, world, nursery.cancel_scope)
        await nursery.start(network.run)
        nursery.start_soon(replicas.run)
        with trio.move_on_after(world.plan.chaos_s + CALM_S):
            async with trio.open_nursery() as calling:
                for host in hosts:
                    calling.start_soon(host.run)
                await trio.sleep(world.plan.chaos_s)
                world.is_calm = True
                world.note("weather", "is calm from now on")
        for host in hosts:
            world.expect(host.order is None, f"{host.name} still waits for {host.order}")
        await replicas.check_at_the_end()
        nursery.cancel_scope.cancel()


# Orders, and the tools that carry them out


class Order:
    """One call, which several hosts may make."""

    def __init__(self, name: str, tool: str, key: str, chance: random.Random) -> None:
        self.name = name
        self.tool = tool
        self.key = key  # its idempotency key, or ""
        self.count = chance.choice((1, 3))
        self.pause_s = chance.choice((0.0, 0.2, 1.0, 3.0))
        self.fails = chance.random() < 0.1
        self.made_at = trio.current_time()
        self.requests = 0
        self.fences: dict[str, int] = {}  # of the last run of each of its streams
        self.results: set[str] = set()
        self.is_answered = False  # its result or its error is at some host, perhaps
        # Reasons for an end other than its result.
        self.is_cancelled = False
        self.was_interrupted = False  # a replica was lost that had it, or may have had it

    @property
    def is_once(self) -> bool:
        """Whether the same call of all hosts runs once."""
        return self.tool.startswith("once-") and not self.key

    @property
    def is_lasting(self) -> bool:
        """Whether its tool restarts after its replica has died."""
        return self.tool.endswith("lasting")

    @property
    def is_shareable(self) -> bool:
        """Whether it is still the call that other hosts make, too."""
        is_new = trio.current_time() < self.made_at + SHARED_S
        return is_new and bool(self.is_once or self.key)

    @property
    def may_be_anew(self) -> bool:
        """Whether another host may have made it again: then nothing is kept of its last run."""
        return self.is_once and (self.was_interrupted or self.fails)

    @property
    def call(self) -> Json:
        """The params of a call."""
        meta = {KEY: self.key} if self.key else {}
        return {"name": self.tool, "arguments": {"order": self.name}, "_meta": meta}

    def __str__(self) -> str:
        return f"{self.name} ({self.tool}{self.key and ', with a key'})"


class Orders(dict[str, Order]):
    """All orders, by their names."""

    def draw(self, chance: random.Random) -> Order:
        """A new one, or one that another host has made as well."""
        shared = [order for order in self.values() if order.is_shareable]
        if shared and chance.random() < 0.5:
            return chance.choice(shared)
        name = f"order {len(self) + 1}"
        key = f"the key of {name}".ljust(40, ".") if chance.random() < 0.3 else ""
        order = self[name] = Order(name, chance.choice(TOOLS), key, chance)
        return order


class OneAnswer(SharedWitness):
    """Sees at the server's end of each connection that no request is answered twice."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._answered: set[tuple[FarChannel, Any]] = set()

    def heard(self, channel: FarChannel, received: Sequence[Incoming]) -> None:
        """The server receives these lines."""

    def said(self, channel: FarChannel, written: bytes) -> None:
        """The server writes these lines."""
        for line in written.splitlines():
            said = msgspec.json.decode(line)
            if "method" not in said:
                asked = channel, said["id"]
                self._world.expect(asked not in self._answered, f"a second answer: {line!r}")
                self._answered.add(asked)


class PatientReplicas(Replicas):
    """Replicas whose tools carry out orders."""

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.orders = Orders()

    def _make_witness(self) -> SharedWitness:
        return OneAnswer(self._world, self.ledger, KEYRING)

    def _check(self, engine: Engine) -> None:
        """A host may come to another replica when one with the same key has just confirmed all: so
        its delivery may be behind the mark.
        """

    def _make_server(self, life: Life) -> Server:
        limits = self._world.plan.limits
        server = Server("patient", resume_min_s=0, resume_max_s=LONG_S, limits=limits)
        for name in TOOLS:

            async def tool(call: Call, order: str) -> str:
                """Carry out an order."""
                return await self._carry_out(life, call, self.orders[order])

            server.tool(name=name, restart=name.endswith("lasting"))(tool)
        return server

    async def _carry_out(self, life: Life, call: Call, order: Order) -> str:
        stream, fence = call._stream.id, call._stream.record.fence
        if life.is_over.is_set():
            await trio.sleep_forever()
        self._check_run(order, stream, fence)
        for n in range(order.count):
            await call.progress(n + 1)
            await call.log("info", {"of": stream, "number": n + 1})
            await trio.sleep(order.pause_s)
        if life.is_over.is_set():
            await trio.sleep_forever()
        result = f"{order.name}, {stream[:6]}, {fence}"
        order.results.add(result)
        if order.fails:
            raise RuntimeError(result)
        return result

    def _check_run(self, order: Order, stream: str, fence: int) -> None:
        """Check that an order is carried out as often as promised.

        A stream is run again by its next owner, if the tool restarts. A call that is made once, or
        has a key, has another stream only if its last one has ended without a result that is kept.
        """
        world, records = self._world, self._store.shared.records
        world.note("tool", f"{order} begins: {stream[:6]}, {fence}")
        world.counts["runs"] += 1
        earlier = order.fences.get(stream)
        is_restart = earlier is not None and order.is_lasting and fence > earlier
        world.expect(earlier is None or is_restart, f"{order} is run twice by one replica")
        for other in order.fences if order.is_once or order.key else ():
            record = records.get(other)
            has_failed = record is not None and record.last_error == record.last > 0
            is_over = record is None or record.outcome.is_tombstone or has_failed
            is_over |= order.is_cancelled  # which the store does not know yet
            is_fine = other == stream or (is_over and not order.key)
            world.expect(is_fine, f"{order} is run again, as if there were no {other[:6]}")
        order.fences[stream] = fence

    def _excuse(self, replica: Replica) -> None:
        """The calls that no other replica runs may end as interrupted."""
        records = list(self._store.shared.records.values())
        for order in self.orders.values():
            name = f'"{order.name}"'.encode()
            live = [r for r in records if r.outcome is Outcome.LIVE and name in r.origin]
            mine = replica.journal.replica, ""
            order.was_interrupted |= not live or any(r.owner in mine for r in live)


# Hosts


class Host:
    """A client that makes one call after the other, over one connection after the other."""

    def __init__(
        self,
        number: int,
        world: World,
        network: Network,
        orders: Orders,
        patience: PatienceSettings,
    ) -> None:
        chance = world.chance
        self.name = f"host {number}"
        self.order: Order | None = None  # that it is busy with
        self._world = world
        self._network = network
        self._orders = orders
        self._patience = patience
        self._dial = network.dialer(self.name, "os(0)", pings=chance.random() < 0.9)
        self._capabilities = chance.choice((PLAIN, PLAIN, PLAIN, STREAMS, POSITIONS))
        self._code = ""  # the short name of its call
        self._was_cut = False  # in the middle of its call, of which it knows no name

    async def run(self) -> None:
        """Make calls, and see each to its end."""
        chance = self._world.chance
        while self.order is not None or not self._world.is_calm:
            with suppress(OSError, *GONE):
                async with self._dial() as channel:
                    await self._talk(Line(channel, self._world, self.name))
            self._was_cut = self.order is not None
            await trio.sleep(chance.choice((0.0, 0.5, 3.0)))

    async def _talk(self, line: "Line") -> None:
        chance = self._world.chance
        await line.ask("initialize", HELLO | {"capabilities": self._capabilities})
        await line.answer()
        while self.order is not None or not self._world.is_calm:
            if self.order is None:
                self._begin()
            elif self._was_cut and not (self._code or self.order.is_once or self.order.key):
                self._end("is lost with its connection")
                continue
            self._was_cut = False
            await self._ask(line)
            if chance.random() < 0.2:
                return
            await trio.sleep(chance.choice((0.0, 0.1, 2.0)))

    def _begin(self) -> None:
        self._code = ""
        self.order = self._orders.draw(self._world.chance)
        self._world.counts["orders"] += 1

    def _end(self, how: str) -> None:
        self._world.note(self.name, f"{self.order} {how}")
        self.order = None

    async def _ask(self, line: "Line") -> None:
        """Make the call, or wait for it by its name; and take the answer."""
        order, chance = self.order, self._world.chance
        assert order is not None
        order.requests += 1
        params = order.call
        if self._code and chance.random() < 0.8:
            wait_s = chance.choice((0.5, 5.0, 45.0))
            params = {"name": "wait_for_call", "arguments": {"call": self._code, "wait_s": wait_s}}
        elif self._code and not (order.is_once or order.key):
            return
        if chance.random() < 0.7:
            params = params | {"_meta": params.get("_meta", {}) | {"progressToken": line.last + 1}}
        await line.ask("tools/call", params)
        self._world.note(self.name, f"{line.last}: {params['name']}, {order} {self._code}")
        gives_up = chance.random()
        if gives_up < 0.2:
            with trio.move_on_after(3 * chance.random()):
                self._take(await line.answer())
                return
            await self._give_up(line, is_cancel=gives_up < 0.1)
        else:
            self._take(await line.answer())

    async def _give_up(self, line: "Line", *, is_cancel: bool) -> None:
        """Cancel the call; or vanish, and come back for it."""
        order, chance = self.order, self._world.chance
        assert order is not None
        if not is_cancel:
            self._network.lose_client(self.name)
            raise trio.EndOfChannel
        reason = chance.choice(("timed out", "the user wants it no more"))
        is_kept = {"never": False, "always": True, "timeout": reason == "timed out"}
        if not is_kept[self._patience.keep_cancelled]:
            order.is_cancelled = True
        order.is_answered = True  # just before
        await line.cancel(reason)
        self._end(f"is cancelled: {reason}")

    # Answers

    def _take(self, answer: Json) -> None:
        if "error" in answer:
            self._take_error(answer["error"])
            return
        result, order = answer["result"], self.order
        assert order is not None
        text: str = result["content"][0]["text"]
        self._world.note(self.name, f"is answered: {text}")
        if CALL in result.get("_meta", {}):
            self._world.counts["interim answers"] += 1
            self._code = result["_meta"][CALL]
        elif result.get("isError") and text.startswith(NOT_KEPT):
            # The next owner of a call with a key does not know that an earlier client was told of
            # it: the result is kept until another client has it.
            is_gone = order.is_cancelled or (order.key and order.is_answered)
            self._world.expect(is_gone or order.may_be_anew, f"{order}: {text}")
            self._end("is not kept")
        elif not text.startswith(ANOTHER_WAITS):
            is_its = any(each in text for each in order.results)
            self._world.expect(is_its, f"{order}: {text} is no result of it")
            self._world.counts["results"] += 1
            order.is_answered = True
            self._end("is done")

    def _take_error(self, error: Json) -> None:
        """The call has no result, for a reason; some are told only for the moment."""
        order, told = self.order, error["message"]
        assert order is not None
        reason = error.get("data", {}).get("reason", "busy" if "journal" in told else told)
        self._world.note(self.name, f"is refused: {reason}")
        self._world.counts[f"told {reason[:40]}"] += 1
        if reason in RETRIED:
            return
        # A call that no client could come back to does not restart.
        is_findable = order.key or self._patience.patience_s is not None
        may_fail = order.was_interrupted and not (
            order.is_lasting and is_findable and not order.is_once
        )
        is_fine = {
            "interrupted": may_fail,
            "cancelled": order.is_cancelled,
            "messages_gone": order.key and order.is_answered,
            "abandoned": order.may_be_anew,
            "stream_not_found": order.may_be_anew,
        }
        self._world.expect(is_fine.get(reason), f"{order}: {told}, with no reason to")
        if order.is_once:
            self._code = ""  # it is made again
        else:
            order.is_answered = True
            self._end(f"ends as {reason}")


class Line:
    """One connection of a host, with one request after the other."""

    def __init__(self, channel: ClientChannel, world: World, name: str) -> None:
        self.last = 0  # id of a request
        self._channel = channel
        self._world = world
        self._name = name
        self._answers: dict[int, Json] = {}
        # Of the last log message of each stream that the last request has brought.
        self._numbers: dict[str, int] = {}
        self._may_be_late = False  # messages of a request that was cancelled

    async def ask(self, method: str, params: Json) -> None:
        """Send a request."""
        self.last += 1
        self._numbers.clear()
        await self._say({"id": self.last, "method": method, "params": params})

    async def cancel(self, reason: str) -> None:
        """Cancel the last request."""
        self._may_be_late = True
        params = {"requestId": self.last, "reason": reason}
        await self._say({"method": "notifications/cancelled", "params": params})

    async def _say(self, said: Json) -> None:
        await self._channel.send(msgspec.json.encode({"jsonrpc": "2.0"} | said) + b"\n")

    async def answer(self) -> Json:
        """The answer to the last request."""
        asked_at = trio.current_time()
        while self.last not in self._answers:
            with trio.move_on_after(LOOK_S):
                for line in await self._channel.receive():
                    self._hear(msgspec.json.decode(line))
            self._check_in_time(asked_at)
        return self._answers.pop(self.last)

    def _check_in_time(self, asked_at: float) -> None:
        """An answer may be late only while a fault has effects."""
        world = self._world
        quiet_at = max(world.quiet_at[""], world.quiet_at.get(self._name, 0.0))
        late_s = trio.current_time() - max(asked_at, quiet_at)
        is_fine = world.faults or late_s < ANSWER_S
        world.expect(is_fine, f"{self._name} has no answer to {self.last} after {late_s:.0f} s")

    def _hear(self, said: Json) -> None:
        if "method" not in said:
            self._answers[said["id"]] = said
        elif said["method"] == "notifications/message":
            data = said["params"]["data"]
            before = self._numbers.get(data["of"], 0)
            is_next = data["number"] > before or self._may_be_late
            self._world.expect(is_next, f"{self._name} gets {data} after {before}")
            self._numbers[data["of"]] = data["number"]

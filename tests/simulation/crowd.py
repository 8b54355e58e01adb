"""A crowd of clients that do anything at all, to servers with small limits.

The rest of the simulation checks what each client gets. Here no mixture of requests, limits, slow
commits, crashes and take-overs may end a server, or keep it from ending.
"""

import math
import random
import traceback
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final, NamedTuple

import msgspec
import pytest
import trio
from trio.testing import MockClock

from streams import Call, Server
from streams.backends import PatienceSettings
from streams.errors import Full, JournalError, StreamsError, Unavailable, first_of
from streams.exchange import Caller
from streams.journal.contract import Shortage
from streams.journal.memory import MemoryJournal
from streams.journal.records import Change, Record
from streams.keys import Keyring
from streams.limits import Limits
from streams.protocol.extension import KEY
from streams.server.patience import CALL
from streams.webhooks.sender import Answer as Posted
from tests.rigs.replicas import Replica, Replicas, open_replicas
from tests.rigs.server import (
    EXTENDED,
    PLAIN,
    POSITIONS,
    REQUESTS,
    RESUME_REQUEST,
    STATUS_OF_REQUEST,
    STREAMS,
    House,
    Json,
    Talker,
    open_house,
)
from tests.rigs.web import BOTH, EVENTS, JSON, LINES, Answer, Browser
from tests.rigs.webhooks import URL, queue, sending, virtual
from tests.simulation.universe import Report, decide_everything
from transports.memory import Cable

CAPABILITIES: Final = (STREAMS, STREAMS | REQUESTS, POSITIONS, PLAIN, EXTENDED, REQUESTS)
REVISIONS: Final = ("2025-11-25", "2025-06-18", "2025-03-26")
GONE: Final = (trio.BrokenResourceError, trio.ClosedResourceError, trio.EndOfChannel)
HEARD_MAX: Final = 60
VISIT_S: Final = 30.0
ANSWERS_KEPT: Final = 12
SHORT: Final = Shortage("the disk is nearly full", is_severe=False)
VERY_SHORT: Final = Shortage("the disk is full", is_severe=True)


def simulate_crowd(seed: int, *, is_shared: bool = False) -> Report:
    """Run one seed: the same history each time. With `is_shared` there are several replicas.

    It is a violation if a server ends, or does not end when it should.
    """
    chance, heard, clock = random.Random(seed), Heard(), MockClock(autojump_threshold=0)
    violations: list[str] = []
    trace: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        decide_everything(patch, clock, seed)
        try:
            trio.run(_several if is_shared else _one, chance, heard, clock=clock)
        except Exception as error:  # any error is reported with its seed
            cause = error.__cause__ or first_of(error)
            violations.append(f"{type(cause).__name__}: {cause}")
            trace += traceback.format_exc().splitlines()
    counts = dict(heard.counts)
    return Report(seed, clock.current_time(), counts, violations, heard.digest, trace)


async def _one(chance: random.Random, heard: "Heard") -> None:
    """A server, which is started again with its journal, or with what a crash leaves of it."""
    server, keyring = make_server(chance), Keyring.load(None)
    journal: MemoryJournal = SlowJournal(chance)
    patience = _patience(chance)
    tells = chance.random() < 0.5
    for _ in range(chance.choice((1, 2, 3))):
        hooks = queue(URL, clock=virtual) if tells else None
        opened = open_house(
            server, journal=journal, keyring=keyring, patience=patience, hooks=hooks
        )
        async with opened as house, sending(journal, partial(_receive, chance, heard), hooks):
            await _let_loose(chance, heard, [house], keyring, chance.choice((10, 40)))
        if chance.random() < 0.5:
            journal = house.as_after_a_crash()


async def _receive(chance: random.Random, heard: "Heard", *what: Any) -> Posted:
    """Answer a webhook."""
    heard.counts["webhook"] += 1
    await trio.sleep(20 * chance.random() ** 3)
    if chance.random() < 0.2:
        raise OSError("nobody is there")
    return Posted(chance.choice((204, 204, 410, 500)))


async def _several(chance: random.Random, heard: "Heard") -> None:
    """Replicas, which stop, die, and lose their store for a while."""
    drawn = chance.getstate()

    def make() -> Server:
        same = random.Random()
        same.setstate(drawn)
        return make_server(same)

    async with open_replicas(make) as replicas, trio.open_nursery() as nursery:
        start = partial(replicas.start, patience=_patience(chance))
        live = [await start() for _ in range(2)]
        nursery.start_soon(_trouble, chance, replicas, start, live)
        await _let_loose(chance, heard, live, replicas.keyring, chance.choice((20, 60)))
        nursery.cancel_scope.cancel()


async def _trouble(
    chance: random.Random,
    replicas: Replicas,
    start: Callable[[], Awaitable[Replica]],
    live: list[Replica],
) -> None:
    while True:
        await trio.sleep(8 * chance.random())
        what = chance.choice(("stop", "kill", "start", "cut"))
        if what == "cut":
            some = [each for each in live if chance.random() < 0.7]
            replicas.kill_store(*some)
            await trio.sleep(chance.choice((0.1, 1, 3, 5)))
            replicas.start_store(*some)
        elif what == "start" and len(live) < 3:
            live.append(await start())
        elif what in ("stop", "kill"):
            replica = live.pop(chance.randrange(len(live)))
            if not live:
                live.append(await start())
            if what == "kill":
                replica.kill()
            else:
                await replica.stop()


async def _let_loose(
    chance: random.Random,
    heard: "Heard",
    houses: Sequence[House],
    keyring: Keyring,
    for_s: float,
) -> None:
    with trio.move_on_after(for_s):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(_operate, chance, heard, houses)
            nursery.start_soon(_change_keys, chance, keyring, houses)
            for _ in range(chance.choice((2, 4, 6))):
                visit = chance.choice((_visit, _browse))
                nursery.start_soon(_come_and_go, visit, chance, heard, houses)


async def _operate(chance: random.Random, heard: "Heard", houses: Sequence[House]) -> None:
    """An operator cancels calls now and then, and hangs up on clients."""
    while True:
        await trio.sleep(10 * chance.random())
        engine = chance.choice(houses).running.engine
        if chance.random() < 0.3:
            engine.hang_up(0.5)
        with suppress(StreamsError):  # the store is away
            name = heard.any_of(chance, "", "stream").get("streamId", "")
            stream = await engine.operations.load_call(name)
            if stream is not None and not (stream.state.is_ended or stream.state.is_tombstone):
                engine.operations.stop(stream, is_told=True)


async def _change_keys(chance: random.Random, keyring: Keyring, houses: Sequence[House]) -> None:
    """An operator adds keys, and removes older ones, whose tokens are void then."""
    keys: list[bytes] = []
    while True:
        keys = [chance.randbytes(32), *keys[: chance.choice((0, 1, 2))]]
        keyring.change_to(Keyring(keys))
        for house in list(houses):
            await house.running.engine.use_new_keys()
        await trio.sleep(20 * chance.random())


async def _come_and_go(
    visit: Callable[..., Any], chance: random.Random, heard: "Heard", houses: Sequence[House]
) -> None:
    while True:
        await visit(chance, heard, houses)
        await trio.sleep(4 * chance.random())


def make_server(chance: random.Random) -> Server:
    """A server with small limits, and tools that take their time."""
    limits = Limits(
        resident_max=chance.choice((0, 1, 3)),
        streams_per_principal_max=chance.choice((1, 2, 4, 30)),
        streams_max=chance.choice((4, 8, 1_000)),
        tombstone_s=chance.choice((2.0, 10.0)),
        drained_s=chance.choice((2.0, 10.0)),
        last_page_s=3.0,
        restarts_max=3,
        unsent_entries_max=chance.choice((3, 1_000)),
        unsent_bytes_max=chance.choice((500, 1_000_000)),
        undelivered_bytes_max=chance.choice((300, 1_000_000)),
        bytes_per_principal_max=chance.choice((0, 400)),
        requests_per_principal_max=chance.choice((0, 0, 5)),
        message_bytes_max=chance.choice((600, 1_000_000)),
        sessions_max=chance.choice((2, 1_000)),
        session_idle_s=chance.choice((5.0, 1_000.0)),
    )
    server = Server(
        "crowded",
        resume_min_s=0,
        resume_max_s=chance.choice((3, 15)),
        announce_after_s=chance.choice((0, 0, 0.005, 0.3)),
        limits=limits,
    )

    @server.tool
    async def work(call: Call, count: int, pause_s: float, late_s: float, asks: bool) -> str:
        try:
            for n in range(count):
                await trio.sleep(pause_s)
                await (call.log("info", n) if chance.random() < 0.5 else call.progress(n))
            if asks:
                await call.request("elicitation/create", {"message": "?"})
        finally:
            await _clean_up(late_s, lambda: call.log("info", "late"))
        return "done"

    @server.tool(restart=True)
    async def redo(call: Call, count: int, pause_s: float, late_s: float) -> str:
        try:
            for n in range(call.restored or 0, count):
                await call.log("info", n)
                await trio.sleep(pause_s)
                await call.checkpoint(n + 1)
        finally:
            await _clean_up(late_s, lambda: call.checkpoint(count))
        return "done"

    @server.tool
    async def quick() -> str:
        await server.resource_updated("x:a")
        return "at once"

    @server.tool(annotations={"readOnlyHint": chance.random() < 0.5})
    async def immediate() -> str:
        return "without await"

    @server.resource("x:{name}")
    async def resource(name: str) -> str:
        return name

    @server.method("crowd/wait")
    async def wait(call: Call, pause_s: float) -> str:
        await trio.sleep(pause_s)
        return "waited"

    @server.tool(pages=True)
    async def paged(count: int) -> AsyncIterator[Json]:  # a thread would know no virtual time
        for n in range(count):
            yield {"row": n}

    return server


async def _clean_up(late_s: float, write: Callable[[], Any]) -> None:
    """Write something at the end, whether the call is cancelled or not."""
    if late_s:
        with trio.CancelScope(shield=True):
            await trio.sleep(late_s)
            with suppress(StreamsError):
                await write()


def _patience(chance: random.Random) -> PatienceSettings | None:
    settings = PatienceSettings(
        patience_s=chance.choice((None, 0.3, 2.0)),
        once=chance.choice(((), ("*",), ("work", "quick"))),
        keep_cancelled=chance.choice(("never", "always", "timeout")),
    )
    return chance.choice((None, settings))


class SlowJournal(MemoryJournal):
    """A journal that takes its time, and takes nothing now and then.

    A lookup is answered with what is there after its pause.
    """

    def __init__(self, chance: random.Random) -> None:
        super().__init__()
        self._chance = chance
        self._may_be_short = chance.random() < 0.3

    async def _pause(self, most_s: float) -> None:
        if self._may_be_short and self._chance.random() < 0.1:
            self.shortage = self._chance.choice((None, None, SHORT, VERY_SHORT))
        if self._chance.random() < 0.5:
            await trio.sleep(most_s * self._chance.random() ** 3)

    async def commit(self, changes: Sequence[Change]) -> Sequence[JournalError | None]:
        await self._pause(0.5)
        if self._chance.random() < 0.05:
            raise self._chance.choice((Full, Unavailable))("for the moment")
        answers = await super().commit(changes)
        await self._pause(0.1)
        return answers

    async def find(self, stream: str) -> Record | None:
        await self._pause(0.05)
        return await super().find(stream)

    async def count(self, principal: str) -> int:
        await self._pause(0.05)
        return await super().count(principal)

    async def listed(
        self, principal: str, *, after: int, limit: int, only_read: bool = False
    ) -> Sequence[Record]:
        await self._pause(0.05)
        return await super().listed(principal, after=after, limit=limit, only_read=only_read)

    async def due(self, *, limit: int, only_unwanted: bool = False) -> Sequence[Record]:
        await self._pause(0.05)
        return await super().due(limit=limit, only_unwanted=only_unwanted)


# Names, and requests


class Told(NamedTuple):
    """A name that a client was told, as the params of a request."""

    principal: str
    kind: str
    params: Json


class Heard:
    """The last names that all clients were told: they use those of others, too."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()  # of each kind
        self.digest = 0
        self._told: list[Told] = []

    def note(self, principal: str, message: Json) -> None:
        """Note the names in a message."""
        params, result = message.get("params") or {}, message.get("result") or {}
        if "stream" in params:
            named = {name: params["stream"].get(name, "") for name in ("streamId", "resumeToken")}
            self._add(principal, "stream", named)
        elif "maxWait" in params:
            self._add(principal, "request", {k: params[k] for k in ("requestId", "resumeToken")})
        if "nextResumeToken" in result:
            self._add(principal, "page", {"resumeToken": result["nextResumeToken"]})
        if code := (result.get("_meta") or {}).get(CALL):
            self._add(principal, "call", {"call": code})

    def _add(self, principal: str, kind: str, params: Json) -> None:
        self.counts[kind] += 1
        self.digest = zlib.crc32(repr(params).encode(), self.digest)
        self._told.append(Told(principal, kind, params))
        del self._told[:-HEARD_MAX]

    def any_of(self, chance: random.Random, principal: str, kind: str) -> Json:
        """The params that name one of this kind, mostly one of this principal; or nothing."""
        found = [each for each in self._told if each.kind == kind]
        own = [each for each in found if each.principal == principal]
        chosen = own if own and chance.random() < 0.8 else found
        return dict(chance.choice(chosen).params) if chosen else {}


class Requests:
    """The random requests of one client."""

    def __init__(self, chance: random.Random, heard: Heard, principal: str) -> None:
        self._chance = chance
        self._heard = heard
        self._principal = principal
        self._last = 0  # id of a request
        # With how often each is chosen.
        self._kinds: dict[Callable[[], Json], int] = {
            self._call: 9,
            self._page: 2,
            lambda: self._ask("stream/poll/all"): 5,
            lambda: self._ask("stream/poll", "stream"): 4,
            lambda: self._ask("stream/resume", "stream"): 4,
            lambda: self._ask(STATUS_OF_REQUEST, "request"): 2,
            lambda: self._ask(RESUME_REQUEST, "request"): 3,
            self._wait: 3,
            self._ack: 3,
            self._cancel: 2,
            self._anything: 4,
        }

    def next(self) -> Json:
        """A request, or a notification."""
        [kind] = self._chance.choices(list(self._kinds), list(self._kinds.values()))
        return kind()

    def _request(self, method: str, params: Json) -> Json:
        self._last += 1
        return {"jsonrpc": "2.0", "id": self._last, "method": method, "params": params}

    def _named(self, kind: str) -> Json:
        return self._heard.any_of(self._chance, self._principal, kind)

    def _ask(self, method: str, kind: str = "") -> Json:
        cursor = {"after": self._chance.randrange(4)} if self._chance.random() < 0.3 else {}
        return self._request(method, self._named(kind) | cursor)

    def _anything(self) -> Json:
        method, params = self._chance.choice(
            (
                ("ping", {}),
                ("tools/list", {}),
                ("initialize", _hello(self._chance)),
                ("logging/setLevel", {"level": self._chance.choice(("debug", "error"))}),
                ("resources/subscribe", {"uri": "x:a"}),
                ("resources/unsubscribe", {"uri": "x:a"}),
                ("resources/read", {"uri": "x:b"}),
                ("crowd/wait", {"pause_s": self._chance.choice((0.0, 1.0, 20.0))}),
            )
        )
        return self._request(method, params)

    def _call(self) -> Json:
        chance = self._chance
        tool = chance.choice(("work", "work", "redo", "quick", "immediate"))
        arguments: Json = {}
        if tool in ("work", "redo"):
            arguments["count"] = chance.randrange(5)
            arguments["pause_s"] = chance.choice((0.0, 0.01, 0.5))
            arguments["late_s"] = chance.choice((0.0, 0.0, 1.0, 8.0))
        if tool == "work":
            arguments["asks"] = chance.random() < 0.2
        meta: Json = {}
        if chance.random() < 0.3:
            meta["progressToken"] = self._last
        if chance.random() < 0.3:
            key = f"{chance.randrange(6)}".ljust(chance.choice((1, 40)), ".")
            meta[KEY] = key
        return self._request("tools/call", {"name": tool, "arguments": arguments, "_meta": meta})

    def _page(self) -> Json:
        turn = self._named("page") if self._chance.random() < 0.7 else {}
        return self._request("tools/call", {"name": "paged", "arguments": {"count": 3}} | turn)

    def _wait(self) -> Json:
        name = self._chance.choice(("wait_for_call", "list_calls"))
        arguments = self._named("call") if name == "wait_for_call" else {}
        return self._request("tools/call", {"name": name, "arguments": arguments})

    def _ack(self) -> Json:
        stream = self._named("stream").get("streamId", "")
        params = {"streamId": stream, "seq": self._chance.randrange(6)}
        return {"jsonrpc": "2.0", "method": "notifications/stream/ack", "params": params}

    def _cancel(self) -> Json:
        params = {"requestId": max(0, self._last - self._chance.randrange(6))}
        return {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": params}


def _hello(chance: random.Random) -> Json:
    return {
        "protocolVersion": chance.choice(REVISIONS),
        "capabilities": chance.choice(CAPABILITIES),
        "clientInfo": {"name": "crowd", "version": "1"},
    }


def _answer_to(question: Json) -> Json:
    return {"jsonrpc": "2.0", "id": question["id"], "result": {"action": "decline"}}


# Clients


async def _visit(chance: random.Random, heard: Heard, houses: Sequence[House]) -> None:
    """A client over one connection, which breaks off at any moment."""
    principal = chance.choice(("alice", "alice", "bob", f"conn({chance.randrange(10**9)})"))
    cable = Cable(principal=principal, capacity=chance.choice((300, 1 << 20)))
    chance.choice(houses).serve(cable.far)
    talker = Talker(cable.near, cable)
    requests = Requests(chance, heard, principal)
    try:
        with trio.move_on_after(VISIT_S):
            if "protocolVersion" not in await talker.request(
                "hello", "initialize", **_hello(chance)
            ):
                return  # the server has no room, or is about to end
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_listen, chance, heard, talker)
                for _ in range(chance.randrange(1, 25)):
                    await talker.say(requests.next())
                    await _pause(chance)
                nursery.cancel_scope.cancel()
    except* GONE:
        pass  # the server has hung up
    finally:
        with trio.CancelScope(shield=True):
            await talker.channel.aclose()


async def _listen(chance: random.Random, heard: Heard, talker: Talker) -> None:
    while True:
        message = await talker.read()
        talker.seen.clear()
        heard.note(talker.cable.far.principal, message)
        if message.get("method") == "elicitation/create" and chance.random() < 0.7:
            await talker.say(_answer_to(message))
        if chance.random() < 0.03:
            await trio.sleep(3)  # it is slow


async def _browse(chance: random.Random, heard: Heard, houses: Sequence[House]) -> None:
    """A client over HTTP, whose requests come to any of the servers."""
    principal = chance.choice(("alice", "bob", ""))
    async with trio.open_nursery() as nursery:
        leaves_at = trio.current_time() + chance.choice((5.0, math.inf))  # its token expires
        caller = Caller(principal, lambda: leaves_at - trio.current_time()) if principal else None
        web = _Web(chance, heard, houses, nursery, caller)
        if await web.open():
            for _ in range(chance.randrange(1, 25)):
                web.act()
                await _pause(chance)
        nursery.cancel_scope.cancel()


class _Web:
    """A session over HTTP."""

    def __init__(
        self,
        chance: random.Random,
        heard: Heard,
        houses: Sequence[House],
        nursery: trio.Nursery,
        caller: Caller | None,
    ) -> None:
        self._chance, self._heard, self._houses = chance, heard, houses
        self._nursery, self._caller = nursery, caller
        self._principal = caller.principal if caller else f"anonymous {chance.random()}"
        self._requests = Requests(chance, heard, self._principal)
        self._session: str | None = None
        self._answers: list[Answer] = []
        self._told: set[Any] = set()  # ids of questions that were answered

    def _ask(self, method: str, body: Any = None, **headers: str) -> Answer:
        house = self._chance.choice(self._houses)
        browser = Browser(house, self._nursery, self._session, self._caller)
        answer = browser.ask(method, body, **headers)
        self._answers = [*self._answers, answer][-ANSWERS_KEPT:]
        return answer

    async def open(self) -> bool:
        """Open the session; False where the server does not."""
        hello = {"jsonrpc": "2.0", "id": "hello", "method": "initialize"}
        answer = self._ask("POST", hello | {"params": _hello(self._chance)})
        with trio.move_on_after(4):
            while not answer.is_whole:
                await trio.sleep(0.02)
        self._session = answer.headers.get("mcp-session-id")
        return self._session is not None

    def act(self) -> None:
        """Do something, and note what has come."""
        chance = self._chance
        what = chance.random()
        if what < 0.6:
            accept = chance.choice((BOTH, BOTH, LINES, JSON))
            self._ask("POST", self._requests.next(), accept=accept)
        elif what < 0.75:
            ids = [each for answer in self._answers for each in _ids_in(answer)]
            is_new = not ids or chance.random() < 0.2  # a standing stream
            headers = {} if is_new else {"last_event_id": chance.choice(ids)}
            self._ask("GET", accept=EVENTS, **headers)
        elif what < 0.98:
            chance.choice(self._answers).cut()
        else:
            self._ask("DELETE")
        for message in [each for answer in self._answers for each in _messages_in(answer)]:
            self._heard.note(self._principal, message)
            is_question = message.get("method") == "elicitation/create"
            if is_question and message["id"] not in self._told and chance.random() < 0.5:
                self._told.add(message["id"])
                self._ask("POST", _answer_to(message))


def _ids_in(answer: Answer) -> list[str]:
    return answer.ids if answer.headers.get("content-type") == EVENTS else []


def _messages_in(answer: Answer) -> list[Json]:
    found = []
    for line in answer.body.splitlines():
        with suppress(msgspec.DecodeError):  # another field, or only a part
            found.append(msgspec.json.decode(line.removeprefix(b"data: "), type=dict))
    return found


async def _pause(chance: random.Random) -> None:
    if chance.random() < 0.6:
        await trio.sleep(3 * chance.random() ** 2)

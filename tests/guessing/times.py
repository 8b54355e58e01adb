"""How long a refusal takes: for unknown things, and for another caller's."""

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple, TypeVar

import msgspec
import trio

from streams.engine.engine import Engine
from streams.engine.sessions import HttpSession
from streams.errors import Refusal
from streams.journal.ownership import key_path
from streams.journal.sqlite import open_sqlite_journal
from streams.keys import Keyring, name_of
from streams.limits import Limits
from streams.protocol.vocabulary import Poll
from tests.guessing.guesses import Ask, Guesser, Theirs, body_of
from tests.guessing.tries import Pipeline
from tests.wire.httpclient import HttpClient
from tests.wire.process import ServerProcess
from tests.wire.raw import WebSocketPeer
from tests.wire.rawhttp import EVENTS, JSON
from tests.wire.tools_server import server as tools
from tests.wire.verbs import PLAIN, POSITIONS

APART_MAX: Final = 0.02

T = TypeVar("T")


class Apart(NamedTuple):
    """Medians, in µs, of guesses that must take the same time; the first is for unknown things."""

    what: str
    medians: dict[str, float]

    @classmethod
    def of(cls, what: str, taken: Mapping[str, Sequence[int]]) -> "Apart":
        """From times in nanoseconds, by kind."""
        return cls(what, {name: statistics.median(each) / 1000 for name, each in taken.items()})

    @property
    def most(self) -> float:
        """The largest difference from the first, as a fraction of it."""
        first, *others = self.medians.values()
        return max(abs(other - first) / first for other in others)

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {median:.2f} µs" for name, median in self.medians.items())
        return f"{self.what}: {figures}; {self.most:.2%} apart"


def medians(
    what: str,
    kinds: Mapping[str, Callable[[], T]],
    ask: Callable[[T], int],
    rounds: int,
    seed: int,
) -> Apart:
    """Time each kind once a round, in a changing order; `ask` returns nanoseconds.

    The guesses of a round are made before it. Otherwise the work just before a guess would change
    its time.
    """
    taken: dict[str, list[int]] = {name: [] for name in kinds}
    names, dice = list(kinds), random.Random(seed)
    for _ in range(rounds):
        made = {name: kinds[name]() for name in names}
        dice.shuffle(names)
        for name in names:
            taken[name].append(ask(made[name]))
    return Apart.of(what, taken)


# Over sockets


def over_websocket(server: ServerProcess, guesser: Guesser, rounds: int) -> list[Apart]:
    with server.connect("ws-streams") as peer:
        peer.initialize(POSITIONS)
        assert isinstance(peer, WebSocketPeer)
        asked = peer

        def ask(body: bytes) -> int:
            began = time.perf_counter_ns()
            asked.send_frame(body)
            asked.receive_raw()
            return time.perf_counter_ns() - began

        def line(choose: Callable[[], Ask]) -> bytes:
            return body_of(choose(), 0) + b"\n"

        return [
            medians(f"WebSocket, {what}", _made(line, kinds), ask, rounds, 1)
            for what, kinds in _asks(guesser).items()
        ]


def over_http(server: ServerProcess, guesser: Guesser, rounds: int) -> list[Apart]:
    with closing(HttpClient(server.http_port, JSON)) as client:
        client.initialize(PLAIN)
        with closing(Pipeline(server.http_port)) as pipeline:

            def ask(request: bytes) -> int:
                began = time.perf_counter_ns()
                pipeline.send(request)
                pipeline.response()
                return time.perf_counter_ns() - began

            def post(choose: Callable[[], Ask]) -> bytes:
                return client.post_bytes(body_of(choose(), 0))

            def get(choose: Callable[[], str]) -> bytes:
                return client.head("GET", {"Accept": EVENTS, "Last-Event-ID": choose()})

            found = [
                medians(f"HTTP, {what}", _made(post, kinds), ask, rounds, 2)
                for what, kinds in _asks(guesser).items()
            ]
            events = {"unknown": guesser.unknown_event, "theirs": guesser.known_event}
            return [*found, medians("HTTP, event id", _made(get, events), ask, rounds, 3)]


def _made(
    make: Callable[[Callable[[], T]], bytes], kinds: Mapping[str, Callable[[], T]]
) -> dict[str, Callable[[], bytes]]:
    """The request for each kind of guess."""
    return {name: partial(make, choose) for name, choose in kinds.items()}


def _asks(guesser: Guesser) -> dict[str, dict[str, Callable[[], Ask]]]:
    def poll(choose: Callable[[], Ask], *, with_token: bool) -> Callable[[], Ask]:
        def ask() -> Ask:
            params = choose()[1]
            token = {"resumeToken": guesser.word()} if with_token else {}
            return "stream/poll", {**params, **token}

        return ask

    streams = {
        "unknown": guesser.unknown,
        "in memory": guesser.running,
        "at rest": guesser.evicted,
    }
    return {
        "id": {name: poll(choose, with_token=False) for name, choose in streams.items()},
        "id and token": {name: poll(choose, with_token=True) for name, choose in streams.items()},
        "page": {"unknown": guesser.unknown_page, "theirs": guesser.known_page},
    }


# In the server


def received(text: str) -> str:
    """A new string, as parsed from a client's message: its hash was never computed before."""
    return text.encode().decode()


def of_lookups(journal: Path, theirs: Theirs, rounds: int) -> list[Apart]:
    """Time the lookups alone, in this process, over the journal of a server that has ended."""
    return trio.run(_of_lookups, journal, theirs, rounds)


async def _of_lookups(journal_path: Path, theirs: Theirs, rounds: int) -> list[Apart]:
    tools.limits = Limits(resident_max=0)
    async with open_sqlite_journal(journal_path) as journal:
        keyring = Keyring.load(key_path(journal_path))
        async with tools.open(journal, keyring) as running:
            engine = running.engine
            ids = [*theirs.running, *theirs.evicted]
            here = [each for each in ids if engine._streams.index.get(each) is not None]
            away = [each for each in ids if each not in here]
            assert here, "some that ended just now are in memory"
            assert away, "some that had ended are at rest"
            guesser, dice = Guesser(theirs, 4), random.Random(5)
            streams = {
                "unknown": guesser.word,
                "in memory": lambda: dice.choice(here),
                "at rest": lambda: dice.choice(away),
            }
            lookups = _Lookups(engine, keyring, guesser)
            return [lookups.pages(rounds), *await lookups.streams(streams, rounds)]


@dataclass(frozen=True, slots=True)
class _Lookups:
    """The lookups of a session without streams; each is timed in nanoseconds."""

    engine: Engine
    keyring: Keyring
    guesser: Guesser
    session: HttpSession = field(default_factory=lambda: HttpSession("a guesser's"))

    async def streams(self, choices: dict[str, Callable[[], str]], rounds: int) -> list[Apart]:
        """Each way to name a stream, once a round for each choice of one."""
        ways = ("id", "id and token", "event id")
        taken: dict[str, dict[str, list[int]]] = {
            way: {name: [] for name in choices} for way in ways
        }
        names, dice = list(choices), random.Random(6)
        for _ in range(rounds):
            dice.shuffle(names)
            for name in names:
                # All values are made first, so that no work just before a lookup changes its time.
                stream, token = received(choices[name]()), self.guesser.word()
                event_id = f"{name_of(self.keyring.token(stream)).hex()}_1"
                taken["id"][name].append(await self._find(Poll(stream, None, None)))
                taken["id and token"][name].append(await self._find(Poll(stream, token, None)))
                taken["event id"][name].append(await self._recall(event_id))
        return [Apart.of(f"lookup, {way}", each) for way, each in taken.items()]

    def pages(self, rounds: int) -> Apart:
        choices = {"unknown": self.guesser.unknown_page, "theirs": self.guesser.known_page}
        return medians("lookup, page", choices, self._page, rounds, 6)

    async def _recall(self, event_id: str) -> int:
        began = time.perf_counter_ns()
        await self.engine.operations.load(self.session, event_id)
        return time.perf_counter_ns() - began

    async def _find(self, intent: Poll) -> int:
        began = time.perf_counter_ns()
        try:
            await self.engine.operations.find(self.session, intent)
        except Refusal:
            return time.perf_counter_ns() - began
        raise AssertionError("a guess was right")

    def _page(self, ask: Ask) -> int:
        params = ask[1]
        token, raw = received(params["resumeToken"]), msgspec.Raw(msgspec.json.encode(params))
        began = time.perf_counter_ns()
        try:
            self.engine.operations._find_page(self.session, token, raw)
        except Refusal:
            return time.perf_counter_ns() - began
        raise AssertionError("a guess was right")

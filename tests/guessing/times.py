"""How long it takes to be refused: for what there is not, and for what is somebody else's."""

import random
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import trio

from streams.engine import Engine
from streams.errors import Refusal
from streams.keys import Keyring, name_of
from streams.limits import Limits
from streams.ownership import key_path
from streams.sessions import HttpSession
from streams.sqlite import open_sqlite_journal
from streams.vocabulary import Poll
from tests.guessing.guesses import Ask, Guesser, Theirs, body_of
from tests.guessing.tries import Pipeline
from tests.wire.httpclient import HttpClient
from tests.wire.process import ServerProcess
from tests.wire.raw import WebSocketPeer
from tests.wire.rawhttp import EVENTS, JSON
from tests.wire.tools_server import server as tools
from tests.wire.verbs import PLAIN, POSITIONS

APART_MAX: Final = 0.02


class Apart(NamedTuple):
    """The medians of guesses that must take the same time, in µs; the first is for what there is
    not.
    """

    what: str
    medians: dict[str, float]

    @property
    def most(self) -> float:
        """The largest difference to the first, as a part of it."""
        first, *others = self.medians.values()
        return max(abs(other - first) / first for other in others)

    def __str__(self) -> str:
        figures = ", ".join(f"{name} {median:.2f} µs" for name, median in self.medians.items())
        return f"{self.what}: {figures}; {self.most:.2%} apart"


def medians(what: str, kinds: dict[str, Callable[[], int]], rounds: int, seed: int) -> Apart:
    """Each kind once a round, in an order that changes; each returns nanoseconds."""
    taken: dict[str, list[int]] = {name: [] for name in kinds}
    names, dice = list(kinds), random.Random(seed)
    for _ in range(rounds):
        dice.shuffle(names)
        for name in names:
            taken[name].append(kinds[name]())
    return Apart(what, {name: statistics.median(each) / 1000 for name, each in taken.items()})


# Over sockets


def over_websocket(server: ServerProcess, guesser: Guesser, rounds: int) -> list[Apart]:
    with server.connect("ws-streams") as peer:
        peer.initialize(POSITIONS)
        assert isinstance(peer, WebSocketPeer)
        asked = peer

        def timed(choose: Callable[[], Ask]) -> Callable[[], int]:
            def ask() -> int:
                body = body_of(choose(), 0) + b"\n"
                began = time.perf_counter_ns()
                asked.send_frame(body)
                asked.receive_raw()
                return time.perf_counter_ns() - began

            return ask

        return [
            medians(f"WebSocket, {what}", {n: timed(c) for n, c in kinds.items()}, rounds, 1)
            for what, kinds in _asks(guesser).items()
        ]


def over_http(server: ServerProcess, guesser: Guesser, rounds: int) -> list[Apart]:
    with closing(HttpClient(server.http_port, JSON)) as client:
        client.initialize(PLAIN)
        with closing(Pipeline(server.http_port)) as pipeline:

            def timed(request: Callable[[], bytes]) -> Callable[[], int]:
                def ask() -> int:
                    data = request()
                    began = time.perf_counter_ns()
                    pipeline.send(data)
                    pipeline.response()
                    return time.perf_counter_ns() - began

                return ask

            def posted(choose: Callable[[], Ask]) -> Callable[[], int]:
                return timed(lambda: client.post_bytes(body_of(choose(), 0)))

            def continued(choose: Callable[[], str]) -> Callable[[], int]:
                headers = {"Accept": EVENTS}
                return timed(lambda: client.head("GET", {**headers, "Last-Event-ID": choose()}))

            found = [
                medians(f"HTTP, {what}", {n: posted(c) for n, c in kinds.items()}, rounds, 2)
                for what, kinds in _asks(guesser).items()
            ]
            events = {"unknown": guesser.unknown_event, "theirs": guesser.known_event}
            kinds = {name: continued(choose) for name, choose in events.items()}
            return [*found, medians("HTTP, event id", kinds, rounds, 3)]


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
        "at rest": guesser.resting,
    }
    return {
        "id": {name: poll(choose, with_token=False) for name, choose in streams.items()},
        "id and token": {name: poll(choose, with_token=True) for name, choose in streams.items()},
        "page": {"unknown": guesser.unknown_page, "theirs": guesser.known_page},
    }


# In the server


def received(text: str) -> str:
    """As it comes from a client: a string of its own, that was never looked up before."""
    return text.encode().decode()


def of_lookups(journal: Path, theirs: Theirs, rounds: int) -> list[Apart]:
    """The lookups alone, in this process, over the journal of a server that has ended."""
    return trio.run(_of_lookups, journal, theirs, rounds)


async def _of_lookups(journal_path: Path, theirs: Theirs, rounds: int) -> list[Apart]:
    tools.limits = Limits(resident_max=0)
    async with open_sqlite_journal(journal_path) as journal:
        keyring = Keyring.load(key_path(journal_path))
        async with tools.open(journal, keyring) as running:
            engine = running.engine
            ids = [*theirs.running, *theirs.resting]
            here = [each for each in ids if engine._streams.get(each) is not None]
            away = [each for each in ids if each not in here]
            assert here, "some that ended just now are in memory"
            assert away, "some that had ended are at rest"
            return await _timed(engine, keyring, Guesser(theirs, 4), (here, away), rounds)


async def _timed(
    engine: Engine,
    keyring: Keyring,
    guesser: Guesser,
    streams: tuple[Sequence[str], Sequence[str]],
    rounds: int,
) -> list[Apart]:
    session, dice = HttpSession("a guesser's"), random.Random(5)
    here, away = streams
    ids = {
        "unknown": guesser.word,
        "in memory": lambda: dice.choice(here),
        "at rest": lambda: dice.choice(away),
    }

    async def find(stream: str, token: str | None) -> int:
        intent = Poll(stream, token, None)
        began = time.perf_counter_ns()
        try:
            await engine.access.find(session, intent)
        except Refusal:
            return time.perf_counter_ns() - began
        raise AssertionError("a guess was right")

    async def recall(event_id: str) -> int:
        began = time.perf_counter_ns()
        await engine.access.recall(session, event_id)
        return time.perf_counter_ns() - began

    def event_of(stream: str) -> str:
        return f"{name_of(keyring.token(stream)).hex()}_1"

    by_id: dict[str, list[int]] = {name: [] for name in ids}
    by_token: dict[str, list[int]] = {name: [] for name in ids}
    by_event: dict[str, list[int]] = {name: [] for name in ids}
    pages = {"unknown": guesser.unknown_page, "theirs": guesser.known_page}

    def turn(choose: Callable[[], Ask]) -> int:
        params = choose()[1]
        token, raw = received(params["resumeToken"]), msgspec.Raw(msgspec.json.encode(params))
        began = time.perf_counter_ns()
        try:
            engine.access._find_page(session, token, raw)
        except Refusal:
            return time.perf_counter_ns() - began
        raise AssertionError("a guess was right")

    by_page = medians(
        "lookup, page", {n: partial(turn, choose) for n, choose in pages.items()}, rounds, 6
    )
    names = list(ids)
    for _ in range(rounds):
        dice.shuffle(names)
        for name in names:
            stream, token = received(ids[name]()), guesser.word()
            event_id = event_of(stream)
            by_id[name].append(await find(stream, None))
            by_token[name].append(await find(stream, token))
            by_event[name].append(await recall(event_id))
    return [by_page] + [
        Apart(f"lookup, {what}", {n: statistics.median(each) / 1000 for n, each in taken.items()})
        for what, taken in (("id", by_id), ("id and token", by_token), ("event id", by_event))
    ]

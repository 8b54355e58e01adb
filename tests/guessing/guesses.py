"""A server with another caller's streams, and guesses at them."""

import json
import random
import sqlite3
import string
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

from tests.wire.httpclient import HttpClient
from tests.wire.process import Gate, ServerProcess, gate_in, wait_until
from tests.wire.raw import Peer
from tests.wire.verbs import POSITIONS, STREAMS, start

LETTERS: Final = string.ascii_letters + string.digits + "-_"
STREAMS_EACH: Final = 20  # half of them in memory, half evicted
LIMIT: Final = ("--limit", "resident_max=0")

Ask = tuple[str, dict[str, Any]]


class Theirs(NamedTuple):
    """Another caller's streams and secrets: parts that a guesser may know, and the secrets."""

    running: list[str]  # ids of streams in memory
    evicted: list[str]  # of streams that are not in memory
    tokens: list[str]  # of all these streams
    pages: list[str]  # tokens of pages
    events: list[str]  # event ids


@contextmanager
def served(folder: Path) -> Iterator[tuple[ServerProcess, Theirs]]:
    """A server with another caller's streams: half of them run, the others are evicted."""
    with (
        gate_in(folder / "gate") as gate,
        ServerProcess(folder, options=LIMIT) as server,
        server.connect("stdio") as owner,  # an anonymous caller's streams open by their ids
    ):
        owner.initialize(POSITIONS)
        evicted = [start(owner, "count", n=2) for _ in range(STREAMS_EACH)]
        for each in evicted:
            owner.response(each.id)
        with server.connect("stdio") as other:
            other.initialize(POSITIONS)
            running = [start(other, "count", n=2, gate=gate.path) for _ in range(STREAMS_EACH)]
            pages = [_page_token(other, gate) for _ in range(3)]
            events = _event_ids(server, gate)
            owner.close()
            _wait_for_eviction(server.journal, STREAMS_EACH)
            yield (
                server,
                Theirs(
                    [each.stream for each in running],
                    [each.stream for each in evicted],
                    [each.token for each in [*running, *evicted]],
                    pages,
                    events,
                ),
            )


def _page_token(peer: Peer, gate: Gate) -> str:
    page = peer.response(peer.call("pages", n=3, gate=gate.path, free=2))
    return str(page.result["nextResumeToken"])


def _event_ids(server: ServerProcess, gate: Gate) -> list[str]:
    """Event ids of running streams whose client has hung up."""
    found = []
    with closing(HttpClient(server.http_port)) as client:
        client.initialize(STREAMS)
        for n in range(3):
            exchange = client.call("count", n, n=2, gate=gate.path).head()
            event = exchange.next_event()
            assert event.id
            found.append(event.id)
    return found


def _wait_for_eviction(journal: Path, count: int) -> None:
    with closing(sqlite3.connect(f"file:{journal}?mode=ro", uri=True)) as file:

        def are_evicted() -> bool:
            [rests] = file.execute("SELECT count(*) FROM rests").fetchone()
            return bool(rests >= count)

        wait_until("the streams come to rest", are_evicted)


class Guesser:
    """Makes up requests, each of which must be refused."""

    def __init__(self, theirs: Theirs, seed: int) -> None:
        self.theirs = theirs
        self._dice = random.Random(seed)

    def word(self, letters: int = 43) -> str:
        return "".join(self._dice.choices(LETTERS, k=letters))

    def near(self, secret: str) -> str:
        """A secret with one letter changed.

        The bits of the letter that the encoding ignores stay, so the result is another secret.
        """
        at = self._dice.randrange(len(secret))
        others = LETTERS.replace(secret[at], "")
        return secret[:at] + self._dice.choice(others) + secret[at + 1 :]

    def unknown(self) -> Ask:
        return self._method(), {"streamId": self.word()}

    def running(self) -> Ask:
        return self._method(), {"streamId": self._dice.choice(self.theirs.running)}

    def evicted(self) -> Ask:
        return self._method(), {"streamId": self._dice.choice(self.theirs.evicted)}

    def with_token(self, ask: Ask) -> Ask:
        token = self.word() if self._dice.random() < 0.5 else self.near_token()
        return ask[0], {**ask[1], "resumeToken": token}

    def near_token(self) -> str:
        return self.near(self._dice.choice(self.theirs.tokens))

    def token_alone(self) -> Ask:
        token = self.word() if self._dice.random() < 0.5 else self.near_token()
        if self._dice.random() < 0.5:
            return "requests/resume", {"resumeToken": token}
        return "requests/getStatus", {"resumeToken": token, "requestId": 1}

    def page(self) -> Ask:
        return self._dice.choice((self.unknown_page, self.known_page))()

    def unknown_page(self) -> Ask:
        return self._page(self.word(72))

    def known_page(self) -> Ask:
        """A page that exists, with a wrong proof."""
        token = self._dice.choice(self.theirs.pages)
        return self._page(token[:32] + self.near(token[32:]))

    def _page(self, token: str) -> Ask:
        return "tools/call", {"name": "pages", "arguments": {"n": 3}, "resumeToken": token}

    def any_stream(self) -> Ask:
        ask = self._dice.choice((self.unknown, self.running, self.evicted))()
        return ask if self._dice.random() < 0.4 else self.with_token(ask)

    def any(self) -> Ask:
        return self._dice.choices((self.any_stream, self.token_alone, self.page), (7, 2, 1))[0]()

    def event_id(self) -> str:
        return self._dice.choice((self.unknown_event, self.known_event))()

    def unknown_event(self) -> str:
        key = f"{self._dice.getrandbits(128):032x}"
        return f"{key}_{self._dice.randrange(3)}{self._delivery()}"

    def known_event(self) -> str:
        """The event id of another caller's stream."""
        key = self._dice.choice(self.theirs.events).partition("_")[0]
        return f"{key}_{self._dice.randrange(3)}{self._delivery()}"

    def _delivery(self) -> str:
        return self._dice.choice(("", f"_{self.word(16)}"))

    def _method(self) -> str:
        return self._dice.choice(("stream/resume", "stream/poll"))


def id_of(n: int) -> str:
    """A request id of constant length, so that answers differ in nothing else."""
    return f"{n:012d}"


def body_of(ask: Ask, n: int) -> bytes:
    method, params = ask
    message = {"jsonrpc": "2.0", "id": id_of(n), "method": method, "params": params}
    return json.dumps(message).encode()

"""Watches what goes over the server's end of every connection: the newest wins, and is told of.

Whoever asks for a stream has a claim on it, and the newest claim that was served is the only one
that may be served from then on.
"""

import itertools
from collections.abc import Sequence
from typing import Any, Final

import msgspec
import trio

from streams.keys import Keyring
from streams.messages import Incoming
from tests.simulation.ledger import Ledger
from tests.simulation.network import FarChannel
from tests.simulation.world import World

RESUMES: Final = ("stream/resume", "requests/resume")
TOLD_S: Final = 60.0  # in which whoever is displaced has been told
_Claim = tuple[int, FarChannel]


class Witness:
    """Of all servers, one after the other."""

    def __init__(self, world: World, ledger: Ledger, keyring: Keyring) -> None:
        self._world = world
        self._ledger = ledger
        self._keyring = keyring
        self._numbers = itertools.count(1)
        self._claims: dict[str, list[_Claim]] = {}  # on each job, in the order of their arrival
        self._served: dict[str, tuple[int, FarChannel | None]] = {}
        self._asked: dict[tuple[FarChannel, Any], tuple[str, int]] = {}  # by a request's id
        self._displaced: dict[tuple[str, FarChannel], float] = {}  # since when
        self._told: set[tuple[str, FarChannel]] = set()  # that somebody else has come
        self._read: dict[str, int] = {}  # up to where each job was sent to who is served

    def heard(self, channel: FarChannel, received: Sequence[Incoming]) -> None:
        """A server is given these lines."""
        for line in received:
            if isinstance(line, bytes) and (b'"tools/call"' in line or b'/resume"' in line):
                self._claim(channel, msgspec.json.decode(line))
            elif isinstance(line, bytes) and b"notifications/cancelled" in line:
                self._let_go(channel, msgspec.json.decode(line)["params"]["requestId"])

    def _claim(self, channel: FarChannel, said: dict[str, Any]) -> None:
        params = said["params"]
        is_resume = said["method"] in RESUMES
        key = self._key_of(params) if is_resume else params["arguments"]["job"]
        if key is not None:
            claim = (next(self._numbers), channel)
            self._claims.setdefault(key, []).append(claim)
            self._asked[channel, said["id"]] = (key, claim[0])
            self._told.discard((key, channel))

    def _key_of(self, params: dict[str, Any]) -> str | None:
        for stream, known in self._ledger.known.items():
            is_named = params.get("streamId") == stream
            if is_named or params["resumeToken"] == self._keyring.token(stream):
                return known.job.key
        return None

    def said(self, channel: FarChannel, written: bytes) -> None:
        """A server writes this."""
        if b"notifications/stream/position" in written:
            lines = written.splitlines()
            for header in (line for line in lines if b"notifications/stream/position" in line):
                params = msgspec.json.decode(header)["params"]
                known = self._ledger.known.get(params["streamId"])
                if known is not None:
                    self._serve(known.job.key, channel)
                    self._read[known.job.key] = params["seq"] + params["count"] - 1
        if b'"superseded"' in written:
            for line in written.splitlines():
                if b'"superseded"' in line:
                    self._supersede(channel, msgspec.json.decode(line)["id"])

    def _serve(self, key: str, channel: FarChannel) -> None:
        number, served = self._served.get(key, (0, None))
        if served is channel:
            return
        job = self._world.jobs[key]
        known = self._ledger.known[job.stream or ""]
        has_all = known.has_ended and self._read.get(key) == known.last
        if served is not None and not has_all and (key, served) not in self._told:
            self._displaced[key, served] = trio.current_time()
        claims = [claim for claim in self._claims.get(key, ()) if claim[1] is channel]
        newer = [claim for claim in claims if claim[0] > number]
        if self._world.expect(newer, f"{key} is sent to who was displaced, or never asked"):
            self._served[key] = newer[-1]

    def _supersede(self, channel: FarChannel, id: Any) -> None:
        key, number = self._asked.get((channel, id), ("", 0))
        self._world.counts["told superseded"] += 1
        self._told.add((key, channel))
        self._displaced.pop((key, channel), None)
        is_newer = any(claim[0] > number for claim in self._claims.get(key, ()))
        self._world.expect(is_newer, f"{key}: told to be superseded, and nobody came later")

    def _let_go(self, channel: FarChannel, id: Any) -> None:
        """Who asked for it does not want it any more, and may get it all the same: what has ended
        cannot be cancelled.
        """
        key, _ = self._asked.get((channel, id), ("", 0))
        self._displaced.pop((key, channel), None)
        number, served = self._served.get(key, (0, None))
        if served is channel:
            self._served[key] = (number - 1, None)

    def check(self) -> None:
        """Whoever was displaced, and can be told, was told."""
        for (key, channel), since in list(self._displaced.items()):
            if trio.current_time() - since > TOLD_S:
                del self._displaced[key, channel]
                self._world.expect(
                    not channel.is_ready, f"{key}: nobody has told who was displaced of it"
                )
